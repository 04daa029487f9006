"""A layer that drafts, with a KV cache of its own that follows the base's.

Its row p reads the base's hidden state at position p and the embedding of token p + 1, sees rows 0 .. p, and gives an
output that predicts token p + 2. Rows are computed when a draft needs them, those of prompts at once.

In recorded steps (``medusa.engine.graph``) rows are computed as soon as their tokens are committed, always the largest
possible number for each sequence, and no rows are pending here until the steps end.

Legend: B sequences, C positions of each, R rows of a pass, D hidden size, F width of the base's hidden states.
"""

import weakref
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from medusa.attention.contract import TreeAttention, TreePlan
from medusa.cache.pool import BlockPool
from medusa.cache.sequence import CachedSequence
from medusa.cache.texts import FixedTexts, HostTexts, Texts
from medusa.cache.window import windowed
from medusa.tree import Draft

MANY = 16
"""Least number of new rows that are computed at once, without waiting for a draft: those of a prompt."""


class Followed(NamedTuple):
    """A follower's part of a recorded step, or the base's.

    Attributes:
        texts: The cached texts of the layer, or of the base.
        latest: [B, D] its outputs at the last rows.
    """

    texts: FixedTexts
    latest: Tensor


class Follower(ABC):
    """The common part of such layers; subclasses compute rows.

    Args:
        attention: The attention backend.
        device: Device of hidden states.
        window: See ``windowed``; None = rows see the whole text.
    """

    def __init__(self, attention: TreeAttention, device: torch.device, window: int | None = None) -> None:
        self.attention, self._device, self._window = attention, torch.device(device), window
        self._waiting: weakref.WeakKeyDictionary[CachedSequence, list[tuple[Tensor, Tensor]]]
        self._waiting = weakref.WeakKeyDictionary()
        self._latest: weakref.WeakKeyDictionary[CachedSequence, Tensor] = weakref.WeakKeyDictionary()

    @abstractmethod
    def states(self, hidden: Tensor) -> Tensor:
        """The inputs [..., D] of rows, made of the base's hidden states [..., F]."""

    @abstractmethod
    def run(self, pool: BlockPool, plan: TreePlan, states_RD: Tensor) -> Tensor:
        """Outputs [R, D] of a pass's rows, whose keys and values go into the pool.

        Args:
            pool: The layer's pool.
            plan: The plan of the pass; its tokens are those after the rows' positions.
            states_RD: The result of ``states``, or the layer's own outputs.
        """

    def new_pool(self) -> BlockPool:
        """An empty cache; a row also depends on the token after its position."""
        return BlockPool(1, self._device, ahead=True)

    def follow(self, sequences: Sequence[CachedSequence]) -> list[CachedSequence]:
        """The layer's own sequences for these sequences of the base."""
        return [one.follower(self) for one in sequences]

    @torch.inference_mode()
    def observe(
        self, sequences: Sequence[CachedSequence], hidden_BCF: Tensor, tokens_BC: Tensor, counts: Sequence[int]
    ) -> None:
        """Take the positions of these sequences that the base has just committed.

        Args:
            sequences: The base's sequences.
            hidden_BCF: Its hidden states at the new positions.
            tokens_BC: The tokens that follow them in the texts.
            counts: Number of new positions of each sequence.
        """
        own = self.follow(sequences)
        for one, hidden_CF, tokens_C, count in zip(own, hidden_BCF, tokens_BC, counts, strict=True):
            if count:
                self._waiting.setdefault(one, []).append((hidden_CF[:count], tokens_C[:count]))
        self._catch_up([one for one, count in zip(own, counts, strict=True) if count and self._count(one) >= MANY])

    @torch.inference_mode()
    def read(self, cached: "Cached") -> tuple[Texts, Tensor]:
        """Compute pending rows; returns the layer's cached texts and its outputs [B, D] at the last rows."""
        if isinstance(cached, Mapping):
            return cached[self]
        sequences, own = cached, self.follow(cached)
        self._catch_up(own)
        for ours, theirs in zip(own, sequences, strict=True):
            assert ours.length == theirs.length > 0, "it has observed the text from its first token on"
        return HostTexts(own), torch.stack([self._latest[one] for one in own])

    def advance(self, followed: Followed, hidden_BAF: Tensor, tokens_BA: Tensor, counts_B: Tensor) -> Tensor:
        """Compute the rows of new positions in a recorded step; returns the outputs [B, D] at the last ones.

        Args:
            followed: The layer's part of the step, before these positions.
            hidden_BAF: The base's hidden states at these positions; undefined after ``counts_B``.
            tokens_BA: The tokens that follow them; undefined after ``counts_B``.
            counts_B: int64, number of new positions; 0 if a sequence may not grow.
        """
        draft = Draft.chain(tokens_BA)
        plan = self.plan(followed.texts, draft, committed=counts_B)
        out_BAD = draft.spread(self.run(followed.texts.pool, plan, draft.flat(self.states(hidden_BAF))))
        index_B = torch.arange(len(counts_B), device=counts_B.device)
        new_BD = out_BAD[index_B, (counts_B - 1).clamp(min=0)]
        return torch.where(counts_B[:, None] > 0, new_BD, followed.latest)

    def resume(self, sequences: Sequence[CachedSequence], latest_BD: Tensor) -> None:
        """Take the latest outputs after recorded steps of these sequences have ended."""
        for one, latest_D in zip(self.follow(sequences), latest_BD.clone(), strict=True):
            self._latest[one] = latest_D

    def extend(
        self, own: Sequence[CachedSequence], states_BCD: Tensor, tokens_BC: Tensor, counts: Sequence[int]
    ) -> Tensor:
        """Compute and commit rows of the layer's sequences; returns the outputs [B, D] at the last ones.

        Args:
            own: The layer's sequences.
            states_BCD: See ``run``.
            tokens_BC: The tokens that follow them.
            counts: Number of rows of each sequence, at least one.
        """
        draft = Draft.chain(tokens_BC, counts)
        texts = HostTexts(own)
        plan = self.plan(texts, draft, committed=counts)
        out_RD = self.run(texts.pool, plan, draft.flat(states_BCD))
        for one, count in zip(own, counts, strict=True):
            one.length += count
        return out_RD[torch.tensor(plan.firsts[1:], device=out_RD.device) - 1]

    def plan(
        self, texts: Texts, draft: Draft, ahead: int = 0, computed: int = 0,
        committed: Tensor | Sequence[int] | int = 0,
    ) -> TreePlan:  # fmt: skip
        """The plan of a pass over trees behind the texts, within the window; see ``Texts.plan`` and ``windowed``."""
        plan = texts.plan(draft, self.attention, ahead, computed)
        return plan if self._window is None else windowed(plan, self._window, committed)

    def _count(self, one: CachedSequence) -> int:
        return sum(len(tokens_C) for _, tokens_C in self._waiting.get(one, ()))

    def _catch_up(self, own: Sequence[CachedSequence]) -> None:
        """Compute pending rows, in passes of at most a window's rows of each text."""
        behind = [one for one in own if one in self._waiting]
        if not behind:
            return
        parts = [zip(*self._waiting.pop(one), strict=True) for one in behind]
        hidden, tokens = zip(*[[torch.cat(rows) for rows in pair] for pair in parts], strict=True)
        most = max(map(len, tokens))
        step = self._window or most
        for first in range(0, most, step):
            left, rows = [index for index, each in enumerate(tokens) if len(each) > first], slice(first, first + step)
            some, counts = [behind[index] for index in left], [len(tokens[index][rows]) for index in left]
            hidden_BCF = pad_sequence([hidden[index][rows] for index in left], batch_first=True)
            tokens_BC = pad_sequence([tokens[index][rows] for index in left], batch_first=True)
            for one, out_D in zip(some, self.extend(some, self.states(hidden_BCF), tokens_BC, counts), strict=True):
                self._latest[one] = out_D


Cached = Sequence[CachedSequence] | Mapping[Follower | None, Followed]
"""The cached texts for drafters: the base's sequences, or in a recorded step its own part (None) and its followers'."""


def texts_of(cached: Cached) -> Texts:
    """The base's cached texts."""
    return cached[None].texts if isinstance(cached, Mapping) else HostTexts(cached)


def tell(sequences: Sequence[CachedSequence], hidden_BCF: Tensor, tokens_BC: Tensor, counts: Sequence[int]) -> None:
    """Pass newly committed positions to the observers of these sequences, see ``Follower.observe``."""
    for observer in dict.fromkeys(observer for one in sequences for observer in one.observers):
        rows = [row for row, one in enumerate(sequences) if observer in one.observers]
        own = [sequences[row] for row in rows]
        observer.observe(own, hidden_BCF[rows], tokens_BC[rows], [counts[row] for row in rows])
