"""Kernels that select: likeliest tokens, draws, the accepted path of a tree (kernels/draw.h, kernels/tree.h)."""

import ctypes

import torch
from torch import Tensor

from medusa.cpu.native import LIBRARY, kernels, number_type, reads, reads_indices
from medusa.noise import gumbel_of


class _Drawing(ctypes.Structure):
    """``Drawing`` of draw.h."""

    _fields_ = [
        *[(name, ctypes.c_int64) for name in ("number_type", "threads", "rows", "columns", "top_k")],
        *[(name, ctypes.c_float) for name in ("temperature", "top_p", "min_p")],
        *[(name, ctypes.c_void_p) for name in ("logits", "keys", "out")],
    ]


class _Verdict(ctypes.Structure):
    """``Verdict`` of tree.h."""

    _fields_ = [
        *[(name, ctypes.c_int64) for name in ("batch", "nodes")],
        *[(name, ctypes.c_void_p) for name in ("tokens", "parents", "edges", "bonus", "likelihood")],
        *[(name, ctypes.c_void_p) for name in ("path", "counts", "taken", "leaf", "after")],
    ]  # fmt: skip


def argmax(x: Tensor) -> Tensor:
    """``x.argmax(-1)`` of x [..., V]: the first of the largest; by the kernel where it can, several times as fast."""
    if not reads(x):
        return x.argmax(-1)
    out: Tensor = torch.ops.medusa.argmax(x)
    return out


def _argmax(x: Tensor) -> Tensor:
    x = x.contiguous()
    out = torch.empty(x.shape[:-1], dtype=torch.int64)
    kernels().medusa_argmax(
        number_type(x.dtype), torch.get_num_threads(), out.numel(), x.shape[-1], x.data_ptr(), out.data_ptr()
    )
    return out


def draw(logits: Tensor, keys: Tensor, temperature: float, top_k: int, top_p: float, min_p: float) -> Tensor:
    """One token per row of logits [..., V] that the kernels read: the best after filters and Gumbel noise, int64 [...].

    The noise is that of ``medusa.noise`` and the filters are those of ``medusa.acceptance.logits.Warper``; tokens that
    are equally likely stay or go together.

    Args:
        logits: [..., V] in a dtype that ``reads`` knows, on a CPU.
        keys: int64 [...], ``medusa.noise.keys`` of each row.
        temperature: Above 0.
        top_k: 0 = all.
        top_p: 1 = all.
        min_p: 0 = all.
    """
    out: Tensor = torch.ops.medusa.draw(logits, keys, temperature, top_k, top_p, min_p)
    return out


def _draw(logits: Tensor, keys: Tensor, temperature: float, top_k: int, top_p: float, min_p: float) -> Tensor:
    logits, keys, out = logits.contiguous(), keys.contiguous(), torch.empty(logits.shape[:-1], dtype=torch.int64)
    drawing = _Drawing(
        number_type=number_type(logits.dtype), threads=torch.get_num_threads(), rows=out.numel(),
        columns=logits.shape[-1], top_k=top_k, temperature=temperature, top_p=top_p, min_p=min_p,
        logits=logits.data_ptr(), keys=keys.data_ptr(), out=out.data_ptr(),
    )  # fmt: skip
    kernels().medusa_draw(ctypes.byref(drawing))
    return out


def gumbel(keys: Tensor, tokens: Tensor) -> Tensor:
    """Noise [B, V] float32 of keys [B] and token ids [V], as ``medusa.noise.gumbel_of`` but for the last bits."""
    if not reads_indices(keys, tokens):
        return gumbel_of(keys[:, None], tokens)
    out: Tensor = torch.ops.medusa.gumbel(keys, tokens)
    return out


def _gumbel(keys: Tensor, tokens: Tensor) -> Tensor:
    keys, tokens, out = keys.contiguous(), tokens.contiguous(), torch.empty(len(keys), len(tokens))
    kernels().medusa_gumbel(len(keys), keys.data_ptr(), len(tokens), tokens.data_ptr(), out.data_ptr())
    return out


def depths(parents: Tensor) -> Tensor:
    """Edges from the root to each node, [B, N] like the parents, which stand before their children."""
    out: Tensor = torch.ops.medusa.depths(parents)
    return out


def _depths(parents: Tensor) -> Tensor:
    parents = parents.contiguous()
    out = torch.empty_like(parents)
    kernels().medusa_depths(*parents.shape, parents.data_ptr(), out.data_ptr())
    return out


def select_path(
    tokens: Tensor, parents: Tensor, edges: Tensor, bonus: Tensor, likelihood: Tensor | None
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """The fields of ``Accepted``, paths and tokens [B, N]; see ``medusa.acceptance.path.select_path``."""
    found: tuple[Tensor, Tensor, Tensor, Tensor, Tensor] = torch.ops.medusa.select_path(
        tokens, parents, edges, bonus, likelihood
    )
    return found


def _select_path(
    tokens: Tensor, parents: Tensor, edges: Tensor, bonus: Tensor, likelihood: Tensor | None
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    tokens, parents, edges, bonus = (x.contiguous() for x in (tokens, parents, edges, bonus))
    likelihood = None if likelihood is None else likelihood.float().contiguous()
    path, taken = torch.empty_like(tokens), torch.empty_like(tokens)
    counts, leaf, after = (tokens.new_empty(len(tokens)) for _ in range(3))
    verdict = _Verdict(
        *tokens.shape, tokens.data_ptr(), parents.data_ptr(), edges.data_ptr(), bonus.data_ptr(),
        None if likelihood is None else likelihood.data_ptr(), path.data_ptr(), counts.data_ptr(), taken.data_ptr(),
        leaf.data_ptr(), after.data_ptr(),
    )  # fmt: skip
    kernels().medusa_select_path(ctypes.byref(verdict))
    return path, counts, taken, leaf, after


LIBRARY.define("argmax(Tensor x) -> Tensor")
LIBRARY.define("draw(Tensor x, Tensor keys, float temperature, int top_k, float top_p, float min_p) -> Tensor")
LIBRARY.define("gumbel(Tensor keys, Tensor tokens) -> Tensor")
LIBRARY.define("depths(Tensor parents) -> Tensor")
LIBRARY.define(
    "select_path(Tensor tokens, Tensor parents, Tensor edges, Tensor bonus, Tensor? likelihood)"
    " -> (Tensor, Tensor, Tensor, Tensor, Tensor)"
)
for _function in (_argmax, _draw, _gumbel, _depths, _select_path):
    LIBRARY.impl(_function.__name__[1:], _function, "CPU")
