"""Successive steps of the same requests: eagerly here, as CUDA graphs in ``medusa.engine.graph``."""

import time
from collections.abc import Sequence
from typing import Protocol

from medusa.acceptance import Rule
from medusa.base.model import BaseModel
from medusa.cache import CachedSequence
from medusa.drafters import Drafter
from medusa.engine.logprobs import LogprobReader
from medusa.engine.prefill import Chunk
from medusa.engine.step import decode_step
from medusa.state import DecodeState


class Steps(Protocol):
    """Successive decode steps of the same sequences, each from the state that the previous step left."""

    places: int
    """Number of positions after each text for which blocks must be reserved when the next step begins."""

    @property
    def sizes(self) -> Sequence[int]:
        """Nodes of each sequence's tree in the last step, the root included."""

    def next(self, chunks: Sequence[Chunk] = ()) -> list[list[int]]:
        """The new tokens of each sequence, the last of them the base's own.

        Args:
            chunks: Chunks of other requests' prompts, which are computed at the same time.
        """

    def stop(self) -> tuple[list[list[int]] | None, DecodeState]:
        """End the steps; returns the tokens of a step under way (None = there is none) and the state after it."""


class EagerSteps:
    """Repeated calls of ``decode_step``."""

    def __init__(
        self,
        base: BaseModel,
        sequences: Sequence[CachedSequence],
        drafter: Drafter,
        rule: Rule,
        state: DecodeState,
        reader: LogprobReader | None = None,
    ) -> None:
        self._base, self._sequences, self._drafter, self._rule = base, sequences, drafter, rule
        self._state, self._reader = state, reader
        self.places = drafter.nodes
        self.sizes: Sequence[int] = ()

    def next(self, chunks: Sequence[Chunk] = ()) -> list[list[int]]:
        """A step; chunks share its pass."""
        began = time.perf_counter()
        drafter = self._drafter.beside_prompts() if chunks else self._drafter
        result = decode_step(self._base, self._sequences, drafter, self._rule, self._state, self._reader, chunks)
        self._state, self.sizes = result.state, result.sizes
        if not chunks:  # otherwise the time includes the chunks
            self._drafter.observe([len(new) for new in result.tokens], time.perf_counter() - began)
        return result.tokens

    def stop(self) -> tuple[list[list[int]] | None, DecodeState]:
        """Nothing is under way between two steps."""
        return None, self._state
