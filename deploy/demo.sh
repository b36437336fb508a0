#!/usr/bin/env bash
# The promise, broken into on purpose: a cluster of containers, runs that pay invoices, a worker
# killed in the middle of its payments, the server that leads the journal killed, the next one cut
# off the network; approvals by a plain NATS publish. It ends with the audit of every journal and
# with how often the money moved. Exit code 0: every run ended, and paid exactly once.
#
#   deploy/demo.sh [--keep]      about three minutes; --keep leaves the cluster up
#
# It needs Docker with compose (v1 or v2), and the image: it is built where it is not there, with
# BUILD_ARGS (deploy/README.md). RUNS=9 says how many runs.
set -euo pipefail
cd "$(dirname "$0")"

RUNS=${RUNS:-9}
PROJECT=runfold-demo
STREAM=RUNFOLD_JOURNAL_0
export DEMO_PAY_S=${DEMO_PAY_S:-25}  # a payment takes so long: time to kill its worker in it
export ACK_WAIT=${ACK_WAIT:-10}      # a worker silent for so long is lost; 30 s by default
export NATS_PORT=0 BRIDGE1_PORT=0 BRIDGE2_PORT=0  # any: the demo needs none of them
keep=no
[ "${1:-}" = --keep ] && keep=yes

compose=docker-compose
docker compose version >/dev/null 2>&1 && compose="docker compose"
tmp=$(mktemp -d)
compose() { $compose -p $PROJECT --env-file "$tmp/env" -f compose.cluster.yaml "$@"; }

# ---- how it speaks and waits --------------------------------------------------------------------

began=$SECONDS
title() { printf '\n== %3ds  %s\n' $((SECONDS - began)) "$*"; }
say() { printf '   %s\n' "$*"; }
indent() { sed 's/^/   | /'; }
fail() { printf '\nFAILED: %s\n' "$*"; exit 1; }

wait_for() { # SECONDS WHAT COMMAND...: until the command succeeds
  local until=$((SECONDS + $1)) what=$2
  shift 2
  until "$@"; do
    [ $SECONDS -lt $until ] || fail "not in time: $what"
    sleep 1
  done
}

cleanup() {
  local code=$?
  trap - EXIT
  if [ $code -ne 0 ]; then
    compose ps || true
    compose logs --no-color --tail=15 || true
  fi
  if [ $keep = yes ]; then
    (umask 077 && cp "$tmp/env" demo.env)
    say "kept: http://$(compose port bridge1 8787), with RUNFOLD_TOKEN of deploy/demo.env; to end it:"
    say "$compose -p $PROJECT --env-file deploy/demo.env -f deploy/compose.cluster.yaml down -v"
  else
    compose down -v --remove-orphans >/dev/null 2>&1 || true
  fi
  rm -rf "$tmp"
  exit $code
}
trap cleanup EXIT
trap 'exit 130' INT TERM

# ---- hands --------------------------------------------------------------------------------------

container() { compose ps -q "$1"; }
ops() { docker exec "$ops" "$@"; }
hands() { docker exec -i "$ops" python /app/hands.py "$@"; }

people() { # a runfold command through a bridge; through the other one where the first is not well
  local until=$((SECONDS + 120)) code bridge
  while :; do
    for bridge in bridge1 bridge2; do
      code=0
      ops env "RUNFOLD_STORE=http://$bridge:8787" runfold "$@" 2>"$tmp/said" || code=$?
      [ $code -eq 9 ] || { [ $code -eq 0 ] || cat "$tmp/said" >&2; return $code; }
    done
    [ $SECONDS -lt $until ] || fail "no bridge answers: $(cat "$tmp/said")"
    sleep 1
  done
}

audit() { ops sh -c "RUNFOLD_STORE=\$AUDITOR_NATS runfold $*"; }
ledger() { ops sh -c 'cat /data/payments.jsonl 2>/dev/null || true'; }
approvals() { people inbox --json | hands approvals; }

waiting() { # so many approvals
  approvals >"$tmp/approvals" && [ "$(grep -c . "$tmp/approvals")" -eq "$1" ]
}

approve() { # RUN...: each by a message that anybody's NATS client can publish
  local run marker words=()
  approvals >"$tmp/approvals"
  for run in "$@"; do
    marker=$(awk -v run="$run" '$1 == run {print $2}' "$tmp/approvals")
    [ -n "$marker" ] || fail "$run waits for no approval"
    say "nats pub runfold.signal.$run.approve '{\"marker\":\"$marker\"}'"
    words+=("runfold.signal.$run.approve" "{\"marker\":\"$marker\"}")
  done
  hands publish "${words[@]}"
}

leads() { # a server of $1 leads $STREAM, and signals are taken, too; sets $leader
  leader=$(hands leader $STREAM 2>/dev/null | head -1) || return 1
  [[ " $1 " == *" ${leader:-none} "* ]] && audit signals >/dev/null 2>&1
}

healthy() { # SERVICE...
  local one
  for one in "$@"; do
    docker inspect -f '{{.State.Health.Status}}' "$(container "$one")" | grep -qx healthy || return 1
  done
}

without() { # NAME LIST
  local one
  for one in $2; do [ "$one" = "$1" ] || printf '%s ' "$one"; done
}

held() { # all runs named are held by workers; $tmp/holders says by which
  people workers --json | hands holders >"$tmp/holders"
  local run
  for run in "$@"; do grep -qw "$run" "$tmp/holders" || return 1; done
}

unknown() { # so many writes, at least, wait for a person
  people inbox --json | hands unknown >"$tmp/unknown" &&
    [ "$(grep -c . "$tmp/unknown")" -ge "$1" ]
}

ended() { # every run
  people list --json | hands ended >"$tmp/ended" &&
    [ "$(grep -c ' completed$' "$tmp/ended")" -eq "$RUNS" ]
}

# ---- the story ----------------------------------------------------------------------------------

title "Image and cluster: 3 nats-servers, 3 workers, 2 bridges"
docker image inspect runfold:0.5 >/dev/null 2>&1 ||
  docker build ${BUILD_ARGS:-} -f Dockerfile -t runfold:0.5 .. >"$tmp/build" 2>&1 ||
  { tail -20 "$tmp/build"; fail "the image can't be built"; }
sh make-env.sh >"$tmp/env"
compose down -v --remove-orphans >/dev/null 2>&1 || true
compose up -d >"$tmp/up" 2>&1 || { cat "$tmp/up"; fail "the cluster does not start"; }
ops=$(container ops)
nodes="nats1 nats2 nats3"
wait_for 120 "workers and bridges are healthy" healthy worker1 worker2 worker3 bridge1 bridge2
compose run --rm -T init doctor \
  --monitor http://nats1:8222,http://nats2:8222,http://nats3:8222 2>/dev/null | indent

title "$RUNS runs, each of which asks before it pays an invoice"
runs=$(seq -f 'invoice-%g' "$RUNS")
for run in $runs; do
  people start payer --id "$run" --input "${run/-/ }" >/dev/null
done
wait_for 120 "all runs ask for approval" waiting "$RUNS"
people list | indent

title "A person approves two thirds of them, by plain NATS messages"
first=$(seq -f 'invoice-%g' $((RUNS * 2 / 3)))
second=$(seq -f 'invoice-%g' $((RUNS * 2 / 3 + 1)) "$RUNS")
wait_for 60 "the streams have leaders" leads "$nodes"
approve $first
wait_for 60 "the approvals are in the journals" waiting $((RUNS - RUNS * 2 / 3))
wait_for 60 "workers hold the approved runs" held $first
indent <"$tmp/holders"

# The one with the most runs, if it can be with odd and even invoices: some are paid, some are not.
victim=$(awk '{odd = even = 0; for (i = 2; i <= NF; i++) if ($i ~ /[13579]$/) odd = 1; else even = 1
  print odd + even, NF, $1}' "$tmp/holders" | sort -rn | awk 'NR == 1 {print $3}')
lost=$(awk -v host="$victim" '$1 == host {print NF - 1}' "$tmp/holders")
killed=$leader
title "SIGKILL: $victim, in the middle of $lost payments of ${DEMO_PAY_S} s"
docker kill -s KILL "$(container "$victim")" >/dev/null
title "SIGKILL: $killed, which leads the journal; the other workers' payments go on"
docker kill -s KILL "$(container "$killed")" >/dev/null
wait_for 90 "another server leads" leads "$(without "$killed" "$nodes")"
say "$leader leads the journal now"

title "$lost writes are unknown: nobody pays again, nobody guesses"
wait_for 120 "what the killed worker held waits for a person" unknown "$lost"
people inbox | awk '/^[a-z]/ {shown = /^reconcile/} shown' | indent

title "$killed is started again; then $leader, which leads now, is cut off the network"
docker start "$(container "$killed")" >/dev/null
wait_for 120 "$killed has caught up" healthy "$killed"
wait_for 60 "the streams have leaders" leads "$nodes"
cut=$leader
network=$(docker inspect -f '{{range .NetworkSettings.Networks}}{{.NetworkID}}{{end}}' \
  "$(container "$cut")")
docker network disconnect "$network" "$(container "$cut")"
wait_for 90 "the majority has leaders" leads "$(without "$cut" "$nodes")"
say "$cut is cut off; $leader leads the journal now"

title "The other runs are approved while it is cut off"
approve $second
wait_for 120 "the approvals are in the journals" waiting 0

title "An operator looks for each unknown write's key in the bank's ledger, and says what happened"
while read -r run step start key; do
  ledger >"$tmp/ledger" # or the demo ends here: what can't be read is no miss
  if grep -q "\"key\": \"$key\"" "$tmp/ledger"; then
    say "$key is there: runfold reconcile $run $step --start $start --done '\"PAID-${run#*-}\"'"
    people reconcile "$run" "$step" --start "$start" --done "\"PAID-${run#*-}\"" \
      --request-id "desk-$run" >/dev/null
  else
    say "$key is not there: runfold reconcile $run $step --start $start --retry"
    people reconcile "$run" "$step" --start "$start" --retry \
      --request-id "desk-$run" >/dev/null
  fi
done <"$tmp/unknown"

title "Everything heals: $cut is connected again, $victim started"
docker network connect --alias "$cut" --alias nats "$network" "$(container "$cut")"
docker start "$(container "$victim")" >/dev/null
wait_for 240 "every run has ended" ended
people list | indent
wait_for 120 "every server has caught up" healthy $nodes

title "The proof: the audit of every journal, and how often the money moved"
audit check --all | indent
audit signals --rejected | indent
twice=0
for run in $runs; do
  count=$(ledger | grep -c "\"run\": \"$run\"" || true)
  say "$run: paid $count time(s)"
  [ "$count" -eq 1 ] || twice=1
done
[ "$twice" -eq 0 ] || fail "an invoice was not paid exactly once"
[ "$(ledger | grep -c .)" -eq "$RUNS" ] || fail "the ledger holds something else, too"

title "Green: $RUNS runs ended, $RUNS payments, nothing lost, nothing twice"
