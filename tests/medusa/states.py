"""States that rules are asked from, without a base."""

import torch

from medusa.state import DecodeState


def state_at(positions, seeds=None):
    """Roots at these positions of unknown texts; seeds are 0 where none are given."""
    positions = torch.as_tensor(positions)
    roots = torch.zeros_like(positions)
    history = torch.zeros(len(positions), 1, dtype=torch.int64)
    seeds = roots if seeds is None else seeds
    return DecodeState(roots, torch.zeros(len(positions), 1), roots == 0, history, positions, seeds, roots)
