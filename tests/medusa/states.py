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


def decode_state(histories, base, seeds=None):
    """A state whose sequences have these tokens, the root last, and random hidden states; seeds are 0 or as given."""
    positions = torch.tensor([len(history) - 1 for history in histories])
    history = torch.tensor([[*history, *([0] * (30 - len(history)))] for history in histories])
    roots, hidden = history.gather(1, positions[:, None])[:, 0], torch.randn(len(histories), base.hidden_size)
    active, seeds = torch.ones_like(roots, dtype=torch.bool), torch.zeros_like(roots) if seeds is None else seeds
    return DecodeState(roots, hidden.to(base.dtype), active, history, positions, seeds, torch.zeros_like(roots))
