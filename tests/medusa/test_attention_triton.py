"""Triton's kernels without a GPU: their numbers by the interpreter, their machine code by compiling for many cards."""

import logging
import os
import re
import subprocess
import sys
from pathlib import Path
from tempfile import NamedTemporaryFile

import pytest
import torch

triton = pytest.importorskip("triton")

from triton.backends.compiler import GPUTarget  # noqa: E402
from triton.compiler import ASTSource  # noqa: E402
from triton.runtime.errors import OutOfResources  # noqa: E402

from medusa.attention import BackendUnavailableError, attend, backends, choose  # noqa: E402
from medusa.attention import triton as backend_module  # noqa: E402
from medusa.attention.contract import KernelError  # noqa: E402
from medusa.attention.kernels import merge_kernel, split_kernel  # noqa: E402
from medusa.attention.trial import LayerShape, try_out  # noqa: E402
from medusa.attention.triton import (  # noqa: E402
    MAX_SPLITS,
    Tile,
    TritonAttention,
    choose_rows,
    choose_splits,
    choose_tile,
    row_blocks,
    shared_bytes,
)
from medusa.cpu.losses import KINDS  # noqa: E402
from medusa.gpu.kernels import add_norm_kernel, gate_kernel, move_kernel, turn_kernel  # noqa: E402
from medusa.gpu.loss_kernel import loss_kernel  # noqa: E402
from medusa.gpu.losses import COLUMNS  # noqa: E402
from medusa.gpu.packed import _layout, _sample, tile_of  # noqa: E402
from medusa.gpu.packed_kernels import expand_kernel, product_kernel, sum_kernel  # noqa: E402
from medusa.gpu.packed_weight import KNOWN, PackedWeight  # noqa: E402
from tests.conftest import CLONES_CACHE  # noqa: E402
from tests.medusa.attention_cases import Case, make  # noqa: E402

ROOT = Path(__file__).parents[2]
SHARED_MEMORY = {
    75: 64 << 10, 80: 163 << 10, 86: 99 << 10, 89: 99 << 10, 90: 227 << 10, 100: 227 << 10, 120: 99 << 10,
}  # fmt: skip
"""Bytes that one program can have: Turing, A100, other Amperes (A10), Ada (L4), Hopper, Blackwells (large, desk)."""
HOPPER, BLACKWELL = 90, 100
FEW = {HOPPER: 64, BLACKWELL: 64}
"""Bytes of a thread's registers that may spill: a loop's worth would be thousands."""
SOME = 128
ITEMSIZE = {"fp16": 2, "bf16": 2, "fp32": 4}
STRIDES = ["q_row", "q_head"]
ATTENTION = ("llama", "gpt2", "gemma2", "gemma3_text", "gpt_oss", "deepseek_v3", "llama4_text")
"""Families with groups of heads and without, soft caps, windows, sinks, values of another size, and chunks."""


OF_FAMILIES = " or ".join(f"triton-{family}" for family in ATTENTION)
OF_BATCHES = "test_batch.py and not (many or probabilities or penalties or large_trees)"
INTERPRETED = {
    "a pass, losses and moves": ("test_gpu_pass.py test_gpu_losses.py test_gpu_moves.py", "test"),
    "packed weights": ("test_gpu_packed.py", "test"),
    "attention": (
        "test_attention.py test_conformance.py test_batch.py test_assistant.py",
        f"triton and (test_attention.py or test_assistant.py or {OF_FAMILIES} or {OF_BATCHES})",
    ),
}
"""Files and names of tests whose kernels can be interpreted in a minute or two."""


@pytest.mark.slow
@pytest.mark.parametrize("what", INTERPRETED)
def test_interpreted_kernels_compute_what_they_should(what):
    """In a process whose Triton interprets its kernels."""
    files, names = INTERPRETED[what]
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-k", names, "-m", "not gpu", "-p", "no:cacheprovider"]
    command += ["-p", "tests.medusa.interpreter", *(f"tests/medusa/{file}" for file in files.split())]
    environment = os.environ | {"TRITON_INTERPRET": "1"}
    result = subprocess.run(command, check=False, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert result.returncode == 0, result.stdout[-4000:] + result.stderr[-1000:]
    assert int(re.search(r"(\d+) passed", result.stdout)[1]) > 60


def cross_compile(kernel, types: dict[str, str], constants: dict[str, object], card: int = HOPPER, **options: int):
    """Compile for a card with pointers and strides as well aligned as they are; returns the kernel and its spills."""
    signature = {name: "constexpr" if name in constants else types[name] for name in kernel.arg_names}
    aligned = {
        (index,): [["tt.divisibility", 16]]
        for index, name in enumerate(kernel.arg_names)
        if signature[name].startswith("*") or name in STRIDES
    }
    target = GPUTarget("cuda", card, 32)
    compiled = triton.compile(ASTSource(kernel, signature, constants, aligned), target=target, options=options)
    return compiled, local_bytes(compiled.asm["cubin"])


def local_bytes(cubin: bytes) -> int:
    """Bytes of stack and local memory per thread, which is where registers spill to."""
    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    with NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        usage = subprocess.run([tool, "-res-usage", file.name], capture_output=True, text=True, check=True).stdout
    return sum(int(re.search(rf"{name}:(\d+)", usage)[1]) for name in ("STACK", "LOCAL"))


@pytest.fixture(autouse=True)
def own_cache(monkeypatch):
    """Of the clone: kernels that did not change are compiled once."""
    monkeypatch.setenv("TRITON_CACHE_DIR", str(CLONES_CACHE / "triton"))


def compile_split(dtype: str, dim: int, rows: int, everything: bool, card: int):
    tile = choose_tile(choose_rows([rows]), dim, ITEMSIZE[dtype], SHARED_MEMORY[card], window=everything)
    types = dict.fromkeys(["query", "key", "value"], f"*{dtype}")
    types |= dict.fromkeys([*STRIDES, "table_stride", "rows", "width", "kv_heads", "window"], "i32")
    types |= dict.fromkeys(["work", "words", "depths"], "*i32") | dict.fromkeys(["lengths", "table"], "*i64")
    types |= {"partial": "*fp32", "partial_lse": "*fp32", "scaling": "fp32", "softcap": "fp32"}
    block = triton.next_power_of_2(dim)
    constants: dict[str, object] = {
        "GROUPS": 4, "DIM": dim, "DIM_V": dim, "SIZE": 32, "BLOCK_D": block, "BLOCK_DV": block,
        "BLOCK_M": tile.rows, "BLOCK_N": tile.keys, "UPCAST": False,
    }  # fmt: skip
    constants |= {} if everything else {"softcap": None, "window": None}
    return cross_compile(split_kernel, types, constants, card, num_warps=tile.warps, num_stages=tile.stages)


def check_split(dtype: str, dim: int, rows: int, everything: bool = False, card: int = HOPPER):
    """The compiled kernel."""
    compiled, spilled = compile_split(dtype, dim, rows, everything, card)
    assert 0 < compiled.metadata.shared <= SHARED_MEMORY[card]
    assert spilled <= FEW.get(card, SOME)
    if card in FEW and dtype != "fp32" and rows >= 64:
        fast = {HOPPER: "wgmma", BLACKWELL: "tcgen05.mma"}[card]
        assert fast in compiled.asm["ptx"], "the tensor cores' fast path"
        assert "cp.async" in compiled.asm["ptx"], "keys and values arrive while others are computed"
    return compiled


def test_the_kernel_compiles_for_hopper():
    """The table does not shorten the pipeline: two blocks of keys and of values are on their way during a third."""
    compiled, tile = check_split("bf16", 128, rows=256), choose_tile(128, 128, 2)
    assert compiled.metadata.shared >= 2 * tile.stages * tile.keys * 128 * 2


@pytest.mark.parametrize(("dim", "norms"), [(64, "heads"), (80, "none"), (256, "whole")])
def test_the_kernels_of_a_pass_compile(dim, norms):
    """Without spilled registers, on an old card and on a new one."""
    types = dict.fromkeys(["joined", "cosines", "sines", "norms", "query", "keys", "values", "x", "y"], "*bf16")
    types |= {"after": "*bf16", "before": "*bf16", "out": "*bf16", "positions": "*i64", "places": "*i64"}
    types |= {"epsilon": "fp32", "offset": "fp32", "factor": "fp32", "out_stride": "i32"}
    whole, block = norms == "whole", triton.next_power_of_2(dim)
    heads = {"HEADS": 32, "KV_HEADS": 8, "DIM": dim, "BLOCK": block, "ROTATED": dim, "NORM": norms != "none"}
    heads |= {"WHOLE": whole, "ALL": 32 * block if whole else block, "ONCE": whole, "PAIRS": dim == 80}
    wide = {"WIDTH": 40 * dim, "BLOCK": triton.next_power_of_2(40 * dim), "ADD": norms != "none"}
    wide |= {"AFTER": whole, "BEFORE": norms != "heads", "ONCE": whole}
    for card in (80, HOPPER):
        assert cross_compile(turn_kernel, types, heads, card, num_warps=4 if whole else 1)[1] == 0
        assert cross_compile(add_norm_kernel, types, wide, card, num_warps=8)[1] == 0
        gate = {"WIDTH": 100 * dim, "BLOCK": 1024, "GELU": whole}
        assert norms == "heads" or cross_compile(gate_kernel, types, gate, card)[1] == 0
        moved = types | dict.fromkeys(["addresses", "sources", "targets"], "*i64") | {"like": "*bf16", "moves": "i32"}
        moves = {"WIDTH": 8 * dim, "BLOCK": 2048}
        assert norms != "none" or cross_compile(move_kernel, moved, moves, card)[1] == 0


@pytest.mark.parametrize("kind", [KINDS.index(name) for name in ("ce", "lk")])
def test_the_kernel_of_the_losses_compiles(kind):
    types = dict.fromkeys(["logits", "teacher"], "*bf16") | dict.fromkeys(["taught_by", "labels", "correct"], "*i64")
    types |= {"loss": "*fp32", "columns": "i32", "eta": "fp32", "least": "fp32"}
    for card in (80, HOPPER):
        assert cross_compile(loss_kernel, types, {"KIND": kind, "BLOCK": COLUMNS}, card, num_warps=8)[1] == 0


def check_packed(form, rows, card):
    """Products with weights of a form and their expansion compile without spills, and fit the card."""
    weight, tile = PackedWeight.of(_sample(form), torch.device("cpu")), tile_of(rows, card == BLACKWELL)
    factors, fifths = ("*fp16" if weight.factors.dtype == torch.float16 else "*fp32"), weight.fifths is not None
    types = dict.fromkeys(["x", "bias"], "*bf16") | dict.fromkeys(["numbers", "codes"], "*i32")
    types |= {"fifths": "*u8" if fifths else "*i32", "factors": factors, "out": "*fp32", "indices": "*i64"}
    types |= dict.fromkeys(["rows", "outputs", "inputs", "total", "chunks", "each", "x_stride"], "i32")
    constants = _layout(weight) | {"BIAS": True, "SPLIT": True, "EVEN": False, "UPCAST": False}
    constants |= {"BLOCK_O": tile.outputs, "BLOCK_R": tile.rows}
    compiled, spilled = cross_compile(
        product_kernel, types, constants, card, num_warps=tile.warps, num_stages=tile.stages
    )
    assert 0 < compiled.metadata.shared <= SHARED_MEMORY[card]
    assert spilled <= SOME
    assert "mma" in compiled.asm["ptx"], "tensor cores"
    constants = _layout(weight) | {"INDEXED": True, "BLOCK_O": 32}
    assert cross_compile(expand_kernel, types | {"out": "*bf16"}, constants, card)[1] <= SOME


@pytest.mark.parametrize("card", [89, HOPPER])
def test_the_kernels_of_packed_weights_compile(card):
    check_packed(4, 1, card)
    types = {"partial": "*fp32", "out": "*bf16", "rows": "i32", "outputs": "i32", "splits": "i32"}
    assert cross_compile(sum_kernel, types, {"BLOCK": 256}, card, num_warps=1)[1] == 0


@pytest.mark.slow
@pytest.mark.parametrize("form", sorted(KNOWN))
def test_every_form_of_packed_weights_fits_every_card(form):
    """In the tiles of few and of many rows, in turns."""
    for index, card in enumerate(card for card in SHARED_MEMORY if card > 75):
        check_packed(form, (1, 32, 64)[(form + index) % 3], card)
    check_packed(form, 64, BLACKWELL)


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


@pytest.mark.slow
@pytest.mark.parametrize(
    ("card", "dim"), [(75, 128), (80, 128), (BLACKWELL, 128), *((c, 256) for c in SHARED_MEMORY if c != HOPPER)]
)
def test_every_tile_fits_every_card(card, dim):
    """The largest heads, with windows, in blocks of a step and of a prefill; compiling all sizes takes half an hour."""
    for rows in (32, 256):
        check_split("bf16" if card > 75 else "fp16", dim, rows, True, card)
    check_split("fp32", dim, 256, True, card)


@pytest.mark.parametrize("limit", sorted({*SHARED_MEMORY.values(), 96 << 10, 100 << 10, 200 << 10}))
@pytest.mark.parametrize("dim", [8, *DIMS])
def test_tiles_stay_within_any_limit(limit, dim):
    before = 0
    for rows in (1, 2, 16, 17, 64, 100, 256, 10_000):
        for itemsize, window in ((2, False), (2, True), (4, False)):
            tile = choose_tile(choose_rows([rows]), dim, itemsize, limit, window)
            width = max(16, triton.next_power_of_2(dim))
            assert shared_bytes(tile, width, itemsize, limit, window) <= limit
            assert all(size >= 16 and size.bit_count() == 1 for size in tile[:2])
        before, block = max(before, tile.rows), tile.rows
        assert block >= before, "more rows never get a smaller block"


def test_what_hopper_gets_is_what_it_always_got():
    assert choose_tile(128, 128, 2) == Tile(128, 64, 8, 3)
    assert choose_tile(16, 256, 2) == Tile(16, 32, 4, 2)
    assert choose_tile(128, 64, 4) == Tile(16, 32, 4, 1)


@pytest.mark.parametrize(
    ("rows", "block"),
    [
        ([4], 16),
        ([17] * 48, 32),
        ([64], 64),
        ([65, 65], 128),
        ([2048], 128),
        ([2048, *[4] * 8], 128),  # a chunk of a prompt and a few plain rows: mostly the chunk's
        ([2048, *[4] * 48], 64),
        ([64, *[4] * 48], 16),
    ],
    ids=str,
)
def test_blocks_of_rows_hold_a_tree_and_do_not_waste_on_many_small_ones(rows, block):
    assert choose_rows(rows) == block


@pytest.mark.parametrize("nodes", [(8, 8), (8, 1, 40)], ids=str)
def test_every_row_is_in_one_block(nodes):
    plan = make(Case(nodes=nodes, lengths=(5, 0, 33)[: len(nodes)]), torch.float32).plan(None)
    rows = []
    for sequence, first, start, size in row_blocks(plan, 16, groups=4).tolist():
        assert (start, size) == (plan.firsts[sequence], nodes[sequence])
        rows += [4 * start + row for row in range(first, min(first + 16, 4 * size))]
    assert rows == list(range(4 * sum(nodes)))


class Launcher:
    """In place of the kernel: refuses head sizes from some on, as a card with too little shared memory does."""

    def __init__(self, limit: int) -> None:
        self.limit, self.launches = limit, 0

    def __getitem__(self, grid):
        def launch(*args, DIM=0, **options):
            self.launches += 1
            if self.limit <= DIM:
                raise OutOfResources(151_552, 101_376, "shared memory")

        return launch


@pytest.fixture
def refusing(monkeypatch):
    """A backend whose kernel cannot be launched for head sizes of 64 and more, and its launcher."""
    monkeypatch.setattr(triton.knobs.runtime, "interpret", True)
    launcher = Launcher(64)
    monkeypatch.setattr(backend_module, "split_kernel", launcher)
    monkeypatch.setattr(backend_module, "merge_kernel", Launcher(1 << 20))
    return TritonAttention(torch.device("cpu")), launcher


def test_a_kernel_that_cannot_be_launched_leaves_its_layers_to_the_reference(refusing, caplog):
    backend, launcher = refusing
    layer = make(Case(), torch.float32)
    plan = layer.plan(backend)
    backends._reference.cache_clear()
    with caplog.at_level(logging.INFO, "medusa.attention.backends"):
        for _ in range(3):
            out = attend(plan, *layer.inputs)
            torch.testing.assert_close(out.double(), layer.expected(), atol=5e-6, rtol=5e-6)
    assert launcher.launches == 1, "it is not tried again"
    (warning,) = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert "head size 64" in warning and "out of resource: shared memory" in warning


def test_layers_of_other_sizes_stay_with_the_kernel(refusing):
    backend, launcher = refusing
    large, small = (make(Case(dim=dim), torch.float32) for dim in (64, 32))
    for layer in (large, small, small):
        attend(layer.plan(backend), *layer.inputs)
    assert launcher.launches == 3


def test_while_a_graph_is_captured_nothing_else_is_computed_instead(refusing, monkeypatch):
    """A graph must hold what has run before; the recorder then goes on eagerly, since this is a RuntimeError."""
    backend, _ = refusing
    layer = make(Case(), torch.float32)
    plan = layer.plan(backend)
    monkeypatch.setattr(backends, "_capturing", lambda query: True)
    with pytest.raises(KernelError, match="cannot be launched") as error:
        attend(plan, *layer.inputs)
    assert isinstance(error.value, RuntimeError)


def test_the_trial_finds_what_cannot_be_launched(refusing):
    backend, _ = refusing
    failure = try_out(backend, torch.device("cpu"), torch.float32, [LayerShape(4, 256, 256)])
    assert failure is not None
    assert "out of resource: shared memory" in failure


@pytest.mark.parametrize(("splits", "warps", "dim"), [(16, 1, 256), (MAX_SPLITS, 4, 256)])
def test_the_merge_compiles_for_hopper(splits, warps, dim):
    types = {"partial": "*fp32", "partial_lse": "*fp32", "sinks": "*bf16", "out": "*bf16"}
    types |= dict.fromkeys(["rows", "splits"], "i32")
    constants = {"GROUPS": 4, "DIM_V": dim, "BLOCK_DV": dim, "BLOCK_S": splits}
    compiled, spilled = cross_compile(merge_kernel, types, constants, num_warps=warps)
    assert compiled.metadata.shared <= min(SHARED_MEMORY.values())
    assert spilled <= FEW[HOPPER]


@pytest.mark.parametrize(
    ("programs", "key_blocks", "processors", "splits"),
    [
        # An 8B model's layer, one sequence, 64 nodes: 16 splits of 16 programs fill 132 processors.
        (16, 1000, 132, 16),
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
