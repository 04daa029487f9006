"""The flash backend: flash attention over the cached prefix, masked products inside the tree, merged by log-sum-exp.

Flash kernels do not support tree masks, but only the N x N part inside the tree needs a mask. Softmax over both parts
is the mean of the parts' outputs, weighted by exp(log-sum-exp). The prefix is computed by the package flash-attn if it
is installed, otherwise by torch's flash kernels. The package reads blocks of multiples of ``PAGE`` positions in place;
smaller blocks, and all blocks for torch's kernels, are first copied in order.

Legend: S sequences with trees of N nodes, R = N * g rows of a key head.
"""

import importlib
import inspect
import logging
from collections.abc import Callable

import torch
from torch import Tensor

from medusa.attention.contract import Scoring, TreePlan
from medusa.attention.parts import Part, by_part

logger = logging.getLogger(__name__)

MAX_DIM = 256
DIM_STEP = 8
"""Head sizes must be multiples of this; otherwise kernels would pad, and so copy, the whole cache."""
PAGE = 256
"""flash-attn 2 reads blocks through a table if their size is a multiple of this number of positions."""
HALF = frozenset({torch.bfloat16, torch.float16})

_CUDA_KERNEL = torch.ops.aten._flash_attention_forward
_CPU_KERNEL = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu

Prefix = Callable[[Tensor, Tensor, Tensor, Part, Scoring], tuple[Tensor, Tensor]]
"""(rows [S, R, Hkv, D], keys and values [blocks, size, Hkv, D], part, scoring) -> attention over each sequence's first
L keys: output [S, R, Hkv, D] and log-sum-exp [S, Hkv, R]. Both are undefined if L is 0."""


class FlashAttention:
    """Prefix and tree separately. Layers with windows are left to the reference: a window cuts the prefix by depth."""

    name = "flash"

    def __init__(self, device: torch.device) -> None:
        on_gpu = device.type == "cuda"
        package = _package() if on_gpu else None
        self._prefix: Prefix = _with_package(package) if package else _torch_cuda if on_gpu else _torch_cpu
        self.recordable = on_gpu  # torch's CPU kernel is called per sequence, with its true length
        self._softcap = package is not None and "softcap" in inspect.signature(package).parameters
        self.dtypes = HALF if on_gpu else HALF | {torch.float32, torch.float64}
        logger.info("flash attention by %s", "flash-attn" if package else f"torch's own kernel for {device.type}")

    def objection(self, query: Tensor, key: Tensor, value: Tensor, scoring: Scoring) -> str | None:
        """Dtypes, head sizes, windows and softcaps that flash kernels do not support."""
        dim, dim_v = query.shape[-1], value.shape[-1]
        if query.dtype not in self.dtypes:
            return f"flash kernels do not compute in {query.dtype}"
        if dim != dim_v or dim > MAX_DIM or dim % DIM_STEP:
            return f"head sizes ({dim}, {dim_v}) must be equal multiples of {DIM_STEP} up to {MAX_DIM}"
        if scoring.window is not None:
            return "a sliding window hides other rows of the prefix from every depth of the tree"
        if scoring.softcap is not None and not self._softcap:
            return "this flash kernel does not cap scores"
        return None

    def attend(self, plan: TreePlan, query: Tensor, key: Tensor, value: Tensor, scoring: Scoring) -> Tensor:
        """See ``TreeAttention``: a flash kernel for the prefix, masked products for the tree, then a merge."""

        def attend(part: Part, query_SNHD: Tensor) -> Tensor:
            query_SKGND = query_SNHD.unflatten(2, (key.shape[2], -1)).permute(0, 2, 3, 1, 4)
            rows_SRKD = query_SKGND.permute(0, 2, 3, 1, 4).flatten(1, 2)  # the g heads of a key head are rows of it
            out_SRKD, lse_SKR = self._prefix(rows_SRKD, key, value, part, scoring)
            grid = (-1, part.nodes)
            prefix = out_SRKD.transpose(1, 2).unflatten(2, grid), lse_SKR.unflatten(2, grid)
            tree = _inside_tree(part, query_SKGND, key, value, scoring)
            out_SKGND = merge(_without_empty(part, *prefix), tree, scoring.sinks)
            return out_SKGND.to(query.dtype).permute(0, 3, 1, 2, 4).flatten(2, 3)

        return by_part(plan, query, attend)


def merge(first: tuple[Tensor, Tensor], second: tuple[Tensor, Tensor], sinks: Tensor | None = None) -> Tensor:
    """Merge the attention over two sets of keys into the attention over both.

    Args:
        first: Output [S, Hkv, g, N, Dv], finite, and log-sum-exp [S, Hkv, g, N]; -inf = the row sees no key.
        second: The same over the other keys; every row sees at least one.
        sinks: [H] scores that take weight and add no value.

    Returns:
        Output [S, Hkv, g, N, Dv] in the dtype of the log-sum-exps.
    """
    top = torch.maximum(first[1], second[1])
    if sinks is not None:
        sinks = sinks.to(top.dtype).view(top.shape[1], top.shape[2], 1)
        top = torch.maximum(top, sinks)
    weights = (first[1] - top).exp(), (second[1] - top).exp()
    total = weights[0] + weights[1]
    if sinks is not None:
        total = total + (sinks - top).exp()
    return first[0] * (weights[0] / total)[..., None] + second[0] * (weights[1] / total)[..., None]


def _without_empty(part: Part, out: Tensor, lse: Tensor) -> tuple[Tensor, Tensor]:
    """Set log-sum-exps of sequences without a prefix to -inf; flash-attn returns +inf, which would take all weight."""
    empty = (part.lengths == 0).view(-1, 1, 1, 1)
    return out.masked_fill(empty[..., None], 0.0), lse.masked_fill(empty, float("-inf"))


def _inside_tree(
    part: Part, query_SKGND: Tensor, key: Tensor, value: Tensor, scoring: Scoring
) -> tuple[Tensor, Tensor]:
    """Attention inside the tree, in float32 or better: output [S, Hkv, g, N, D], log-sum-exp [S, Hkv, g, N]."""
    dtype = torch.promote_types(query_SKGND.dtype, torch.float32)
    keys, values = (part.gather_own(arena).to(dtype).transpose(1, 2)[:, :, None] for arena in (key, value))
    scores = torch.matmul(query_SKGND.to(dtype), keys.transpose(-1, -2)) * scoring.scaling
    if scoring.softcap is not None:
        scores = scoring.softcap * torch.tanh(scores / scoring.softcap)
    scores = scores.masked_fill(~part.ancestors[:, None, None], float("-inf"))
    return torch.matmul(scores.softmax(-1), values), scores.logsumexp(-1)


def _package() -> Callable[..., tuple[Tensor, Tensor]] | None:
    """flash-attn's kernel for cached keys; flash-attn 4 alone does not have it."""
    try:
        module = importlib.import_module("flash_attn.flash_attn_interface")
    except ImportError:
        return None
    return getattr(module, "flash_attn_with_kvcache", None)


def _with_package(kernel: Callable[..., tuple[Tensor, Tensor]]) -> Prefix:
    def prefix(rows: Tensor, key: Tensor, value: Tensor, part: Part, scoring: Scoring) -> tuple[Tensor, Tensor]:
        options: dict[str, object] = {} if scoring.softcap is None else {"softcap": scoring.softcap}
        if key.shape[1] % PAGE == 0:
            options["block_table"] = part.blocks_int32
        else:
            key, value = part.gather(key), part.gather(value)
        return kernel(
            rows, key, value, cache_seqlens=part.lengths_int32, softmax_scale=scoring.scaling, causal=False,
            num_splits=0, return_softmax_lse=True, **options,
        )  # fmt: skip

    return prefix


def _torch_cuda(rows: Tensor, key: Tensor, value: Tensor, part: Part, scoring: Scoring) -> tuple[Tensor, Tensor]:
    """torch's variable-length kernel over concatenated sequences; it reads true lengths on the device.

    It does not split long prefixes among multiprocessors, so the package is faster for few sequences.
    """
    (count, rows_each), positions = rows.shape[:2], part.places.shape[1]
    index = torch.arange(count + 1, dtype=torch.int32, device=rows.device)
    out, lse, *_ = _CUDA_KERNEL(
        rows.flatten(0, 1), part.gather(key).flatten(0, 1), part.gather(value).flatten(0, 1),
        index * rows_each, index * positions, rows_each, positions, 0.0, False, False,
        scale=scoring.scaling, seqused_k=part.lengths_int32,
    )  # fmt: skip
    return out.unflatten(0, (count, -1)), lse.unflatten(1, (count, -1)).transpose(0, 1)


def _torch_cpu(rows: Tensor, key: Tensor, value: Tensor, part: Part, scoring: Scoring) -> tuple[Tensor, Tensor]:
    """torch's CPU kernel, one sequence at a time, because lengths are known on a CPU."""
    count, rows_each, kv_heads, _ = rows.shape
    out = torch.empty_like(rows)
    lse = rows.new_empty(count, kv_heads, rows_each, dtype=torch.promote_types(rows.dtype, torch.float32))
    for index, length in enumerate(part.lengths.tolist()):
        if length:
            keys, values = (arena.flatten(0, 1)[part.places[index, :length]] for arena in (key, value))
            tensors = (x[None].transpose(1, 2) for x in (rows[index], keys, values))
            out_1KRD, lse_1KR = _CPU_KERNEL(*tensors, scale=scoring.scaling)
            out[index], lse[index] = out_1KRD[0].transpose(0, 1), lse_1KR[0]
    return out, lse
