"""Mixes prompts of many sources, without duplicates and without texts of evaluations, and with a share of long ones.

The results are conversations without answers, for `data regenerate`, in files of a few thousand in random order. Each
file is a fair sample of the mixture, so regeneration can stop after any of them.
"""

import json
import random
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from tqdm import tqdm

from medusa.data.mixture import Mixture, MixtureSource
from medusa.data.overlap import Overlap, as_whole

KEPT = "kept"
COLUMNS = (KEPT, "duplicate", "evaluation", "held out", "too long", "long", "beyond most")
"""Outcomes for a prompt; it is kept only with the first."""


@dataclass(frozen=True)
class Conversation:
    """The turns of a user."""

    turns: list[str]
    source: str
    kind: str
    tokens: int
    """Number of tokens of its turns."""

    def record(self) -> dict[str, Any]:
        """The record for `data regenerate`."""
        messages = [{"role": "user", "content": self.turns[0]}]
        for turn in self.turns[1:]:  # the answer between them will be generated
            messages += [{"role": "assistant", "content": ""}, {"role": "user", "content": turn}]
        return {"messages": messages, "source": self.source, "kind": self.kind}


class Mixer:
    """Selects prompts of a mixture, source by source; held-out sources come first, and others may not overlap them.

    Args:
        mixture: The sources, and how they are mixed.
        directory: Directory of the sources' files.
        evaluations: Texts with which no prompt may overlap.
        length: Returns the number of tokens of a text.
        seed: Seed of the order, and of the selection from sources with too many prompts.
    """

    def __init__(
        self, mixture: Mixture, directory: Path, evaluations: Iterable[str], length: Callable[[str], int], seed: int = 0
    ) -> None:
        self._mixture, self._directory, self._length, self._seed = mixture, directory, length, seed
        self._evaluations, self._heldout, self._seen = Overlap(evaluations), Overlap(), set[int]()
        self.counts: dict[str, Counter[str]] = {}
        """Number of each source's prompts by outcome, see `COLUMNS`."""

    def mix(self, heldout: bool) -> list[Conversation]:
        """The conversations of one side of the split, in random order; call it for the held-out side first."""
        sources = [source for source in self._mixture.sources if source.heldout is heldout]
        bar = tqdm(sources, desc="held-out sources" if heldout else "sources", unit="source")
        found = [conversation for source in bar for conversation in self._taken(source)]
        rng = random.Random(f"{self._seed} {heldout}")
        rng.shuffle(found)
        if not heldout:
            found = [self._continued(one, rng) for one in self._with_fewer_long(found)]
        return found

    def _taken(self, source: MixtureSource) -> Iterator[Conversation]:
        counts = self.counts.setdefault(source.name, Counter())
        said = list(source.turns(self._directory))
        random.Random(f"{self._seed} {source.name}").shuffle(said)
        for turns in said:
            text = "\n".join(turns)
            outcome, tokens = self._judged(text, source, counts)
            counts[outcome] += 1
            if outcome == KEPT:
                self._seen.add(as_whole(text))
                if source.heldout:
                    self._heldout.add(text)
                yield Conversation(turns, source.name, source.kind, tokens)

    def _judged(self, text: str, source: MixtureSource, counts: Counter[str]) -> tuple[str, int]:
        """The outcome for a prompt, and its number of tokens if they were counted."""
        if source.most and counts[KEPT] >= source.most:
            return "beyond most", 0
        if as_whole(text) in self._seen:
            return "duplicate", 0
        if text in self._evaluations:
            return "evaluation", 0
        if not source.heldout and text in self._heldout:
            return "held out", 0
        tokens = self._length(text)
        return (KEPT, tokens) if 0 < tokens <= self._mixture.most_tokens else ("too long", tokens)

    def _with_fewer_long(self, found: Sequence[Conversation]) -> Iterator[Conversation]:
        """All conversations, without long ones beyond their share."""
        short = sum(one.tokens <= self._mixture.long_tokens for one in found)
        share = self._mixture.long_share
        room = int(short * share / (1 - share)) if share < 1 else len(found)
        for one in found:
            if one.tokens > self._mixture.long_tokens:
                if not room:
                    self.counts[one.source].update({KEPT: -1, "long": 1})
                    continue
                room -= 1
            yield one

    def _continued(self, one: Conversation, rng: random.Random) -> Conversation:
        """Add a second turn at random."""
        if len(one.turns) > 1 or not self._mixture.second_turns or rng.random() >= self._mixture.second_share:
            return one
        turn = rng.choice(self._mixture.second_turns)
        return Conversation([*one.turns, turn], one.source, one.kind, one.tokens + self._length(turn))


def write(conversations: Sequence[Conversation], directory: Path, size: int) -> None:
    """Write files of ``size`` conversations each into a new directory."""
    directory.mkdir(parents=True)
    for number, start in enumerate(range(0, len(conversations), size)):
        lines = (json.dumps(one.record(), ensure_ascii=False) for one in conversations[start : start + size])
        (directory / f"{number:03}.jsonl").write_text("\n".join(lines) + "\n", encoding="utf-8")


def report(mixer: Mixer, mixture: Mixture, sides: Mapping[str, Sequence[Conversation]]) -> dict[str, Any]:
    """The origin and statistics of the prompts, for users of the data."""
    return {
        "prompts": {side: len(found) for side, found in sides.items()},
        "kinds": {side: dict(Counter(one.kind for one in found).most_common()) for side, found in sides.items()},
        "tokens": {side: _quantiles([one.tokens for one in found]) for side, found in sides.items()},
        "second_turns": sum(len(one.turns) > 1 for one in sides["train"]),
        "sources": {source.name: asdict(source) | dict(mixer.counts[source.name]) for source in mixture.sources},
    }


def table(mixer: Mixer) -> str:
    """A table of the outcomes by source."""
    total: Counter[str] = sum(mixer.counts.values(), Counter())
    rows: list[tuple[str, ...]] = [("source", *COLUMNS)]
    for name, counts in (*mixer.counts.items(), ("all", total)):
        rows.append((name, *(str(counts[column]) for column in COLUMNS)))
    width = max(len(row[0]) for row in rows)
    return "\n".join(f"{row[0]:<{width}}" + "".join(f"{value:>12}" for value in row[1:]) for row in rows)


def _quantiles(tokens: list[int]) -> dict[str, int]:
    ordered = sorted(tokens) or [0]
    return {f"{share} %": ordered[min(len(ordered) - 1, len(ordered) * share // 100)] for share in (10, 50, 90, 100)}
