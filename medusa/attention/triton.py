"""The Triton backend: one pass over keys and values for all rows of a tree (``medusa/attention/kernels.py``)."""

from typing import NamedTuple

import torch
import triton
from torch import Tensor

from medusa.attention.base import BackendUnavailableError, Scoring
from medusa.attention.kernels import merge_kernel, split_kernel
from medusa.attention.plan import TreePlan

MAX_DIM = 256
MAX_SPLITS = 64
WAVES = 2
"""Programs per multiprocessor that the splits aim at: one computes while another waits for memory."""


class Tile(NamedTuple):
    """How one program cuts its work.

    Attributes:
        rows: Packed query rows of a block.
        keys: Cache rows of a block.
        warps: Warps of a program.
        stages: Blocks of keys and values in flight.
    """

    rows: int
    keys: int
    warps: int
    stages: int


def choose_tile(rows: int, dim: int, itemsize: int) -> Tile:
    """A tile whose queries and blocks in flight fit a Hopper multiprocessor's shared memory (227 KiB).

    Every block of rows reads all keys, so blocks are as large as registers allow. Products in float32 use no tensor
    cores and hold their operands in registers: small blocks.

    Args:
        rows: N * g, packed rows of a key head.
        dim: The larger of D and Dv.
        itemsize: Bytes of an element.
    """
    block = max(16, triton.next_power_of_2(rows))
    if itemsize > 2:
        return Tile(16, 32 if dim <= 64 else 16, 4, 1)
    block = min(block, 128)
    return Tile(block, 64 if dim <= 128 else 32, 4 if block <= 64 else 8, 3 if dim <= 128 else 2)


def choose_splits(programs: int, key_blocks: int, processors: int) -> int:
    """Into how many parts, a power of two, the cache is split so that its programs fill the device.

    Args:
        programs: Programs per split.
        key_blocks: Blocks of keys; a split gets at least two of them.
        processors: Multiprocessors.
    """
    splits = min(WAVES * processors // programs, key_blocks // 2, MAX_SPLITS)
    return 1 << max(splits.bit_length() - 1, 0)


class TritonAttention:
    """Split-K flash decoding with bit-packed tree masks. On a CPU only in Triton's interpreter, for tests.

    Attributes:
        processors: Multiprocessors to fill.
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

    def objection(self, query: Tensor, key: Tensor, value: Tensor, scoring: Scoring) -> str | None:
        """Head sizes that do not fit, and dtypes that the kernel does not know."""
        if query.dtype not in self.dtypes:
            return f"its kernel does not compute in {query.dtype}"
        dim = max(query.shape[-1], value.shape[-1])
        return f"head size ({dim}) exceeds {MAX_DIM}" if dim > MAX_DIM else None

    def attend(self, plan: TreePlan, query: Tensor, key: Tensor, value: Tensor, scoring: Scoring) -> Tensor:
        """See ``TreeAttention.attend``; the result is a transposed view of [B, N, H, Dv]."""
        query, key, value = (x if x.stride(-1) == 1 else x.contiguous() for x in (query, key, value))
        (batch, heads, nodes, dim), kv_heads, dim_v = query.shape, key.shape[1], value.shape[-1]
        groups, pairs = heads // kv_heads, batch * kv_heads
        rows = nodes * groups
        tile = choose_tile(rows, max(dim, dim_v), query.element_size())
        row_blocks = triton.cdiv(rows, tile.rows)
        reach = plan.kv_length if scoring.window is None else min(plan.kv_length, scoring.window + nodes)
        splits = choose_splits(row_blocks * pairs, triton.cdiv(reach, tile.keys), self.processors)
        partial = query.new_empty(splits, pairs, rows, dim_v, dtype=torch.float32)
        partial_lse = query.new_empty(splits, pairs, rows, dtype=torch.float32)
        out = query.new_empty(batch, nodes, heads, dim_v)
        block_dv = max(16, triton.next_power_of_2(dim_v))
        with torch.cuda.device_of(query):  # Triton launches on the current device
            split_kernel[(row_blocks, pairs, splits)](
                query, key, value, plan.lengths, plan.words, plan.depths_int32, partial, partial_lse,
                *query.stride()[:3], *key.stride()[:3], *value.stride()[:3],
                nodes, kv_heads, scoring.scaling, scoring.softcap, scoring.window,
                GROUPS=groups, DIM=dim, DIM_V=dim_v, BLOCK_D=max(16, triton.next_power_of_2(dim)), BLOCK_DV=block_dv,
                BLOCK_M=tile.rows, BLOCK_N=tile.keys, UPCAST=self._interpreted,
                num_warps=tile.warps, num_stages=tile.stages,
            )  # fmt: skip
            merge_kernel[(rows, pairs)](
                partial, partial_lse, scoring.sinks, out, rows, kv_heads, splits,
                GROUPS=groups, DIM_V=dim_v, BLOCK_DV=block_dv, BLOCK_S=triton.next_power_of_2(splits),
                num_warps=1 if splits <= 16 else 4,
            )  # fmt: skip
        return out.transpose(1, 2)
