"""Models that write drafts token by token: a smaller one, the base's first layers, or its multi-token-prediction layer.

Legend: B batch, C tokens of a pass, D hidden size, V vocabulary.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Protocol

import torch
from torch import Tensor

from medusa.base.model import BaseModel
from medusa.cache import CachedSequence, Observer, provisional
from medusa.state import DecodeState
from medusa.tree import Draft

CHUNK = 512
"""Most tokens of a text per pass."""

Sequences = Sequence[CachedSequence]
Reading = tuple[Sequences, Tensor]
"""A model's own sequences, and its hidden states [B, D] at the roots."""


class Writer(Protocol):
    """A model that continues texts from the roots."""

    context_length: int
    device: torch.device
    observers: Sequence[Observer]
    """Its layers that read the hidden states of committed tokens."""

    @contextmanager
    def reading(self, state: DecodeState, sequences: Sequences, drafting: Sequence[bool]) -> Iterator[Reading]:
        """Compute the texts up to their roots.

        Args:
            state: The state of the step.
            sequences: The base's sequences.
            drafting: The sequences to draft for; nothing is computed for the others.
        """

    def write(self, own: Sequences, tokens_B1: Tensor, counts: Sequence[int], hidden_BD: Tensor) -> Tensor:
        """Compute one more token where the count is 1; returns the new hidden states, and the old ones elsewhere."""

    def logits(self, hidden_BD: Tensor) -> Tensor:
        """[B, V'] of the next tokens; V' may differ from the base's by padding."""


class SmallModel:
    """A smaller model. Its cache follows the base's: accepted tokens are computed together with the root.

    Args:
        model: The model, prepared for decoding, with the base's tokens.
    """

    observers: Sequence[Observer] = ()

    def __init__(self, model: BaseModel) -> None:
        self._model, self.context_length, self.device = model, model.context_length, model.device

    @contextmanager
    def reading(self, state: DecodeState, sequences: Sequences, drafting: Sequence[bool]) -> Iterator[Reading]:
        """The model's own sequences, which follow the base's, and its hidden states at the roots."""
        own, missing = [one.follower(self._model) for one in sequences], []
        for row, (ours, theirs) in enumerate(zip(own, sequences, strict=True)):
            ours.length = min(ours.length, theirs.length)  # an abandoned step
            if ours.empty:  # a new sequence begins with the blocks of its text that others have computed
                ours.recall(state.history[row, : int(state.positions[row])].tolist())
            missing.append(drafting[row] * (theirs.length + 1 - ours.length))
        hidden_BD = self._read(state, own, missing)
        for row, ours in enumerate(own):
            if ours.unknown:  # for others to find its full blocks
                ours.remember(state.history[row, : ours.length].tolist())
        yield own, hidden_BD

    def _read(self, state: DecodeState, own: Sequences, missing: list[int]) -> Tensor:
        """Compute the texts from the last draft up to their roots; returns the last hidden states."""
        model = self._model
        hidden_BD = torch.zeros(len(missing), model.hidden_size, device=model.device, dtype=model.dtype)
        while any(missing):
            counts = [min(tokens, CHUNK) for tokens in missing]
            index_C = torch.arange(max(counts), device=state.history.device)
            lengths_B1 = torch.tensor([[one.length] for one in own], device=state.history.device)
            places_BC = (lengths_B1 + index_C).clamp(max=state.history.shape[1] - 1)
            hidden_BD = self.write(own, state.history.gather(1, places_BC), counts, hidden_BD)
            missing = [tokens - count for tokens, count in zip(missing, counts, strict=True)]
        return hidden_BD

    def write(self, own: Sequences, tokens_BC: Tensor, counts: Sequence[int], hidden_BD: Tensor) -> Tensor:
        """See ``Writer``; counts may be larger than 1."""
        going = [index for index, count in enumerate(counts) if count]
        chosen, index = [own[place] for place in going], torch.tensor(going, device=tokens_BC.device)
        known_BC = tokens_BC[index].clamp(max=self._model.vocab_size - 1)
        plan = self._model.plan([(Draft.chain(known_BC, [counts[place] for place in going]), chosen)])
        hidden_RD = self._model.run(chosen[0].pool, plan)
        for one, count in zip(chosen, plan.sizes, strict=True):
            one.length += count
        ends = torch.tensor(plan.firsts[1:], device=index.device) - 1
        return hidden_BD.index_copy(0, index, hidden_RD[ends])

    def logits(self, hidden_BD: Tensor) -> Tensor:
        """The model's logits."""
        return self._model.logits(hidden_BD)


class FirstLayers(SmallModel):
    """The base's own first layers (``BaseModel.shallow``), which write after the base's cached text.

    The verify pass overwrites these entries.
    """

    @contextmanager
    def reading(self, state: DecodeState, sequences: Sequences, drafting: Sequence[bool]) -> Iterator[Reading]:
        """The base's sequences, with their roots during the draft."""
        with provisional(sequences):
            yield sequences, self._read(state, sequences, [int(on) for on in drafting])


class MtpWriter:
    """The base's multi-token-prediction layer, applied repeatedly to its own output; see ``medusa.base.mtp``.

    Args:
        base: The base with this layer (``BaseModel.with_mtp``).
    """

    def __init__(self, base: BaseModel) -> None:
        assert base.mtp is not None, "checked by the caller"
        self._base, self._layer = base, base.mtp
        self.context_length, self.device = base.context_length, base.device
        self.observers: Sequence[Observer] = [base.mtp]

    @contextmanager
    def reading(self, state: DecodeState, sequences: Sequences, drafting: Sequence[bool]) -> Iterator[Reading]:
        """The layer's own sequences, and its outputs at their last rows."""
        own, (_, hidden_BD) = self._layer.follow(sequences), self._layer.read(sequences)
        yield own, hidden_BD

    def write(self, own: Sequences, tokens_B1: Tensor, counts: Sequence[int], hidden_BD: Tensor) -> Tensor:
        """See ``Writer``."""
        going = [index for index, count in enumerate(counts) if count]
        index = torch.tensor(going, device=tokens_B1.device)
        chosen, ones = [own[place] for place in going], [1] * len(going)
        new_BD = self._layer.extend(chosen, hidden_BD[index, None], tokens_B1[index], ones)
        return hidden_BD.index_copy(0, index, new_BD)

    def logits(self, hidden_BD: Tensor) -> Tensor:
        """The base's logits for the layer's output."""
        return self._base.logits(hidden_BD)
