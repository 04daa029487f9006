"""Passes and states by hand, for tests that look inside a step."""

import torch

from medusa.cache import CachedSequence, tell
from medusa.state import DecodeState
from medusa.tree import Draft


@torch.inference_mode()
def prefill(base, prompts, seeds=None, chunk=512, pool=None, observers=()):
    """What is cached of all prompts but their last tokens, and the state whose roots these are."""
    pool = pool or base.new_pool()
    sequences = [CachedSequence(pool, observers) for _ in prompts]
    for prompt, one in zip(prompts, sequences, strict=True):
        one.recall(prompt[:-2])
    hidden = torch.zeros(len(prompts), base.feature_size, dtype=base.dtype, device=base.device)
    for row, (prompt, one) in enumerate(zip(prompts, sequences, strict=True)):
        while one.length < len(prompt) - 1:
            tokens = prompt[one.length : min(one.length + chunk, len(prompt) - 1)]
            hidden_1CF = verify(base, [one], Draft.chain(torch.tensor([tokens], device=base.device)))
            one.length += len(tokens)
            hidden[row] = hidden_1CF[0, -1]
            after = torch.tensor([prompt[one.length - len(tokens) + 1 : one.length + 1]], device=base.device)
            tell([one], hidden_1CF, after, [len(tokens)])
    width = max(map(len, prompts)) + 1
    history = torch.tensor([[*prompt, *([0] * (width - len(prompt)))] for prompt in prompts], device=base.device)
    positions = torch.tensor([len(prompt) - 1 for prompt in prompts], device=base.device)
    roots = history.gather(1, positions[:, None])[:, 0]
    seeds = torch.tensor(seeds or [0] * len(prompts), device=base.device)
    active = torch.ones_like(roots, dtype=torch.bool)
    return sequences, DecodeState(roots, hidden, active, history, positions, seeds, positions + 1)


@torch.inference_mode()
def verify(base, sequences, draft):
    """Hidden states [B, N, F] of the nodes of trees, 0 behind the end of smaller ones."""
    return draft.spread(base.run(sequences[0].pool, base.plan([(draft, sequences)])))
