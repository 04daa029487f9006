"""One decode step: draft, verify, accept, commit. Chunks of prompts may share its pass of the base."""

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import pad

from medusa.acceptance import Accepted, Rule, accept
from medusa.attention import TreePlan
from medusa.base.model import BaseModel
from medusa.cache import BlockPool, CachedSequence, tell
from medusa.drafters import Drafter
from medusa.engine.logprobs import LogprobReader
from medusa.engine.prefill import Chunk, first_state, take_chunks
from medusa.state import DecodeState
from medusa.tree import Draft

HISTORY = 256
"""Least number of tokens by which a history grows."""


@dataclass(frozen=True)
class StepResult:
    """The result of a step.

    Attributes:
        tokens: The new tokens of each sequence, on the host; the last is the base's own. Empty if it was not active.
        state: The state that the next step starts from.
        sizes: Nodes of each sequence's tree, the root included.
    """

    tokens: list[list[int]]
    state: DecodeState
    sizes: Sequence[int]


@torch.inference_mode()
def decode_step(
    base: BaseModel,
    sequences: Sequence[CachedSequence],
    drafter: Drafter,
    rule: Rule,
    state: DecodeState,
    reader: LogprobReader | None = None,
    chunks: Sequence[Chunk] = (),
) -> StepResult:
    """Draft a tree, verify it in one pass of the base, accept a path, and keep its keys and values in the cache.

    Chunks of prompts are computed in the same pass.
    """
    state = with_room(state, max(one.length for one in sequences) + drafter.nodes + 1)
    draft = fit(base, sequences, drafter.propose(state, sequences))
    plan = base.plan([(draft, sequences), *(chunk.part for chunk in chunks)], lengths_B=state.positions)
    accepted, hidden_BNF, after = verify(base, sequences[0].pool, plan, rule, state, reader, chunks)
    tokens, counts = read_tokens(accepted.emitted.tolist())  # the step's only copy to the host
    for one, count in zip(sequences, counts, strict=True):
        one.length += count
    _tell(sequences, accepted, hidden_BNF, counts)
    return StepResult(tokens, after, draft.row_sizes)


def verify(
    base: BaseModel,
    pool: BlockPool,
    plan: TreePlan,
    rule: Rule,
    state: DecodeState,
    reader: LogprobReader | None = None,
    chunks: Sequence[Chunk] = (),
) -> tuple[Accepted, Tensor, DecodeState]:
    """Run the base over the plan's first trees and accept a path of each, without copies to the host.

    Returns:
        What was accepted, the hidden states [B, N, F] at the nodes, and the next state.
    """
    draft, hidden_RF = plan.drafts[0], base.run(pool, plan)
    if chunks:
        drafted = plan.firsts[draft.tokens.shape[0]]
        behind_RF, hidden_RF = hidden_RF[drafted:], hidden_RF[:drafted]
        logits_RV = take_chunks(base, behind_RF, hidden_RF, chunks)
    else:
        logits_RV = base.logits(hidden_RF)
    hidden_BNF, logits_BNV = draft.spread(hidden_RF), draft.spread(logits_RV)
    accepted = _judge(draft, hidden_BNF, logits_BNV, rule, state, reader)
    if draft.depth > 0:  # the keys of a root alone are in their place already
        base.commit(pool, plan, accepted.path, accepted.counts)
    return accepted, hidden_BNF, _next(state, accepted)


@torch.inference_mode()
def first_step(chunks: Sequence[Chunk], drafter: Drafter, rule: Rule, reader: LogprobReader | None) -> StepResult:
    """The base's own token after each of some texts, whose last chunks have been computed.

    Args:
        chunks: The last chunk of each text.
        drafter: Drafts nothing, because no further pass of the base follows here.
        rule: Chooses the tokens.
        reader: Reads log-probabilities; None = no request asks for them.
    """
    hidden_BF = torch.stack([chunk.hidden for chunk in chunks])
    logits_BV = torch.stack([chunk.logits for chunk in chunks])
    state = first_state([chunk.request for chunk in chunks], hidden_BF)
    draft = drafter.propose(state)
    accepted = _judge(draft, hidden_BF[:, None], logits_BV[:, None], rule, state, reader)
    tokens, counts = read_tokens(accepted.emitted.tolist())
    _tell([chunk.request.cached for chunk in chunks], accepted, hidden_BF[:, None], counts)
    return StepResult(tokens, _next(state, accepted), draft.row_sizes)


def _judge(
    draft: Draft, hidden_BNF: Tensor, logits_BNV: Tensor, rule: Rule, state: DecodeState, reader: LogprobReader | None
) -> Accepted:
    """Accept a path of each tree; hidden states and logits of smaller trees are padded with 0."""
    accepted = accept(draft, rule(draft, logits_BNV, state), state, hidden_BNF)
    if reader is not None:
        reader.read(accepted, logits_BNV)
    return accepted


def _next(state: DecodeState, accepted: Accepted) -> DecodeState:
    positions_B = state.positions + accepted.counts
    return dataclasses.replace(state, roots=accepted.bonus, hidden=accepted.hidden, positions=positions_B)


def _tell(sequences: Sequence[CachedSequence], accepted: Accepted, hidden_BNF: Tensor, counts: Sequence[int]) -> None:
    """Pass the committed tokens and their hidden states to layers that draft."""
    if any(one.observers for one in sequences):
        tell(sequences, accepted.along_path(hidden_BNF), accepted.tokens, counts)


def read_tokens(emitted: list[list[int]]) -> tuple[list[list[int]], list[int]]:
    """The tokens of each sequence and how many they are, from ``Accepted.emitted``."""
    *rows, counts = emitted
    tokens = [list(row[:count]) for row, count in zip(zip(*rows, strict=True), counts, strict=True)]
    return tokens, counts


def with_room(state: DecodeState, width: int) -> DecodeState:
    """The state with a history that has room for ``width`` tokens."""
    missing = width - state.history.shape[1]
    if missing <= 0:
        return state
    return dataclasses.replace(state, history=pad(state.history, (0, max(missing, HISTORY))))


def fit(base: BaseModel, sequences: Sequence[CachedSequence], draft: Draft) -> Draft:
    """The part of a draft that the base can verify: any tree, or its tokens as a chain, or the root alone."""
    if base.decoding == "tree":
        return draft
    if draft.parts:
        return Draft.stack([(rows, fit(base, sequences, part)) for rows, part in draft.parts])
    # In such bases the place in the cache is the position, so the chain must end within the context.
    longest = max(one.length for one in sequences)
    rows = max(1, base.context_length - 1 - longest if base.decoding == "chain" else 1)
    chain = Draft.chain(draft.tokens[:, :rows])
    if draft.probs is not None and torch.equal(draft.parents[:, :rows], chain.parents):  # same parents, same probs
        return dataclasses.replace(chain, probs=draft.probs[:, :rows])
    return chain
