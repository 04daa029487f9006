"""What a device's memory holds while a base is served: weights, a pass, recorded steps, and the KV cache in the rest.

Nothing is measured or loaded, so a device that nobody has here is planned as well as one that is. Estimates err on the
safe side: more requests may fit than the plan says.
"""

import math
from dataclasses import dataclass

from medusa.budget.shape import FLOAT32, Shape

KEPT_FREE = 0.05
"""Share of the memory for driver or system, libraries, and what the allocator cannot use: an estimate."""
GRAPH_BYTES = 1 << 25
"""Of a recorded step: about 1,000 kernels with 32 KiB each, an estimate."""
TOKEN_BYTES = 8
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
    """Of a pass: beside the trees, or in a pass of their own where steps are recorded."""
    block: int
    """Positions of a block of the KV cache."""
    reserve: int
    """Positions behind the text of a request that are kept for its trees."""
    buckets: int = 0
    """Of fixed buffers that steps are recorded over, on a GPU; 0 = steps run eagerly."""
    head_bytes: int = 0
    """Of the heads' weights."""

    @property
    def computed(self) -> int:
        """Requests of a step, inert ones too: a recorded one is for a power of two."""
        return 1 << (self.requests - 1).bit_length() if self.buckets else self.requests

    @property
    def rows(self) -> int:
        """Of the largest pass."""
        trees = self.computed * self.nodes
        return max(trees, self.prompt_tokens) if self.buckets else trees + self.prompt_tokens


@dataclass(frozen=True)
class Plan:
    """Where the memory goes, in bytes."""

    shape: Shape
    limits: Limits
    memory: int
    """Of the device."""
    cache: int
    """For the KV cache."""

    @property
    def block_bytes(self) -> int:
        """Of a block of the KV cache."""
        return self.limits.block * self.shape.cached_bytes

    @property
    def blocks(self) -> int:
        """Of the KV cache; one more is nobody's."""
        return self.cache // self.block_bytes - 1

    @property
    def positions(self) -> int:
        """Of the KV cache."""
        return self.blocks * self.limits.block

    def fitting(self, tokens: int) -> int:
        """How many requests with so many tokens, prompt and completion together, the KV cache holds."""
        return self.blocks // -(-(tokens + self.limits.reserve) // self.limits.block)

    def table(self) -> str:
        """The plan in some lines of text."""
        shape, limits = self.shape, self.limits
        steps = f"estimate: {limits.buckets} buckets of {limits.computed:,} requests"
        lines = [
            ("weights", shape.weight_bytes, f"{shape.bits} bits a weight of the layers"),
            ("heads", limits.head_bytes, ""),
            ("activations", pass_bytes(shape, limits), f"of {limits.rows:,} rows, the largest pass"),
            ("recorded steps", graph_bytes(shape, limits), steps),
            ("kept free", int(KEPT_FREE * self.memory), "estimate: system, libraries, fragmentation"),
            ("KV cache", self.cache, f"{self.blocks:,} blocks of {limits.block} = {self.positions:,} positions"),
        ]
        counted = sorted({tokens for tokens in (*CONTEXTS, shape.context) if tokens <= shape.context})
        return "\n".join(
            [
                f"{shape.name}: {shape.weights / 1e9:.3g} billion weights on {in_words(self.memory)} of memory",
                *(f"  {what:<16} {in_words(size):>10}  {note}".rstrip() for what, size, note in lines if size),
                f"  a position takes {shape.cached_bytes:,} bytes, a block {self.block_bytes:,}",
                "  requests that fit, of so many tokens: "
                + ", ".join(f"{self.fitting(tokens):,} of {tokens:,}" for tokens in counted),
            ]
        )


def make_plan(shape: Shape, limits: Limits, memory: int, cache: int | None = None) -> Plan:
    """Divide a device's memory.

    Args:
        shape: Of the base.
        limits: Of the engine.
        memory: Bytes of the device.
        cache: Positions that the KV cache shall have; None = as many as fit.

    Raises:
        ValueError: The weights do not fit, or leave no room for the rest.
    """
    usable, weights = memory - int(KEPT_FREE * memory), f"weights ({in_words(shape.weight_bytes)})"
    if shape.weight_bytes > usable:
        raise ValueError(
            f"{weights} of {shape.name} exceed the memory that can be used ({in_words(usable)}); take fewer bits a"
            f" weight than {shape.bits}, a larger device, or spread the base over at least"
            f" {math.ceil(1.1 * shape.weight_bytes / usable)}"
        )
    activations, graphs = pass_bytes(shape, limits), graph_bytes(shape, limits)
    left = usable - shape.weight_bytes - limits.head_bytes - activations - graphs
    wanted = ((cache or limits.block) // limits.block + 1) * limits.block * shape.cached_bytes
    if left < wanted:
        raise ValueError(
            f"{weights}, activations ({in_words(activations)}) and recorded steps ({in_words(graphs)}) of"
            f" {shape.name} leave {in_words(max(0, left))} of {in_words(usable)}, too little for"
            f" {cache or limits.block:,} positions of the KV cache ({shape.cached_bytes:,} bytes each); let fewer than"
            f" {limits.requests} requests decode together (--max-batch), or take a larger device"
        )
    return Plan(shape, limits, memory, wanted if cache else left)


def pass_bytes(shape: Shape, limits: Limits, rows: int | None = None) -> int:
    """Bytes of what a pass holds at its largest moment, attention by a kernel that keeps no scores.

    Beside its rows (None = the largest pass's) these are logits of every node of every tree, drawn from in float32.
    """
    logits = shape.vocabulary * (shape.itemsize + COPIES * FLOAT32)
    return (rows or limits.rows) * shape.row_bytes + limits.computed * limits.nodes * logits


def graph_bytes(shape: Shape, limits: Limits) -> int:
    """Bytes of recorded steps, an estimate: as many buckets as are kept, all of the largest size, and a pass.

    A bucket keeps the text of each request, and its kernels. All share the memory of one pass.
    """
    if not limits.buckets:
        return 0
    texts = limits.computed * TOKEN_BYTES * (shape.context + limits.reserve)
    return limits.buckets * (texts + GRAPH_BYTES) + pass_bytes(shape, limits, limits.computed * limits.nodes)


def in_words(size: float) -> str:
    """Bytes as a text; a GB is 1e9 of them."""
    return f"{size / 1e9:.2f} GB" if size >= 1e9 else f"{size / 1e6:.1f} MB"
