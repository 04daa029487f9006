"""Drafting no more than pays: heads beside prompt lookup, both sized by what steps cost here (``medusa.budget.cost``).

Decisions follow from measured costs, scores, what was accepted, and how long steps really take;
greedy and sampled text depends on none of it.
"""

from collections.abc import Callable
from itertools import accumulate
from operator import mul
from statistics import fmean
from typing import NamedTuple

import torch
from torch import Tensor

from medusa.budget.cost import StepCosts
from medusa.budget.record import Average, agreement, written
from medusa.drafters.heads import HeadsDrafter
from medusa.drafters.prompt_lookup import LOOKUP_GUESSES, MAX_MATCH, PromptLookupDrafter
from medusa.heads import DraftHeads, Vocabulary
from medusa.state import DecodeState
from medusa.tree import Draft

NEXT_RIGHT = 0.6
"""How often a level is right below one that was right, before anything was seen."""
FIRST_CREDIT, LATER_CREDIT = 4.0, 2.0
"""Weight of the prior at the start and after a pause, in plain steps' time; half of it heads may lose each time."""
PRIOR_EARNINGS = 1.5
"""What heads are taken to earn before anything was seen, as a multiple of plain decoding."""
FIRST_PAUSE, LONGEST_PAUSE = 32, 1024
"""Steps without heads (exponential back-off): each pause is twice as long as the one before, until heads have paid for
``PROVEN`` steps on end."""
PROVEN = 64


class PricedDrafter:
    """Proposes what brings more tokens than its time would bring otherwise; the root alone where nothing does.

    A chain that was found in the text before is as likely as such chains were lately, by the number of tokens that
    agreed. Heads add a tree if that chain leaves them enough to win. Their probabilities are corrected by what was
    accepted of what they predicted. Heads that lose time pause, for longer and longer (exponential back-off). The rate
    that time is worth is kept apart for steps with a chain and without: tokens that a chain brings are cheap, and what
    heads add is worth what it saves in the other steps.

    For one completion, or one batch of them, at a time; those of the same ``experience`` share what is learned.
    For a CPU, where shapes cost nothing. Of a batch, a node costs rows of all sequences: what counts is its mean
    probability over those that still grow.

    Args:
        costs: For this size of batch.
        vocabulary: Both ends of the base.
        heads: The trained heads; None = lookup alone.
        lookup: Whether to look back.
        experience: What other completions with the same costs, heads and lookup have shown; None = nothing yet.
        clock: Tells how long steps really take; None = as long as they are priced, so that a run can be repeated.
    """

    recordable = False

    def __init__(
        self,
        costs: StepCosts,
        vocabulary: Vocabulary,
        heads: DraftHeads | None = None,
        lookup: bool = True,
        experience: "Experience | None" = None,
        clock: Callable[[], float] | None = None,
    ) -> None:
        self.costs, self.nodes, self._clock = costs, costs.most, clock
        heads, lookup = (heads, lookup) if costs.most > 1 else (None, False)
        self._known = experience or Experience(costs.step(1))
        self._sizes = PricedSizes(costs, self._known)
        self._heads = HeadsDrafter(heads, vocabulary, costs.most, sizes=self._sizes) if heads is not None else None
        self._lookup = PromptLookupDrafter(min(costs.most, LOOKUP_GUESSES + 1)) if lookup else None
        self._last: _Step | None = None

    def propose(self, state: DecodeState) -> Draft:
        """A draft below ``state.roots``."""
        now = self._clock() if self._clock is not None else None
        self._learn(state, now)
        chain, found = self._look_up(state)
        # The engine can always decode plainly.
        plain, dearer = 1 / self.costs.step(1), self._known.dearer
        easy, rate = (max(self._known.paces[known].value, plain) for known in (True, False))
        guesses, first = self._price_chain(state, chain, found, dearer * easy)
        draft = Draft.chain(chain.tokens[:, : 1 + guesses])
        tree = None
        if self._heads is not None and self._drafts_heads(guesses, first, rate):
            self._sizes.open(dearer * rate, 1 + guesses, int(state.active.sum()))
            tree = self._heads.propose(state)
            draft = tree.join(draft) if guesses else tree
        levels = 0 if tree is None else self._sizes.levels
        seconds = self.costs.step(draft.tokens.shape[1]) + self.costs.draft(levels)
        self._last = _Step(state, chain, found, guesses, tree, seconds, now)
        return draft

    def _drafts_heads(self, guesses: int, first: float, rate: float) -> bool:
        """Whether heads draft; beside a chain they win only where it is wrong at once."""
        return self._known.back_off.draft(rate) and (not guesses or (1 - first) * self._known.back_off.earnings > rate)

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
        length = chain.tokens.shape[1] - 1
        chances = [list(accumulate(self._chain_odds(match, length), mul)) for match in found if match]
        gains_C = torch.tensor(chances).sum(0) / max(1, int(state.active.sum()))
        guesses, _ = self.costs.worth(gains_C, rate)
        return guesses, float(gains_C[0]) if guesses else 0.0

    def _chain_odds(self, match: int, length: int) -> list[float]:
        """How likely each token of a chain is right after those before it: they count as agreeing tokens too."""
        return [self._known.odds[min(match + ahead, MAX_MATCH)].value for ahead in range(length)]

    def _learn(self, state: DecodeState, now: float | None) -> None:
        """See what became of the last step, and how long it took."""
        last, self._last = self._last, None
        texts = written(last.state, state) if last is not None else None
        if last is None or texts is None or not any(texts):
            return
        rows = [row for row, text in enumerate(texts) if text]
        drafted = last.guesses > 0 or last.tree is not None
        if now is not None and last.began is not None:
            self._known.time(drafted, now - last.began, last.seconds)
        seconds = last.seconds * (self._known.dearer if drafted else 1.0)
        self._known.paces[any(last.found)].add(fmean(len(texts[row]) for row in rows), seconds)
        chained, length = agreement(last.chain, texts), last.chain.tokens.shape[1] - 1
        for row in rows:
            judged = min(chained[row] + 1, len(texts[row]), length) if last.found[row] else 0
            for ahead in range(judged):
                self._known.odds[min(last.found[row] + ahead, MAX_MATCH)].add(ahead < chained[row], 1.0)
        if last.tree is None:
            return
        right, levels = agreement(last.tree, texts), self._sizes.levels
        depth = fmean(right[row] for row in rows)
        self._known.trust.add(depth, self._sizes.predicted)
        self._known.next_right.add(depth, fmean(min(right[row] + 1, levels) for row in rows))
        if not last.guesses:
            self._known.back_off.add(depth, max(seconds - self.costs.step(1), 0.0))


class PricedSizes:
    """``Sizes`` of the heads' tree by prices.

    Attributes:
        levels: Levels of the last tree.
        predicted: Accepted tokens that the heads expect of it, not corrected.
    """

    def __init__(self, costs: StepCosts, known: "Experience") -> None:
        self.levels, self.predicted = 0, 0.0
        self._costs, self._known, self._rate, self._rows, self._active = costs, known, 0.0, 1, 1

    def open(self, rate: float, rows: int, active: int) -> None:
        """Begin a tree beside ``rows`` nodes for ``active`` sequences, at ``rate`` tokens per second and sequence."""
        self.levels, self.predicted = 1, 0.0
        self._rate, self._rows, self._active = rate, rows, max(1, active)

    def parents(self, level: int, scores_BC: Tensor, beam: int) -> int:
        """See ``Sizes``: as many as would each pay for a child, if these together pay for the level."""
        children_C = self._gains(scores_BC, beam) * self._known.next_right.value
        count, gain = self._costs.worth(children_C, self._rate, self._rows)
        if gain <= self._rate * self._costs.level:
            return 0
        self.levels = level + 2
        return count

    def nodes(self, scores_BM: Tensor, most: int) -> int:
        """See ``Sizes``; column 0 is the root."""
        gains_C = self._gains(scores_BM[:, 1:], most - 1)
        count, _ = self._costs.worth(gains_C, self._rate, self._rows)
        self.predicted = float(gains_C[:count].sum()) / self._known.trust.value
        return 1 + count

    def _gains(self, scores_BC: Tensor, most: int) -> Tensor:
        """[most] accepted tokens per active sequence that the best candidates add, as corrected."""
        best_BC = scores_BC.topk(min(most, scores_BC.shape[1])).values.exp()
        return (best_BC.sum(0) * (self._known.trust.value / self._active)).clamp(max=1.0)


class BackOff:
    """Says when heads draft: while they earn their time, and again after each pause.

    Args:
        plain: Seconds of a plain step.
    """

    def __init__(self, plain: float) -> None:
        self._plain, self._average = plain, Average(PRIOR_EARNINGS / plain, FIRST_CREDIT * plain)
        self._pause, self._left, self._paid = FIRST_PAUSE, 0, 0

    @property
    def earnings(self) -> float:
        """Accepted tokens per second that drafts by heads have taken beyond a plain step."""
        return self._average.value

    def draft(self, rate: float) -> bool:
        """Whether this step is not one of a pause; asked once per step."""
        if self._left > 0:
            self._left -= 1
            if self._left <= 0:
                self._average = Average(PRIOR_EARNINGS / self._plain, LATER_CREDIT * self._plain)
        elif self.earnings <= rate:
            self._left, self._paid = self._pause, 0
            self._pause = min(2 * self._pause, LONGEST_PAUSE)
        return self._left <= 0

    def add(self, tokens: float, seconds: float) -> None:
        """Count what a draft has brought, and its time."""
        self._average.add(tokens, seconds)
        self._paid += 1
        if self._paid >= PROVEN:
            self._pause = FIRST_PAUSE


class Experience:
    """What drafts have brought so far. Several threads may add to it: an addition that is lost does no harm.

    Args:
        plain: Seconds of a plain step.

    Attributes:
        trust: Tokens accepted of the heads' trees / tokens that the heads predicted.
        next_right: Levels that were right / levels below a right one.
        odds: By the number of tokens that agreed, how often the next token of a chain was right.
        paces: Tokens per second of steps without a chain and with one.
        back_off: Whether heads draft at all.
    """

    def __init__(self, plain: float) -> None:
        self.trust, self.next_right = Average(1.0, 8.0), Average(NEXT_RIGHT, 8.0)
        self.odds = [Average(1 - 0.5 ** max(1, match - 1), 8.0) for match in range(MAX_MATCH + 1)]
        self.paces = [Average(1 / plain, 8 * plain) for _ in (False, True)]
        self.back_off = BackOff(plain)
        self._times = [Average(1.0, 8 * plain) for _ in (False, True)]

    @property
    def dearer(self) -> float:
        """How much more a drafted step takes than it is priced at, beside what a plain step takes more."""
        return self._times[True].value / self._times[False].value

    def time(self, drafted: bool, seconds: float, priced: float) -> None:
        """See how long a step took; one that something else held up counts three times as much as usual at most."""
        average = self._times[drafted]
        average.add(min(seconds, 3 * average.value * priced), priced)


class _Step(NamedTuple):
    """The last step: from where, what was found and drafted, and what it costs."""

    state: DecodeState
    chain: Draft
    found: list[int]
    guesses: int
    tree: Draft | None
    seconds: float
    began: float | None
