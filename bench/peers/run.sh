#!/bin/bash
# Runfold among its peers, in one table: see bench/peers.md.
# usage: bash bench/peers/run.sh [w1,w4,w2 [PASSES]] [--only NAME,…] [--markdown bench/peers.md]
# BENCH_ROOT (/tmp/runfold-peers): environments, data, results · BENCH_SECS (5): each part of W1
exec "${PYTHON:-python3}" "$(dirname "$0")/run.py" "$@"
