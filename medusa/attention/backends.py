"""The registry of attention backends, and the choice among them. A backend is imported when it is chosen."""

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
"""Order of preference for "auto"; the reference comes last. On a GPU by memory traffic: triton reads keys and values
once, flash copies them first, and the reference copies them and computes masked products. On a CPU by exactness: the
reference's sums depend on the places of keys in the cache."""


def build(name: str, device: torch.device) -> TreeAttention:
    """The backend with this name.

    Raises:
        ValueError: There is no such backend.
        BackendUnavailableError: The backend does not run on this device.
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
    """Choose a backend: the requested one, or with "auto" the first that works on the device.

    Args:
        name: Name of a backend, or "auto".
        device: Device of the layers.
        dtype: Dtype of queries, keys and values.
        layers: Layers with which "auto" tests backends; none = an ordinary layer.

    Returns:
        The backend and the reason for the choice, which is also logged.

    Raises:
        ValueError: There is no such backend.
        BackendUnavailableError: The requested backend does not run on this device.
    """
    backend, reason = (build(name, device), "asked for") if name != "auto" else _best(device, dtype, layers)
    chosen = name != "auto" or device.type in PREFERENCE  # other devices have no choice
    logger.log(logging.INFO if chosen else logging.DEBUG, "attention %s: %s", backend.name, reason)
    return backend, reason


def attend(plan: TreePlan, query: Tensor, key: Tensor, value: Tensor, scoring: Scoring) -> Tensor:
    """``TreeAttention.attend`` of the plan's backend, or of the reference if the backend cannot compute the layer.

    Raises:
        KernelError: A kernel failed while a graph was captured; run the step again eagerly.
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
    """Why only the reference can compute this; None if backends can."""
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
    """The reference, for layers that a backend cannot compute; each reason is logged once."""
    logger.info("attention: reference is used instead of %s for some layers: %s", instead_of, reason)
    return build("reference", torch.device("cpu"))
