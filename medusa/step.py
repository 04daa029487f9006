"""One decode step: draft, verify, accept, commit."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from medusa.acceptance import Accepted, Rule, select_path
from medusa.base_model import BaseModel
from medusa.cache import SlotCache
from medusa.drafters import DecodeState, Drafter
from medusa.tree import Draft


@dataclass(frozen=True)
class StepResult:
    """What a step gives.

    Attributes:
        tokens: The new tokens of each sequence, on the host, the last of them the base's own; none where it was not
            active.
        state: What the next step starts from.
    """

    tokens: list[list[int]]
    state: DecodeState


def verify(base: BaseModel, cache: SlotCache, draft: Draft) -> Tensor:
    """Run the base once over all tree rows; their keys and values go behind the committed rows of the cache.

    Returns:
        Last hidden states [B, N, D].
    """
    cache.begin(draft.tokens.shape[1])
    plan = base.new_plan(draft, cache)
    positions_BN = cache.lengths[:, None] + draft.depths
    return base.tree_hidden_states(draft.tokens, positions_BN, cache, plan)


@torch.inference_mode()
def decode_step(base: BaseModel, cache: SlotCache, drafter: Drafter, rule: Rule, state: DecodeState) -> StepResult:
    """Draft a tree, verify it in one pass of the base, accept a path, and keep that path's rows of the cache."""
    draft = drafter.propose(state)

    hidden_BND = verify(base, cache, draft)

    verdict = rule(draft, base.logits(hidden_BND), state)
    accepted = select_path(draft, verdict)

    counts_B = torch.where(state.active, accepted.counts, 0)
    if draft.depth == 0:
        cache.extend(counts_B)  # the root alone: its row already stands where it belongs
    else:
        cache.commit(accepted.path, counts_B)
    *rows, counts = torch.cat([accepted.tokens.T, counts_B[None]]).tolist()  # the step's only copy to the host
    cache.grow(counts)
    tokens = [list(row[:count]) for row, count in zip(zip(*rows, strict=True), counts, strict=True)]
    return StepResult(tokens, _next_state(state, accepted, hidden_BND, cache))


@torch.inference_mode()
def prefill(base: BaseModel, cache: SlotCache, prompts: Sequence[Sequence[int]], chunk: int = 512) -> DecodeState:
    """Cache all of each prompt but its last token, which becomes the first root.

    Args:
        base: The frozen base.
        cache: An empty cache of B slots.
        prompts: Token ids of B prompts, at least one each.
        chunk: Rows per forward pass; bounds the memory of long prompts.

    Returns:
        The state of the first step; the hidden state of a prompt of one token is zero.
    """
    batch, lengths = len(prompts), [len(prompt) for prompt in prompts]
    padded = [[*prompt, *([0] * (max(lengths) - len(prompt)))] for prompt in prompts]
    prompts_BT = torch.tensor(padded, device=base.device)
    last_B1 = torch.tensor(lengths, device=base.device)[:, None] - 1
    hidden_BD = torch.zeros(batch, base.hidden_size, dtype=base.dtype, device=base.device)
    for start in range(0, prompts_BT.shape[1] - 1, chunk):
        rows_BC = prompts_BT[:, :-1][:, start : start + chunk]
        hidden_BCD = verify(base, cache, Draft.chain(rows_BC))
        index_B = last_B1[:, 0] - 1 - start
        here_B = (index_B >= 0) & (index_B < rows_BC.shape[1])
        picked_BD = hidden_BCD[torch.arange(batch, device=base.device), index_B.clamp(0, rows_BC.shape[1] - 1)]
        hidden_BD = torch.where(here_B[:, None], picked_BD, hidden_BD)
        counts_B = (last_B1[:, 0] - start).clamp(0, rows_BC.shape[1])
        cache.extend(counts_B)
        cache.grow([min(max(length - 1 - start, 0), rows_BC.shape[1]) for length in lengths])
    roots_B = prompts_BT.gather(1, last_B1)[:, 0]
    history_BT = torch.nn.functional.pad(prompts_BT, (0, cache.capacity + 1 - prompts_BT.shape[1]))
    return DecodeState(
        roots_B, hidden_BD, torch.ones_like(roots_B, dtype=torch.bool), history_BT, positions=last_B1[:, 0]
    )


def _next_state(state: DecodeState, accepted: Accepted, hidden_BND: Tensor, cache: SlotCache) -> DecodeState:
    new_A = torch.arange(1, accepted.tokens.shape[1] + 1, device=hidden_BND.device)
    state.history.scatter_(1, state.positions[:, None] + new_A, accepted.tokens)
    index_B = torch.arange(len(hidden_BND), device=hidden_BND.device)
    hidden_BD = hidden_BND[index_B, accepted.leaf]
    return DecodeState(accepted.bonus, hidden_BD, state.active, state.history, cache.lengths)
