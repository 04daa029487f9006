"""A model at a given cached length, to be stepped from there again and again.

All that benchmarks need of the engine: a batch that requests join, its steps, and drafters of their own.
"""

import heapq
from collections.abc import Sequence
from statistics import median
from typing import NamedTuple

import torch

from medusa import Batch, Draft, EngineConfig, MedusaModel, Request, SamplingParams, Speculation, Tree
from medusa.benchmarks.machine import SAMPLE_SECONDS
from medusa.cache import BLOCK, Cached
from medusa.clock import seconds
from medusa.drafters import Drafter
from medusa.state import DecodeState

STEPS = 4
"""Steps in a row that are timed together."""
MOST_ROWS = 8
"""Rows of steps in a sample, at most: the context grows meanwhile."""
PLAIN = Speculation(nodes=1)
FIRST_GUESS, NEXT_GUESS = 0.5, 0.4
"""How often the best guess of a head is right where nothing is known about heads; each next rank less."""


def typical_tree(nodes: int, depth: int) -> Tree:
    """The likeliest ``nodes`` nodes, the root included, where heads of ``depth`` levels are all alike."""
    paths: list[tuple[int, ...]] = []
    waiting: list[tuple[float, tuple[int, ...]]] = [(-FIRST_GUESS, (0,))] if depth else []
    while waiting and len(paths) < nodes - 1:
        negative, path = heapq.heappop(waiting)
        paths.append(path)
        heapq.heappush(waiting, (negative * NEXT_GUESS, (*path[:-1], path[-1] + 1)))
        if len(path) < depth:
            heapq.heappush(waiting, (negative * FIRST_GUESS, (*path, 0)))
    return Tree(tuple(paths))


class Sizes(NamedTuple):
    """What steps and their attention are measured at."""

    nodes: Sequence[int]
    """Tree sizes N."""
    batches: Sequence[int]
    """Sequences B."""
    context: int
    """Cached tokens L of each."""
    rounds: int
    """Measured repetitions."""
    seed: int = 0
    """Of all random numbers."""


class FreeDrafter(Drafter):
    """Drafts that cost nothing: a fixed tree of the same tokens every time."""

    recordable = True

    def __init__(self, tree: Tree, device: torch.device) -> None:
        self.nodes, self._depth = tree.nodes, tree.depth
        self._parents, self._tokens = (
            tree.parents.to(device),
            torch.zeros(1, tree.nodes - 1, dtype=torch.int64).to(device),
        )

    def propose(self, state: DecodeState, _: Cached = (), /) -> Draft:
        """The tree below the roots."""
        batch = len(state.roots)
        tokens_BN = torch.cat([state.roots[:, None], self._tokens.expand(batch, -1)], dim=1)
        return Draft.of(tokens_BN, self._parents.expand(batch, -1), self._depth)


class Rig:
    """Sequences of ``context`` cached random tokens, since their values decide no time.

    Args:
        model: A base with heads.
        batch: Sequences B.
        context: Cached tokens L of each.
        seed: Of the tokens.
        nodes: Of the largest tree.

    Raises:
        ValueError: The context, and what steps write behind it, exceed the base's context length.
    """

    def __init__(self, model: MedusaModel, batch: int, context: int, seed: int = 0, nodes: int = 1) -> None:
        base, depth = model.base, model.heads.config.num_heads if model.heads else 0
        room = (MOST_ROWS * STEPS + 4) * (depth + 1)  # with steps before and ahead of those that are timed
        if context + room > base.context_length:
            raise ValueError(
                f"context ({context} tokens) and {room} tokens behind it exceed the base's context"
                f" ({base.context_length} tokens); give a smaller --context"
            )
        generator = torch.Generator().manual_seed(seed)
        self.model, self._room, self._device = model, room, base.device
        self._prompts = torch.randint(base.vocab_size, (batch, context), generator=generator).tolist()
        # Memory for all at once, with blocks to spare: later batches find the prompts in it.
        trees = max(EngineConfig().tree_reserve, 2 * nodes)
        self._pool = base.new_pool(batch * (context + room + trees + 2 * BLOCK))
        self._batch, self._requests = model.batch(self._pool), list[Request]()

    def begin(self, speculation: Speculation) -> Batch:
        """A batch of which every sequence has its first token; the one before has ended."""
        for request in self._requests:  # what its steps were recorded over is free again
            self._batch.remove(request)
        batch, params = self.model.batch(self._pool), SamplingParams(max_new_tokens=self._room, ignore_eos=True)
        self._batch, self._requests = batch, [batch.add(prompt, params, speculation) for prompt in self._prompts]
        while not all(request.output.tokens for request in self._requests):
            batch.step()
        return batch

    def step_seconds(self, speculation: Speculation) -> float:
        """Seconds of a step: the median over several rows of steps, after one that does not count."""
        batch = self.begin(speculation)
        batch.step()  # records what is not recorded yet
        times = [self._row(batch)]
        times += [self._row(batch) for _ in range(min(MOST_ROWS - 1, int(SAMPLE_SECONDS / times[0])))]
        return median(times) / STEPS

    def _row(self, batch: Batch) -> float:
        return seconds(lambda: [batch.step() for _ in range(STEPS)], self._device)
