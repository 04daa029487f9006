"""The packed layers of a model, on a CPU (``medusa.cpu.packed``) or a GPU (``medusa.gpu.packed``)."""

from collections import defaultdict
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from medusa.cpu.experts import PackedExperts, are_known
from medusa.cpu.packed import Packed
from medusa.cpu.packed import PackedEmbedding as CpuEmbedding
from medusa.cpu.packed import PackedLinear as CpuLinear
from medusa.gpu.packed import PackedEmbedding as GpuEmbedding
from medusa.gpu.packed import PackedLinear as GpuLinear
from medusa.gpu.packed_weight import KNOWN, PackedWeight

CPU = torch.device("cpu")


def stays_packed(module: nn.Module, packed: Packed, device: torch.device = CPU) -> bool:
    """Whether the kernels of this device compute a module's linear layers, embeddings or experts with such a weight."""
    scaled = isinstance(module, nn.Embedding) and isinstance(getattr(module, "embed_scale", None), Tensor)
    matrix = isinstance(module, nn.Linear) or type(module) is nn.Embedding or scaled
    return (matrix or are_known(module)) if device.type == "cpu" else (matrix and packed.kind in KNOWN)


def packed_linear(packed: Packed | PackedWeight, bias: Tensor | None, device: torch.device = CPU) -> nn.Module:
    """A linear layer with this weight on a device."""
    if isinstance(packed, Packed) and device.type == "cpu":
        return CpuLinear(packed, bias)
    return GpuLinear(PackedWeight.of(packed, device) if isinstance(packed, Packed) else packed, bias)


def packed_embedding(packed: Packed, scale: Tensor | None, device: torch.device = CPU) -> CpuEmbedding | GpuEmbedding:
    """Embeddings with this weight on a device."""
    if device.type == "cpu":
        return CpuEmbedding(packed, scale)
    weight = PackedWeight.of(packed, device)
    return GpuEmbedding(weight, None if scale is None else scale.to(weight.device))


def set_packed(model: nn.Module, packed: Mapping[str, Packed], device: torch.device = CPU) -> None:
    """Let linear layers and experts of a model compute with packed weights on a device, by the names of these."""
    owners = defaultdict[str, dict[str, Packed]](dict)
    for name, kept in packed.items():
        path, _, own = name.rpartition(".")
        owners[path][own] = kept
    for path, parts in owners.items():
        module: Any = model.get_submodule(path)
        linear = isinstance(module, nn.Linear)
        made = packed_linear(parts["weight"], module.bias, device) if linear else PackedExperts.of(module, parts)
        model.set_submodule(path, made)


def packed_weights(model: nn.Module) -> list[Packed | PackedWeight]:
    """The packed weights of a model; tied ones appear once."""
    held = (one for module in model.modules() for one in vars(module).values())
    return list({id(one): one for one in held if isinstance(one, Packed | PackedWeight)}.values())
