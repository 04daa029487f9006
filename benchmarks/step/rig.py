"""A base and its heads at a given cached length, to be stepped from there again and again, as ``generate`` steps."""

import logging
from collections.abc import Callable
from functools import partial
from statistics import median

import torch

from benchmarks.machine import SAMPLE_SECONDS
from medusa import BaseModel, Draft, DraftHeads
from medusa.acceptance import Rule, greedy
from medusa.base.verify import verify
from medusa.budget.tree_search import typical_tree
from medusa.clock import seconds
from medusa.drafters import Drafter, HeadsDrafter, PlainDrafter
from medusa.engine.graph import GraphSteps, Record, StepGraphs, cuda_recorder
from medusa.engine.steps import EagerSteps, Steps
from medusa.state import DecodeState

logger = logging.getLogger(__name__)

STEPS = 4
"""Steps in a row per sample, where a caller has no number of its own."""


def default_record(device: torch.device) -> Record | None:
    """How ``generate`` records steps by default: as CUDA graphs on a GPU, and not at all elsewhere."""
    return cuda_recorder() if device.type == "cuda" else None


class Rig:
    """Sequences of ``context`` cached tokens that hold random numbers, since their values decide no time.

    Args:
        base: Prepared for decoding; the layers that the heads read are tapped here.
        heads: On its device and in its dtype, frozen.
        batch: Sequences B.
        context: Cached tokens L of each.
        room: Rows that steps may write behind them, see ``room_for``.
        seed: Of the random numbers.
        record: How steps are recorded; None = see ``default_record``.
        clock: Measures the seconds of a call on a device.

    Attributes:
        graph: Steps and passes run as graphs; where they cannot, the log says why.

    Raises:
        ValueError: Context and room exceed the base's context length.
    """

    @torch.inference_mode()
    def __init__(
        self,
        base: BaseModel,
        heads: DraftHeads,
        batch: int,
        context: int,
        room: int,
        seed: int = 0,
        record: Record | None = None,
        clock: Callable[[Callable[[], object], torch.device], float] = seconds,
    ) -> None:
        if context + room > base.context_length:
            raise ValueError(
                f"context ({context} tokens) and {room} rows behind it exceed the base's context"
                f" ({base.context_length} tokens); give a smaller --context"
            )
        base = base.tapped(heads.config.feature_layers)
        self.base, self.heads, self.batch, self.context, self._clock = base, heads, batch, context, clock
        generator = torch.Generator(base.device).manual_seed(seed)
        self.cache = base.new_cache(batch, context + room, context + room)  # it may not move
        self.rewind()
        history_BT = torch.randint(
            base.vocab_size, (batch, context + room + 1), device=base.device, generator=generator
        )
        roots_B, positions_B = history_BT[:, context].clone(), self.cache.lengths.clone()
        hidden_BF = torch.randn(batch, base.feature_size, dtype=base.dtype, device=base.device, generator=generator)
        active_B = torch.ones_like(roots_B, dtype=torch.bool)
        self.state = DecodeState(
            roots_B, hidden_BF, active_B, history_BT, positions_B, *(2 * [torch.zeros_like(roots_B)])
        )
        self.verify(Draft.chain(roots_B[:, None]))  # the cache is allocated at its first write
        for layer in self.cache.layers:
            if layer.is_initialized:
                for buffer in (layer.keys, layer.values):
                    used = -(-batch * self.cache.capacity // buffer.shape[1])
                    buffer[:used].normal_(generator=generator)  # memory that was never written is not really there
        self._kept: list[object] = []
        self._record = record or default_record(base.device)
        self._start = StepGraphs(base, self._record).steps if self._record is not None else EagerSteps
        self.graph = isinstance(self.begin(PlainDrafter()), GraphSteps)

    @property
    def kv_bytes_per_token(self) -> int:
        """Bytes of keys and values of one cached token, all layers."""
        layers = [layer for layer in self.cache.layers if layer.is_initialized]
        buffers = [buffer for layer in layers for buffer in (layer.keys, layer.values)]
        return sum(buffer[0, 0].numel() * buffer.element_size() for buffer in buffers)

    def drafter(self, nodes: int) -> Drafter:
        """A drafter of a fixed tree of ``nodes`` nodes; 1 = plain decoding."""
        if nodes == 1:
            return PlainDrafter()
        grown = typical_tree(nodes, self.heads.config.num_heads)
        return HeadsDrafter(self.heads, self.base, nodes, grown.tree)

    def rewind(self) -> None:
        """Forget what steps have committed."""
        self.cache.cut([self.context] * self.batch)

    def draft(self, nodes: int) -> Draft:
        """A draft of ``nodes`` nodes."""
        with torch.inference_mode():
            return self.drafter(nodes).propose(self.state)

    @torch.inference_mode()
    def verify(self, draft: Draft) -> torch.Tensor:
        """Verify alone: the pass of the base over a draft, and its logits."""
        return self.base.logits(verify(self.base, self.cache, draft))

    @torch.inference_mode()
    def verifier(self, draft: Draft) -> Callable[[], object]:
        """What verifies this draft at the rig's context, as a graph where steps are graphs."""
        if not self.graph or self._record is None:
            return partial(self.verify, draft)
        self.rewind()
        lengths = self.cache.lengths

        def run() -> None:
            self.cache.lengths = lengths
            with self.cache.fixed_shapes():
                self.verify(draft)

        run()  # compiles and allocates before it is recorded
        try:
            replay = self._record(run)
        except RuntimeError as error:
            logger.warning("passes run eagerly, recording one as a graph has failed: %s", error)
            return partial(self.verify, draft)
        self._kept.append(run)  # a graph reads its tensors' memory and does not hold it
        return torch.inference_mode()(replay)

    def begin(self, drafter: Drafter, rule: Rule = greedy) -> Steps:
        """Steps from the rig's context on; what ran before is forgotten."""
        self.rewind()
        return self._start(self.base, self.cache, drafter, rule, self.state)

    def run(self, drafter: Drafter, rule: Rule = greedy, steps: int = 1) -> list[list[list[int]]]:
        """The tokens of each sequence of so many steps, one after the other, from the rig's context on."""
        running = self.begin(drafter, rule)
        tokens = [running.next() for _ in range(steps)]
        self.rewind()
        return tokens

    def stepper(self, drafter: Drafter, rule: Rule = greedy) -> Callable[[], None]:
        """What runs one step per call, from the rig's context again once its room is used up."""
        running: Steps | None = None

        def step() -> None:
            nonlocal running
            if running is None or self.cache.longest + 2 * drafter.nodes > self.cache.capacity:
                running = self.begin(drafter, rule)
            running.next()

        return step

    def step_seconds(self, drafter: Drafter, rule: Rule = greedy, steps: int = STEPS) -> float:
        """Seconds of a step, of so many in a row; where they are short the median of several such rows.

        A first step does not count: it brings the state to its place, and records what is not recorded yet. Graphs run
        one step ahead of the host, before the clock starts as after it has stopped.
        """
        first = self._row_seconds(drafter, rule, steps)
        further = [self._row_seconds(drafter, rule, steps) for _ in range(int(SAMPLE_SECONDS / first))]
        return median([first, *further]) / steps

    def _row_seconds(self, drafter: Drafter, rule: Rule, steps: int) -> float:
        running = self.begin(drafter, rule)
        running.next()
        spent = self._clock(lambda: [running.next() for _ in range(steps)], self.base.device)
        self.rewind()
        return spent


def room_for(nodes: int, depth: int, steps: int = STEPS) -> int:
    """Rows that ``Rig.step_seconds`` may write: one step before, one ahead, and room for two trees at the end."""
    return (steps + 2) * (depth + 1) + 2 * nodes
