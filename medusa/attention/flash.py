"""The flash backend: flash attention over the cached prefix, masked products inside the tree, merged by log-sum-exp.

No flash kernel takes the mask of a tree, but only the N x N part inside the tree needs one. Softmax over both parts is
the mean of the parts' outputs, weighted by exp(log-sum-exp). The prefix is computed by the package flash-attn where it
is installed, otherwise by the flash kernels that torch brings along.
"""

import importlib
import inspect
import logging
from collections.abc import Callable

import torch
from torch import Tensor

from medusa.attention.contract import Scoring, TreePlan

logger = logging.getLogger(__name__)

MAX_DIM = 256
DIM_STEP = 8
"""Head sizes are multiples of this; kernels would pad, and copy, the whole cache otherwise."""
HALF = frozenset({torch.bfloat16, torch.float16})

_CUDA_KERNEL = torch.ops.aten._flash_attention_forward
_CPU_KERNEL = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu

Prefix = Callable[[Tensor, Tensor, Tensor, TreePlan, Scoring], tuple[Tensor, Tensor]]
"""(rows [B, R, Hkv, D], keys and values [B, S, Hkv, D], plan, scoring) -> attention over each sequence's first L keys:
output [B, R, Hkv, D] and log-sum-exp [B, Hkv, R]. Both are undefined where L is 0."""


class FlashAttention:
    """Prefix and tree apart. Windows that hide rows are left to the reference: they cut the prefix by node depth."""

    name = "flash"

    def __init__(self, device: torch.device) -> None:
        on_gpu = device.type == "cuda"
        package = _package() if on_gpu else None
        self._prefix: Prefix = _with_package(package) if package else _torch_cuda if on_gpu else _torch_cpu
        self.recordable = on_gpu  # torch's kernel for CPUs is handed each sequence apart, cut to its length
        self._softcap = package is not None and "softcap" in inspect.signature(package).parameters
        self.dtypes = HALF if on_gpu else HALF | {torch.float32, torch.float64}
        logger.info("flash attention by %s", "flash-attn" if package else f"torch's own kernel for {device.type}")

    def objection(self, query: Tensor, key: Tensor, value: Tensor, scoring: Scoring) -> str | None:
        """What flash kernels do not know: some dtypes and head sizes, windows, softcaps."""
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
        """See ``TreeAttention.attend``."""
        kv_heads, nodes = key.shape[1], query.shape[2]
        query_BKGND = query.unflatten(1, (kv_heads, -1))
        rows_BRKD = query_BKGND.permute(0, 2, 3, 1, 4).flatten(1, 2)  # the g heads of a key head are rows of it
        out_BRKD, lse_BKR = self._prefix(rows_BRKD, key.transpose(1, 2), value.transpose(1, 2), plan, scoring)
        prefix = out_BRKD.transpose(1, 2).unflatten(2, (-1, nodes)), lse_BKR.unflatten(2, (-1, nodes))
        tree = _inside_tree(plan, query_BKGND, key, value, scoring)
        return merge(_without_empty(plan, *prefix), tree, scoring.sinks).flatten(1, 2).to(query.dtype)


def merge(first: tuple[Tensor, Tensor], second: tuple[Tensor, Tensor], sinks: Tensor | None = None) -> Tensor:
    """Attention over two sets of keys, from the attention over each.

    Args:
        first: Output [B, Hkv, g, N, Dv] and log-sum-exp [B, Hkv, g, N] (-inf: nothing seen); finite outputs only.
        second: The same over the other keys; every row has seen something here.
        sinks: [H] scores that take weight and add no value.

    Returns:
        [B, Hkv, g, N, Dv] in the log-sum-exps' dtype.
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


def _without_empty(plan: TreePlan, out: Tensor, lse: Tensor) -> tuple[Tensor, Tensor]:
    """Sequences without a prefix have seen nothing; flash-attn says +inf there, which would take all the weight."""
    empty = (plan.lengths == 0).view(-1, 1, 1, 1)
    return out.masked_fill(empty[..., None], 0.0), lse.masked_fill(empty, float("-inf"))


def _inside_tree(
    plan: TreePlan, query_BKGND: Tensor, key: Tensor, value: Tensor, scoring: Scoring
) -> tuple[Tensor, Tensor]:
    """Attention among the tree's own rows, in float32 or better: output [B, Hkv, g, N, D], lse [B, Hkv, g, N]."""
    dtype = torch.promote_types(query_BKGND.dtype, torch.float32)
    at = plan.tree_rows[:, None, :, None].expand(-1, key.shape[1], -1, key.shape[3])
    keys, values = (x.gather(2, at).to(dtype)[:, :, None] for x in (key, value))
    scores = torch.matmul(query_BKGND.to(dtype), keys.transpose(-1, -2)) * scoring.scaling
    if scoring.softcap is not None:
        scores = scoring.softcap * torch.tanh(scores / scoring.softcap)
    scores = scores.masked_fill(~plan.draft.ancestors[:, None, None], float("-inf"))
    return torch.matmul(scores.softmax(-1), values), scores.logsumexp(-1)


def _package() -> Callable[..., tuple[Tensor, Tensor]] | None:
    """flash-attn's kernel for cached keys; the package may be there without it (flash-attn 4 alone)."""
    try:
        module = importlib.import_module("flash_attn.flash_attn_interface")
    except ImportError:
        return None
    return getattr(module, "flash_attn_with_kvcache", None)


def _with_package(kernel: Callable[..., tuple[Tensor, Tensor]]) -> Prefix:
    def prefix(rows: Tensor, keys: Tensor, values: Tensor, plan: TreePlan, scoring: Scoring) -> tuple[Tensor, Tensor]:
        softcap = {} if scoring.softcap is None else {"softcap": scoring.softcap}
        return kernel(
            rows, keys, values, cache_seqlens=plan.lengths_int32, softmax_scale=scoring.scaling, causal=False,
            num_splits=0, return_softmax_lse=True, **softcap,
        )  # fmt: skip

    return prefix


def _torch_cuda(rows: Tensor, keys: Tensor, values: Tensor, plan: TreePlan, scoring: Scoring) -> tuple[Tensor, Tensor]:
    """torch's variable-length kernel over the slots as one long row of keys: reads true lengths on the device.

    It does not split long prefixes among multiprocessors, so the package is faster for few sequences.
    """
    batch, count, kv_heads, dim = rows.shape
    slot = keys.stride(0) // keys.stride(1)  # rows from one sequence's first key to the next one's
    flat = ((batch - 1) * slot + keys.shape[1], kv_heads, dim)
    sequences = torch.arange(batch + 1, dtype=torch.int32, device=rows.device)
    out, lse, *_ = _CUDA_KERNEL(
        rows.flatten(0, 1), keys.as_strided(flat, keys.stride()[1:]), values.as_strided(flat, values.stride()[1:]),
        sequences * count, sequences * slot, count, keys.shape[1], 0.0, False, False,
        scale=scoring.scaling, seqused_k=plan.lengths_int32,
    )  # fmt: skip
    return out.unflatten(0, (batch, count)), lse.unflatten(1, (batch, count)).transpose(0, 1)


def _torch_cpu(rows: Tensor, keys: Tensor, values: Tensor, plan: TreePlan, scoring: Scoring) -> tuple[Tensor, Tensor]:
    """torch's CPU kernel, sequence by sequence: lengths are at hand on a CPU."""
    batch, count, kv_heads, _ = rows.shape
    out = torch.empty_like(rows)
    lse = rows.new_empty(batch, kv_heads, count, dtype=torch.promote_types(rows.dtype, torch.float32))
    for index, length in enumerate(plan.lengths.tolist()):
        if length:
            parts = (x[index, None].transpose(1, 2) for x in (rows, keys[:, :length], values[:, :length]))
            out_1KRD, lse_1KR = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
                *parts, scale=scoring.scaling
            )
            out[index], lse[index] = out_1KRD[0].transpose(0, 1), lse_1KR[0]
    return out, lse
