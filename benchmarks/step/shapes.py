"""Bases with real shapes and random weights, because the time of a pass depends on the shape and not on the weights."""

import argparse
import copy
import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from tokenizers import Tokenizer, models
from torch import nn
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    GenerationConfig,
    PretrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerFast,
)
from transformers.initialization import no_init_weights

from medusa import BaseModel, DraftHeads, HeadsConfig, build_heads
from medusa.base.checkpoint import choose_dtype, usable_device
from medusa.base.packing import set_packed
from medusa.cpu.experts import use_experts
from medusa.cpu.int8 import round_linears
from medusa.cpu.native import use_kernels
from medusa.cpu.packed import DTYPE, Packed
from medusa.heads.layer import LayerConfig

WEIGHT_STD = 0.02


def _llama(hidden: int, inner: int, layers: int, heads: int, head_dim: int, tied: bool) -> dict[str, Any]:
    return {
        "model_type": "llama", "vocab_size": 128_256, "hidden_size": hidden, "intermediate_size": inner,
        "num_hidden_layers": layers, "num_attention_heads": heads, "num_key_value_heads": 8, "head_dim": head_dim,
        "max_position_embeddings": 131_072, "tie_word_embeddings": tied,
    }  # fmt: skip


def _qwen3(hidden: int, inner: int, layers: int, heads: int, tied: bool) -> dict[str, Any]:
    llama = _llama(hidden, inner, layers, heads, 128, tied)
    return llama | {"model_type": "qwen3", "vocab_size": 151_936, "max_position_embeddings": 40_960}


def _attention_at(layers: int, others: str, places: Sequence[int]) -> list[str]:
    attention = "full_attention" if others == "conv" else "attention"
    return [attention if layer in places else others for layer in range(layers)]


SHAPES: dict[str, dict[str, Any]] = {
    "qwen3-0.6b": _qwen3(1024, 3072, 28, 16, tied=True),
    "qwen3-4b": _qwen3(2560, 9728, 36, 32, tied=True),
    "qwen3-8b": _qwen3(4096, 12_288, 36, 32, tied=False),
    "smollm2-135m": _llama(576, 1536, 30, 9, 64, tied=True)
    | {"vocab_size": 49_152, "num_key_value_heads": 3, "max_position_embeddings": 8192},
    "llama-1b": _llama(2048, 8192, 16, 32, 64, tied=True),
    "llama-3b": _llama(3072, 8192, 28, 24, 128, tied=True),
    "llama-8b": _llama(4096, 14_336, 32, 32, 128, tied=False),
    "qwen3.5-0.8b": _llama(1024, 3584, 24, 8, 256, tied=True)
    | {"model_type": "qwen3_5_text", "vocab_size": 248_320, "num_key_value_heads": 2}
    | {"layer_types": (["linear_attention"] * 3 + ["full_attention"]) * 6, "linear_num_value_heads": 16},
    "lfm2-350m": _llama(1024, 6656, 16, 16, 64, tied=True)
    | {"model_type": "lfm2", "vocab_size": 65_536, "layer_types": _attention_at(16, "conv", (2, 5, 8, 10, 12, 14))},
    "granite-4-h-350m": _llama(768, 2048, 32, 12, 64, tied=True)
    | {"model_type": "granitemoehybrid", "vocab_size": 100_352, "num_key_value_heads": 4, "num_local_experts": 0}
    | {"shared_intermediate_size": 2048, "layer_types": _attention_at(32, "mamba", (10, 13, 17, 27))}
    | {"mamba_n_heads": 48, "mamba_d_head": 32, "mamba_d_state": 128, "position_embedding_type": None},
    "olmoe-1b-7b": _llama(2048, 1024, 16, 16, 128, tied=False)
    | {"model_type": "olmoe", "vocab_size": 50_304, "num_key_value_heads": 16, "max_position_embeddings": 4096}
    | {"num_experts": 64, "num_experts_per_tok": 8},
    "qwen3-30b-a3b": _qwen3(2048, 6144, 48, 32, tied=False)
    | {"model_type": "qwen3_moe", "num_key_value_heads": 4, "moe_intermediate_size": 768, "norm_topk_prob": True}
    | {"num_experts": 128, "num_experts_per_tok": 8},
}
"""Values of the published configs that determine the time of a pass: Llama 3.1 and 3.2, Qwen 3 and 3.5, SmolLM2, LFM2,
Granite 4, OLMoE."""


def given_device(options: argparse.Namespace) -> torch.device:
    """The device that ``--device`` names; see ``usable_device``."""
    return usable_device(None if options.device == "auto" else options.device)


def given_dtype(options: argparse.Namespace) -> torch.dtype | None:
    """The dtype that ``--dtype`` names; None = auto."""
    return None if options.dtype == "auto" else getattr(torch, options.dtype)


def shape_config(name: str) -> PretrainedConfig:
    """The transformers config of a named shape.

    Raises:
        ValueError: The shape is not known.
    """
    if name not in SHAPES:
        raise ValueError(f"shape ({name}) is not known; choose one of: {', '.join(SHAPES)}")
    return AutoConfig.for_model(**SHAPES[name], name_or_path=name)


def random_model(config: PretrainedConfig, dtype: torch.dtype, device: torch.device) -> PreTrainedModel:
    """A model with small random weights, created on its device in its dtype; it never ends an answer."""
    with torch.device(device), no_init_weights():
        model = AutoModelForCausalLM.from_config(copy.deepcopy(config), dtype=dtype)
    model.tie_weights()
    fill(model)
    model.generation_config = GenerationConfig(eos_token_id=None, pad_token_id=0)
    return model.eval().requires_grad_(False)


def random_base(
    config: PretrainedConfig, dtype: torch.dtype | None, device: torch.device, attention: str = "auto",
    int8: bool = False, packed: bool = False,
) -> BaseModel:  # fmt: skip
    """A base with random weights, prepared for decoding; arguments are those of ``BaseModel.load``.

    The default dtype is bfloat16, or the device's replacement for it. With ``packed`` its layers have 4 bits.
    """
    model = random_model(config, DTYPE if packed else dtype or choose_dtype(torch.bfloat16, device), device)
    if packed:
        pack_layers(model, device)
    if int8:
        round_linears(model, output=model.get_output_embeddings())
    if device.type == "cpu":
        use_kernels(model)
        use_experts(model)
    no_words = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.BPE()))
    return BaseModel(model, no_words, config.name_or_path, attention, int8=int8)


def random_heads(base: BaseModel, architecture: str, num_heads: int) -> DraftHeads:
    """Heads for ``base`` with small random weights."""
    layer = LayerConfig.of(base.config) if architecture in ("attention", "block") else None
    with torch.device(base.device):
        config = HeadsConfig(base.hidden_size, base.vocab_size, num_heads, architecture=architecture, layer=layer)
        heads = build_heads(config).to(base.dtype)
    fill(heads)
    return heads


def pack_layers(model: PreTrainedModel, device: torch.device) -> None:
    """Give linear layers random weights of 4 bits in the layout of Q4_K; all but an output layer that is tied."""
    tied = model.get_output_embeddings() if model.config.tie_word_embeddings else None
    layers = [(name, one) for name, one in model.named_modules() if isinstance(one, nn.Linear) and one is not tied]
    made, chosen = dict[torch.Size, Packed](), dict[str, Packed]()
    for name, layer in layers:
        outputs, inputs = shape = layer.weight.shape
        if inputs % 256:
            raise ValueError(
                f"layer ({name}) reads {inputs} numbers, and blocks of Q4_K have 256; choose another shape"
            )
        if shape not in made:
            blocks = torch.randint(256, (outputs, inputs // 256, 144), dtype=torch.uint8)
            blocks[..., :4] = torch.tensor([1e-4, 1e-4], dtype=torch.float16).view(torch.uint8)  # scales
            made[shape] = Packed.of(blocks.flatten(1), "Q4_K")
        chosen[f"{name}.weight"] = replace(made[shape], parts=made[shape].parts.clone())
    set_packed(model, chosen, device)


@torch.no_grad()
def fill(module: nn.Module) -> None:
    """Fill matrices with uniform numbers of standard deviation ``WEIGHT_STD``, vectors (norms, biases) with ones."""
    generators: dict[torch.device, torch.Generator] = {}
    bound = WEIGHT_STD * math.sqrt(3)
    for parameter in module.parameters():
        if parameter.dim() < 2:
            parameter.fill_(1.0)
            continue
        device = parameter.device
        generators.setdefault(device, torch.Generator(device).manual_seed(0))
        parameter.uniform_(-bound, bound, generator=generators[device])


def key_heads(config: Any) -> int:
    """Number of key heads of a layer; families without grouped heads do not have this config key."""
    return int(getattr(config, "num_key_value_heads", None) or config.num_attention_heads)
