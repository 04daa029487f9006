"""The mixtures of experts that a pass with our own kernels knows, recognised by their parts and by what routers return.

In a decoder they stand in place of the MLP (``medusa.base.usual_block``): in Mixtral, OLMoE, LFM2, GPT-OSS and Qwen's
mixtures. In Gemma 4 they stand beside it, and both read the residual through norms of their own.
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
BESIDE = {"router", "experts"}
"""Parts of a layer whose mixture stands beside its MLP."""
BESIDE_NORMS = ("pre_feedforward_layernorm_2", "post_feedforward_layernorm_2", "post_feedforward_layernorm_1")
"""More parts of it: norms of what experts read, of what they give, and of what the MLP gives."""
READER = {"scale", "per_expert_scale", "proj.weight"}
"""Parameters of a router that reads the residual itself, through a norm without a weight."""
LEAST = 1e-6
"""Added to a sum of sigmoids that shares are divided by; as in kernels/experts.h."""
TRIED = 32
"""Rows that a router is tried with."""


class MixtureParts(NamedTuple):
    """A mixture.

    Attributes:
        router: It chooses experts.
        scores: Its weight is [E, D], and it may have a bias [E]: the router, or a linear layer in it.
        experts: The experts.
        bias: float32 [E], added to probabilities where experts are chosen, or None.
        shared: The MLP that all rows visit, or None.
        gate: The linear layer that gives one gate of that MLP's output; or None.
        norms: ``BESIDE_NORMS``, if that MLP stands beside the mixture; then the router is one that reads the residual.
    """

    router: Any
    scores: Any
    experts: Any
    bias: Tensor | None
    shared: Any
    gate: Any
    norms: tuple[Any, ...] = ()


class Routing(NamedTuple):
    """How a router divides a row among its experts.

    Attributes:
        sigmoid: Probabilities are sigmoids of scores, not their softmax.
        normalized: Shares are divided by their sum.
        whole: Shares are float32, whatever the weight's dtype is.
        scale: A factor on shares.
        top: Experts that a row visits.
    """

    sigmoid: bool
    normalized: bool
    whole: bool
    scale: float
    top: int


def mixture_of(layer: nn.Module) -> MixtureParts | None:
    """The mixture of a decoder's layer; None = it has none, or one of another kind."""
    if {name for name, _ in layer.named_children()} >= {"mlp", *BESIDE, *BESIDE_NORMS}:
        router: Any = layer.router
        if {name for name, _ in router.named_parameters()} != READER or not hasattr(router, "scalar_root_size"):
            return None
        norms = tuple(getattr(layer, name) for name in BESIDE_NORMS)
        return MixtureParts(router, router.proj, layer.experts, None, layer.mlp, None, norms)
    mlp: Any = getattr(layer, "mlp", None) or getattr(layer, "feed_forward", None)
    parts = {name for name, _ in mlp.named_children()} if isinstance(mlp, nn.Module) else set()
    own = [name for name, _ in mlp.named_parameters(recurse=False)] if parts else []
    if own or parts - SHARED not in ROUTED or parts & SHARED not in (set(), SHARED):
        return None
    router = getattr(mlp, "router", None) or mlp.gate
    if [name for name, _ in router.named_parameters()] not in (["weight"], ["weight", "bias"]):
        return None
    shared, gate = (mlp.shared_expert, mlp.shared_expert_gate) if parts >= SHARED else (None, None)
    return MixtureParts(router, router, mlp.experts, getattr(mlp, "expert_bias", None), shared, gate)


@torch.no_grad()
def routing_of(parts: MixtureParts) -> Routing | None:
    """How a mixture's router divides rows, found by its results; None = in another way."""
    router, bias, weight = parts.router, parts.bias, parts.scores.weight
    generator = torch.Generator().manual_seed(0)
    rows = torch.randn(TRIED, weight.shape[1], generator=generator).to(weight)
    try:
        _, shares, chosen = router(rows) if bias is None else router(rows, bias)
        top, scale = chosen.shape[1], float(getattr(router, "routed_scaling_factor", 1.0))
        if parts.norms:
            scores = parts.scores(router.norm(rows) * router.scale * router.scalar_root_size)
            factors = scale * router.per_expert_scale.float()[chosen]
        else:
            scores, factors = linear(rows, weight, getattr(router, "bias", None)), scale
    except (TypeError, ValueError, AttributeError, IndexError, RuntimeError):
        return None  # another family's code, with parts of these names
    whole = shares.dtype == torch.float32 != weight.dtype
    for sigmoid, normalized in product((False, True), (True, False)):
        probabilities = scores.sigmoid() if sigmoid else scores.float().softmax(-1)
        ranks = probabilities if bias is None else probabilities + bias
        expected = probabilities.gather(1, chosen).float()
        if normalized:
            expected = expected / (expected.sum(-1, keepdim=True) + LEAST * sigmoid)
        close = torch.allclose(shares.float(), factors * expected, rtol=4 * torch.finfo(shares.dtype).eps)
        if close and torch.equal(ranks.topk(top).indices, chosen):
            return Routing(sigmoid, normalized, whole, scale, top)
    return None
