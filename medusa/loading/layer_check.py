"""Tests each layer of a model by itself over cached rows, with the inputs that it had in a pass over plain text.

Rounding errors grow from layer to layer: over a whole model in half precision, two correct passes can differ more than
a pass with a wrong layer. So each layer gets the rows that it had over plain text, and the output of its attention is
compared directly. Errors do not grow, and a fault appears in the layer that causes it.

This file needs only torch, because a copy of it is exported with heads.

Legend: P texts, T tokens, B sequences, N rows of a pass over cached rows, D hidden size.
"""

import inspect
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

LIMITS = {torch.float64: 1e-4, torch.float32: 5e-3}
"""Largest relative difference of a layer's output and of the logits; ``COARSE`` for coarser dtypes."""
COARSE = 0.05
COARSE_WHOLE = 0.25
"""Limit for the logits of a pass whose layers are not found, since rounding errors grow in it."""
SPREADS = 3
"""The output of a layer's attention, and the logits of a pass of our own kernels, may differ by this multiple of the
difference between two correct passes."""
LEAST = {torch.float64: 1e-5, torch.float32: 1e-3, torch.float16: 5e-3}
"""Smallest limit for these; ``COARSE_LEAST`` for coarser dtypes."""
COARSE_LEAST = 0.015
MOST = 0.6
"""Largest limit for logits: those of other texts differ by 1 and more."""


class LayerCheck:
    """Records the rows of every layer over plain texts, and compares the layers with them over cached rows.

    Args:
        decoder: The layers between token ids and the output layer; it gets ``position_ids`` over cached rows.
        num_layers: Number of its layers. If they cannot be found, only the logits are compared.
        dtype: Dtype of its computation; None = with rounded activations.
        fused: The pass that is compared does not call the layers, so only its logits are compared. Rounding errors grow
            in it from layer to layer, and so they do in ``rounding``.
    """

    def __init__(self, decoder: nn.Module, num_layers: int, dtype: torch.dtype | None, fused: bool = False) -> None:
        lists = (part for part in decoder.modules() if isinstance(part, nn.ModuleList) and len(part) == num_layers)
        self._decoder, self._layers, self._dtype, self._fused = decoder, list(next(lists, ())), dtype, fused
        self._mixers = [(index, part) for index, layer in enumerate(self._layers) for part in _mixers(layer)]
        self._inputs: dict[nn.Module, Tensor] = {}
        self._outputs: dict[nn.Module, Tensor] = {}
        self._rounded: dict[nn.Module, Tensor] = {}
        self._index: tuple[Tensor, Tensor] | None = None
        self._errors: list[tuple[str, Tensor, Tensor | float]] = []

    @contextmanager
    def recording(self) -> Iterator[None]:
        """A context for the pass over texts [P, T] with which later passes are compared."""

        def note_input(layer: nn.Module, args: tuple[Any, ...], options: dict[str, Any]) -> None:
            self._inputs[layer] = _rows(args, options)

        yield from self._noting(note_input, self._outputs)

    @contextmanager
    def rounding(self) -> Iterator[None]:
        """A context for the same pass with differently rounded inputs: it measures how much correct passes differ."""

        def round_input(layer: nn.Module, args: tuple[Any, ...], options: dict[str, Any]) -> Any:
            rows = _rows(args, options) if self._fused else self._inputs[layer]
            generator = torch.Generator(rows.device).manual_seed(self._layers.index(layer))
            noise = torch.randn(rows.shape, device=rows.device, generator=generator) * torch.finfo(rows.dtype).eps / 4
            return _with_rows((rows * (1 + noise)).to(rows.dtype), args, options)

        yield from self._noting(round_input, self._rounded)

    @contextmanager
    def replaying(self, texts: int | Sequence[int], compared: bool) -> Iterator[None]:
        """A context for a pass over cached rows whose layers get the recorded rows of their positions.

        Args:
            texts: The text of all rows, or of each row, in the order of the decoder calls.
            compared: Compare the outputs of attention with those over plain text.
        """
        if self._fused:
            yield
            return
        left = None if isinstance(texts, int) else list(texts)

        def find(_: nn.Module, __: Any, options: dict[str, Any]) -> None:
            positions_1N = options["position_ids"]
            length, count = next(iter(self._inputs.values())).shape[1], positions_1N.shape[1]
            now = texts if left is None else [left.pop(0) for _ in range(count)]
            texts_1N = torch.zeros_like(positions_1N) + torch.tensor(now, device=positions_1N.device)
            self._index = texts_1N, positions_1N.clamp(max=length - 1)

        def replace_input(layer: nn.Module, args: tuple[Any, ...], options: dict[str, Any]) -> Any:
            rows, expected = _rows(args, options), self._expected(self._inputs[layer])
            if rows.shape != expected.shape:
                raise ValueError("its layers do not take one hidden state per row")
            if compared:
                number = self._layers.index(layer)
                name = f"the output of layer {number} differs" if number else "its embeddings differ"
                errors_BN, limit = _difference(rows, expected), self._limit(LIMITS, COARSE)
                # Rounding may change a few choices of experts; faults between rows appear in attention.
                self._errors.append((name, errors_BN.median() if number else errors_BN.max(), limit))
            return _with_rows(expected, args, options)

        def compare(part: nn.Module, _: Any, output: Any) -> None:
            rows = _first(output)
            number = next(index for index, mixer in self._mixers if mixer is part) + 1
            expected, rounded = self._expected(self._outputs[part]), self._expected(self._rounded[part])
            limit = (SPREADS * _difference(rounded, expected).max()).clamp(min=self._limit(LEAST, COARSE_LEAST))
            self._errors.append((f"attention of layer {number} differs", _difference(rows, expected).max(), limit))

        hooks = [layer.register_forward_pre_hook(replace_input, with_kwargs=True) for layer in self._layers]
        if self._layers:
            hooks.append(self._decoder.register_forward_pre_hook(find, with_kwargs=True))
        if compared:
            hooks += [part.register_forward_hook(compare) for _, part in self._mixers]
        yield from _until_end(hooks)

    def objection(self, ours_BNV: Tensor, theirs_BNV: Tensor, rounded_BNV: Tensor | None = None) -> str | None:
        """The difference in compared passes or logits that is largest for its limit; None if all are within limits.

        Args:
            ours_BNV: Logits over cached rows.
            theirs_BNV: Logits over plain text.
            rounded_BNV: The same with differently rounded inputs, if the pass is fused.
        """

        def difference(logits_BNV: Tensor) -> Tensor:
            errors_BN: Tensor = (logits_BNV - theirs_BNV).pow(2).mean(-1).sqrt() / theirs_BNV.std(-1)
            # Where layers are compared too, rounding may change a few choices of experts in correct passes.
            return errors_BN.max() if self._fused else errors_BN.median()

        limit: Tensor | float = self._limit(LIMITS, COARSE if self._layers else COARSE_WHOLE)
        if rounded_BNV is not None and self._layers:
            limit = (SPREADS * difference(rounded_BNV)).clamp(self._limit(LEAST, COARSE_LEAST), MOST)
        found = [*self._errors, ("its logits differ", difference(ours_BNV), limit)]
        named = [(name, error.nan_to_num(nan=torch.inf).item(), float(limit)) for name, error, limit in found]
        name, error, limit = max(named, key=lambda one: one[1] / one[2])
        return None if error <= limit else f"{name} from plain text by {error:.2g} (limit {limit:.2g})"

    def _noting(self, before: Callable[..., Any], outputs: dict[nn.Module, Tensor]) -> Iterator[None]:
        """Call ``before`` with the inputs of each layer, and keep the outputs of the mixers."""

        def note_output(part: nn.Module, _: Any, output: Any) -> None:
            outputs[part] = _first(output)

        hooks = [layer.register_forward_pre_hook(before, with_kwargs=True) for layer in self._layers]
        hooks += [part.register_forward_hook(note_output) for _, part in self._mixers]
        yield from _until_end(hooks)

    def _limit(self, limits: dict[torch.dtype, float], coarse: float) -> float:
        return coarse if self._dtype is None else limits.get(self._dtype, coarse)

    def _expected(self, recorded: Tensor) -> Tensor:
        assert self._index is not None, "the decoder is called before its layers"
        texts_1N, positions_1N = (index.to(recorded.device) for index in self._index)
        return recorded[texts_1N, positions_1N]


def _mixers(layer: nn.Module) -> list[nn.Module]:
    """The outermost parts of a layer that get masks, so that they can read other rows; otherwise the layer."""

    def below(module: nn.Module) -> Iterator[nn.Module]:
        for part in module.children():
            if "attention_mask" in inspect.signature(part.forward).parameters:
                yield part
            else:
                yield from below(part)

    return list(below(layer)) or [layer]


def _difference(rows_BND: Tensor, expected_BND: Tensor) -> Tensor:
    """[B, N]: norm of each row's difference, relative to the norm of the row or of the mean row if that is larger."""
    difference_BN = (rows_BND.float() - expected_BND.float()).flatten(2).norm(dim=-1)
    size_BN = expected_BND.float().flatten(2).norm(dim=-1)
    errors_BN: Tensor = difference_BN / size_BN.maximum(size_BN.mean()).clamp(min=1e-30)
    return errors_BN


def _rows(args: tuple[Any, ...], options: dict[str, Any]) -> Tensor:
    rows: Tensor = args[0] if args else options["hidden_states"]
    return rows


def _with_rows(rows: Tensor, args: tuple[Any, ...], options: dict[str, Any]) -> Any:
    return ((rows, *args[1:]), options) if args else (args, options | {"hidden_states": rows})


def _first(output: Any) -> Tensor:
    rows: Tensor = output[0] if isinstance(output, tuple) else output
    return rows


def _until_end(hooks: Sequence[Any]) -> Iterator[None]:
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()
