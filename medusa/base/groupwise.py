"""Checkpoints with groups of 4 or 8 bit weights (GPTQ, AWQ, compressed-tensors, MXFP4) as bases.

A layer stays packed (``medusa.base.packing``) if our kernels support its groups; otherwise it is expanded. Both compute
with the same weights. On a GPU, MXFP4 is transformers', and so is what the kernels there do not run for.
"""

import copy
import json
import logging
import math
import re
from collections import defaultdict
from collections.abc import Collection, Mapping
from contextlib import ExitStack
from itertools import product
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import snapshot_download
from safetensors import safe_open
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, GenerationConfig, PreTrainedModel
from transformers.initialization import no_init_weights

from medusa.base import mx_experts
from medusa.base.group_layouts import LAYOUTS, Grouped, Layout, bits_and_sizes, read_layer
from medusa.base.packing import CPU, set_packed
from medusa.base.stored_names import Places
from medusa.cpu.experts import have_known_form, in_order
from medusa.cpu.packed import PANEL, Packed

logger = logging.getLogger(__name__)

FILES = ["*.json", "model*.safetensors", "gptq_model*.safetensors"]
"""Patterns of the files that are downloaded from the Hub."""
INDEX = "model.safetensors.index.json"


def reads(config: Any) -> bool:
    """Whether ``load`` knows the quantisation method of a base with this config."""
    return _quantisation(config).get("quant_method") in (*LAYOUTS, mx_experts.METHOD)


def of_experts(config: Any) -> bool:
    """Whether the quantised weights of a base with this config are those of experts (``medusa.base.mx_experts``)."""
    return _quantisation(config).get("quant_method") == mx_experts.METHOD


def describe(config: Any) -> str:
    """Describe the weights of a base with this config; "" if ``load`` does not support them."""
    told = _quantisation(config)
    if of_experts(config):
        return mx_experts.DESCRIPTION
    if not reads(config) or LAYOUTS[told["quant_method"]].oddities(told):
        return ""
    kinds = [
        f"{bits} bits {f'in groups of {size}' if size else 'with a scale for each output'}"
        for bits, size in bits_and_sizes(told)
    ]
    return f"weights of {' and '.join(kinds)} ({told['quant_method']})"


def packed_dtype(config: Any) -> torch.dtype:
    """The default dtype in which a base with this config stays packed."""
    return torch.float32 if config.dtype == torch.float32 else torch.bfloat16  # float32 is kept, and expanded


def held_bits(config: Any, dtype: torch.dtype | None) -> int | None:
    """Most bits per weight of a packed layer on a CPU, including scales; None = it cannot be packed.

    Args:
        config: The base's config.
        dtype: The requested dtype; None = none was requested.
    """
    if not describe(config) or (dtype or packed_dtype(config)) != torch.bfloat16:
        return None
    if of_experts(config):
        return math.ceil(mx_experts.BITS)
    kinds = bits_and_sizes(_quantisation(config))
    return max(math.ceil(bits + (32 / size if size else 0) + (bits == 4) / 4) for bits, size in kinds)


def packs(config: Any, dtype: torch.dtype | None) -> bool:
    """Whether the linear layers of a base with this config stay packed on a GPU; see ``held_bits`` for arguments."""
    told = _quantisation(config)
    kinds = (group.get("weights") or {} for group in (told.get("config_groups") or {}).values())
    reordered = told.get("desc_act") or any(kind.get("actorder") in ("group", "dynamic") for kind in kinds)
    return not of_experts(config) and not reordered and held_bits(config, dtype) is not None


def load(name: str, config: Any, dtype: torch.dtype, pack: bool, device: torch.device = CPU) -> PreTrainedModel:
    """Load the model of a checkpoint, on the CPU.

    Args:
        name: Directory or Hub id.
        config: The checkpoint's config.
        dtype: Dtype of the model.
        pack: Keep layers packed if the kernels support their groups. False expands all layers: for training, for
            dtypes that packed layers do not have, or if the kernels do not run.
        device: Where packed layers compute, and already are.

    Raises:
        OSError: The checkpoint cannot be downloaded, or has no safetensors.
        ValueError: It is quantised in an unsupported way, or its layers are not those of the model.
    """
    told = _quantisation(config)
    if not of_experts(config):
        _check(told)
    plain = copy.deepcopy(config)
    del plain.quantization_config
    with no_init_weights():  # memory that is never written is not used
        model: PreTrainedModel = AutoModelForCausalLM.from_config(plain, dtype=dtype)
    directory = Path(name) if Path(name).is_dir() else Path(snapshot_download(name, allow_patterns=FILES))
    with ExitStack() as stack:
        stored = _stored(directory, stack)
        if of_experts(config):
            parts = {f"{one}{part}" for one in mx_experts.names_of(stored) for part in mx_experts.PARTS}
            expanded, packed = mx_experts.read(stored, model, dtype, pack)
        else:
            layout = LAYOUTS[told["quant_method"]]
            layers = {path for path, _, own in (key.rpartition(".") for key in stored) if own == layout.parts[0]}
            parts = {f"{path}.{own}" for path in layers for own in layout.parts}
            expanded, packed = _layers(layout, stored, layers, model, dtype, pack, told, device)
        plain_state = _plain({key: file for key, file in stored.items() if key not in parts}, model, dtype)
    _fill(model, plain_state | expanded, packed)
    set_packed(model, packed, device)
    counts = len(packed), len(expanded)
    logger.info("base %s: %s, %d layers kept packed, %d expanded", name, describe(config), *counts)
    if (directory / "generation_config.json").is_file():
        model.generation_config = GenerationConfig.from_pretrained(directory)
    return model


def _quantisation(config: Any) -> Mapping[str, Any]:
    told = getattr(config, "quantization_config", None) or {}
    return told if isinstance(told, dict) else told.to_dict()


def _check(told: Mapping[str, Any]) -> None:
    """Raise ValueError if the checkpoint is quantised in an unsupported way."""
    odd = LAYOUTS[told["quant_method"]].oddities(told)
    if odd:
        raise ValueError(
            f"quantisation ({told['quant_method']}: {odd[0]}) cannot be read on a CPU; only 4 or 8 bits of GPTQ,"
            " AWQ (gemm) and compressed-tensors (pack-quantized) can; use such weights, a GGUF file or plain ones, or a"
            " GPU"
        )


def _stored(directory: Path, stack: ExitStack) -> dict[str, Any]:
    """The open file of each tensor."""
    found = sorted(directory.glob("*.safetensors"))
    if (directory / INDEX).is_file():
        names = json.loads((directory / INDEX).read_text())["weight_map"].values()
        found = [directory / name for name in sorted(set(names))]
    elif (directory / "model.safetensors").is_file():
        found = [directory / "model.safetensors"]
    if not found:
        raise OSError(f"base ({directory}) has quantised weights, but no safetensors files; convert its weights")
    stored = dict[str, Any]()
    for path in found:
        file = stack.enter_context(safe_open(path, "pt"))
        stored |= dict.fromkeys(file.keys(), file)
    return stored


def _plain(stored: Mapping[str, Any], model: PreTrainedModel, dtype: torch.dtype) -> dict[str, Tensor]:
    """The plain tensors; biases of 0 that the model does not have are left out, because old GPTQ writers add them."""
    known, places, plain = model.state_dict().keys(), Places(model), dict[str, Tensor]()
    for key, file in stored.items():
        tensor = file.get_tensor(key)
        if not key.endswith(".bias") or places.of(key).name in known or tensor.any():
            plain[key] = tensor.to(dtype) if tensor.is_floating_point() else tensor
    return places.joined(plain)


def _layers(
    layout: Layout,
    stored: Mapping[str, Any],
    layers: Collection[str],
    model: PreTrainedModel,
    dtype: torch.dtype,
    pack: bool,
    told: Mapping[str, Any],
    device: torch.device,
) -> tuple[dict[str, Tensor], dict[str, Packed]]:
    """Weights of these layers by the model's names, those of experts joined: expanded and packed ones."""
    expanded, packed = dict[str, Tensor](), dict[str, Packed]()
    tied = model.get_output_embeddings() if model.config.tie_word_embeddings else None
    for name, paths in _by_name(model, layers).items():
        module, shape = _owner(model, name, paths)
        inputs = shape[-1]
        outputs, parts = shape.numel() // inputs // len(paths), list[Packed | Tensor]()
        packs = pack and module is not tied and (device.type == "cpu" or isinstance(module, nn.Linear))
        for _, path in sorted(paths.items()):
            weight = _weight(layout, stored, path, outputs, inputs, told)
            kept = _packed(weight) if packs else None
            parts.append(weight.expand(dtype) if kept is None else kept)
        whole = [one for one in parts if isinstance(one, Packed)]
        layouts = {(one.packing, one.runs) for one in whole}
        if len(whole) == len(parts) and len(layouts) == 1 and (len(parts) == 1 or outputs % PANEL == 0):
            packed[name] = Packed.joined(whole)
        else:
            numbers = (one.expand().to(dtype) if isinstance(one, Packed) else one for one in parts)
            expanded[name] = torch.cat(list(numbers)).view(shape)
    return expanded, packed


def _by_name(model: PreTrainedModel, layers: Collection[str]) -> dict[str, dict[tuple[int, int], str]]:
    """The layers that each of the model's weights is made of, by their ``Place.order``."""
    places, found = Places(model), defaultdict[str, dict[tuple[int, int], str]](dict)
    for path in sorted(layers):
        place = places.of(f"{path}.weight")
        found[place.name][place.order] = path
    return found


def _owner(model: PreTrainedModel, name: str, paths: Mapping[tuple[int, int], str]) -> tuple[nn.Module, torch.Size]:
    """The linear layer or the experts of the model with this weight, which is made of these layers, and its shape."""
    path, _, own = name.rpartition(".")
    try:
        module: nn.Module | None = model.get_submodule(path)
    except AttributeError:
        module = None
    if isinstance(module, nn.Linear) and len(paths) == 1:
        return module, module.weight.shape
    if module is None or not have_known_form(module) or not in_order(module):
        what = "not in the model" if module is None else f"no linear layer there but {type(module).__name__}"
        first = next(iter(paths.values()))
        raise ValueError(f"quantised layer ({first}) is {what}; use a checkpoint of plain weights, or a GPU")
    shape: torch.Size = getattr(module, own).shape
    wanted = set(product(range(shape[0]), range(2 if own == mx_experts.PAIRED else 1)))
    if paths.keys() != wanted:
        raise ValueError(
            f"experts ({path}) have {len(paths)} quantised layers and need {len(wanted)}, of experts 0 to"
            f" {shape[0] - 1}; use a checkpoint of plain weights, or a GPU"
        )
    return module, shape


def _weight(
    layout: Layout, stored: Mapping[str, Any], path: str, outputs: int, inputs: int, told: Mapping[str, Any]
) -> Grouped:
    """The weight of a quantised layer."""
    keys = {own: f"{path}.{own}" for own in layout.parts if f"{path}.{own}" in stored}
    tensors = {own: stored[key].get_tensor(key) for own, key in keys.items()}
    try:
        return read_layer(layout, tensors, outputs, inputs, told)
    except ValueError as error:
        raise ValueError(f"quantised layer ({path}) cannot be read: {error}; use another checkpoint") from error


def _packed(weight: Grouped) -> Packed | None:
    """The weight in the kernels' layout; None if they do not support it."""
    if weight.groups is not None:
        return None
    return Packed.of_groups(weight.numbers, weight.scales, weight.zeros, weight.bits)


def _fill(model: PreTrainedModel, state: dict[str, Tensor], packed: Collection[str]) -> None:
    """Set all tensors of a model except the packed weights.

    Raises:
        ValueError: Tensors are missing, or not in the model.
    """
    missing, unexpected = map(set, model.load_state_dict(state, strict=False, assign=True))
    model.tie_weights(missing_keys=missing, recompute_mapping=False)
    patterns = [*(model._keys_to_ignore_on_load_unexpected or ()), r"rotary_emb\.inv_freq"]
    missing -= set(packed)
    odd = {key for key in unexpected if not any(re.search(pattern, key) for pattern in patterns)} | missing
    if odd:
        where = "is missing" if min(odd) in missing else "is not in the model"
        raise ValueError(f"tensor ({min(odd)}) {where}; use a checkpoint of plain weights, or a GPU")
