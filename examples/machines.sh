#!/usr/bin/env bash
# Training on several machines without a scheduler: one launcher on each, started over ssh.
#   examples/machines.sh node-a,node-b --recipe train/recipes/llama-3.1-8b.yaml
# The clone has the same path on all machines, and the others reach the first one at MASTER_PORT.
# Ctrl-C stops all of them; the same command continues from the last checkpoint.
set -euo pipefail

if [ $# -lt 2 ]; then
    echo "usage: examples/machines.sh HOST[,HOST...] --recipe FILE [--recipe.KEY VALUE ...]" >&2
    exit 2
fi
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
IFS=, read -r -a hosts <<<"$1"
shift

start() { # NODE_RANK HOST ARGUMENTS...
    local rank=$1 host=$2
    shift 2
    local settings="NNODES=${#hosts[@]} NODE_RANK=$rank MASTER_ADDR=${hosts[0]} MASTER_PORT=${MASTER_PORT:-29500}"
    # A terminal (-tt), so that the end of ssh is a signal to the launcher behind it.
    ssh -tt "$host" "cd $(printf %q "$root") && $settings exec ./launch.sh train $(printf '%q ' "$@")" </dev/null
}

jobs=()
for rank in "${!hosts[@]}"; do
    start "$rank" "${hosts[rank]}" "$@" &
    jobs+=($!)
done
trap 'kill "${jobs[@]}" 2>/dev/null || true' INT TERM
status=0
for job in "${jobs[@]}"; do
    wait "$job" || status=$?
done
exit "$status"
