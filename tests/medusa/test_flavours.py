"""The CPU kernels as other processors and compilers have them; ``-v`` names those that this machine runs."""

import os
import platform
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from medusa.cpu import native

pytestmark = pytest.mark.slow

HERE = Path(__file__).parent
ALL = (
    "native", "native_drafts", "exactness", "recurrent_kernels", "layers_that_differ", "experts", "attention", "int8",
    "packed", "loss_kernel",
)  # fmt: skip
FEW = ("native", "exactness", "loss_kernel", "recurrent_kernels", "layers_that_differ")
"""For flavours that few machines run, or that differ in little: linear and recurrent layers, passes, and texts."""
WHOLE = ("packed", "int8", "experts")
"""Where rows are whole numbers."""
KERNELS = Path(native.__file__).with_name("kernels")
CHECK = [
    "-std=c++17", "-ffp-contract=off", "-w", "-pthread", f"-I{KERNELS}",
    str(HERE / "kernels" / "check.cpp"),
]  # fmt: skip
X86 = platform.machine() == "x86_64"
WITH_CLANG = pytest.mark.skipif(shutil.which("clang++") is None, reason="there is no clang (Debian's clang)")


def run(command, **environment):
    return subprocess.run(command, env=os.environ | environment, capture_output=True, text=True, check=False)


def passes_the_tests(names, **environment):
    """Exactness, kernels and the identity of texts, with kernels that are built so."""
    files = [str(HERE / f"test_{name}.py") for name in names]
    done = run([sys.executable, "-m", "pytest", "-q", "-n", "0", "-m", "not slow", *files], **environment)
    return done.returncode == 0 and "skipped" not in done.stdout, done.stdout[-2000:]


@pytest.mark.skipif(not X86, reason="for x86-64")
@pytest.mark.parametrize(
    ("hidden", "flags", "names"),
    [
        pytest.param("amx_bf16", "-mno-amx-tile", ALL, id="no matrix unit"),
        pytest.param("avx512_bf16|avx512_vnni", "-march=x86-64-v4", [*FEW, "packed"], id="AVX-512"),
        pytest.param("avx512f.* avx_vnni", "-march=x86-64-v3 -mavxvnni", WHOLE, id="AVX2 and VNNI"),
        pytest.param("avx512f|avx_vnni", "-march=x86-64-v3", ALL, id="AVX2"),
        pytest.param("sse2", "-march=x86-64 -fno-openmp", [*FEW, "packed"], id="SSE2 and own threads"),
    ],
)
def test_processors_that_have_less(hidden, flags, names):
    if not re.search(f" ({hidden})", Path("/proc/cpuinfo").read_text()):
        pytest.skip(f"this processor has no {hidden}: that is how the other tests run")
    passed, said = passes_the_tests(names, MEDUSA_CXXFLAGS=flags)
    assert passed, said


@WITH_CLANG
def test_clang():
    passed, said = passes_the_tests(FEW, CXX="clang++")
    assert passed, said


@WITH_CLANG
def test_clang_14_would_compile_them():
    """Later ones only warn of what it refuses, such as captured structured bindings."""
    strictly = ["-std=c++17", "-march=native", "-Werror=c++20-extensions", "-fsyntax-only"]
    built = run(["clang++", *strictly, str(KERNELS / "kernels.cpp")])
    assert built.returncode == 0, built.stderr[-2000:]


@pytest.mark.skipif(
    not (shutil.which("aarch64-linux-gnu-g++") and shutil.which("qemu-aarch64")),
    reason="there is no emulator (Debian's g++-aarch64-linux-gnu and qemu-user)",
)
@pytest.mark.parametrize(
    ("march", "flavour"), [("armv8.2-a", "NEON,"), ("armv8.6-a+bf16", "NEON with bfloat16,")], ids=str
)
def test_aarch64_in_an_emulator(march, flavour, tmp_path):
    program = str(tmp_path / "check")
    built = run(["aarch64-linux-gnu-g++", *CHECK, "-O1", "-static", f"-march={march}", "-o", program])
    assert built.returncode == 0, built.stderr[-2000:]
    done = run(["qemu-aarch64", program])
    assert done.stdout.startswith(flavour)
    assert done.stdout.endswith("ok\n"), done.stdout


@pytest.mark.skipif(not X86 or shutil.which("g++") is None, reason="needs g++ with its sanitizers")
@pytest.mark.parametrize("sanitizer", ["address,undefined", "thread"])
def test_sanitizers_find_nothing(sanitizer, tmp_path):
    program = str(tmp_path / "check")
    flags = ["-O0", "-march=native", f"-fsanitize={sanitizer}", "-fno-sanitize-recover=all"]
    built = run(["g++", *CHECK, *flags, "-o", program])
    assert built.returncode == 0, built.stderr[-2000:]
    done = run([program])
    assert done.stdout.endswith("ok\n"), done.stdout + done.stderr[-2000:]
