"""Each layer of a model by itself: what it does over cached rows, from the inputs that it had over plain text.

Over a whole model, two equally right passes in half precision differ by more than a layer that is wrong: rounding
grows from layer to layer. So each layer is handed the rows that it had over plain text, and what its attention gives is
compared at once. Nothing grows, and a fault shows in the layer where it is.

This file needs torch only: a copy of it travels with exported heads.

Legend: P texts, T tokens, B sequences, N rows of a pass, D hidden size.
"""

import inspect
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

LIMITS = {torch.float64: 1e-4, torch.float32: 5e-3}
"""Largest difference / size of what a layer's attention gives. Where rows are right, 1e-5 was met in float32 and 0.01 in
half precision; a wrong mask, position or row makes 0.1 to 1."""
COARSE = 0.05
"""For half precision, and for rounded activations."""


class LayerCheck:
    """Records the rows of every layer over plain texts, and holds the layers to them over cached rows.

    Every sequence of a cached pass has P / B texts in a row: the paths that it may go.

    Args:
        decoder: What is between token ids and the output layer; it is called with ``position_ids`` over cached rows.
        num_layers: How many layers it has. Where they cannot be found, nothing is recorded or compared.
    """

    def __init__(self, decoder: nn.Module, num_layers: int) -> None:
        lists = (part for part in decoder.modules() if isinstance(part, nn.ModuleList) and len(part) == num_layers)
        self._decoder, self._layers = decoder, list(next(lists, ()))
        self._mixers = [(index, part) for index, layer in enumerate(self._layers) for part in _mixers(layer)]
        self._inputs: dict[nn.Module, Tensor] = {}
        self._outputs: dict[nn.Module, Tensor] = {}
        self._index: tuple[Tensor, Tensor] | None = None
        self._errors: list[tuple[str, Tensor]] = []

    @contextmanager
    def recording(self) -> Iterator[None]:
        """A pass over texts [P, T] is what later passes are compared with."""

        def note_input(layer: nn.Module, args: tuple[Any, ...], options: dict[str, Any]) -> None:
            self._inputs[layer] = _rows(args, options)

        def note_output(part: nn.Module, _: Any, output: Any) -> None:
            self._outputs[part] = _first(output)

        hooks = [layer.register_forward_pre_hook(note_input, with_kwargs=True) for layer in self._layers]
        hooks += [part.register_forward_hook(note_output) for _, part in self._mixers]
        yield from _until_end(hooks)

    @contextmanager
    def replaying(self, paths_N: Sequence[int] | None = None) -> Iterator[None]:
        """Passes over cached rows whose layers get the recorded rows of their positions.

        Args:
            paths_N: Which text of its sequence a row belongs to, for a pass that is compared; None = all to the first,
                and nothing is compared.
        """

        def find(_: nn.Module, __: Any, options: dict[str, Any]) -> None:
            positions_BN = options["position_ids"]
            texts, length = next(iter(self._inputs.values())).shape[:2]
            paths = torch.zeros_like(positions_BN) + torch.tensor(paths_N or 0, device=positions_BN.device)
            first_B = torch.arange(len(positions_BN), device=positions_BN.device) * (texts // len(positions_BN))
            self._index = first_B[:, None] + paths, positions_BN.clamp(max=length - 1)

        def replace_input(layer: nn.Module, args: tuple[Any, ...], options: dict[str, Any]) -> Any:
            rows, expected = _rows(args, options), self._expected(self._inputs[layer])
            if rows.shape != expected.shape:
                raise ValueError("its layers do not take one hidden state per row")
            if paths_N is not None:
                number = self._layers.index(layer)
                name = f"what layer {number} gives differs" if number else "its embeddings differ"
                errors_BN = _difference(rows, expected)
                # An expert more or less is rounding; what is wrong between rows shows in their attention.
                self._errors.append((name, errors_BN.median() if number else errors_BN.max() * 5))
            return ((expected, *args[1:]), options) if args else (args, options | {"hidden_states": expected})

        def compare(part: nn.Module, _: Any, output: Any) -> None:
            rows = _first(output)
            number = next(index for index, mixer in self._mixers if mixer is part) + 1
            error = _difference(rows, self._expected(self._outputs[part])).max()
            self._errors.append((f"attention of layer {number} differs", error))

        hooks = [layer.register_forward_pre_hook(replace_input, with_kwargs=True) for layer in self._layers]
        if self._layers:
            hooks.append(self._decoder.register_forward_pre_hook(find, with_kwargs=True))
        if paths_N is not None:
            hooks += [part.register_forward_hook(compare) for _, part in self._mixers]
        yield from _until_end(hooks)

    def worst(self) -> tuple[str, float]:
        """What differed most in compared passes, in words, and by how much of its size; NaN counts as most."""
        named = [(name, error.nan_to_num(nan=torch.inf).item()) for name, error in self._errors]
        return max(named, key=lambda error: error[1], default=("nothing differs", 0.0))

    def _expected(self, recorded: Tensor) -> Tensor:
        assert self._index is not None, "the decoder is called before its layers"
        texts_BN, positions_BN = (index.to(recorded.device) for index in self._index)
        return recorded[texts_BN, positions_BN]


def logits_error(ours_BNV: Tensor, theirs_BNV: Tensor) -> float:
    """Root mean square difference of a row's logits / their standard deviation, of the median row."""
    errors_BN = (ours_BNV - theirs_BNV).pow(2).mean(-1).sqrt() / theirs_BNV.std(-1)
    return errors_BN.nan_to_num(nan=torch.inf).median().item()


def _mixers(layer: nn.Module) -> list[nn.Module]:
    """The outermost parts of a layer that are handed masks, so that they can look at other rows; else the layer."""

    def below(module: nn.Module) -> Iterator[nn.Module]:
        for part in module.children():
            if "attention_mask" in inspect.signature(part.forward).parameters:
                yield part
            else:
                yield from below(part)

    return list(below(layer)) or [layer]


def _difference(rows_BND: Tensor, expected_BND: Tensor) -> Tensor:
    """[B, N]: the size of the difference in each row / the size of the row, or of the mean row where that is larger."""
    difference_BN = (rows_BND.float() - expected_BND.float()).flatten(2).norm(dim=-1)
    size_BN = expected_BND.float().flatten(2).norm(dim=-1)
    return difference_BN / size_BN.maximum(size_BN.mean()).clamp(min=1e-30)


def _rows(args: tuple[Any, ...], options: dict[str, Any]) -> Tensor:
    rows: Tensor = args[0] if args else options["hidden_states"]
    return rows


def _first(output: Any) -> Tensor:
    rows: Tensor = output[0] if isinstance(output, tuple) else output
    return rows


def _until_end(hooks: Sequence[Any]) -> Iterator[None]:
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()
