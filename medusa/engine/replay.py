"""Replay of drafts over a known text: the steps that greedy decoding of it would take, without passes of the base.

Greedy acceptance takes the deepest path of a draft that the base would have written. If the base's text is known, that
path is known too, and the base's hidden states over the text come from one pass, like those of a prompt. All else is as
in ``decode_step``: drafters see the same states, and histories that end with the root.

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
"""Number of tokens that a pass computes."""


@dataclass(frozen=True)
class Text:
    """A prompt with its answer, and the base's hidden states over both.

    Attributes:
        ids: [T] int64.
        prompt_tokens: P.
        hidden: [T - 1, F] the base's hidden states; the last token's are not needed.
        pool: The KV cache that holds its full blocks.
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
        """The tokens that follow these places of the text; -1 after its end."""
        return pad(self.ids, (0, 1), value=-1)[(places + 1).clamp(max=len(self.ids))]

    def own(self, base: BaseModel) -> int:
        """Number of tokens of the answer that are the base's most likely token at their place."""
        hidden_AF, answer_A = self.hidden[self.prompt_tokens - 1 :], self.ids[self.prompt_tokens :]
        parts = zip(hidden_AF.split(CHUNK), answer_A.split(CHUNK), strict=True)
        return sum(int((base.logits(hidden).argmax(-1) == tokens).sum()) for hidden, tokens in parts)


class Step(NamedTuple):
    """A draft, and how much of it the text confirms.

    Attributes:
        draft: A draft of one sequence, whose root is a token of the answer.
        accepted: Number of draft tokens on its deepest path that equals the text.
        left: Number of tokens of the text after the root, at least 1.
        next: The token after the root.
    """

    draft: Draft
    accepted: int
    left: int
    next: int

    @property
    def rank(self) -> int | None:
        """Rank of the text's next token among the root's children, by score; 0 = the best, None = not among them."""
        rows = zip(self.draft.tokens[0].tolist(), self.draft.parents[0].tolist(), strict=True)
        firsts = [(node, token) for node, (token, parent) in enumerate(rows) if node and not parent]
        if self.draft.scores is not None:
            scores = self.draft.scores[0].tolist()
            firsts.sort(key=lambda first: -scores[first[0]])
        return next((rank for rank, (_, token) in enumerate(firsts) if token == self.next), None)


@torch.inference_mode()
def read(base: BaseModel, pool: BlockPool, prompt: Sequence[int], answer: Sequence[int]) -> Text:
    """Compute the hidden states of a text in passes like those of a prompt.

    Args:
        base: The base, with the feature layers that the drafter reads.
        pool: A pool of this base; several texts can share it.
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
def replay(base: BaseModel, drafter: Drafter, text: Text, every_place: bool = False) -> Iterator[Step]:
    """The steps that emit an answer after its first token, which the prompt's pass gives.

    Args:
        base: The base that has read the text.
        drafter: Proposes drafts; it may learn, or have a model that follows the base. If it reads the base's KV cache,
            the base computes each accepted path again.
        text: A text of the base.
        every_place: Draft at each place of the answer, and not only where a step would begin.
    """
    place, end, sequence = text.prompt_tokens, len(text.ids) - 1, CachedSequence(text.pool, drafter.observers)
    if drafter.sees_base and not drafter.observers:  # observers need all hidden states
        sequence.recall(text.ids[:place].tolist())
    _commit(base, sequence, text, place, drafter.sees_base)
    state = _state(text, place)
    while place < end:
        state = with_room(state, place + drafter.nodes + 1)
        draft = fit(base, [sequence], drafter.propose(state, [sequence]))
        places_1N = place + draft.depths
        verdict, unread_1N1 = Verdict(None, text.after(places_1N)), text.hidden.new_empty(*places_1N.shape, 1)
        found = accept(draft, verdict, state, unread_1N1)  # also appends the accepted tokens to the history
        step = Step(draft, int(found.counts) - 1, end - place, int(text.ids[place + 1]))
        yield step
        place += 1 if every_place else 1 + step.accepted
        if place < end:
            _commit(base, sequence, text, place, drafter.sees_base)
            state = replace(_state(text, place), history=state.history)
    sequence.close()


def tally(text: Text, steps: Iterable[Step], depths: int) -> Tensor:
    """Counts of one text, in the way of ``generate``: the pass of its prompt is a step.

    Args:
        text: The text.
        steps: The steps of its answer.
        depths: D, the number of depths to count.

    Returns:
        int64 [2, 1 + D]. Column 0: tokens, and steps. Column d: drafts that are right down to depth d, and drafts that
        are right down to depth d - 1 if the text has another token there. Counts of texts can be added. The first row
        divided by the second is tokens per step, and acceptance by depth.
    """
    counts = torch.zeros(2, 1 + depths, dtype=torch.int64)
    counts[:, 0] = torch.tensor([text.answer_tokens, 1])
    for step in steps:
        counts[1, 0] += 1
        counts[0, 1 : 1 + step.accepted] += 1
        counts[1, 1 : 1 + min(step.accepted + 1, step.left)] += 1
    return counts


def _state(text: Text, place: int) -> DecodeState:
    """The state of a step whose root is the token at ``place``."""
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
    """Commit all tokens before a place, as far as drafters can see it."""
    first = sequence.length
    if cached:
        compute(base, sequence, text.ids[first:place])
    sequence.length = place
    tell([sequence], text.hidden[None, first:place], text.ids[None, first + 1 : place + 1], [place - first])


def compute(base: BaseModel, sequence: CachedSequence, tokens_C: Tensor) -> Tensor:
    """Compute and cache a text's next tokens (int64 [C]) in passes like a prompt's; returns hidden states [C, F]."""
    parts = []
    for part in tokens_C.split(1 if base.decoding == "plain" else CHUNK):
        parts.append(base.run(sequence.pool, base.plan([(Draft.chain(part[None]), [sequence])])))
        sequence.length += len(part)
    return torch.cat(parts)
