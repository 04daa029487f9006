"""Passes and states by hand, for tests that look inside a step; batches to their ends."""

import torch

from medusa.cache import CachedSequence, tell
from medusa.state import DecodeState
from medusa.tree import Draft


def finish(batch):
    """All steps of a batch."""
    while len(batch):
        batch.step()


@torch.inference_mode()
def prefill(base, prompts, seeds=None, chunk=512, pool=None, observers=()):
    """What is cached of all prompts but their last tokens, and the state whose roots these are."""
    pool = pool or base.new_pool()
    sequences = [CachedSequence(pool, observers) for _ in prompts]
    for prompt, one in zip(prompts, sequences, strict=True):
        one.recall(prompt[:-2])
    hidden = torch.zeros(len(prompts), base.feature_size, dtype=base.dtype, device=base.device)
    equal = dict[tuple[int, ...], list[int]]()  # thousands of samples begin with one prompt: one pass computes it
    for row, (prompt, one) in enumerate(zip(prompts, sequences, strict=True)):
        equal.setdefault((one.length, *prompt), []).append(row)
    for rows in equal.values():
        prompt, group = prompts[rows[0]], [sequences[row] for row in rows]
        while (start := group[0].length) < len(prompt) - 1:
            end = min(start + chunk, len(prompt) - 1)
            tokens, after = torch.tensor([prompt[start:end], prompt[start + 1 : end + 1]], device=base.device)
            hidden_bCF = verify(base, group, Draft.chain(tokens.expand(len(rows), -1)))
            for one in group:
                one.length = end
            hidden[rows] = hidden_bCF[:, -1]
            tell(group, hidden_bCF, after.expand(len(rows), -1), [end - start] * len(rows))
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
