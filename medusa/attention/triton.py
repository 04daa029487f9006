"""The Triton backend: one pass over keys and values for all rows of a tree (``medusa/attention/kernels.py``)."""

from collections import Counter
from collections.abc import Iterator, Sequence
from functools import lru_cache
from typing import NamedTuple

import torch
import triton
from torch import Tensor
from triton.errors import TritonError
from triton.runtime import driver

from medusa.attention.contract import BackendUnavailableError, KernelError, Scoring, TreePlan
from medusa.attention.kernels import merge_kernel, split_kernel

MAX_DIM = 256
MAX_SPLITS = 64
WAVES = 2
"""Intended number of programs per multiprocessor: one computes while another waits for memory."""
HOPPER, AMPERE = 227 << 10, 99 << 10
"""Bytes of shared memory that a program can have. From ``HOPPER`` on, tensor cores read operands from there (Hopper,
large Blackwells); below ``AMPERE``, Triton uses no tensor cores (Turing: 64 KiB)."""
REGISTERS = 1 << 13
"""Elements of a block of rows (rows x D) beyond which four warps' registers spill, if they also hold operands."""
READING = 64
"""Fixed cost of a block of rows, in rows, because it reads every key; so mixed trees get blocks of medium size."""
MOST_ROWS = 128


class Tile(NamedTuple):
    """The block sizes of one program.

    Attributes:
        rows: Packed query rows of a block.
        keys: Keys of a block.
        warps: Warps of a program.
        stages: Blocks of keys and values in flight.
    """

    rows: int
    keys: int
    warps: int
    stages: int


def choose_rows(rows: Sequence[int]) -> int:
    """Choose the number of rows of a block, a power of two, with the least total cost of all trees.

    A large block reads keys for more rows at once, but a small tree fills little of it. Trees of equal size get a block
    that holds all their rows, up to the largest block.

    Args:
        rows: n * g of each tree, the packed rows of a key head.
    """
    trees, sizes = Counter(rows), [MOST_ROWS >> shift for shift in range(4)]
    cost = {size: (size + READING) * sum(-(-n // size) * count for n, count in trees.items()) for size in sizes}
    return min(sizes, key=cost.__getitem__)


@lru_cache(maxsize=256)
def choose_tile(rows: int, dim: int, itemsize: int, shared_memory: int = HOPPER, window: bool = False) -> Tile:
    """Choose a tile that fits the device's shared memory (queries and blocks in flight) and registers.

    Every block of rows reads all keys, so blocks are as large as possible. Products without tensor cores (float32, old
    cards) hold their operands in registers, so their blocks are small.

    Args:
        rows: Most rows of a block (``choose_rows``).
        dim: The larger of D and Dv.
        itemsize: Bytes of an element.
        shared_memory: Bytes that a program can have on the device.
        window: The layer has a sliding window.
    """
    dim = max(16, triton.next_power_of_2(dim))
    if itemsize > 2 or shared_memory < AMPERE:
        return Tile(16, 32 if dim <= 64 else 16, 4, 1)
    return next(
        tile
        for tile in _tiles(rows, dim, wide=shared_memory >= HOPPER)
        if shared_bytes(tile, dim, itemsize, shared_memory, window) <= shared_memory
    )


def _tiles(block: int, dim: int, wide: bool) -> Iterator[Tile]:
    """Tiles in the order of preference."""
    if wide:
        yield Tile(block, 64 if dim <= 128 else 32, 4 if block <= 64 else 8, 3 if dim <= 128 else 2)
    block = min(block, max(16, 2 * REGISTERS // dim))
    while block >= 16:
        for keys, stages in ((64, 3), (32, 3), (32, 2), (16, 2)):
            if keys <= 32 or block * dim <= REGISTERS:
                yield Tile(block, keys, 8 if block > 64 or block * dim > REGISTERS else 4, stages)
        block //= 2


def shared_bytes(tile: Tile, dim: int, itemsize: int, shared_memory: int = HOPPER, window: bool = False) -> int:
    """An upper bound on a program's shared memory in bytes: queries, keys and values in flight, weights, a mask.

    Args:
        tile: A tile in half precision.
        dim: The larger of D and Dv, a power of two.
        itemsize: Bytes of an element.
        shared_memory: Bytes of the device; operands that are read from registers leave shared memory a stage earlier.
        window: The layer has a sliding window, so masks of all blocks, positions and places are there too.
    """
    in_flight = tile.stages if shared_memory >= HOPPER else max(1, tile.stages - 1)
    blocks = itemsize * (tile.rows * dim + 2 * in_flight * tile.keys * dim + tile.rows * tile.keys)
    mask = 4 * (tile.rows + 1 + 2 * tile.stages) * tile.keys if window else 0
    return max(blocks + mask, 4 * tile.rows * dim)  # the result reuses their memory


def choose_splits(programs: int, key_blocks: int, processors: int) -> int:
    """Choose the number of splits of a sequence, a power of two, so that the programs fill the device.

    Args:
        programs: Programs per split.
        key_blocks: Blocks of keys; a split gets at least two.
        processors: Multiprocessors.
    """
    splits = min(WAVES * processors // programs, key_blocks // 2, MAX_SPLITS)
    return 1 << max(splits.bit_length() - 1, 0)


class TritonAttention:
    """Split-K flash decoding with bit-packed tree masks. On a CPU it runs only in Triton's interpreter, for tests.

    Attributes:
        processors: Number of multiprocessors.
        shared_memory: Bytes that a program can have.
    """

    name = "triton"
    recordable = True
    dtypes = frozenset({torch.float32, torch.bfloat16, torch.float16})

    def __init__(self, device: torch.device) -> None:
        self._interpreted = bool(triton.knobs.runtime.interpret)
        if device.type != "cuda" and not self._interpreted:
            raise BackendUnavailableError(
                f"attention (triton) needs a GPU, not {device}; choose reference, or set TRITON_INTERPRET=1 to debug it"
            )
        on_gpu = device.type == "cuda"
        self.processors = torch.cuda.get_device_properties(device).multi_processor_count if on_gpu else 4
        self.shared_memory = _shared_memory(device) if on_gpu else HOPPER
        self._refused: dict[tuple[object, ...], str] = {}

    def objection(self, query: Tensor, key: Tensor, value: Tensor, scoring: Scoring) -> str | None:
        """Head sizes that do not fit, dtypes without support, and kernels that could not be launched before."""
        if query.dtype not in self.dtypes:
            return f"its kernel does not compute in {query.dtype}"
        dim, size = max(query.shape[-1], value.shape[-1]), key.shape[1]
        if dim > MAX_DIM:
            return f"head size ({dim}) exceeds {MAX_DIM}"
        if size & (size - 1):
            return f"blocks of the cache ({size} positions) are not a power of two"
        return self._refused.get(_kind(query, key, value, scoring))

    def attend(self, plan: TreePlan, query: Tensor, key: Tensor, value: Tensor, scoring: Scoring) -> Tensor:
        """See ``TreeAttention``: one launch for all trees, and a merge of the splits."""
        groups, dim = query.shape[1] // key.shape[2], max(query.shape[-1], value.shape[-1])
        rows = plan.once(("block of rows", groups), lambda: choose_rows([size * groups for size in plan.sizes]))
        itemsize = 2 if self._interpreted else query.element_size()  # the tiles of half precision, with exact numbers
        tile = choose_tile(rows, dim, itemsize, self.shared_memory, scoring.window is not None)
        try:
            return self._launch(tile, plan, query, key, value, scoring)
        except TritonError as error:  # it cannot be compiled, or needs more than a multiprocessor has
            lines = [line for line in str(error).splitlines() if line.strip()] or [type(error).__name__]
            reason = (
                f"its kernel for head size {query.shape[-1]} and blocks of {tile.rows} rows and {tile.keys} keys"
                f" cannot be launched: {lines[-1].strip()}"
            )
            self._refused[_kind(query, key, value, scoring)] = reason
            raise KernelError(reason) from error

    def _launch(
        self, tile: Tile, plan: TreePlan, query: Tensor, key: Tensor, value: Tensor, scoring: Scoring
    ) -> Tensor:
        (rows, heads, dim), (_, size, kv_heads, dim_v) = query.shape, value.shape
        groups = heads // kv_heads
        work = plan.once(("blocks of rows", tile.rows, groups), lambda: row_blocks(plan, tile.rows, groups))
        depths = plan.once("depths in int32", lambda: plan.depths.to(torch.int32))
        reach, window = plan.kv_length, scoring.window
        if window is not None:
            reach = min(reach, window + max(plan.sizes))
        splits = choose_splits(len(work) * kv_heads, triton.cdiv(reach, tile.keys), self.processors)
        partial = query.new_empty(splits, kv_heads, rows * groups, dim_v, dtype=torch.float32)
        partial_lse = query.new_empty(splits, kv_heads, rows * groups, dtype=torch.float32)
        out = query.new_empty(rows, heads, dim_v)
        block_dv = max(16, triton.next_power_of_2(dim_v))
        with torch.cuda.device_of(query):  # Triton launches on the current device
            split_kernel[(len(work), kv_heads, splits)](
                query, key, value, work, plan.lengths, plan.table.blocks, plan.words, depths, partial, partial_lse,
                *query.stride()[:2], plan.table.blocks.stride(0), rows, plan.words.shape[1], kv_heads,
                scoring.scaling, scoring.softcap, window,
                GROUPS=groups, DIM=dim, DIM_V=dim_v, SIZE=size,
                BLOCK_D=max(16, triton.next_power_of_2(dim)), BLOCK_DV=block_dv,
                BLOCK_M=tile.rows, BLOCK_N=tile.keys, UPCAST=self._interpreted,
                num_warps=tile.warps, num_stages=tile.stages,
            )  # fmt: skip
            merge_kernel[(rows * groups, kv_heads)](
                partial, partial_lse, scoring.sinks, out, rows * groups, splits,
                GROUPS=groups, DIM_V=dim_v, BLOCK_DV=block_dv, BLOCK_S=triton.next_power_of_2(splits),
                num_warps=1 if splits <= 16 else 4,
            )  # fmt: skip
        return out


def row_blocks(plan: TreePlan, block: int, groups: int) -> Tensor:
    """[blocks of rows, 4] int32: sequence, first packed row, first row of the tree, and number of its nodes.

    For trees of equal size it is computed on the device, so that a graph can capture it; otherwise on the host.
    """
    device = plan.lengths.device
    if plan.uniform is None:
        packed = [range(0, size * groups, block) for size in plan.sizes]
        numbers = [
            (sequence, row, plan.firsts[sequence], plan.sizes[sequence])
            for sequence, starts in enumerate(packed)
            for row in starts
        ]
        return torch.tensor(numbers, dtype=torch.int32, device=device)
    each = -(-plan.uniform * groups // block)
    index = torch.arange(len(plan.sizes) * each, dtype=torch.int32, device=device)
    sequence, nodes = index // each, torch.full_like(index, plan.uniform)
    return torch.stack([sequence, index % each * block, sequence * nodes, nodes], dim=1)


def _kind(query: Tensor, key: Tensor, value: Tensor, scoring: Scoring) -> tuple[object, ...]:
    """The properties of a layer on which its compiled kernels depend."""
    groups, sizes = query.shape[1] // key.shape[2], (query.shape[-1], value.shape[-1])
    return query.dtype, groups, sizes, scoring.window is None, scoring.softcap is None, scoring.sinks is None


def _shared_memory(device: torch.device) -> int:
    """Triton's limit on a kernel's shared memory when it loads one."""
    with torch.cuda.device(device):
        return int(driver.active.utils.get_device_properties(torch.cuda.current_device())["max_shared_mem"])
