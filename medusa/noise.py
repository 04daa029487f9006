"""Random numbers as pure functions: a counter-based hash of (seed, position, token id).

There is no generator state, so a draw does not depend on earlier draws, on the tree, or on the batch. Every stage of
the hash is salted: without salts, equal numbers (token id = position at seed 0) would cancel in the xor.

Legend: B batch, N positions, V vocabulary.
"""

import torch
from torch import Tensor

TEXT = 0x85EBCA6B
"""Stream of the base's own draws; different streams are independent of each other."""
DRAFT = 0x27D4EB2F
"""Stream of a drafter's draws."""
OTHER_DRAFTS = (0x9E3779B1, 0x5F356495)
"""Streams of a second and a third drafter that draws: siblings must be drawn independently."""
CHANCE = 0x165667B1
"""Stream of the decisions whether a drawn draft token is accepted."""


def gumbel_noise(seeds_B: Tensor, positions_BN: Tensor, vocab_size: int, stream: int = TEXT) -> Tensor:
    """Standard Gumbel noise [B, N, V] float32: its argmax over log-probabilities + noise is a draw.

    ``-log(-log1p(-v))`` with v in (0, 1): float32 resolves v finest near 0, where the largest noise values come from.

    Args:
        seeds_B: [B] int64.
        positions_BN: [B, N] int64 absolute positions.
        vocab_size: V.
        stream: One of the independent streams.
    """
    tokens_V = torch.arange(vocab_size, device=positions_BN.device)
    return gumbel_of(keys(seeds_B, positions_BN, stream)[:, :, None], tokens_V)


def gumbel_of(keyed: Tensor, tokens: Tensor) -> Tensor:
    """Gumbel noise for pairs of a key (see ``keys``) and a token id: float32, in their broadcast shape."""
    return -torch.log(-torch.log1p(-_uniform(keyed, tokens)))


def uniform_noise(seeds_B: Tensor, positions_BN: Tensor, tokens_BN: Tensor) -> Tensor:
    """Numbers [B, N] float32 uniform in (0, 1), one for each pair of a position and a token id."""
    return _uniform(keys(seeds_B, positions_BN, CHANCE), tokens_BN)


def keys(seeds_B: Tensor, positions_BN: Tensor, stream: int = TEXT) -> Tensor:
    """[B, N] int64 below 2^32: the key of the noise of all tokens at a position."""
    seeds_B = _mix(seeds_B ^ 0x9E3779B9) ^ _mix((seeds_B >> 32) + 0x7F4A7C15)
    return _mix(seeds_B[:, None] ^ _mix(positions_BN ^ stream))


def _uniform(keyed: Tensor, tokens: Tensor) -> Tensor:
    hashed = _mix(keyed ^ _mix(tokens ^ 0xC2B2AE35))
    # 1 would be noise of minus infinity, like a token that a filter removed.
    return ((hashed.float() + 0.5) * 2.0**-32).clamp_(max=1 - 2.0**-24)


def _mix(value: Tensor) -> Tensor:
    """A 32-bit integer finaliser (two rounds of xor-shift and multiply) on int64 tensors."""
    value = value & 0xFFFFFFFF
    value = ((value ^ (value >> 16)) * 0x7FEB352D) & 0xFFFFFFFF
    value = ((value ^ (value >> 15)) * 0x846CA68B) & 0xFFFFFFFF
    return value ^ (value >> 16)
