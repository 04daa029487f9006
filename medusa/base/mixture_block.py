"""The mixtures of experts that a pass with our own kernels knows, recognised by their parts and by what routers return.

In a decoder they stand in place of the MLP (``medusa.base.usual_block``): in Mixtral, OLMoE, LFM2, GPT-OSS and Qwen's
mixtures.
"""

from itertools import product
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.functional import linear

ROUTED = ({"gate", "experts"}, {"router", "experts"})
"""Parts of a mixture."""
SHARED = {"shared_expert", "shared_expert_gate"}
"""More parts of a mixture with an expert that all rows visit."""
LEAST = 1e-6
"""Added to a sum of sigmoids that shares are divided by; as in kernels/experts.h."""
TRIED = 32
"""Rows that a router is tried with."""


class MixtureParts(NamedTuple):
    """A mixture.

    Attributes:
        router: It chooses experts; its weight is [E, D], and it may have a bias [E].
        experts: The experts.
        bias: float32 [E], added to probabilities where experts are chosen, or None.
        shared: The MLP that all rows visit, or None.
        gate: The linear layer that gives one gate of that MLP's output; or None.
    """

    router: Any
    experts: Any
    bias: Tensor | None
    shared: Any
    gate: Any


class Routing(NamedTuple):
    """How a router divides a row among its experts.

    Attributes:
        sigmoid: Probabilities are sigmoids of scores, not their softmax.
        normalized: Shares are divided by their sum.
        whole: Shares are float32, whatever the weight's dtype is.
        scale: A factor on shares.
    """

    sigmoid: bool
    normalized: bool
    whole: bool
    scale: float


def mixture_of(layer: nn.Module) -> MixtureParts | None:
    """The mixture of a decoder's layer; None = it has none, or one of another kind."""
    mlp: Any = getattr(layer, "mlp", None) or getattr(layer, "feed_forward", None)
    parts = {name for name, _ in mlp.named_children()} if isinstance(mlp, nn.Module) else set()
    own = [name for name, _ in mlp.named_parameters(recurse=False)] if parts else []
    if own or parts - SHARED not in ROUTED or parts & SHARED not in (set(), SHARED):
        return None
    router = getattr(mlp, "router", None) or mlp.gate
    if [name for name, _ in router.named_parameters()] not in (["weight"], ["weight", "bias"]):
        return None
    shared, gate = (mlp.shared_expert, mlp.shared_expert_gate) if parts >= SHARED else (None, None)
    return MixtureParts(router, mlp.experts, getattr(mlp, "expert_bias", None), shared, gate)


@torch.no_grad()
def routing_of(parts: MixtureParts) -> Routing | None:
    """How a mixture's router divides rows, found by its results; None = in another way."""
    router, bias, weight = parts.router, parts.bias, parts.router.weight
    generator = torch.Generator().manual_seed(0)
    rows = torch.randn(TRIED, weight.shape[1], generator=generator).to(weight)
    try:
        _, shares, chosen = router(rows) if bias is None else router(rows, bias)
        scores, top = linear(rows, weight, getattr(router, "bias", None)), router.top_k
        scale = float(getattr(router, "routed_scaling_factor", 1.0))
    except (TypeError, ValueError, AttributeError, RuntimeError):  # another family's code, with parts of these names
        return None
    whole = shares.dtype == torch.float32 != weight.dtype
    for sigmoid, normalized in product((False, True), (True, False)):
        probabilities = scores.sigmoid() if sigmoid else scores.float().softmax(-1)
        ranks = probabilities if bias is None else probabilities + bias
        expected = probabilities.gather(1, chosen).float()
        if normalized:
            expected = expected / (expected.sum(-1, keepdim=True) + LEAST * sigmoid)
        close = torch.allclose(shares.float(), scale * expected, rtol=4 * torch.finfo(shares.dtype).eps)
        if close and torch.equal(ranks.topk(top).indices, chosen):
            return Routing(sigmoid, normalized, whole, scale)
    return None
