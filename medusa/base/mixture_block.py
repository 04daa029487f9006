"""The mixtures of experts that a pass with our own kernels knows, recognised by their parts and by what routers return.

In a decoder they stand in place of the MLP (``medusa.base.usual_block``): in Mixtral, OLMoE and Qwen's mixtures.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.functional import linear

ROUTED = {"gate", "experts"}
SHARED = {"shared_expert", "shared_expert_gate"}
"""Parts of a mixture with an expert that all rows visit."""
TRIED = 32
"""Rows that a router is tried with."""


class MixtureParts(NamedTuple):
    """A mixture.

    Attributes:
        router: It chooses experts; its weight is [E, D].
        experts: The experts.
        shared: The MLP that all rows visit, or None.
        gate: The linear layer that gives one gate of that MLP's output; or None.
    """

    router: Any
    experts: Any
    shared: Any
    gate: Any


def mixture_of(layer: nn.Module) -> MixtureParts | None:
    """The mixture of a decoder's layer; None = it has none, or one of another kind."""
    mlp: Any = getattr(layer, "mlp", None)
    parts = {name for name, _ in mlp.named_children()} if isinstance(mlp, nn.Module) else set()
    own = [name for name, _ in mlp.named_parameters(recurse=False)] if parts else []
    if own or parts not in (ROUTED, ROUTED | SHARED) or [name for name, _ in mlp.gate.named_parameters()] != ["weight"]:
        return None
    shared = parts >= SHARED
    return MixtureParts(
        mlp.gate, mlp.experts, mlp.shared_expert if shared else None, mlp.shared_expert_gate if shared else None
    )


@torch.no_grad()
def shares_of(router: Any) -> tuple[bool, bool] | None:
    """How a router divides a row among its experts, found by its results.

    Returns:
        Whether shares are divided by their sum, and whether they are float32 whatever the weight's dtype is; None if
        they are not a softmax over scores.
    """
    weight: Tensor = router.weight
    generator = torch.Generator().manual_seed(0)
    rows = torch.randn(TRIED, weight.shape[1], generator=generator).to(weight)
    try:
        _, shares, chosen = router(rows)
        best = linear(rows, weight).float().softmax(-1).topk(router.top_k)
    except (TypeError, ValueError, AttributeError, RuntimeError):  # another family's code, with parts of these names
        return None
    if not torch.equal(best.indices, chosen):
        return None
    whole = shares.dtype == torch.float32 != weight.dtype
    for normalized in (True, False):
        expected = best.values / best.values.sum(-1, keepdim=True) if normalized else best.values
        if torch.allclose(shares.float(), expected.to(shares.dtype).float(), rtol=1e-5):
            return normalized, whole
    return None
