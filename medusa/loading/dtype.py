"""Chooses the dtype of a base that transformers runs, by timing a layer at load.

Our kernels read 16 bits faster than 32 on any CPU, so a pass that they compute completely keeps the checkpoint's dtype.
The parts that torch computes (norms, activations, experts) may take several times as long in 16 bits, if the CPU has no
instructions for them.
"""

import logging
from copy import deepcopy
from functools import partial
from statistics import median
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from medusa.base.model import BaseModel
from medusa.base.taps import find_layers
from medusa.clock import alternate, seconds
from medusa.cpu import native

logger = logging.getLogger(__name__)

OTHERS = {torch.bfloat16: (torch.float32,), torch.float16: (torch.float32, torch.bfloat16)}
"""Dtypes that may replace a checkpoint's dtype."""
ROWS, ROUNDS = 4, 5
"""Rows of the timed pass (trees on a CPU start with this number of nodes), and number of repetitions."""
GAIN = 1.1
"""Another dtype must be faster by this factor, so that noise in the times does not change text."""
CACHES = 128 << 20
"""Bytes that are written between two passes to clear the caches, since in a model weights come from memory."""
FAILURES = (TypeError, AttributeError, RuntimeError, ValueError, IndexError, KeyError)
"""Errors of a layer that cannot be called by itself."""


def faster_dtype(base: BaseModel) -> torch.dtype:
    """The dtype in which to load this base, which was loaded in its checkpoint's dtype; the log gives the reason.

    It differs from the checkpoint's only if our kernels compute the linear layers, but not the whole pass.
    """
    own = base.dtype
    placed = hasattr(base.model.config, "quantization_config") or hasattr(base.model, "hf_device_map") or base.ranks > 1
    if own not in OTHERS or base.device.type != "cpu" or placed or not native.available():
        return own  # choose_dtype has logged the reason
    if base.fused:
        logger.info("dtype %s: that of the checkpoint, since our kernels compute its pass", _name(own))
        return own
    if base.packed:
        logger.info("dtype %s: that of the checkpoint, since its weights stay packed", _name(own))
        return own
    try:
        times = _layer_seconds(base, (own, *OTHERS[own]))
    except FAILURES as error:
        why = (str(error).splitlines() or [type(error).__name__])[0]
        logger.info("dtype %s: that of the checkpoint, since no layer could be timed: %s", _name(own), why)
        return own
    fastest = min(times, key=lambda dtype: times[dtype])
    chosen = fastest if times[own] > GAIN * times[fastest] else own
    said = ", ".join(f"{1e3 * time:.2g} ms in {_name(dtype)}" for dtype, time in times.items())
    which = "the checkpoint's" if chosen == own else f"faster than the checkpoint's ({_name(own)})"
    logger.info("dtype %s: %s, a layer takes %s", _name(chosen), which, said)
    return chosen


@torch.inference_mode()
def _layer_seconds(base: BaseModel, dtypes: tuple[torch.dtype, ...]) -> dict[torch.dtype, float]:
    """Seconds of the last layer in each dtype; in some families the first layers are of another kind."""
    layer = find_layers(base.decoder, base.num_layers)[1][-1]
    args, options = _inputs(base, layer)
    far = torch.empty(CACHES, dtype=torch.uint8)

    def measure(copied: nn.Module, dtype: torch.dtype) -> float:
        rows, named = tree_map(partial(_cast, dtype), (args, options))
        far.zero_()
        return seconds(lambda: copied(*rows, **named), base.device)

    samples = {dtype: partial(measure, deepcopy(layer).to(dtype), dtype) for dtype in dtypes}
    return {dtype: median(times) for dtype, times in alternate(samples, ROUNDS).items()}


def _inputs(base: BaseModel, layer: nn.Module) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments of a layer in a small pass."""
    calls: list[tuple[tuple[Any, ...], dict[str, Any]]] = []
    hook = layer.register_forward_pre_hook(lambda _, *inputs: calls.append(inputs), with_kwargs=True)
    try:
        base.hidden_states(torch.arange(ROWS)[None] % base.vocab_size)
    finally:
        hook.remove()
    return calls[0]


def _cast(dtype: torch.dtype, x: object) -> object:
    return x.to(dtype) if isinstance(x, Tensor) and x.is_floating_point() else x


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
