"""Triton's kernels without a GPU: their numbers by the interpreter, their machine code by compiling for Hopper."""

import os
import re
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

triton = pytest.importorskip("triton")

from triton.backends.compiler import GPUTarget  # noqa: E402
from triton.compiler import ASTSource  # noqa: E402

from medusa.attention import BackendUnavailableError, choose  # noqa: E402
from medusa.attention.kernels import merge_kernel, split_kernel  # noqa: E402
from medusa.attention.triton import MAX_SPLITS, choose_splits, choose_tile  # noqa: E402
from tests.medusa.test_conformance import FAMILIES  # noqa: E402

ROOT = Path(__file__).parents[2]
HOPPER = GPUTarget("cuda", 90, 32)
SHARED_MEMORY = 227 * 1024
"""Bytes that one program can have on a Hopper multiprocessor."""
FEW = 64
"""Bytes of a thread's registers that may spill: a loop's worth would be thousands."""
ITEMSIZE = {"fp16": 2, "bf16": 2, "fp32": 4}
AXES = {"q": ("batch", "head", "node"), "k": ("batch", "head", "row"), "v": ("batch", "head", "row")}
STRIDES = [f"{tensor}_{axis}" for tensor, axes in AXES.items() for axis in axes]


def run_interpreted(marks: str, file: str = "test_attention.py", names: str = "triton") -> None:
    """Run tests in a process whose Triton interprets its kernels."""
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-k", names, "-m", marks, "-p", "no:cacheprovider"]
    command.append(f"tests/medusa/{file}")
    environment = os.environ | {"TRITON_INTERPRET": "1"}
    result = subprocess.run(command, check=False, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert result.returncode == 0, result.stdout[-4000:] + result.stderr[-1000:]
    assert int(re.search(r"(\d+) passed", result.stdout)[1]) > 5


@pytest.mark.slow
def test_the_kernels_compute_attention_over_the_grid_and_verify_trees_of_every_family():
    """In processes of one thread, two at a time: interpreting takes minutes."""
    families = sorted(FAMILIES)
    halves = [f"triton and ({' or '.join(families[part::2])})" for part in range(2)]
    jobs = [("test_conformance.py", names) for names in halves] + [("test_attention.py", "triton")]
    with ThreadPoolExecutor(2) as pool:
        list(pool.map(lambda job: run_interpreted("not gpu", *job), jobs))


def cross_compile(kernel, types: dict[str, str], constants: dict[str, object], **options: int):
    """Compile for Hopper with pointers and strides as well aligned as they are; returns the kernel and its spills."""
    signature = {name: "constexpr" if name in constants else types[name] for name in kernel.arg_names}
    aligned = {
        (index,): [["tt.divisibility", 16]]
        for index, name in enumerate(kernel.arg_names)
        if signature[name].startswith("*") or name in STRIDES
    }
    compiled = triton.compile(ASTSource(kernel, signature, constants, aligned), target=HOPPER, options=options)
    return compiled, local_bytes(compiled.asm["cubin"])


def local_bytes(cubin: bytes) -> int:
    """Bytes of stack and local memory per thread, which is where registers spill to."""
    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    path = Path(os.environ["TRITON_CACHE_DIR"]) / "kernel.cubin"
    path.write_bytes(cubin)
    usage = subprocess.run([tool, "-res-usage", path], capture_output=True, text=True, check=True).stdout
    return sum(int(re.search(rf"{name}:(\d+)", usage)[1]) for name in ("STACK", "LOCAL"))


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))


def compile_split(dtype: str, dim: int, rows: int, everything: bool = False):
    tile = choose_tile(rows, dim, ITEMSIZE[dtype])
    types = dict.fromkeys(["query", "key", "value"], f"*{dtype}") | dict.fromkeys(
        [*STRIDES, "nodes", "kv_heads"], "i32"
    )
    types |= {"lengths": "*i64", "words": "*i32", "depths": "*i32", "partial": "*fp32", "partial_lse": "*fp32"}
    types |= {"scaling": "fp32", "softcap": "fp32", "window": "i32"}
    block = triton.next_power_of_2(dim)
    constants: dict[str, object] = {
        "GROUPS": 4, "DIM": dim, "DIM_V": dim, "BLOCK_D": block, "BLOCK_DV": block, "BLOCK_M": tile.rows,
        "BLOCK_N": tile.keys, "UPCAST": False,
    }  # fmt: skip
    constants |= {} if everything else {"softcap": None, "window": None}
    return cross_compile(split_kernel, types, constants, num_warps=tile.warps, num_stages=tile.stages)


def check_split(dtype: str, dim: int, rows: int, everything: bool = False) -> None:
    compiled, spilled = compile_split(dtype, dim, rows, everything)
    assert 0 < compiled.metadata.shared <= SHARED_MEMORY
    assert spilled <= FEW
    if dtype != "fp32" and rows >= 64:
        assert "wgmma" in compiled.asm["ptx"], "the tensor cores' fast path"
        assert "cp.async" in compiled.asm["ptx"], "keys and values arrive while others are computed"


@pytest.mark.parametrize(
    "variant",
    [
        ("bf16", 128, False),
        *(pytest.param(v, marks=pytest.mark.slow) for v in (("fp16", 64, False), ("bf16", 256, True))),
    ],
)
def test_the_kernel_compiles_for_hopper(variant):
    dtype, dim, everything = variant
    check_split(dtype, dim, rows=256, everything=everything)


DIMS, ROWS = (64, 96, 128, 256), (1, 32, 64, 256)


@pytest.mark.slow
@pytest.mark.parametrize("everything", [False, True])
@pytest.mark.parametrize("dim", DIMS)
@pytest.mark.parametrize("rows", ROWS)
def test_every_tile_compiles_for_hopper(rows, dim, everything):
    """The two half precisions share tiles, registers and instructions: they take turns."""
    check_split(("fp16", "bf16")[(ROWS.index(rows) + DIMS.index(dim) + everything) % 2], dim, rows, everything)


@pytest.mark.slow
@pytest.mark.parametrize("everything", [False, True])
@pytest.mark.parametrize("dim", DIMS)
def test_float32_compiles_for_hopper(dim, everything):
    check_split("fp32", dim, 256, everything)


@pytest.mark.parametrize(("splits", "warps", "dim"), [(16, 1, 256), (MAX_SPLITS, 4, 256)])
def test_the_merge_compiles_for_hopper(splits, warps, dim):
    types = {"partial": "*fp32", "partial_lse": "*fp32", "sinks": "*bf16", "out": "*bf16"}
    types |= dict.fromkeys(["rows", "kv_heads", "splits"], "i32")
    constants = {"GROUPS": 4, "DIM_V": dim, "BLOCK_DV": dim, "BLOCK_S": splits}
    compiled, spilled = cross_compile(merge_kernel, types, constants, num_warps=warps)
    assert compiled.metadata.shared <= SHARED_MEMORY
    assert spilled <= FEW


@pytest.mark.parametrize(
    ("programs", "key_blocks", "processors", "splits"),
    [
        (
            16,
            1000,
            132,
            16,
        ),  # an 8B model's layer, one sequence, 64 nodes: 16 splits of 16 programs fill 132 processors
        (16, 5, 132, 2),  # a short cache: at least two blocks of keys per split
        (16, 1, 132, 1),
        (1000, 1000, 132, 1),  # a prefill fills the device by itself
        (1, 10**6, 10**6, MAX_SPLITS),
    ],
)
def test_splits_fill_the_device(programs, key_blocks, processors, splits):
    assert choose_splits(programs, key_blocks, processors) == splits


def test_triton_is_refused_on_a_cpu_that_does_not_interpret():
    with pytest.raises(BackendUnavailableError, match="needs a GPU, not cpu; choose reference"):
        choose("triton", torch.device("cpu"), torch.float32)
