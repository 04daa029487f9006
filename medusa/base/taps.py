"""Outputs of some of a decoder's layers, in addition to its last hidden state.

Hooks record them during a pass. A layer has at most one hook, which is never removed; it does nothing unless the
running pass of its thread needs that layer. So passes of several threads do not mix, and nothing outlives a pass.
This file needs only torch, because a copy of it is exported with heads.

Legend: T rows, D hidden size, F = D * (1 + number of tapped layers).
"""

import copy
import math
import threading
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

_now = threading.local()
"""``noted``: outputs by layer of the pass that runs on this thread; None or missing if it needs none."""


class DecoderPass:
    """A decoder's pass: its last hidden state, followed by the outputs of some of its layers.

    If the last hidden state is a projection of the last layer's output (OPT-350M), other outputs are projected too.

    Args:
        decoder: The layers between token ids and the output layer.
        layers: Layers to read, counted from 1; none = only the last hidden state, which is the output of the last layer
            after the last norm.
        num_layers: Number of layers of the decoder.

    Raises:
        ValueError: The decoder has no such layers, or they cannot be found.
    """

    def __init__(self, decoder: nn.Module, layers: Sequence[int] = (), num_layers: int = 0) -> None:
        self._decoder = decoder
        self._project: nn.Module | None = getattr(decoder, "project_out", None)
        if len(set(layers)) < len(layers) or not set(layers) <= set(range(1, num_layers + 1)):
            raise ValueError(
                f"feature layers ({', '.join(map(str, layers))}) must be different layers of the base, from 1 to"
                f" {num_layers}; load heads that were trained on this base"
            )
        stack = find_layers(decoder, num_layers)[1] if layers else ()
        self._tapped = [stack[layer - 1] for layer in layers]
        for layer in self._tapped:
            if _note not in layer._forward_hooks.values():
                layer.register_forward_hook(_note)

    def __call__(self, **inputs: Any) -> Tensor:
        """Hidden states [B, T, F] on the device of the last one; the first D numbers are the last hidden state.

        Raises:
            ValueError: The output of a layer is not one hidden state per row.
        """
        if not self._tapped:
            hidden: Tensor = self._decoder(**inputs).last_hidden_state
            return hidden
        noted: dict[nn.Module, Tensor | None] = dict.fromkeys(self._tapped)
        _now.noted = noted
        try:
            hidden = self._decoder(**inputs).last_hidden_state
        finally:
            _now.noted = None
        if self._project is not None:
            noted = {layer: state if state is None else self._project(state) for layer, state in noted.items()}
        return torch.cat([hidden, *(_like(hidden, state) for state in noted.values())], dim=-1)


def spread_layers(count: int, num_layers: int) -> tuple[int, ...]:
    """``count`` layers, counted from 1, spread evenly below the last of ``num_layers``.

    Raises:
        ValueError: There are fewer layers.
    """
    if count >= num_layers:
        raise ValueError(
            f"feature layers ({count}) are more than the layers below the last one of the base ({num_layers - 1});"
            " read fewer"
        )
    return tuple(round(num_layers * index / (count + 1)) for index in range(1, count + 1))


def outer_layers(count: int, num_layers: int) -> tuple[int, ...]:
    """``count`` layers from the second to the fourth from the end, as in EAGLE-3.

    Raises:
        ValueError: There are fewer layers.
    """
    if count < 2 or num_layers < count + 5:
        return spread_layers(count, num_layers)
    first, last = 2, num_layers - 3
    return tuple(first + math.ceil(index * (last - first) / (count - 1)) for index in range(count))


def first_layers(decoder: nn.Module, num_layers: int, count: int) -> nn.Module:
    """The decoder with only its first ``count`` layers; all modules are shared.

    Raises:
        ValueError: Its layers cannot be found.
    """
    name, layers = find_layers(decoder, num_layers)
    top = parent = _beside(decoder)
    *path, last = name.split(".")
    for part in path:
        parent._modules[part] = parent = _beside(parent.get_submodule(part))
    parent._modules[last] = layers[:count]
    return top


def _beside(module: nn.Module) -> nn.Module:
    """A shallow copy of a module with its own list of submodules."""
    beside = copy.copy(module)
    beside._modules = dict(module._modules)
    return beside


def find_layers(decoder: nn.Module, num_layers: int) -> tuple[str, nn.ModuleList]:
    """Name and modules of the outermost list of ``num_layers`` modules, whatever the family calls it.

    Raises:
        ValueError: There is none.
    """
    lists = [(name, module) for name, module in decoder.named_modules() if isinstance(module, nn.ModuleList)]
    stacks = [(name, module) for name, module in lists if len(module) == num_layers]
    if not stacks:
        raise ValueError(
            f"layers of the base ({type(decoder).__name__}) cannot be found: it has no list of {num_layers} modules;"
            " use heads without feature layers, and no early exit"
        )
    return min(stacks, key=lambda stack: stack[0].count("."))


def _note(layer: nn.Module, _: Any, output: Any) -> None:
    noted = getattr(_now, "noted", None)
    if noted is not None and layer in noted:
        noted[layer] = output[0] if isinstance(output, tuple) else output


def _like(hidden: Tensor, state: Tensor | None) -> Tensor:
    """A layer's output in the dtype and on the device of the last hidden state."""
    if state is None or state.shape != hidden.shape:
        shape = None if state is None else tuple(state.shape)
        raise ValueError(
            f"a layer of the base gives {shape} where the last hidden state is {tuple(hidden.shape)}; use heads"
            " without feature layers"
        )
    return state.to(hidden)
