"""A cost model of a pass: the larger of reading and multiplying, for the linear layers and for the attention.

What it leaves out (norms, choosing tokens, Python) is what measurements have beyond it. Its three rates are those of
the machine: bytes that memory gives, products of the linear layers, and products of the attention, per second.
"""

from dataclasses import dataclass

from benchmarks.step.rig import Rig
from benchmarks.step.shapes import weight_bytes
from medusa import DraftHeads


@dataclass(frozen=True)
class Rates:
    """What the machine does per second."""

    bandwidth: float
    """Bytes."""
    linear: float = float("inf")
    """Floating-point operations of linear layers."""
    attention: float = float("inf")
    """Floating-point operations of attention."""


@dataclass(frozen=True)
class Work:
    """What a pass has to do."""

    weights: float
    """Bytes of weights."""
    cached: float
    """Bytes of keys and values."""
    linear: float
    """Floating-point operations of linear layers."""
    attention: float
    """Floating-point operations of attention."""

    def seconds(self, rates: Rates) -> float:
        """The least that it takes."""
        linear = max(self.weights / rates.bandwidth, self.linear / rates.linear)
        return linear + max(self.cached / rates.bandwidth, self.attention / rates.attention)


def pass_work(rig: Rig, nodes: int) -> Work:
    """Of a pass over trees of ``nodes`` nodes and its logits, at the rig's batch and context."""
    base, rows = rig.base, rig.batch * nodes
    weights = weight_bytes(base)
    config = base.model.config.get_text_config()
    per_key = 4 * config.num_hidden_layers * config.num_attention_heads * config.head_dim
    return Work(
        weights,
        rig.batch * rig.context * rig.kv_bytes_per_token,
        2 * rows * weights / base.dtype.itemsize,
        rows * rig.context * per_key,
    )


def draft_work(heads: DraftHeads, levels: int) -> Work:
    """Of drafting one chain: every level reads the heads' network and the part of the output layer that they draft."""
    size = next(heads.parameters()).element_size()
    own = sum(parameter.numel() for parameter in heads.parameters())
    shared = levels if heads.config.architecture == "recurrent" else levels / heads.config.num_heads
    weights = size * (own * shared + levels * heads.config.output_size * heads.config.hidden_size)
    return Work(weights, 0, 2 * weights / size, 0)
