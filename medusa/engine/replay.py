"""Drafts held against a text that is known: the steps that decoding it greedily would take, without their passes.

Greedy acceptance takes the deepest path of a draft that the base would have written. Where its text is known, so is
that path, and the base's hidden states over the text come from one pass, as those of a prompt do. The rest is
``decode_step``: drafters see the states, and histories that end with the root, that they would see there.

Legend: T tokens of a text, P of its prompt, N tree nodes, F width of hidden states, D depths.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from medusa.acceptance import Verdict, accept
from medusa.base.model import BaseModel
from medusa.cache import BlockPool, CachedSequence, tell
from medusa.drafters import Drafter
from medusa.engine.config import EngineConfig
from medusa.engine.step import fit, with_room
from medusa.state import DecodeState
from medusa.tree import Draft

CHUNK = EngineConfig.chunk
"""Tokens of a text that a pass computes."""


@dataclass(frozen=True)
class Text:
    """A prompt with its answer, and what the base has computed over both.

    Attributes:
        ids: [T] int64.
        prompt_tokens: P.
        hidden: [T - 1, F] the base's hidden states; the last token's are not needed.
        pool: Where keys and values of its whole blocks can be found.
    """

    ids: Tensor
    prompt_tokens: int
    hidden: Tensor
    pool: BlockPool

    @property
    def answer_tokens(self) -> int:
        """Tokens of the answer."""
        return len(self.ids) - self.prompt_tokens

    def after(self, places: Tensor) -> Tensor:
        """The tokens that follow these places of the text; -1 behind its end."""
        return pad(self.ids, (0, 1), value=-1)[(places + 1).clamp(max=len(self.ids))]

    def own(self, base: BaseModel) -> int:
        """How many tokens of the answer are the base's likeliest at their place."""
        hidden_AF, answer_A = self.hidden[self.prompt_tokens - 1 :], self.ids[self.prompt_tokens :]
        parts = zip(hidden_AF.split(CHUNK), answer_A.split(CHUNK), strict=True)
        return sum(int((base.logits(hidden).argmax(-1) == tokens).sum()) for hidden, tokens in parts)


class Step(NamedTuple):
    """A draft, and how far the text follows it.

    Attributes:
        draft: Of one sequence; its root stands in the answer.
        accepted: Tokens of its deepest path that equals the text.
        left: Tokens of the text behind the root, at least 1.
        next: The token behind the root.
    """

    draft: Draft
    accepted: int
    left: int
    next: int

    @property
    def rank(self) -> int | None:
        """Where the text's next token stands among the first tokens of the draft, by their scores; 0 = the best."""
        rows = zip(self.draft.tokens[0].tolist(), self.draft.parents[0].tolist(), strict=True)
        firsts = [(node, token) for node, (token, parent) in enumerate(rows) if node and not parent]
        if self.draft.scores is not None:
            scores = self.draft.scores[0].tolist()
            firsts.sort(key=lambda first: -scores[first[0]])
        return next((rank for rank, (_, token) in enumerate(firsts) if token == self.next), None)


@torch.inference_mode()
def read(base: BaseModel, pool: BlockPool, prompt: Sequence[int], answer: Sequence[int]) -> Text:
    """Compute a text in passes like those of a prompt.

    Args:
        base: The base, with the feature layers that the drafter reads.
        pool: Of this base; several texts can share it.
        prompt: At least one token.
        answer: At least one token.
    """
    ids, sequence = [*prompt, *answer], CachedSequence(pool)
    ids_T = torch.tensor(ids, device=base.device)
    hidden_TF = compute(base, sequence, ids_T[:-1])
    sequence.remember(ids)
    sequence.close()
    return Text(ids_T, len(prompt), hidden_TF, pool)


@torch.inference_mode()
def replay(
    base: BaseModel, drafter: Drafter, text: Text, every_place: bool = False, cached: bool = False
) -> Iterator[Step]:
    """The steps that bring an answer, from its first token on, which its prompt's pass brings.

    Args:
        base: That has read the text.
        drafter: Proposes; it may be one that learns, or whose model follows the base.
        text: What the base says.
        every_place: Draft at each place of the answer, and not only where a step would begin.
        cached: The drafter reads and writes what the base has cached (early exit), so the base computes each accepted
            path once more.
    """
    place, end, sequence = text.prompt_tokens, len(text.ids) - 1, CachedSequence(text.pool, drafter.observers)
    if cached and not drafter.observers:  # they need all hidden states
        sequence.recall(text.ids[:place].tolist())
    _commit(base, sequence, text, place, cached)
    state = _state(text, place)
    while place < end:
        state = with_room(state, place + drafter.nodes + 1)
        draft = fit(base, [sequence], drafter.propose(state, [sequence]))
        places_1N = place + draft.depths
        verdict, unread_1N1 = Verdict(None, text.after(places_1N)), text.hidden.new_empty(*places_1N.shape, 1)
        found = accept(draft, verdict, state, unread_1N1)  # which also brings the history forward
        step = Step(draft, int(found.counts) - 1, end - place, int(text.ids[place + 1]))
        yield step
        place += 1 if every_place else 1 + step.accepted
        if place < end:
            _commit(base, sequence, text, place, cached)
            state = replace(_state(text, place), history=state.history)
    sequence.close()


def tally(text: Text, steps: Iterable[Step], depths: int) -> Tensor:
    """Counts of one text, as ``generate`` counts: the pass of its prompt is a step.

    Args:
        text: The text.
        steps: Those that bring it.
        depths: D, that are counted.

    Returns:
        int64 [2, 1 + D]: tokens and steps, then for each depth the drafts that are right down to there, and those that
        are right down to the depth before where the text goes on. Counts add up; the first row by the second is tokens
        per step, and acceptance by depth.
    """
    counts = torch.zeros(2, 1 + depths, dtype=torch.int64)
    counts[:, 0] = torch.tensor([text.answer_tokens, 1])
    for step in steps:
        counts[1, 0] += 1
        counts[0, 1 : 1 + step.accepted] += 1
        counts[1, 1 : 1 + min(step.accepted + 1, step.left)] += 1
    return counts


def _state(text: Text, place: int) -> DecodeState:
    """What a step starts from whose root stands at a place."""
    root_1, place_1 = text.ids[place : place + 1], torch.tensor([place], device=text.ids.device)
    return DecodeState(
        roots=root_1,
        hidden=text.hidden[place - 1 : place],
        active=torch.ones_like(root_1, dtype=torch.bool),
        history=text.ids[None, : place + 1].clone(),
        positions=place_1,
        seeds=torch.zeros_like(root_1),
        starts=torch.full_like(root_1, text.prompt_tokens),
    )


def _commit(base: BaseModel, sequence: CachedSequence, text: Text, place: int, cached: bool) -> None:
    """All before a place is committed, as far as drafters can see it."""
    first = sequence.length
    if cached:
        compute(base, sequence, text.ids[first:place])
    sequence.length = place
    tell([sequence], text.hidden[None, first:place], text.ids[None, first + 1 : place + 1], [place - first])


def compute(base: BaseModel, sequence: CachedSequence, tokens_C: Tensor) -> Tensor:
    """Hidden states [C, F] of a text's next tokens (int64 [C]), which are cached, in passes like those of a prompt."""
    parts = []
    for part in tokens_C.split(1 if base.decoding == "plain" else CHUNK):
        parts.append(base.run(sequence.pool, base.plan([(Draft.chain(part[None]), [sequence])])))
        sequence.length += len(part)
    return torch.cat(parts)
