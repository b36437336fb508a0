#!/bin/sh
# Makes the locks of the image anew: every package by version and hash, for all platforms. Needs uv
# (pip install uv). Packages stay at their version unless pyproject.toml forbids it; `lock.sh
# --upgrade` takes the newest.
set -eu
cd "$(dirname "$0")/.."

compile() { # OUTPUT INPUTS AND OPTIONS...
  out=$1
  shift
  uv pip compile --quiet --universal --python-version 3.11 --generate-hashes \
    --custom-compile-command deploy/lock.sh --output-file "deploy/$out" "$@"
}

compile requirements.lock pyproject.toml deploy/image.in \
  --extra bridge --extra creds --extra fast --extra http --extra metrics --extra openai --extra otel "$@"
compile build.lock deploy/build.in "$@"
