"""One decode step: draft, verify, accept, commit."""

import dataclasses
from collections.abc import Callable, Sequence
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

CHUNK = 512
"""Tokens of a prompt that one pass of a prefill computes."""


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


class Reader(Protocol):
    """Whoever wants to see more of a step than its tokens."""

    def read(self, accepted: Accepted, logits_BNV: Tensor) -> None:
        """See what was accepted, and the base's logits [B, N, V]."""


@torch.inference_mode()
def decode_step(
    base: BaseModel,
    cache: SlotCache,
    drafter: Drafter,
    rule: Rule,
    state: DecodeState,
    reader: Reader | None = None,
) -> StepResult:
    """Draft a tree, verify it in one pass of the base, accept a path, and keep that path's rows of the cache."""
    state = _make_room(cache, state, drafter.nodes)
    emitted, state = step_on_device(base, cache, drafter, rule, state, reader)
    tokens, counts = read_tokens(emitted.tolist())  # the step's only copy to the host
    cache.grow(counts)
    return StepResult(tokens, state)


def step_on_device(
    base: BaseModel,
    cache: SlotCache,
    drafter: Drafter,
    rule: Rule,
    state: DecodeState,
    reader: Reader | None = None,
) -> tuple[Tensor, DecodeState]:
    """The step without the host, for a cache and a history that have room for it.

    Returns:
        [A + 1, B] int64: the emitted tokens of each sequence, undefined behind their number, which is the last row; and
        the next state.
    """
    draft = _fit(base, cache, drafter.propose(state))

    hidden_BNF = verify(base, cache, draft)

    logits_BNV = base.logits(hidden_BNF)
    verdict = rule(draft, logits_BNV, state)
    accepted = select_path(draft, verdict)
    if reader is not None:
        reader.read(accepted, logits_BNV)

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


class Prefill:
    """Caches all of each prompt but its last token, which becomes the first root.

    Args:
        base: The frozen base.
        cache: A cache of B slots: empty, or with the rows of the first tokens of each prompt; at least its last two
            tokens must be missing, since the pass over the last but one gives the state's hidden state.
        prompts: Token ids of B prompts, at least one each.
        seeds: One per prompt, None = 0.
        chunk: Rows per forward pass; bounds the memory of long prompts. A base that decodes plainly gets one at a time.
    """

    def __init__(
        self,
        base: BaseModel,
        cache: SlotCache,
        prompts: Sequence[Sequence[int]],
        seeds: Sequence[int] | None = None,
        chunk: int = CHUNK,
    ) -> None:
        self.cache, self._base, self._chunk = cache, base, 1 if base.decoding == "plain" else chunk
        batch, width = len(prompts), max(map(len, prompts))
        padded = [[*prompt, *([0] * (width - len(prompt)))] for prompt in prompts]
        self._history_BT = torch.tensor(padded, device=base.device)
        self._hidden_BF = torch.zeros(batch, base.feature_size, dtype=base.dtype, device=base.device)
        self._seeds_B = torch.tensor(seeds or [0] * batch, device=base.device)
        self._missing = [len(prompt) - 1 - length for prompt, length in zip(prompts, cache.host_lengths, strict=True)]

    @torch.inference_mode()
    def advance(self) -> DecodeState | None:
        """Compute one chunk of each prompt.

        Returns:
            The state of the first step once nothing is missing; the hidden state of a prompt of one token is zero.
        """
        if any(self._missing):
            self._compute([min(rows, self._chunk) for rows in self._missing])
        if any(self._missing):
            return None
        lengths_B = self.cache.lengths
        roots_B = self._history_BT.gather(1, lengths_B[:, None])[:, 0]
        active_B = torch.ones_like(roots_B, dtype=torch.bool)
        return DecodeState(
            roots_B, self._hidden_BF, active_B, self._history_BT, lengths_B, self._seeds_B, starts=lengths_B + 1
        )

    def _compute(self, counts: list[int]) -> None:
        cache, device, width = self.cache, self._base.device, self._history_BT.shape[1]
        counts_B, index_C = torch.tensor(counts, device=device), torch.arange(max(counts), device=device)
        tokens_BC = self._history_BT.gather(1, (cache.lengths[:, None] + index_C).clamp(max=width - 1))
        hidden_BCF = verify(self._base, cache, Draft.chain(tokens_BC))
        last_BF = hidden_BCF[torch.arange(len(counts), device=device), (counts_B - 1).clamp(min=0)]
        self._hidden_BF = torch.where(counts_B[:, None] > 0, last_BF, self._hidden_BF)
        cache.extend(counts_B)
        cache.grow(counts)
        self._missing = [rows - count for rows, count in zip(self._missing, counts, strict=True)]


def prefill(
    base: BaseModel,
    cache: SlotCache,
    prompts: Sequence[Sequence[int]],
    seeds: Sequence[int] | None = None,
    chunk: int = CHUNK,
) -> DecodeState:
    """The state of the first step after all of ``Prefill``."""
    job = Prefill(base, cache, prompts, seeds, chunk)
    while (state := job.advance()) is None:
        pass
    return state


class Steps(Protocol):
    """Decode steps of the same sequences in a row, each from the state that the one before left."""

    def next(self) -> list[list[int]]:
        """The new tokens of each sequence, the last of them the base's own; none where it is not active any more."""

    def keep(self, active: Sequence[bool]) -> None:
        """Let only these sequences go on growing."""

    def stop(self) -> tuple[list[list[int]] | None, DecodeState]:
        """No more steps: the tokens of one that is still under way, if there is one, and the state after it."""


StartSteps = Callable[[BaseModel, SlotCache, Drafter, Rule, DecodeState], Steps]
"""Steps from a state on, in the cache that holds its rows: ``EagerSteps``, or ``StepGraphs.steps``."""


class EagerSteps:
    """``decode_step`` again and again."""

    def __init__(
        self,
        base: BaseModel,
        cache: SlotCache,
        drafter: Drafter,
        rule: Rule,
        state: DecodeState,
        reader: Reader | None = None,
    ) -> None:
        self._parts = (base, cache, drafter, rule)
        self._state, self._reader = state, reader

    def next(self) -> list[list[int]]:
        """See ``Steps``."""
        result = decode_step(*self._parts, self._state, self._reader)
        self._state = result.state
        return result.tokens

    def keep(self, active: Sequence[bool]) -> None:
        """See ``Steps``."""
        self._state = dataclasses.replace(self._state, active=torch.tensor(active, device=self._state.roots.device))

    def stop(self) -> tuple[list[list[int]] | None, DecodeState]:
        """See ``Steps``."""
        return None, self._state


def _fit(base: BaseModel, cache: SlotCache, draft: Draft) -> Draft:
    """What the base can verify of a draft, whoever drew it: any tree, or its tokens as a chain, or the root alone."""
    if base.decoding == "tree":
        return draft
    if draft.parts:
        return Draft.stack([(rows, _fit(base, cache, part)) for rows, part in draft.parts])
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
