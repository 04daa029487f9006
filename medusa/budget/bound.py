"""The least time of a decode step on a card: what it must read and multiply, over what the card can do.

A step reads each weight once, the keys and values of each request once, and leaves the logits of each tree node. With
few rows reading takes the time, and nodes are free; with many, multiplying does. Drafting is left out, and so are
norms, the choice of tokens and the starts of kernels: a measured step takes longer. Layers with a window are counted as
if they saw the whole context.
"""

from itertools import count
from typing import NamedTuple

from medusa.budget.shape import Shape

READS = 0.9
"""Share of its memory's bandwidth that a card is assumed to reach in long reads."""
MULTIPLIES = 0.7
"""Share of its products that a card is assumed to reach in matrix products of a step's sizes."""
FREE = 1.1
"""A tree is free where its step takes at most so many times a plain one."""


class Card(NamedTuple):
    """A GPU, as its maker describes it.

    Attributes:
        name: Its own.
        device: As torch calls it.
        memory: Bytes.
        bandwidth: Bytes of its memory, per second.
        products: Floating-point operations on dense bfloat16 matrices, per second.
    """

    name: str
    device: str
    memory: int
    bandwidth: float
    products: float


# NVIDIA's data sheets: A100 80GB SXM, H100 SXM, HGX B200 (an eighth of its eight GPUs), L4. Figures "with sparsity" are
# halved. Cards have a little more memory than their name says; what the name says is planned with.
CARDS = (
    Card("A100 80GB SXM", "NVIDIA A100-SXM4-80GB", 80 * 10**9, 2.039e12, 312e12),
    Card("H100 SXM", "NVIDIA H100 80GB HBM3", 80 * 10**9, 3.35e12, 989e12),
    Card("B200", "NVIDIA B200", 180 * 10**9, 8.0e12, 2250e12),
    Card("L4", "NVIDIA L4", 24 * 10**9, 0.3e12, 121e12),
)


class Work(NamedTuple):
    """What a step cannot avoid.

    Attributes:
        weights: Bytes of weights and logits.
        cached: Bytes of keys and values.
        linear: Floating-point operations of linear layers.
        attention: Floating-point operations of attention.
    """

    weights: float
    cached: float
    linear: float
    attention: float

    @property
    def bytes(self) -> float:
        """All that crosses the memory."""
        return self.weights + self.cached

    @property
    def flops(self) -> float:
        """All that is computed."""
        return self.linear + self.attention

    def milliseconds(self, card: Card) -> float:
        """The least time: linear layers and attention take turns, and each reads while it multiplies."""
        read, multiply = 1e3 / (READS * card.bandwidth), 1e3 / (MULTIPLIES * card.products)
        linear = max(self.weights * read, self.linear * multiply)
        return linear + max(self.cached * read, self.attention * multiply)


def step_work(shape: Shape, requests: int, context: int, nodes: int = 1) -> Work:
    """Of a step that verifies a tree of ``nodes`` nodes for each of so many requests of ``context`` tokens.

    Of a mixture of experts those are read that tokens visit, each of them others by chance.
    """
    rows = requests * nodes
    per_weight, missed = shape.bits / 8, 1 - shape.visited
    dense = shape.layer_weights - shape.expert_weights
    read = dense + shape.expert_weights * (1 - missed**rows)
    weights = read * per_weight + shape.output_weights * shape.itemsize
    if shape.held:
        weights = shape.held * (read + shape.output_weights) / (shape.layer_weights + shape.output_weights)
    multiplied = dense + shape.expert_weights * shape.visited + shape.output_weights
    return Work(
        weights=weights + rows * shape.vocabulary * shape.itemsize,
        cached=requests * (context + nodes) * shape.cached_bytes,
        linear=2 * rows * multiplied,
        attention=2 * rows * (context + nodes) * shape.scored,
    )


def free_nodes(shape: Shape, card: Card, requests: int, context: int) -> int:
    """The largest tree whose step is bound to at most ``FREE`` times a plain one: beyond it verifying costs time."""
    limit = FREE * step_work(shape, requests, context).milliseconds(card)
    return next(n for n in count(1) if step_work(shape, requests, context, n + 1).milliseconds(card) > limit)
