#!/usr/bin/env bash
# Sets up .venv inside the clone, then runs one command in it. Nothing outside the clone is written.
[ -n "${BASH_VERSION:-}" ] || exec bash "$0" "$@"
set -euo pipefail

ROOT=$(cd "$(dirname "$(readlink -f "${BASH_SOURCE[0]}")")" && pwd)
PY=${MEDUSA_PYTHON:-$ROOT/.venv/bin/python}
STAMP=$ROOT/.venv/.setup
CACHE=$ROOT/.cache
EXTRAS=train,serve,demo,smollm2,dev

# A login made earlier with the hf command stays valid: its token is read where it is.
if [ -z "${HF_HOME:-}" ] && [ -f ~/.cache/huggingface/token ]; then
    export HF_TOKEN_PATH=${HF_TOKEN_PATH:-~/.cache/huggingface/token}
fi
export XDG_CACHE_HOME=$CACHE HF_HOME=${HF_HOME:-$CACHE/huggingface} PIP_CACHE_DIR=${PIP_CACHE_DIR:-$CACHE/pip}
export TRITON_HOME=$CACHE TRITON_CACHE_DIR=$CACHE/triton TORCHINDUCTOR_CACHE_DIR=$CACHE/torchinductor
export CUDA_CACHE_PATH=$CACHE/cuda MPLCONFIGDIR=$CACHE/matplotlib WANDB_DATA_DIR=$CACHE/wandb WANDB_CONFIG_DIR=$CACHE/wandb

# Tensors of a few megabytes are allocated in every step: keep their pages, in large pages, instead of asking the kernel
# again each time (on a virtual machine of two cores this made training several times faster).
export GLIBC_TUNABLES=${GLIBC_TUNABLES:-glibc.malloc.hugetlb=1:glibc.malloc.mmap_max=0:glibc.malloc.trim_threshold=4294967296:glibc.malloc.top_pad=67108864}

usage() {
    cat <<'HELP'
usage: ./launch.sh [command] [arguments]

  (none), demo   train heads on the embedded model, then compare plain decoding with decoding by heads
  chat           talk to a model with heads in the terminal
  serve          serve a model with heads over HTTP, as OpenAI's API, with a web page
  heads          make heads for your own model, in one command and a given time
  data           make and inspect training data
  train          train heads (torchrun + DeepSpeed)
  report         figures and curves of a training run
  study          train head designs one after the other, and compare what they draft
  export         write heads for other engines, put them on the Hub, look at heads of any format
  bench          compare drafters with plain decoding and other engines; measure a step against its lower bound
  doctor         show what this machine has, what runs fast on it, and what to fix
  gpu-check      try everything on a GPU machine that has torch and transformers, but perhaps no network
  test           run the tests; arguments go to pytest
  setup          only set up .venv; every command does this first, and the second time it is instantaneous
  help           this text

Arguments go to the command, --help too. Relative paths are read from the clone.

environment
  MEDUSA_PYTHON    run with this interpreter and its packages as they are; nothing is set up
  PYTHON           interpreter that .venv is made with, 3.11 or newer (default: the first one found)
  TORCH_INDEX_URL  extra package index for torch, e.g. https://download.pytorch.org/whl/cpu
  HF_HOME          Hugging Face cache (default: .cache/huggingface in the clone)
  NPROC            training processes on this machine (default: the number of GPUs, or 1)
  NNODES, NODE_RANK, MASTER_ADDR, MASTER_PORT   training on several machines (default: 1, 0, -, 29500)
  OMP_NUM_THREADS  CPU threads of each training process (default: cores / NPROC)
HELP
}

say() { printf 'launch.sh: %s\n' "$*" >&2; }

find_python() {
    local candidate candidates=(python3 python3.13 python3.12 python3.11 python3.14 python)
    if [ -n "${PYTHON:-}" ]; then candidates=("$PYTHON"); fi
    for candidate in "${candidates[@]}"; do
        "$candidate" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && echo "$candidate" && return
    done
    say "found no Python 3.11 or newer${PYTHON:+ at PYTHON=$PYTHON}; install one, or name it: PYTHON=/path/to/python3"
    return 1
}

# Everything that decides what .venv must contain.
fingerprint() { { cat pyproject.toml constraints.txt && echo "$ROOT $EXTRAS" && "$PY" -V; } 2>&1 | cksum; }

ready() { [ -x "$PY" ] && [ -f "$STAMP" ] && [ "$(cat "$STAMP")" = "$(fingerprint)" ]; }

# torch first: DeepSpeed's build imports it. Without build isolation no build fetches tools that no constraint pins.
# Python compiles what it imports, which is less than all that pip would compile, unless it was told not to write.
install() {
    set -- "$PY" -m pip --disable-pip-version-check install -qq --no-build-isolation
    if [ -z "${PYTHONDONTWRITEBYTECODE:-}" ]; then set -- "$@" --no-compile; fi
    set -- "$@" -c constraints.txt
    "$@" ${TORCH_INDEX_URL:+--extra-index-url "$TORCH_INDEX_URL"} setuptools torch && "$@" -e ".[$EXTRAS]"
}

setup() (
    if [ -n "${MEDUSA_PYTHON:-}" ] || ready; then return; fi
    mkdir -p "$CACHE"
    if command -v flock >/dev/null; then
        exec 9>"$CACHE/setup.lock"
        flock -n 9 || { say "waiting for another set-up of this clone" && flock 9; }
        if ready; then return; fi
    fi
    trap 'exit 130' INT TERM
    if [ "$(cat "$STAMP" 2>/dev/null)" = unfinished ] || ! "$PY" -m pip --version >/dev/null 2>&1; then
        python=$(find_python)
        "$python" -m venv --clear .venv
    fi
    say "setting up .venv with $("$PY" -V); the first time takes minutes"
    echo unfinished >"$STAMP" # an interrupted set-up leaves this word, and the next one starts afresh
    if ! install; then
        rm -f "$STAMP" # pip ended in good order: the next set-up goes on from here
        say "set-up failed, see pip's message above; the same command tries again"
        return 1
    fi
    fingerprint >"$STAMP"
    rm -rf "$CACHE/pip" # downloads are kept only while an unfinished set-up may need them
    say ".venv is ready after $SECONDS s"
)

run() { setup; exec "$PY" "$@"; }

# Sets nothing up. Where there is no .venv (no network, say) the machine's own Python runs it, with its own torch.
run_as_it_is() {
    if [ -z "${MEDUSA_PYTHON:-}" ] && ! ready; then PY=$(find_python); fi
    exec "$PY" "$@"
}

cd "$ROOT"
# Python reads the current folder by itself, but not with PYTHONSAFEPATH.
if [ -n "${MEDUSA_PYTHON:-}" ]; then export PYTHONPATH=$ROOT${PYTHONPATH:+:$PYTHONPATH}; fi
command=${1:-demo}
shift $(($# > 0))
case $command in
    help | -h | --help) usage ;;
    setup) setup ;;
    test) run -m pytest -n auto --maxprocesses 8 --dist loadfile "$@" ;; # later arguments win: -n 0 for one process
    demo | chat | serve | heads | data | train | report | study | export | bench) run -m medusa "$command" "$@" ;;
    doctor) run_as_it_is -m medusa doctor "$@" ;;
    gpu-check) run_as_it_is -m medusa.benchmarks.gpu "$@" ;;
    *) say "unknown command '$command'; './launch.sh help' lists the commands" && exit 2 ;;
esac
