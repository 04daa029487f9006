"""Steps of the same sequences in a row: eagerly here, as CUDA graphs in ``medusa.engine.graph``."""

import dataclasses
import time
from collections.abc import Callable, Sequence
from typing import Protocol

import torch

from medusa.acceptance import Rule
from medusa.base.model import BaseModel
from medusa.cache import SlotCache
from medusa.drafters import Drafter
from medusa.engine.prefill import Prefill
from medusa.engine.step import Reader, decode_step
from medusa.state import DecodeState


class Steps(Protocol):
    """Decode steps of the same sequences in a row, each from the state that the one before left."""

    @property
    def sizes(self) -> Sequence[int]:
        """Nodes of each sequence's tree in the last step, the root included."""

    def next(self, prompts: Sequence[Prefill] = ()) -> list[list[int]]:
        """The new tokens of each sequence, the last of them the base's own; none where it is not active any more.

        Args:
            prompts: Of others, which advance by a chunk meanwhile.
        """

    def keep(self, active: Sequence[bool]) -> None:
        """Let only these sequences go on growing."""

    def stop(self) -> tuple[list[list[int]] | None, DecodeState]:
        """No more steps: the tokens of one that is still under way, if there is one, and the state after it."""


StartSteps = Callable[[BaseModel, SlotCache, Drafter, Rule, DecodeState], Steps]
"""Steps from a state on, in the cache that holds its rows: ``EagerSteps``, or ``StepGraphs.steps``."""


class EagerSteps:
    """``decode_step`` again and again."""

    def __init__(
        self,
        base: BaseModel,
        cache: SlotCache,
        drafter: Drafter,
        rule: Rule,
        state: DecodeState,
        reader: Reader | None = None,
    ) -> None:
        self._parts, self._drafter = (base, cache, drafter, rule), drafter
        self._state, self._reader = state, reader
        self.sizes: Sequence[int] = ()

    def next(self, prompts: Sequence[Prefill] = ()) -> list[list[int]]:
        """See ``Steps``."""
        began = time.perf_counter()
        base, cache, drafter, rule = self._parts
        drafter = drafter.beside_prompts() if prompts else drafter
        result = decode_step(base, cache, drafter, rule, self._state, self._reader, prompts)
        self._state, self.sizes = result.state, result.sizes
        if not prompts:  # otherwise the time is not the step's own
            self._drafter.observe([len(new) for new in result.tokens], time.perf_counter() - began)
        return result.tokens

    def keep(self, active: Sequence[bool]) -> None:
        """See ``Steps``."""
        self._state = dataclasses.replace(self._state, active=torch.tensor(active, device=self._state.roots.device))

    def stop(self) -> tuple[list[list[int]] | None, DecodeState]:
        """See ``Steps``."""
        return None, self._state
