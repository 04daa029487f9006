"""How GPTQ, AWQ and compressed-tensors (pack-quantized) store a linear layer of 4 or 8 bits in groups.

A layer has integers, and a scale and a zero point for each group of inputs; its weights are (integer - zero) * scale.

Legend: O outputs, I inputs, G groups, W 32-bit words of 4 or 8 bits each, the lowest bits first.
"""

import math
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

BITS = (4, 8)
AWQ_ORDER = [0, 4, 1, 5, 2, 6, 3, 7]
"""Positions of eight successive outputs in a word of AWQ."""
ONES = {4: 0x11111111, 8: 0x01010101}
"""A word that holds a 1 in each integer, by bits."""


class Grouped(NamedTuple):
    """A quantised weight [O, I].

    Attributes:
        bits: Bits of an integer.
        numbers: uint8 [O, I] integers.
        scales: [O, G] in the stored dtype.
        zeros: uint8 [O, G] zero points.
        groups: int64 [I], the group of each input; None = groups of equal size, in order.
    """

    bits: int
    numbers: Tensor
    scales: Tensor
    zeros: Tensor
    groups: Tensor | None = None

    def expand(self, dtype: torch.dtype) -> Tensor:
        """[O, I] weights, computed in float32 and rounded once."""
        scales, zeros = self.scales.float(), self.zeros.float()
        if self.groups is not None:
            return ((self.numbers.float() - zeros[:, self.groups]) * scales[:, self.groups]).to(dtype)
        whole: Tensor = self.numbers.unflatten(1, (scales.shape[1], -1)).float()
        return whole.sub_(zeros[..., None]).mul_(scales[..., None]).flatten(1).to(dtype)


class Layout(NamedTuple):
    """The layout of a layer in a quantisation method.

    Attributes:
        parts: Names of a layer's tensors; the integers come first.
        read: Makes the weight from these tensors, O, I and the ``quantization_config``.
        oddities: Describes the parts of a ``quantization_config`` that ``read`` does not support.
    """

    parts: tuple[str, ...]
    read: Callable[[Mapping[str, Tensor], int, int, Mapping[str, Any]], Grouped]
    oddities: Callable[[Mapping[str, Any]], list[str]]


def read_layer(
    layout: Layout, tensors: Mapping[str, Tensor], outputs: int, inputs: int, told: Mapping[str, Any]
) -> Grouped:
    """Make a layer's weight [O, I] from its tensors.

    Raises:
        ValueError: A tensor is missing or has a wrong shape.
    """
    try:
        weight = layout.read(tensors, outputs, inputs, told)
    except KeyError as error:
        raise ValueError(f"tensor {error} is missing") from error
    except RuntimeError as error:
        raise ValueError(f"{next(iter(tensors))} {list(tensors[layout.parts[0]].shape)}: {error}") from error
    groups = weight.scales.shape[1]
    for size in {size for _, size in bits_and_sizes(told) if size and math.ceil(inputs / size) == groups}:
        if weight.groups is None and inputs % size:  # the last group is shorter
            weight = weight._replace(groups=torch.arange(inputs) // size)
    even = inputs % groups == 0
    if even and weight.groups is not None and torch.equal(weight.groups, torch.arange(inputs) // (inputs // groups)):
        weight = weight._replace(groups=None)
    shapes = weight.numbers.shape == (outputs, inputs), weight.scales.shape == weight.zeros.shape == (outputs, groups)
    if not all(shapes) or (weight.groups is None and not even):
        raise ValueError(f"{groups} groups of {list(weight.numbers.shape)} do not make [{outputs}, {inputs}]")
    return weight


def bits_and_sizes(told: Mapping[str, Any]) -> list[tuple[int, int]]:
    """Bits of an integer and inputs of a group (0 = all), for each kind of layer.

    Args:
        told: A supported ``quantization_config``.
    """
    weights = [group["weights"] for group in _schemes(told)] or [told]
    found = [(one.get("num_bits") or one.get("bits", 4), max(0, one.get("group_size") or 0)) for one in weights]
    return list(dict.fromkeys(found))


def _schemes(told: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """Schemes of compressed-tensors; each is for some of the layers."""
    return [group for group in (told.get("config_groups") or {}).values() if isinstance(group, Mapping)]


def _bits(words: int, numbers: int) -> int:
    """Bits of an integer, if this number of words holds this number of integers."""
    for bits in BITS:
        if math.ceil(numbers * bits / 32) == words:
            return bits
    raise ValueError(f"it has {32 * words / numbers:.3g} bits a number, and only 4 and 8 can be read")


def _numbers(words: Tensor, bits: int) -> Tensor:
    """Unpack int32 words [...] to uint8 integers [..., 32 / bits]."""
    octets = words.contiguous()[..., None].view(torch.uint8)
    return octets if bits == 8 else torch.stack([octets & 15, octets >> 4], -1).flatten(-2)


def _gptq(tensors: Mapping[str, Tensor], outputs: int, inputs: int, told: Mapping[str, Any]) -> Grouped:
    """Read qweight [W of inputs, O], qzeros [G, W of outputs], scales [G, O], g_idx [I]."""
    words, zeros, order = tensors["qweight"], tensors["qzeros"], tensors.get("g_idx")
    bits = _bits(len(words), inputs)
    if _gptq_format(told) == "gptq":
        zeros = zeros + ONES[bits]  # zero points minus 1 are stored; the subtraction may borrow across the word
    numbers = _numbers(words.T, bits).flatten(1)[:, :inputs]
    zeros = _numbers(zeros, bits).flatten(1)[:, :outputs].T
    return Grouped(bits, numbers, tensors["scales"].T, zeros, None if order is None else order.long())


def _gptq_format(told: Mapping[str, Any]) -> str:
    return str(told.get("checkpoint_format") or told.get("format") or "gptq").lower()


def _gptq_oddities(told: Mapping[str, Any]) -> list[str]:
    bits, words, layout = told.get("bits"), told.get("pack_dtype", "int32"), _gptq_format(told)
    return [
        *[f"{bits} bits"] * (bits not in BITS),
        *["marlin"] * bool(told.get("is_marlin_format")),
        *[layout] * (layout not in ("gptq", "gptq_v2")),
        *[f"words of {words}"] * (words != "int32"),
    ]


def _awq(tensors: Mapping[str, Tensor], outputs: int, inputs: int, told: Mapping[str, Any]) -> Grouped:
    """Read qweight [I, W of outputs], qzeros [G, W of outputs], scales [G, O]."""
    del inputs, told
    numbers, zeros = (
        _numbers(tensors[name].T, 4)[..., AWQ_ORDER].transpose(1, 2).flatten(0, 1)[:outputs]
        for name in ("qweight", "qzeros")
    )
    return Grouped(4, numbers, tensors["scales"].T, zeros)


def _awq_oddities(told: Mapping[str, Any]) -> list[str]:
    bits, layout = told.get("bits", 4), told.get("version") or told.get("format") or told.get("checkpoint_format")
    layout = "llm-awq" if told.get("backend") == "llm-awq" else str(layout or "gemm").lower()
    return [*[f"{bits} bits"] * (bits != 4), *[layout] * (layout != "gemm")]


def _compressed(tensors: Mapping[str, Tensor], outputs: int, inputs: int, told: Mapping[str, Any]) -> Grouped:
    """weight_packed [O, W of inputs], weight_scale [O, G], weight_zero_point [W of outputs, G], weight_g_idx [I]."""
    del told
    words, zeros, order = (tensors.get(f"weight_{name}") for name in ("packed", "zero_point", "g_idx"))
    assert words is not None, "a layer is found by it"
    bits, scales = _bits(words.shape[1], inputs), tensors["weight_scale"].reshape(outputs, -1)
    middle = 1 << (bits - 1)  # integers and zero points are signed, and stored with this offset
    if zeros is None:
        zeros = torch.full(scales.shape, middle, dtype=torch.uint8)
    elif zeros.dtype == torch.int32:
        zeros = _numbers(zeros.T, bits).flatten(1)[:, :outputs].T
    else:  # old writers do not pack zero points
        zeros = (zeros.reshape(outputs, -1).int() + middle).to(torch.uint8)
    in_order = order is None or bool((order < 0).any())  # -1: the order was never set
    numbers = _numbers(words, bits).flatten(1)[:, :inputs]
    return Grouped(bits, numbers, scales, zeros, None if in_order or order is None else order.long())


def _compressed_oddities(told: Mapping[str, Any]) -> list[str]:
    odd = [*["a quantised KV cache"] * bool(told.get("kv_cache_scheme"))]
    odd += ["transforms"] * bool(told.get("transform_config"))
    for group in _schemes(told) or [{}]:
        layout, weights = group.get("format") or told.get("format"), group.get("weights") or {}
        kind, bits, share = weights.get("type", "int"), weights.get("num_bits"), weights.get("strategy", "group")
        odd += [str(layout)] * (layout != "pack-quantized")
        odd += ["rounded activations"] * bool(group.get("input_activations"))
        odd += [f"{kind} of {bits} bits"] * (kind != "int" or bits not in BITS)
        odd += [f"a scale for each {share}"] * (share not in ("group", "channel"))
    return odd


COMPRESSED = ("weight_packed", "weight_scale", "weight_zero_point", "weight_g_idx", "weight_shape")
LAYOUTS = {
    "gptq": Layout(("qweight", "qzeros", "scales", "g_idx"), _gptq, _gptq_oddities),
    "awq": Layout(("qweight", "qzeros", "scales"), _awq, _awq_oddities),
    "compressed-tensors": Layout(COMPRESSED, _compressed, _compressed_oddities),
}
"""Layouts by ``quant_method``."""
