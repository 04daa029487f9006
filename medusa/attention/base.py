"""The contract of tree attention, and the choice of who computes it.

A step makes one ``TreePlan``; every layer then asks the plan's backend for the attention of its N tree rows over
L cached rows and the rows' own ancestors. Backends are imported when they are chosen.
"""

import importlib
import logging
from collections.abc import Sequence
from functools import cache
from typing import TYPE_CHECKING, NamedTuple, Protocol

import torch
from torch import Tensor

if TYPE_CHECKING:
    from medusa.attention.plan import TreePlan
    from medusa.attention.trial import LayerShape

logger = logging.getLogger(__name__)

BACKENDS = {
    "reference": "medusa.attention.reference:ReferenceAttention",
    "exact": "medusa.attention.exact:ExactAttention",
    "flash": "medusa.attention.flash:FlashAttention",
    "triton": "medusa.attention.triton:TritonAttention",
}
PREFERENCE = {"cuda": ("triton", "flash"), "cpu": ("exact",)}
"""On a GPU by the memory they must move: one pass over keys and values; prefix and tree apart. The reference may copy
it all. On a CPU by what holds: sums of the reference depend on where keys stand."""


class Scoring(NamedTuple):
    """How a layer turns products of queries and keys into weights.

    Attributes:
        scaling: Factor on the products.
        window: Sliding window in tokens, by position and not by row; None = full attention.
        softcap: Scores become ``softcap * tanh(score / softcap)`` where given.
        sinks: [H] score of a key that every row sees and that has no value, where given.
        chunk: A row sees its own chunk of this many positions only; None = no chunks.
    """

    scaling: float
    window: int | None = None
    softcap: float | None = None
    sinks: Tensor | None = None
    chunk: int | None = None


class TreeAttention(Protocol):
    """Computes the attention of one layer over tree rows.

    On a GPU nothing in it waits for the device, and its shapes follow from tensors' shapes and ``plan.kv_length``
    alone: the call can be captured in a CUDA graph. True lengths are read from ``plan.lengths`` on the device.
    """

    name: str
    dtypes: frozenset[torch.dtype]
    """Of queries, keys and values."""
    recordable: bool
    """The call can be captured in a CUDA graph; always so on a GPU."""

    def __init__(self, device: torch.device) -> None:
        """Prepare for a device.

        Raises:
            BackendUnavailableError: It does not run there.
        """

    def objection(self, query: Tensor, key: Tensor, value: Tensor, scoring: Scoring) -> str | None:
        """Why this backend cannot compute such a layer (the reference then does), None if it can."""

    def attend(self, plan: "TreePlan", query: Tensor, key: Tensor, value: Tensor, scoring: Scoring) -> Tensor:
        """Attention of tree rows; rows beyond a sequence's L + N count for nothing.

        Args:
            plan: The step's plan; what a backend derives from it is made at the first layer and kept.
            query: [B, H, N, D].
            key: [B, Hkv, S, D] view of [slots, capacity, Hkv, D] with S = ``plan.kv_length``; the tree rows of a
                sequence are already written at rows L .. L+N-1.
            value: [B, Hkv, S, Dv], likewise.
            scoring: The layer's numbers.

        Returns:
            [B, H, N, Dv] in the dtype of the query; which strides it has is the backend's choice.
        """


class BackendUnavailableError(ValueError):
    """A backend does not run here: its package or its device is missing."""


class KernelError(RuntimeError):
    """A backend's kernel for such a layer cannot run on this device; ``objection`` says so from now on."""


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
    name: str, device: torch.device, dtype: torch.dtype, layers: Sequence["LayerShape"] = ()
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


def attend(plan: "TreePlan", query: Tensor, key: Tensor, value: Tensor, scoring: Scoring) -> Tensor:
    """``TreeAttention.attend`` of the plan's backend, or of the reference where the backend objects to the layer.

    Raises:
        KernelError: While a graph is being captured, which must hold what has run before; try again eagerly.
    """
    backend = plan.backend
    reason = _foreign(plan, key, scoring) or backend.objection(query, key, value, scoring)
    if reason is None:
        try:
            return backend.attend(plan, query, key, value, scoring)
        except KernelError as error:
            if _capturing(query):
                raise
            logger.warning("attention %s: %s", backend.name, error)
            reason = str(error)
    return _reference(backend.name, reason).attend(plan, query, key, value, scoring)


def least_work(
    lengths: list[int], nodes: int, heads: int, kv_heads: int, dim: int, dim_v: int, itemsize: int
) -> tuple[int, int]:
    """The bytes and floating-point operations that no implementation of one layer's tree attention can avoid.

    Every key, value, query and output crosses memory once; masks are left out. A time below bytes / bandwidth means
    that something stayed in a cache.

    Args:
        lengths: L of every sequence.
        nodes: N.
        heads: H.
        kv_heads: Hkv.
        dim: D.
        dim_v: Dv.
        itemsize: Bytes of an element.

    Returns:
        (bytes, floating-point operations): the products with keys and values, two operations each; of a tree's own rows
        all N x N, although a mask leaves out most.
    """
    rows, key_rows = nodes * len(lengths), sum(lengths) + nodes * len(lengths)
    traffic = (key_rows * kv_heads + rows * heads) * (dim + dim_v) * itemsize
    products = sum((length + nodes) * nodes for length in lengths) * heads * (dim + dim_v)
    return traffic, 2 * products


def _best(device: torch.device, dtype: torch.dtype, layers: Sequence["LayerShape"]) -> tuple[TreeAttention, str]:
    from medusa.attention.trial import try_out

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


def _foreign(plan: "TreePlan", key: Tensor, scoring: Scoring) -> str | None:
    """What the reference alone computes."""
    if plan.backend.name == "reference":
        return None
    if scoring.chunk is not None and plan.backend.name != "exact":
        return "its kernel knows no chunks"
    return None if key.device == plan.lengths.device else f"the layer is on {key.device}, the step's plan is not"


def _capturing(query: Tensor) -> bool:
    return query.is_cuda and torch.cuda.is_current_stream_capturing()


@cache
def _reference(instead_of: str, reason: str) -> TreeAttention:
    """The reference, for layers that a backend objects to; each reason is logged once."""
    logger.info("attention reference instead of %s for some layers: %s", instead_of, reason)
    return build("reference", torch.device("cpu"))
