"""Small models of the families that are read from GGUF files, with the same weights wherever they are made."""

from typing import Any
from zlib import crc32

import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from tests.medusa.test_conformance import config_of

SIZES = {
    "vocab_size": 300, "hidden_size": 32, "intermediate_size": 64, "head_dim": 8, "moe_intermediate_size": 32,
    "num_hidden_layers": 3, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 2, "sliding_window": 7,
}  # fmt: skip
NO_WINDOWS = {"sliding_window": None}
WIDE = {"intermediate_size": 128, "num_key_value_heads": 4}
EVERY = {"layer_types": None}
SCALED = {"embedding_multiplier": 3.0, "residual_multiplier": 0.5, "attention_multiplier": 0.2, "logits_scaling": 2.0}
MAMBA = {"mamba_n_heads": 8, "mamba_d_head": 8}
MIXERS = {
    "vocab_size": 304, "num_hidden_layers": 4, "mamba_num_heads": 8, "mamba_head_dim": 8, "n_routed_experts": 4,
    "moe_shared_expert_intermediate_size": 32, "head_dim": 16,
}  # fmt: skip
LONGER = {
    "rope_type": "yarn", "rope_theta": 1e4, "factor": 32.0, "original_max_position_embeddings": 32, "beta_fast": 32.0,
    "beta_slow": 1.0,
}  # fmt: skip
EXAONE = {
    "rope_type": "llama3", "rope_theta": 1e6, "factor": 16.0, "original_max_position_embeddings": 8192,
    "low_freq_factor": 1.0, "high_freq_factor": 4.0,
}  # fmt: skip
LATENT = {"kv_lora_rank": 32, "q_lora_rank": 32, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 8}
YARN = {
    "rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 32, "beta_fast": 32.0,
    "beta_slow": 1.0, "mscale": 1.0, "mscale_all_dim": 1.0, "llama_4_scaling_beta": 0.5,
}  # fmt: skip
LLAMA3 = {
    "rope_type": "llama3", "rope_theta": 5e5, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 256,
}  # fmt: skip
LLAMA4 = LLAMA3 | {"factor": 16.0, "high_freq_factor": 1.0, "original_max_position_embeddings": 8192}
PLAIN = {"rope_type": "default", "rope_theta": 5e5}
OLMO3 = PLAIN | {
    "rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 32, "attention_factor": 1.2,
    "beta_fast": 32.0, "beta_slow": 1.0,
}  # fmt: skip
LONGROPE = {
    "rope_type": "longrope", "rope_theta": 1e4, "partial_rotary_factor": 0.75, "long_factor": [1.0, 2.0, 4.0],
    "short_factor": [1.0, 1.0, 1.5], "original_max_position_embeddings": 32,
}  # fmt: skip
DELTA = {
    "num_hidden_layers": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "shared_expert_intermediate_size": 32,
}
FAMILIES: dict[str, dict[str, Any]] = {
    "afmoe": EVERY | {"mup_enabled": True, "route_scale": 2.826},
    "arcee": {"rope_parameters": LONGER},
    "bamba": MAMBA,
    "cohere": {},
    "cohere-norms": {"use_qk_norm": True, "logit_scale": 0.5},
    "cohere2": EVERY,
    "deepseek_v2": LATENT | {
        "q_lora_rank": None, "n_group": 2, "topk_group": 1, "topk_method": "group_limited_greedy",
        "routed_scaling_factor": 16.0, "rope_parameters": LONGER | {"mscale": 0.707, "mscale_all_dim": 0.707},
    },
    "deepseek_v3": LATENT | {
        "n_group": 2, "rope_parameters": LONGER | {"mscale": 1.0, "mscale_all_dim": 1.0},
    },
    "deepseek_v3-lite": LATENT | {
        "q_lora_rank": None, "num_key_value_heads": 4, "n_routed_experts": 4, "num_experts_per_tok": 2, "n_group": 1,
        "topk_group": 1, "first_k_dense_replace": 1, "routed_scaling_factor": 2.446,
    },
    "ernie4_5": {},
    "exaone4": {"rope_parameters": EXAONE},
    "exaone4-whole": NO_WINDOWS | {"layer_types": ["full_attention"] * 3, "rope_parameters": EXAONE},
    "falcon_h1": MAMBA | {
        "mamba_d_ssm": 64, "mamba_norm_before_gate": False, "mamba_rms_norm": True, "rope_theta": 1e11,
    },
    "gemma": {},
    "gemma2": {"query_pre_attn_scalar": 8},
    "gemma3_text": EVERY | {
        "query_pre_attn_scalar": 8,
        "rope_parameters": {
            "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
            "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
        },
    },
    "gemma3_text-whole": {
        "sliding_window": 128,
        "query_pre_attn_scalar": 8,
        "layer_types": ["full_attention"] * 3,
        "final_logit_softcapping": 30.0,
        "rope_parameters": {
            "full_attention": LONGER | {"attn_factor": 1.0},
            "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
        },
    },
    "gemma4_text": {
        "layer_types": ["sliding_attention", "full_attention", "full_attention"], "num_kv_shared_layers": 1,
        "use_double_wide_mlp": False, "global_head_dim": 16, "vocab_size_per_layer_input": 300,
        "hidden_size_per_layer_input": 32, "final_logit_softcapping": 30.0,
    },
    "gemma4_text-keys": {
        "global_head_dim": 16,
        "vocab_size_per_layer_input": 300,
        "hidden_size_per_layer_input": 0,
        "num_kv_shared_layers": 0,
        "attention_k_eq_v": True,
        "num_global_key_value_heads": 1,
    },
    "gemma4_text-experts": {
        "global_head_dim": 16,
        "vocab_size_per_layer_input": 300,
        "hidden_size_per_layer_input": 0,
        "num_kv_shared_layers": 0,
        "enable_moe_block": True,
        "num_experts": 4,
        "top_k_experts": 2,
    },
    "glm4": {},
    "gpt2": {"n_inner": 128},
    "gpt_oss": {"intermediate_size": 32, "rope_parameters": LONGER | {"rope_theta": 1.5e5, "truncate": False}},
    "granite": SCALED,
    "granitemoehybrid": MAMBA | SCALED | {"intermediate_size": 32, "shared_intermediate_size": 64},
    "granitemoehybrid-dense": MAMBA | SCALED | {
        "mamba_d_state": 8, "mamba_n_groups": 1, "mamba_expand": 2, "layer_types": ["mamba", "attention", "mamba"],
        "shared_intermediate_size": 64, "num_local_experts": 0, "num_experts_per_tok": 0,
    },
    "lfm2_moe": {},
    "llama": {"head_dim": 16, "attention_bias": True, "mlp_bias": True, "rope_parameters": LLAMA3},
    "llama4_text": EVERY | {
        "intermediate_size": 32, "intermediate_size_mlp": 64, "no_rope_layers": None, "attention_chunk_size": 8192,
        "floor_scale": 8192, "attn_scale": 0.1, "num_hidden_layers": 4, "interleave_moe_layer_step": 2,
        "rope_parameters": LLAMA4,
    },
    "ministral3": NO_WINDOWS | {"head_dim": 16, "rope_parameters": YARN},
    "mistral": NO_WINDOWS | {"head_dim": 16, "rms_norm_eps": 1e-5, "rope_parameters": {"rope_theta": 1e6}},
    "mixtral": NO_WINDOWS,
    "nemotron": {"head_dim": 16},
    "nemotron_h": MIXERS | {"hybrid_override_pattern": "M*-M"},
    "nemotron_h-experts": MIXERS | {
        "hybrid_override_pattern": "M*EM", "moe_latent_size": 32, "routed_scaling_factor": 2.5
    },
    "olmo2": {"sliding_window": ..., "rms_norm_eps": 1e-6, "rope_parameters": {"rope_theta": 5e5}},
    "olmo3": {"rms_norm_eps": 1e-6, "rope_parameters": {"full_attention": OLMO3, "sliding_attention": PLAIN}},
    "olmoe": {"intermediate_size": 32},
    "phi": WIDE | {"rope_parameters": {"rope_theta": 1e4, "partial_rotary_factor": 1.0}},
    "phi3": NO_WINDOWS | {"original_max_position_embeddings": 32, "rope_parameters": LONGROPE},
    "qwen2": {},
    "qwen2_moe": EVERY | NO_WINDOWS | {"use_sliding_window": False, "shared_expert_intermediate_size": 32},
    "qwen3": {},
    "qwen3_moe": {"norm_topk_prob": True},
    "qwen3_next": EVERY | DELTA,
    "seed_oss": {"rope_parameters": {"rope_theta": 1e7}},
    "smollm3": {"num_hidden_layers": 4, "no_rope_layers": None, "rope_parameters": {"rope_theta": 5e6}},
    "stablelm": {"use_qkv_bias": True},
    "stablelm-parallel": {"use_parallel_residual": True},
    "starcoder2": NO_WINDOWS,
}  # fmt: skip
"""What differs from ``SIZES`` and other tests' models, so that llama.cpp's settings can say it; ... is left out."""


def small(family: str) -> PreTrainedModel:
    """A model of the family whose weights follow from their names alone."""
    changes = {name: value for name, value in (SIZES | FAMILIES[family]).items() if value is not ...}
    model: PreTrainedModel = AutoModelForCausalLM.from_config(config_of(family, **changes)).eval()
    with torch.no_grad():
        for name, tensor in model.state_dict().items():
            places = torch.arange(tensor.numel()) + crc32(name.encode())
            three = (places * 2654435761 >> 15) % 3 - 1
            tensor.copy_(three.view(tensor.shape) * 0.125 + name.endswith(("norm.weight", "layer_scalar")))
    return model
