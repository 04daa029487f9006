"""One decode step: draft, verify, accept, commit. Chunks of prompts may share its pass of the base."""

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor
from torch.nn.functional import pad

from medusa.acceptance import Accepted, Rule, accept
from medusa.base.model import BaseModel
from medusa.base.verify import verify, verify_together
from medusa.cache import SlotCache
from medusa.drafters import Drafter
from medusa.engine.prefill import Prefill, logits_beside
from medusa.state import DecodeState
from medusa.tree import Draft


@dataclass(frozen=True)
class StepResult:
    """What a step gives.

    Attributes:
        tokens: The new tokens of each sequence, on the host, the last of them the base's own; none where it was not
            active.
        state: What the next step starts from.
        sizes: Nodes of each sequence's tree, the root included.
    """

    tokens: list[list[int]]
    state: DecodeState
    sizes: Sequence[int]


class Reader(Protocol):
    """Sees more of a step than its tokens."""

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
    prompts: Sequence[Prefill] = (),
) -> StepResult:
    """Draft a tree, verify it in one pass of the base, accept a path, and keep that path's rows of the cache.

    Prompts advance by a chunk meanwhile.
    """
    state = _make_room(cache, state, drafter.nodes)
    return _read(cache, *step_on_device(base, cache, drafter, rule, state, reader, prompts))


@torch.inference_mode()
def first_step(prompt: Prefill, drafter: Drafter, rule: Rule, reader: Reader | None = None) -> StepResult:
    """The base's own token after each of some prompts, whose pass is over (``Prefill.done``).

    Args:
        prompt: With the base's logits at its last tokens.
        drafter: Drafts nothing: what can be verified was computed already.
        rule: Chooses the tokens.
        reader: See ``Reader``.
    """
    assert prompt.logits is not None, "its pass is over"
    state = prompt.state
    state = dataclasses.replace(state, history=pad(state.history, (0, 1)))  # room for the new tokens
    draft = drafter.propose(state, prompt.cache)
    ends = prompt.ends[:, None], prompt.logits[:, None]
    return _read(prompt.cache, *_conclude(prompt.cache, draft, *ends, rule, state, reader))


def step_on_device(
    base: BaseModel,
    cache: SlotCache,
    drafter: Drafter,
    rule: Rule,
    state: DecodeState,
    reader: Reader | None = None,
    prompts: Sequence[Prefill] = (),
) -> tuple[Tensor, DecodeState, Sequence[int]]:
    """The step without the host, for a cache and a history that have room for it.

    Returns:
        [A + 1, B] int64: the emitted tokens of each sequence, undefined behind their number, which is the last row; the
        next state; and the nodes of each tree.
    """
    draft = _fit(base, cache, drafter.propose(state, cache))

    if prompts:
        hidden_BNF, *chunks = verify_together(base, [(cache, draft), *((one.cache, one.chunk()) for one in prompts)])
        for one, hidden_BCF in zip(prompts, chunks, strict=True):
            one.take(hidden_BCF)
        logits_BNV = draft.spread(logits_beside(base, draft.flat(hidden_BNF), prompts))
    else:
        hidden_BNF = verify(base, cache, draft)
        logits_BNV = draft.on_nodes(base.logits, hidden_BNF)

    return _conclude(cache, draft, hidden_BNF, logits_BNV, rule, state, reader)


def _conclude(
    cache: SlotCache,
    draft: Draft,
    hidden_BNF: Tensor,
    logits_BNV: Tensor,
    rule: Rule,
    state: DecodeState,
    reader: Reader | None,
) -> tuple[Tensor, DecodeState, Sequence[int]]:
    """Accept a path of each tree and keep its rows; logits are 0 behind the end of smaller trees."""
    verdict = rule(draft, logits_BNV, state)
    accepted = accept(draft, verdict, state, hidden_BNF)
    if reader is not None:
        reader.read(accepted, logits_BNV)

    counts_B = accepted.counts
    if draft.depth == 0:
        cache.extend(counts_B)  # the root alone: its row already stands where it belongs
    else:
        cache.commit(accepted.path, counts_B)
    for follower in cache.observers:
        path_BAF = hidden_BNF.gather(1, accepted.path[..., None].expand(-1, -1, hidden_BNF.shape[2]))
        follower.observe(path_BAF, accepted.tokens, counts_B.tolist())
    state = dataclasses.replace(state, roots=accepted.bonus, hidden=accepted.hidden, positions=cache.lengths)
    return accepted.emitted, state, draft.row_sizes


def _read(cache: SlotCache, emitted: Tensor, state: DecodeState, sizes: Sequence[int]) -> StepResult:
    tokens, counts = read_tokens(emitted.tolist())  # the step's only copy to the host
    cache.grow(counts)
    return StepResult(tokens, state, sizes)


def read_tokens(emitted: list[list[int]]) -> tuple[list[list[int]], list[int]]:
    """The tokens of each sequence and their numbers, from what ``step_on_device`` returns."""
    *rows, counts = emitted
    tokens = [list(row[:count]) for row, count in zip(zip(*rows, strict=True), counts, strict=True)]
    return tokens, counts


def _fit(base: BaseModel, cache: SlotCache, draft: Draft) -> Draft:
    """What the base can verify of a draft: any tree, or its tokens as a chain, or the root alone."""
    if base.decoding == "tree":
        return draft
    if draft.parts:
        return Draft.stack([(rows, _fit(base, cache, part)) for rows, part in draft.parts])
    # Where rows stand for positions, they end with the context.
    room = base.context_length - 1 - cache.longest if base.decoding == "chain" else 1
    rows = max(1, room)
    chain = Draft.chain(draft.tokens[:, :rows])
    if draft.probs is not None and torch.equal(draft.parents[:, :rows], chain.parents):  # they still hold
        return dataclasses.replace(chain, probs=draft.probs[:, :rows])
    return chain


def _make_room(cache: SlotCache, state: DecodeState, nodes: int) -> DecodeState:
    """Room for a step's rows in the cache and for its tokens in the history; both grow together, between steps."""
    cache.reserve(cache.longest + nodes)
    missing = cache.capacity + 1 - state.history.shape[1]
    if missing <= 0:
        return state
    return dataclasses.replace(state, history=pad(state.history, (0, missing)))
