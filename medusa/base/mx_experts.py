"""Experts of 4-bit floating-point numbers (MXFP4), as the checkpoints of GPT-OSS store them.

A weight ``gate_up_proj`` or ``down_proj`` of a layer's experts is two tensors: ``<name>_blocks``, uint8 [E, O, K, 16],
whose bytes hold two numbers of 4 bits (E2M1) each, the lower bits first, and ``<name>_scales``, uint8 [E, O, K], powers
of 2 (E8M0). Outputs of ``gate_up_proj`` are those of gate and up projection in turn.

Legend: E experts, O outputs, I inputs, K runs of 32 inputs.
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from tqdm import tqdm
from transformers import PreTrainedModel
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from medusa.cpu.experts import have_known_form
from medusa.cpu.packed import PANEL, RUN, SLICE, Packed

METHOD = "mxfp4"
"""The ``quant_method`` of such checkpoints."""
DESCRIPTION = "weights of experts of 4 bits with a scale for each 32 (mxfp4)"
BITS = 4 + 8 / RUN
"""Bits of a packed weight, including its share of scales."""
PARTS = ("_blocks", "_scales")
PAIRED = "gate_up_proj"


def held_bytes(weights: int, of_experts: int) -> int:
    """Bytes of a model that is packed, of which ``of_experts`` weights are those of experts and the others bfloat16."""
    return int(of_experts * BITS / 8) + (weights - of_experts) * torch.bfloat16.itemsize


def names_of(stored: Mapping[str, Any]) -> list[str]:
    """The model's names of the weights that are stored so."""
    blocks, scales = PARTS
    found = {key.removesuffix(blocks) for key in stored if key.endswith(blocks)}
    return sorted(name for name in found if f"{name}{scales}" in stored)


def read(
    stored: Mapping[str, Any], model: PreTrainedModel, dtype: torch.dtype, pack: bool
) -> tuple[dict[str, Tensor], dict[str, Packed]]:
    """Weights of experts by the model's names: expanded ones as the model has them, and packed ones.

    Args:
        stored: The open file of each tensor.
        model: The model; its experts say whether the kernels know them.
        dtype: Dtype of expanded weights.
        pack: Pack those that the kernels know.

    Raises:
        ValueError: A weight does not have the shape of the model's.
    """
    expanded, packed = dict[str, Tensor](), dict[str, Packed]()
    for name in tqdm(names_of(stored), desc="experts", unit="", disable=None, leave=False):
        path, _, own = name.rpartition(".")
        blocks, scales = (stored[f"{name}{part}"].get_tensor(f"{name}{part}") for part in PARTS)
        scales = scales.view(torch.uint8) if scales.dtype == torch.float8_e8m0fnu else scales
        _check(name, blocks, scales, model)
        kept = _packed(own, blocks, scales) if pack and have_known_form(model.get_submodule(path)) else None
        if kept is None:
            expanded[name] = convert_moe_packed_tensors(blocks, scales, dtype=dtype)
        else:
            packed[name] = kept
    return expanded, packed


def _check(name: str, blocks: Tensor, scales: Tensor, model: PreTrainedModel) -> None:
    try:
        experts, inputs, outputs = model.get_parameter(name).shape
    except AttributeError as error:
        raise ValueError(f"experts ({name}) are not in the model; use a checkpoint of plain weights") from error
    wanted = experts, outputs, inputs // RUN
    if not blocks.dtype == scales.dtype == torch.uint8:
        raise ValueError(
            f"experts ({name}) are stored as {blocks.dtype} and {scales.dtype}, and must be bytes; copy the checkpoint"
            " again"
        )
    if inputs % RUN or scales.shape != wanted or blocks.shape != (*wanted, RUN // 2):
        found = f"{tuple(blocks.shape)} and {tuple(scales.shape)}"
        raise ValueError(
            f"experts ({name}) are stored as {found}, and the model's are [{experts}, {inputs}, {outputs}]; copy the"
            " checkpoint again"
        )


def _packed(own: str, blocks: Tensor, scales: Tensor) -> Packed | None:
    """A weight in the kernels' order (``medusa.cpu.experts``); None if they do not support its numbers."""
    blocks, scales = (_in_order(own, one) for one in (blocks, scales))
    parts, step = list[Packed](), max(1, SLICE // (blocks.shape[1] * RUN) // PANEL) * PANEL
    for some, exponents in zip(blocks.split(step), scales.split(step), strict=True):
        numbers = some.new_empty(*some.shape, 2)
        torch.bitwise_and(some, 15, out=numbers[..., 0])
        torch.bitwise_right_shift(some, 4, out=numbers[..., 1])
        one = Packed.of_mx(numbers.flatten(-2), exponents)
        if one is None:
            return None
        parts.append(one.for_here())
    return Packed.joined(parts)


def _in_order(own: str, stored: Tensor) -> Tensor:
    """[E * O, ...] of [E, O, ...]: of an expert's outputs those of the gate come first."""
    if own == PAIRED:
        stored = stored.unflatten(1, (-1, 2)).transpose(1, 2).flatten(1, 2)
    return stored.flatten(0, 1)
