"""Who computes tree attention: a registry, and the choice among them. Backends are imported when they are chosen."""

import importlib
import logging
from collections.abc import Sequence
from functools import cache

import torch
from torch import Tensor

from medusa.attention.contract import BackendUnavailableError, KernelError, Scoring, TreeAttention, TreePlan
from medusa.attention.trial import LayerShape, try_out

logger = logging.getLogger(__name__)

BACKENDS = {
    "reference": "medusa.attention.reference:ReferenceAttention",
    "exact": "medusa.attention.exact:ExactAttention",
    "flash": "medusa.attention.flash:FlashAttention",
    "triton": "medusa.attention.triton:TritonAttention",
}
PREFERENCE = {"cuda": ("triton", "flash"), "cpu": ("exact",)}
"""On a GPU by the memory they must move: one pass over keys and values; a copy of them in order and flash kernels over
that; a copy and masked products. On a CPU by what holds: sums of the reference depend on where keys stand."""


def build(name: str, device: torch.device) -> TreeAttention:
    """The backend of that name.

    Raises:
        ValueError: There is no such backend.
        BackendUnavailableError: It does not run on that device.
    """
    if name not in BACKENDS:
        raise ValueError(f"attention ({name!r}) is not known; choose one of: auto, {', '.join(BACKENDS)}")
    module, _, attribute = BACKENDS[name].partition(":")
    try:
        backend: TreeAttention = getattr(importlib.import_module(module), attribute)(device)
    except ImportError as error:
        raise BackendUnavailableError(
            f"attention ({name}) cannot be imported: {error}; install its package or choose another"
        ) from error
    return backend


def choose(
    name: str, device: torch.device, dtype: torch.dtype, layers: Sequence[LayerShape] = ()
) -> tuple[TreeAttention, str]:
    """The backend that is asked for, or with "auto" the device's first that works; and why it is that one (logged too).

    Args:
        name: A backend, or "auto".
        device: Where the layers compute.
        dtype: Of queries, keys and values.
        layers: What "auto" tries backends with; none = an ordinary layer.

    Raises:
        ValueError: There is no such backend.
        BackendUnavailableError: The one that is asked for does not run on that device.
    """
    backend, reason = (build(name, device), "asked for") if name != "auto" else _best(device, dtype, layers)
    chosen = name != "auto" or device.type in PREFERENCE  # elsewhere there is nothing to choose
    logger.log(logging.INFO if chosen else logging.DEBUG, "attention %s: %s", backend.name, reason)
    return backend, reason


def attend(plan: TreePlan, query: Tensor, key: Tensor, value: Tensor, scoring: Scoring) -> Tensor:
    """``TreeAttention.attend`` of the plan's backend, or of the reference where the backend objects to the layer.

    Raises:
        KernelError: While a graph is being captured, which must hold what has run before; try again eagerly.
    """
    backend = plan.backend
    reason = _foreign(plan, query, scoring) or backend.objection(query, key, value, scoring)
    if reason is None:
        try:
            return backend.attend(plan, query, key, value, scoring)
        except KernelError as error:
            if _capturing(query):
                raise
            logger.warning("attention %s: %s", backend.name, error)
            reason = str(error)
    return _reference(backend.name, reason).attend(plan, query, key, value, scoring)


def _best(device: torch.device, dtype: torch.dtype, layers: Sequence[LayerShape]) -> tuple[TreeAttention, str]:
    reasons = []
    for name in PREFERENCE.get(device.type, ()):
        try:
            backend = build(name, device)
        except BackendUnavailableError as error:
            reasons.append(str(error))
            continue
        failure = try_out(backend, device, dtype, layers)
        if failure is None:
            return backend, "; ".join([*reasons, f"the first that works on {device} in {dtype}"])
        reasons.append(f"{name} {failure}")
    return build("reference", device), "; ".join(reasons) or f"the one for {device.type}"


def _foreign(plan: TreePlan, query: Tensor, scoring: Scoring) -> str | None:
    """What the reference alone computes."""
    if plan.backend.name == "reference":
        return None
    if scoring.chunk is not None and plan.backend.name != "exact":
        return "its kernel does not support chunks"
    if plan.computed and plan.backend.name != "exact":
        return "its kernel computes whole trees only"
    return None if query.device == plan.lengths.device else f"the layer is on {query.device}, its plan is not"


def _capturing(query: Tensor) -> bool:
    return query.is_cuda and torch.cuda.is_current_stream_capturing()


@cache
def _reference(instead_of: str, reason: str) -> TreeAttention:
    """The reference, for layers that a backend objects to; each reason is logged once."""
    logger.info("attention: reference is used instead of %s for some layers: %s", instead_of, reason)
    return build("reference", torch.device("cpu"))
