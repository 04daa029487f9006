"""One decode step: draft, verify, accept, commit."""

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from medusa.acceptance import Accepted, Rule, select_path
from medusa.base.model import BaseModel
from medusa.cache import SlotCache
from medusa.drafters import Drafter
from medusa.state import DecodeState
from medusa.tree import Draft

LEAVE_AT = 7 / 8
"""Sequences that have ended leave a batch when at most this share of it still grows."""


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
        Hidden states [B, N, F].
    """
    cache.begin(draft.tokens.shape[1])
    plan = base.new_plan(draft, cache)
    positions_BN = cache.lengths[:, None] + draft.depths
    return base.tree_hidden_states(draft.tokens, positions_BN, cache, plan)


@torch.inference_mode()
def decode_step(base: BaseModel, cache: SlotCache, drafter: Drafter, rule: Rule, state: DecodeState) -> StepResult:
    """Draft a tree, verify it in one pass of the base, accept a path, and keep that path's rows of the cache."""
    state = _make_room(cache, state, drafter.nodes)
    emitted, state = step_on_device(base, cache, drafter, rule, state)
    tokens, counts = read_tokens(emitted.tolist())  # the step's only copy to the host
    cache.grow(counts)
    return StepResult(tokens, state)


def step_on_device(
    base: BaseModel, cache: SlotCache, drafter: Drafter, rule: Rule, state: DecodeState
) -> tuple[Tensor, DecodeState]:
    """The step without the host, for a cache and a history that have room for it.

    Returns:
        [A + 1, B] int64: the emitted tokens of each sequence, undefined behind their number, which is the last row; and
        the next state.
    """
    draft = _fit(base, cache, drafter.propose(state))

    hidden_BNF = verify(base, cache, draft)

    verdict = rule(draft, base.logits(hidden_BNF), state)
    accepted = select_path(draft, verdict)

    counts_B = torch.where(state.active, accepted.counts, 0)
    if draft.depth == 0:
        cache.extend(counts_B)  # the root alone: its row already stands where it belongs
    else:
        cache.commit(accepted.path, counts_B)
    emitted = torch.cat([accepted.tokens.T, counts_B[None]])
    return emitted, _next_state(state, accepted, hidden_BNF, cache)


def read_tokens(emitted: list[list[int]]) -> tuple[list[list[int]], list[int]]:
    """The tokens of each sequence and their numbers, from what ``step_on_device`` returns."""
    *rows, counts = emitted
    tokens = [list(row[:count]) for row, count in zip(zip(*rows, strict=True), counts, strict=True)]
    return tokens, counts


@torch.inference_mode()
def prefill(
    base: BaseModel,
    cache: SlotCache,
    prompts: Sequence[Sequence[int]],
    seeds: Sequence[int] | None = None,
    chunk: int = 512,
) -> DecodeState:
    """Cache all of each prompt but its last token, which becomes the first root.

    Args:
        base: The frozen base.
        cache: A cache of B slots: empty, or with the rows of the first tokens of each prompt; at least its last two
            tokens must be missing, since the pass over the last but one gives the state's hidden state.
        prompts: Token ids of B prompts, at least one each.
        seeds: One per prompt, None = 0.
        chunk: Rows per forward pass; bounds the memory of long prompts. A base that decodes plainly gets one at a time.

    Returns:
        The state of the first step; the hidden state of a prompt of one token is zero.
    """
    batch, width = len(prompts), max(map(len, prompts))
    padded = [[*prompt, *([0] * (width - len(prompt)))] for prompt in prompts]
    history_BT = torch.tensor(padded, device=base.device)
    hidden_BF = torch.zeros(batch, base.feature_size, dtype=base.dtype, device=base.device)
    missing = [len(prompt) - 1 - length for prompt, length in zip(prompts, cache.host_lengths, strict=True)]
    while any(missing):
        counts = [min(rows, 1 if base.decoding == "plain" else chunk) for rows in missing]
        counts_B, index_C = torch.tensor(counts, device=base.device), torch.arange(max(counts), device=base.device)
        tokens_BC = history_BT.gather(1, (cache.lengths[:, None] + index_C).clamp(max=width - 1))
        hidden_BCF = verify(base, cache, Draft.chain(tokens_BC))
        last_BF = hidden_BCF[torch.arange(batch, device=base.device), (counts_B - 1).clamp(min=0)]
        hidden_BF = torch.where(counts_B[:, None] > 0, last_BF, hidden_BF)
        cache.extend(counts_B)
        cache.grow(counts)
        missing = [rows - count for rows, count in zip(missing, counts, strict=True)]
    roots_B = history_BT.gather(1, cache.lengths[:, None])[:, 0]
    active_B, seeds_B = torch.ones_like(roots_B, dtype=torch.bool), torch.tensor(seeds or [0] * batch)
    return DecodeState(roots_B, hidden_BF, active_B, history_BT, cache.lengths, seeds_B.to(base.device))


class Steps(Protocol):
    """Decode steps of one batch in a row, each from the state that the one before left."""

    def next(self) -> list[list[int]]:
        """The new tokens of each sequence, the last of them the base's own; none where it is not active any more."""

    def keep(self, active: Sequence[bool]) -> None:
        """Let only these sequences go on growing."""


class EagerSteps:
    """``decode_step`` again and again; sequences that have ended leave the batch, a few at a time."""

    def __init__(self, base: BaseModel, cache: SlotCache, drafter: Drafter, rule: Rule, state: DecodeState) -> None:
        self._parts = (base, cache, drafter, rule)
        self._state = state
        self._numbers = list(range(cache.slots))  # of the sequences that are still in the batch
        self._all = len(self._numbers)

    def next(self) -> list[list[int]]:
        """See ``Steps``."""
        result = decode_step(*self._parts, self._state)
        self._state = result.state
        tokens: list[list[int]] = [[] for _ in range(self._all)]
        for number, new in zip(self._numbers, result.tokens, strict=True):
            tokens[number] = new
        return tokens

    def keep(self, active: Sequence[bool]) -> None:
        """See ``Steps``."""
        slots = [slot for slot, number in enumerate(self._numbers) if active[number]]
        if 0 < len(slots) <= LEAVE_AT * len(self._numbers):  # leaving copies the cache of those that stay
            self._parts[1].select(slots)
            self._state, self._numbers = self._state.select(slots), [self._numbers[slot] for slot in slots]
        flags = [active[number] for number in self._numbers]
        self._state = dataclasses.replace(self._state, active=torch.tensor(flags, device=self._state.roots.device))


def _fit(base: BaseModel, cache: SlotCache, draft: Draft) -> Draft:
    """What the base can verify of a draft, whoever drew it: any tree, or its tokens as a chain, or the root alone."""
    if base.decoding == "tree":
        return draft
    # Where rows stand for positions, they end with the context.
    room = base.context_length - 1 - cache.longest if base.decoding == "chain" else 1
    rows = max(1, room)
    chain = Draft.chain(draft.tokens[:, :rows])
    if draft.probs is not None and torch.equal(draft.parents[:, :rows], chain.parents):  # its laws are still true
        return dataclasses.replace(chain, probs=draft.probs[:, :rows])
    return chain


def _make_room(cache: SlotCache, state: DecodeState, nodes: int) -> DecodeState:
    """Room for a step's rows in the cache and for its tokens in the history; both grow together, between steps."""
    cache.reserve(cache.longest + nodes)
    missing = cache.capacity + 1 - state.history.shape[1]
    if missing <= 0:
        return state
    return dataclasses.replace(state, history=torch.nn.functional.pad(state.history, (0, missing)))


def _next_state(state: DecodeState, accepted: Accepted, hidden_BNF: Tensor, cache: SlotCache) -> DecodeState:
    new_A = torch.arange(1, accepted.tokens.shape[1] + 1, device=hidden_BNF.device)
    state.history.scatter_(1, state.positions[:, None] + new_A, accepted.tokens)
    index_B = torch.arange(len(hidden_BNF), device=hidden_BNF.device)
    hidden_BF = hidden_BNF[index_B, accepted.leaf]
    return dataclasses.replace(state, roots=accepted.bonus, hidden=hidden_BF, positions=cache.lengths)
