"""What a device's memory holds while a base is served: weights, a pass, recorded graphs, and the KV cache in the rest.

Nothing is measured or loaded, so a device that nobody has here is planned as well as one that is. Estimates err on the
safe side: more requests may fit than the plan says.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from medusa.budget.shape import Shape

KEPT_FREE = 0.05
"""Share of the memory for driver or system, libraries, and what the allocator cannot use: an estimate."""
GRAPH_BYTES = 1 << 19
"""Of a recorded step, for each layer: about 16 kernels with 32 KiB each, an estimate."""
FLOAT32, INDEX = 4, 8
"""Bytes of a number in float32, and of a token id or a place."""
COPIES = 3
"""Logits are held so many times in float32 while a token is drawn from them."""
CONTEXTS = (2048, 8192, 32_768)
"""Tokens of the requests that a table counts, beside the base's whole context."""


@dataclass(frozen=True)
class Limits:
    """What the engine computes at most in one pass, and how its KV cache is divided."""

    requests: int
    """That decode together."""
    nodes: int
    """Of a request's tree."""
    prompt_tokens: int
    """Of a pass, beside the trees."""
    block: int
    """Positions of a block of the KV cache."""
    reserve: int
    """Positions behind the text of a request that are kept for its trees."""
    head_bytes: int = 0
    """Of the heads' weights."""
    feature_layers: int = 0
    """Layers whose outputs heads read beside the last."""
    draft_vocabulary: int = 0
    """Tokens that heads can draft; 0 = there are no heads."""


@dataclass(frozen=True)
class Plan:
    """Where the memory goes, in bytes."""

    shape: Shape
    limits: Limits
    memory: int
    """Of the device."""
    kept_free: int
    """For driver or system, libraries, and what cannot be used; an estimate."""
    activations: int
    """Of the largest pass."""
    graphs: int
    """Of recorded steps; an estimate."""
    cache: int
    """Left for the KV cache."""

    @property
    def block_bytes(self) -> int:
        """Of a block of the KV cache."""
        return self.limits.block * self.shape.cached_bytes

    @property
    def blocks(self) -> int:
        """Of the KV cache."""
        return self.cache // self.block_bytes

    @property
    def positions(self) -> int:
        """Of the KV cache."""
        return self.blocks * self.limits.block

    def fitting(self, tokens: int) -> int:
        """How many requests with so many tokens, prompt and completion together, the KV cache holds."""
        return self.blocks // -(-(tokens + self.limits.reserve) // self.limits.block)

    def table(self, contexts: Sequence[int] = CONTEXTS) -> str:
        """The plan in some lines of text.

        Args:
            contexts: Tokens of the requests that are counted; those beyond the base's context are left out.
        """
        shape, limits = self.shape, self.limits
        name = f"{shape.name}: {shape.weights / 1e9:.3g} billion weights"
        lines = [
            ("weights", shape.weight_bytes, f"{shape.bits} bits a weight of the layers"),
            ("heads", limits.head_bytes, ""),
            ("activations", self.activations, f"of {_rows(limits):,} rows, the largest pass"),
            ("recorded graphs", self.graphs, "estimate: steps of " + ", ".join(map(str, buckets(limits.requests)))),
            ("kept free", self.kept_free, "estimate: system, libraries, fragmentation"),
            ("KV cache", self.cache, f"{self.blocks:,} blocks of {limits.block} = {self.positions:,} positions"),
        ]
        counted = sorted({tokens for tokens in (*contexts, shape.context) if tokens <= shape.context})
        fits = ", ".join(f"{self.fitting(tokens):,} of {tokens:,}" for tokens in counted)
        return "\n".join(
            [
                f"{name} on {in_words(self.memory)} of memory",
                *(f"  {what:<16} {in_words(size):>10}  {note}".rstrip() for what, size, note in lines if size),
                f"  a position takes {shape.cached_bytes:,} bytes, a block {self.block_bytes:,}",
                f"  requests that fit, of so many tokens: {fits}",
            ]
        )


def make_plan(
    shape: Shape, limits: Limits, memory: int, share: float = 1.0, recorded: bool = True, cache: int | None = None
) -> Plan:
    """Divide a device's memory.

    Args:
        shape: Of the base.
        limits: Of the engine.
        memory: Bytes of the device.
        share: Of the memory that the KV cache may have at most.
        recorded: Steps are recorded as graphs, on a GPU.
        cache: Positions that the KV cache shall have; None = as many as fit.

    Raises:
        ValueError: The weights do not fit, or leave no room for the rest.
    """
    kept_free = int(KEPT_FREE * memory)
    usable = memory - kept_free
    if shape.weight_bytes > usable:
        raise ValueError(
            f"weights ({in_words(shape.weight_bytes)}) of {shape.name} exceed the memory that can be used"
            f" ({in_words(usable)}); take fewer bits a weight than {shape.bits}, a larger device, or spread the base"
            f" over at least {math.ceil(1.1 * shape.weight_bytes / usable)}"
        )
    activations = pass_bytes(shape, limits, _rows(limits))
    graphs = graph_bytes(shape, limits) if recorded else 0
    left = usable - shape.weight_bytes - limits.head_bytes - activations - graphs
    wanted = cache or limits.block
    if left < wanted * shape.cached_bytes:
        raise ValueError(
            f"weights ({in_words(shape.weight_bytes)}), activations ({in_words(activations)}) and recorded graphs"
            f" ({in_words(graphs)}) of {shape.name} leave {in_words(max(0, left))} of {in_words(usable)}, too little"
            f" for {wanted:,} positions of the KV cache ({shape.cached_bytes:,} bytes each); let fewer than"
            f" {limits.requests} requests decode together (--max-batch), or take a larger device"
        )
    given = cache * shape.cached_bytes if cache else min(left, int(share * memory))
    return Plan(shape, limits, memory, kept_free, activations, graphs, given)


def pass_bytes(shape: Shape, limits: Limits, rows: int) -> int:
    """Bytes of what a pass holds at its largest moment, attention by a kernel that keeps no scores.

    Hidden states, their norms in float32, and the wider of MLP and attention for all rows; logits of every node of
    every tree, drawn from in float32; logits of a draft for the quarter of the nodes that get children.
    """
    widest = max(3 * shape.inner, shape.attention)
    hidden = shape.hidden * (2 * shape.itemsize + 2 * FLOAT32 + shape.itemsize * limits.feature_layers)
    logits = limits.requests * limits.nodes * shape.vocabulary * (shape.itemsize + COPIES * FLOAT32)
    parents = limits.requests * -(-limits.nodes // 4)
    draft = parents * limits.draft_vocabulary * (shape.itemsize + FLOAT32)
    return rows * (hidden + shape.itemsize * widest) + logits + draft


def graph_bytes(shape: Shape, limits: Limits) -> int:
    """Bytes of recorded steps, an estimate: one for each bucket of requests, and the memory that all of them share.

    A recording keeps its kernels, and for each request its text, its place in the KV cache, its hidden state and its
    tree's mask.
    """
    tokens = shape.context + limits.reserve
    text, table = INDEX * tokens, INDEX * -(-tokens // limits.block)
    state = shape.itemsize * shape.hidden * (1 + limits.feature_layers) + limits.nodes * (limits.nodes + 4 * INDEX)
    recorded = sum(bucket * (text + table + state) + shape.layers * GRAPH_BYTES for bucket in buckets(limits.requests))
    return recorded + pass_bytes(shape, limits, limits.requests * limits.nodes)


def buckets(requests: int) -> list[int]:
    """Numbers of requests that steps are recorded for: powers of two, and the largest number itself."""
    return [*(1 << power for power in range((requests - 1).bit_length())), requests]


def in_words(size: float) -> str:
    """Bytes as a text; a GB is 1e9 of them."""
    return f"{size / 1e9:.2f} GB" if size >= 1e9 else f"{size / 1e6:.1f} MB"


def _rows(limits: Limits) -> int:
    """Of the largest pass: the trees of all requests, and a chunk of prompts beside them."""
    return limits.requests * limits.nodes + limits.prompt_tokens
