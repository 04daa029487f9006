"""Drafting no more than pays: heads beside prompt lookup, both sized by what steps cost here (``medusa.cost``).

Decisions follow from measured costs, scores and what was accepted, never from a clock: a run can be repeated.
"""

from statistics import fmean
from typing import NamedTuple

import torch
from torch import Tensor

from medusa.cost import StepCosts
from medusa.drafters.base import DecodeState
from medusa.drafters.heads import HeadsDrafter
from medusa.drafters.prompt_lookup import MAX_MATCH, PromptLookupDrafter
from medusa.drafters.record import Average, agreement, written
from medusa.heads import DraftHeads, Vocabulary
from medusa.tree import Draft

LOOKUP_GUESSES = 10
"""Most tokens that are taken from the text before."""
NEXT_RIGHT = 0.6
"""How often a level is right below one that was right, before anything was seen."""
CREDIT = 2.0
"""Tokens' worth of time that heads may lose before they rest, and that they can save up for worse times."""
PROBE_CREDIT = 0.5
"""The same after a rest."""
FIRST_REST, LONGEST_REST = 16, 1024
"""Steps without heads; each rest is twice as long as the one before, until they have earned all of their credit."""


class PricedDrafter:
    """Proposes what brings more tokens than its time would bring otherwise; the root alone where nothing does.

    A chain that was found in the text before is as likely as such chains were lately, by the number of tokens that
    agreed. Heads add a tree if that chain leaves them enough to win. Their probabilities are corrected by what was
    accepted of what they predicted. Heads that lose time rest, for longer and longer, and are tried again.

    For a CPU, where shapes cost nothing. Of a batch, a node costs rows of all sequences: what counts is its mean
    probability over those that still grow.

    Args:
        costs: For this size of batch.
        vocabulary: Both ends of the base.
        heads: The trained heads; None = lookup alone.
        lookup: Whether to look back.
    """

    recordable = False

    def __init__(
        self, costs: StepCosts, vocabulary: Vocabulary, heads: DraftHeads | None = None, lookup: bool = True
    ) -> None:
        self.costs, self.nodes = costs, costs.most
        self._sizes, self._rest = PricedSizes(costs), Rest()
        self._heads = HeadsDrafter(heads, vocabulary, costs.most, sizes=self._sizes) if heads is not None else None
        self._lookup = PromptLookupDrafter(min(costs.most, LOOKUP_GUESSES + 1)) if lookup and costs.most > 1 else None
        self._odds = [Average(1 - 0.5 ** max(1, match - 1), 8.0) for match in range(MAX_MATCH + 1)]
        plain = costs.step(1)
        self._pace = Average(1 / plain, 8 * plain)
        self._earnings = Average(2 / plain, 8 * plain)
        self._last: _Step | None = None

    def propose(self, state: DecodeState) -> Draft:
        """A draft below ``state.roots``."""
        self._learn(state)
        # The engine can always decode plainly: its time is worth at least that.
        rate = max(self._pace.value, 1 / self.costs.step(1))
        chain, found = self._look_up(state)
        guesses, first = self._price_chain(state, chain, found, rate)
        draft = Draft.chain(chain.tokens[:, : 1 + guesses])
        tree = None
        if self._heads is not None and self._drafts_heads(guesses, first, rate):
            self._sizes.open(rate, 1 + guesses, int(state.active.sum()))
            tree = self._heads.propose(state)
            draft = tree.join(draft) if guesses else tree
        levels = 0 if tree is None else self._sizes.levels
        seconds = self.costs.step(draft.tokens.shape[1]) + self.costs.draft(levels)
        self._last = _Step(state, rate, chain, found, guesses, tree, seconds)
        return draft

    def _drafts_heads(self, guesses: int, first: float, rate: float) -> bool:
        """Whether heads draft; beside a chain they win only where it is wrong at once."""
        return not self._rest.goes_on() and (not guesses or (1 - first) * self._earnings.value > rate)

    def _look_up(self, state: DecodeState) -> tuple[Draft, list[int]]:
        """The whole chain that was found, and the tokens that agreed for each sequence."""
        if self._lookup is None:
            return Draft.chain(state.roots[:, None]), [0] * len(state.roots)
        chain, matches_B = self._lookup.look_up(state)
        return chain, matches_B.tolist()

    def _price_chain(self, state: DecodeState, chain: Draft, found: list[int], rate: float) -> tuple[int, float]:
        """How many tokens of the chain to verify, and how likely its first one is right; (0, 0) for none."""
        if not any(found):
            return 0, 0.0
        odds_B = torch.tensor([self._odds[match].value if match else 0.0 for match in found])
        ahead_C = torch.arange(1, chain.tokens.shape[1])
        gains_C = (odds_B[:, None] ** ahead_C).sum(0) / max(1, int(state.active.sum()))
        guesses, _ = self.costs.worth(gains_C, rate)
        return guesses, float(gains_C[0]) if guesses else 0.0

    def _learn(self, state: DecodeState) -> None:
        """See what became of the last step."""
        last, self._last = self._last, None
        texts = written(last.state, state) if last is not None else None
        if last is None or texts is None or not any(texts):
            return
        rows = [row for row, text in enumerate(texts) if text]
        self._pace.add(fmean(len(texts[row]) for row in rows), last.seconds)
        chained, length = agreement(last.chain, texts), last.chain.tokens.shape[1] - 1
        for row in rows:
            if last.found[row]:
                judged = min(chained[row] + 1, len(texts[row]), length)
                self._odds[last.found[row]].add(chained[row], judged)
        if last.tree is None:
            return
        right, levels = agreement(last.tree, texts), self._sizes.levels
        depth = fmean(right[row] for row in rows)
        self._sizes.trust.add(depth, self._sizes.predicted)
        self._sizes.next_right.add(depth, fmean(min(right[row] + 1, levels) for row in rows))
        seconds = last.seconds - self.costs.step(1 + last.guesses)
        self._earnings.add(depth, seconds)
        alone = fmean(max(0, right[row] - min(chained[row], last.guesses)) for row in rows)
        self._rest.earn(alone - last.rate * seconds)


class PricedSizes:
    """``Sizes`` of the heads' tree by prices.

    Attributes:
        trust: Accepted tokens / predicted ones.
        next_right: Levels that were right / levels below a right one.
        levels: Levels of the last tree.
        predicted: Accepted tokens that the heads expect of it, not corrected.
    """

    def __init__(self, costs: StepCosts) -> None:
        self.trust, self.next_right = Average(1.0, 8.0), Average(NEXT_RIGHT, 8.0)
        self.levels, self.predicted = 0, 0.0
        self._costs, self._rate, self._rows, self._active = costs, 0.0, 1, 1

    def open(self, rate: float, rows: int, active: int) -> None:
        """Begin a tree beside ``rows`` nodes for ``active`` sequences, at ``rate`` tokens per second and sequence."""
        self.levels, self.predicted = 1, 0.0
        self._rate, self._rows, self._active = rate, rows, max(1, active)

    def parents(self, level: int, scores_BC: Tensor, beam: int) -> int:
        """See ``Sizes``: as many as would each pay for a child, if these together pay for the level."""
        children_C = self._gains(scores_BC, beam) * self.next_right.value
        count, gain = self._costs.worth(children_C, self._rate, self._rows)
        if gain <= self._rate * self._costs.level:
            return 0
        self.levels = level + 2
        return count

    def nodes(self, scores_BM: Tensor, most: int) -> int:
        """See ``Sizes``; column 0 is the root."""
        gains_C = self._gains(scores_BM[:, 1:], most - 1)
        count, _ = self._costs.worth(gains_C, self._rate, self._rows)
        self.predicted = float(gains_C[:count].sum()) / self.trust.value
        return 1 + count

    def _gains(self, scores_BC: Tensor, most: int) -> Tensor:
        """[most] accepted tokens per active sequence that the best candidates add, as corrected."""
        best_BC = scores_BC.topk(min(most, scores_BC.shape[1])).values.exp()
        return (best_BC.sum(0) * (self.trust.value / self._active)).clamp(max=1.0)


class Rest:
    """Says when heads draft: as long as they have credit, and now and then in order to see."""

    def __init__(self) -> None:
        self._credit, self._left, self._next = CREDIT, 0, FIRST_REST

    def goes_on(self) -> bool:
        """Whether this step is one of a rest; asked once per step."""
        self._left = max(0, self._left - 1)
        return self._left > 0

    def earn(self, tokens: float) -> None:
        """Count what a draft has brought, less what its time was worth."""
        self._credit = min(CREDIT, self._credit + tokens)
        if self._credit <= 0:
            self._left, self._credit = self._next, PROBE_CREDIT
            self._next = min(2 * self._next, LONGEST_REST)
        elif self._credit == CREDIT:
            self._next = FIRST_REST


class _Step(NamedTuple):
    """The last step: from where, at what rate, what was found and drafted, and what it costs."""

    state: DecodeState
    rate: float
    chain: Draft
    found: list[int]
    guesses: int
    tree: Draft | None
    seconds: float
