"""Kernels for selection: argmax, sampling, the accepted path of a tree (kernels/draw.h, kernels/tree.h)."""

import ctypes

import torch
from torch import Tensor

from medusa import noise
from medusa.cpu.native import kernels, number_type, reads, reads_indices


class _Drawing(ctypes.Structure):
    """``Drawing`` of draw.h."""

    _fields_ = [
        *[(name, ctypes.c_int64) for name in ("number_type", "threads", "rows", "columns", "top_k")],
        *[(name, ctypes.c_float) for name in ("temperature", "top_p", "min_p")],
        *[(name, ctypes.c_void_p) for name in ("logits", "keys", "out")],
    ]


class _Accepting(ctypes.Structure):
    """``Accepting`` of tree.h."""

    _fields_ = [
        *[(name, ctypes.c_int64) for name in ("batch", "nodes", "width")],
        *[(name, ctypes.c_void_p) for name in ("tokens", "parents", "edges", "bonus", "likelihood")],
        *[(name, ctypes.c_void_p) for name in ("active", "positions", "history")],
        ("stride", ctypes.c_int64), ("hidden", ctypes.c_void_p), ("bytes", ctypes.c_int64),
        *[(name, ctypes.c_void_p) for name in ("path", "emitted", "after", "last")],
    ]  # fmt: skip


def argmax(x: Tensor) -> Tensor:
    """``x.argmax(-1)`` of x [..., V], the first maximum; several times as fast if the kernel supports x."""
    if not reads(x):
        return x.argmax(-1)
    x = x.contiguous()
    out = torch.empty(x.shape[:-1], dtype=torch.int64)
    kernels().medusa_argmax(
        number_type(x.dtype), torch.get_num_threads(), out.numel(), x.shape[-1], x.data_ptr(), out.data_ptr()
    )
    return out


def draw(logits: Tensor, keys: Tensor, temperature: float, top_k: int, top_p: float, min_p: float) -> Tensor:
    """Sample one token per row of logits [..., V]: the best after filters and Gumbel noise, int64 [...].

    The noise is that of ``medusa.noise``, and the filters are those of ``medusa.acceptance.logits.Warper``; equally
    likely tokens are kept or removed together.

    Args:
        logits: [..., V] for which ``reads`` is true.
        keys: int64 [...], ``medusa.noise.keys`` of each row.
        temperature: Above 0.
        top_k: Number of tokens to keep; 0 = all.
        top_p: Probability mass to keep; 1 = all.
        min_p: Smallest probability to keep, relative to the largest; 0 = all.
    """
    logits, keys, out = logits.contiguous(), keys.contiguous(), torch.empty(logits.shape[:-1], dtype=torch.int64)
    drawing = _Drawing(
        number_type=number_type(logits.dtype), threads=torch.get_num_threads(), rows=out.numel(),
        columns=logits.shape[-1], top_k=top_k, temperature=temperature, top_p=top_p, min_p=min_p,
        logits=logits.data_ptr(), keys=keys.data_ptr(), out=out.data_ptr(),
    )  # fmt: skip
    kernels().medusa_draw(ctypes.byref(drawing))
    return out


def keys(seeds_B: Tensor, positions_BN: Tensor) -> Tensor:
    """``medusa.noise.keys`` of the base's own draws; in torch they take longer than the draws themselves."""
    if not reads_indices(seeds_B, positions_BN):
        return noise.keys(seeds_B, positions_BN)
    seeds, positions = seeds_B.contiguous(), positions_BN.contiguous()
    out = torch.empty_like(positions)
    kernels().medusa_keys(*positions.shape, seeds.data_ptr(), positions.data_ptr(), noise.TEXT, out.data_ptr())
    return out


def gumbel(keys: Tensor, tokens: Tensor) -> Tensor:
    """Noise [B, V] float32 for keys [B] and token ids [V]; equals ``medusa.noise.gumbel_of`` up to the last bits."""
    if not reads_indices(keys, tokens):
        return noise.gumbel_of(keys[:, None], tokens)
    keys, tokens, out = keys.contiguous(), tokens.contiguous(), torch.empty(len(keys), len(tokens), dtype=torch.float32)
    kernels().medusa_gumbel(len(keys), keys.data_ptr(), len(tokens), tokens.data_ptr(), out.data_ptr())
    return out


def depths(parents: Tensor) -> Tensor:
    """Depth of each node [B, N], the number of edges from the root; parents [B, N] come before their children."""
    parents = parents.contiguous()
    out = torch.empty_like(parents)
    kernels().medusa_depths(*parents.shape, parents.data_ptr(), out.data_ptr())
    return out


def accept(
    tokens: Tensor,
    parents: Tensor,
    width: int,
    edges: Tensor | None,
    bonus: Tensor,
    likelihood: Tensor | None,
    active: Tensor,
    positions: Tensor,
    history: Tensor,
    hidden: Tensor,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """See ``medusa.acceptance.path.accept``; returns the fields of its result, for paths of at most ``width`` nodes."""
    assert history.stride(1) == 1, "the tokens of a text stand side by side"
    tokens, parents, bonus, hidden = tokens.contiguous(), parents.contiguous(), bonus.contiguous(), hidden.contiguous()
    active, positions = active.contiguous(), positions.contiguous()
    edges = None if edges is None else edges.contiguous()
    likelihood = None if likelihood is None else likelihood.float().contiguous()
    batch, nodes, size = hidden.shape
    path, emitted = tokens.new_empty(batch, width), tokens.new_empty(width + 1, batch)
    after, last = tokens.new_empty(batch), hidden.new_empty(batch, size)
    accepting = _Accepting(
        batch, nodes, width, tokens.data_ptr(), parents.data_ptr(), None if edges is None else edges.data_ptr(),
        bonus.data_ptr(), None if likelihood is None else likelihood.data_ptr(), active.data_ptr(),
        positions.data_ptr(), history.data_ptr(), history.stride(0), hidden.data_ptr(), size * hidden.element_size(),
        path.data_ptr(), emitted.data_ptr(), after.data_ptr(), last.data_ptr(),
    )  # fmt: skip
    kernels().medusa_accept(ctypes.byref(accepting))
    return path, emitted, after, last
