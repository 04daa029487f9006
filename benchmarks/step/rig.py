"""A model with a given cached length, from which steps can be repeated.

It uses only these parts of the engine: a batch that requests join, its steps, and custom drafters.
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
"""Number of successive steps that are timed together."""
MOST_ROWS = 8
"""Most rows of steps in a sample, because the context grows with each step."""
PLAIN = Speculation(nodes=1)
FIRST_GUESS, NEXT_GUESS = 0.5, 0.4
"""Assumed probability that a head's best guess is right, and the factor for each further rank."""


def typical_tree(nodes: int, depth: int) -> Tree:
    """The tree of the likeliest ``nodes`` nodes, including the root, if all ``depth`` heads are equally good."""
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
    """Sizes at which steps and attention are measured."""

    nodes: Sequence[int]
    """Tree sizes N."""
    batches: Sequence[int]
    """Numbers of sequences B."""
    context: int
    """Cached tokens L of each sequence."""
    rounds: int
    """Number of measured repetitions."""


class FreeDrafter(Drafter):
    """Drafts without cost: a fixed tree with the same tokens every time, of which no two are equal.

    Equal tokens would visit the same experts of a mixture, and so read fewer weights than a text does.
    """

    recordable = True

    def __init__(self, tree: Tree, device: torch.device) -> None:
        self.nodes, self._depth = tree.nodes, tree.depth
        self._parents, self._tokens = (
            tree.parents.to(device),
            torch.arange(1, tree.nodes)[None].to(device),
        )

    def propose(self, state: DecodeState, _: Cached = (), /) -> Draft:
        """The tree below the roots."""
        batch = len(state.roots)
        tokens_BN = torch.cat([state.roots[:, None], self._tokens.expand(batch, -1)], dim=1)
        return Draft.of(tokens_BN, self._parents.expand(batch, -1), self._depth)


class Rig:
    """Sequences of ``context`` cached random tokens: their values affect time only as far as they differ.

    Args:
        model: A base with heads.
        batch: Number of sequences B.
        context: Cached tokens L of each sequence.
        nodes: Number of nodes of the largest tree.

    Raises:
        ValueError: The context and the tokens of the steps exceed the base's context length.
    """

    def __init__(self, model: MedusaModel, batch: int, context: int, nodes: int = 1) -> None:
        base, depth = model.base, model.heads.config.num_heads if model.heads else 0
        room = (MOST_ROWS * STEPS + 4) * (depth + 1)  # with steps before and after the timed ones
        if context + room > base.context_length:
            raise ValueError(
                f"context ({context} tokens) and {room} tokens behind it exceed the base's context"
                f" ({base.context_length} tokens); give a smaller --context"
            )
        generator = torch.Generator().manual_seed(0)
        self.model, self._room, self._device = model, room, base.device
        self._prompts = torch.randint(base.vocab_size, (batch, context), generator=generator).tolist()
        # Memory for all sequences, with spare blocks, so that later batches find the prompts in the cache.
        trees = max(EngineConfig().tree_reserve, 2 * nodes)
        self._pool = base.new_pool(batch * (context + room + trees + 2 * BLOCK))
        self._batch, self._requests = model.batch(self._pool), list[Request]()

    def begin(self, speculation: Speculation) -> Batch:
        """A batch in which every sequence has its first token; the previous batch is ended."""
        for request in self._requests:  # frees the buffers of its recorded steps
            self._batch.remove(request)
        batch, params = self.model.batch(self._pool), SamplingParams(max_new_tokens=self._room, ignore_eos=True)
        self._batch, self._requests = batch, [batch.add(prompt, params, speculation) for prompt in self._prompts]
        while not all(request.output.tokens for request in self._requests):
            batch.step()
        return batch

    def step_seconds(self, speculation: Speculation) -> float:
        """Seconds per step: the median over several rows of steps, after one warm-up row."""
        batch = self.begin(speculation)
        batch.step()  # records the step if necessary
        times = [self._row(batch)]
        times += [self._row(batch) for _ in range(min(MOST_ROWS - 1, int(SAMPLE_SECONDS / times[0])))]
        return median(times) / STEPS

    def _row(self, batch: Batch) -> float:
        return seconds(lambda: [batch.step() for _ in range(STEPS)], self._device)
