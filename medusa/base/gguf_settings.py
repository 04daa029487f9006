"""The settings of a GGUF file's model by transformers' names, where they are not the same for all families."""

from collections.abc import Mapping
from itertools import islice
from typing import Any

SETTINGS = {
    "context_length": "max_position_embeddings",
    "embedding_length": "hidden_size",
    "feed_forward_length": "intermediate_size",
    "attention.head_count": "num_attention_heads",
    "attention.head_count_kv": "num_key_value_heads",
    "attention.key_length": "head_dim",
    "attention.layer_norm_rms_epsilon": "rms_norm_eps",
    "attention.layer_norm_epsilon": "layer_norm_eps",
    "attention.sliding_window": "sliding_window",
    "rope.freq_base": "rope_theta",
    "expert_count": "num_experts",
    "expert_used_count": "num_experts_per_tok",
    "expert_feed_forward_length": "moe_intermediate_size",
    "expert_shared_feed_forward_length": "shared_expert_intermediate_size",
    "expert_group_count": "n_group",
    "expert_group_used_count": "topk_group",
}
"""llama.cpp's names of settings, behind the name of the family, with transformers' names."""


def windows(told: Mapping[str, Any], known: Mapping[str, Any]) -> dict[str, Any]:
    """Kinds of layers: all see the whole text if there is no window, or the file says which have one."""
    which = told.get("attention.sliding_window_pattern")
    kinds = ("full_attention", "sliding_attention")
    if not known["sliding_window"]:
        return {"layer_types": [kinds[0]] * known["num_hidden_layers"]}
    return {"layer_types": [kinds[bool(one)] for one in which]} if isinstance(which, list) else {}


def gemma(told: Mapping[str, Any], known: Mapping[str, Any]) -> dict[str, Any]:
    """Queries of the models with 27 billion parameters are scaled by another size than that of their heads."""
    large = known["num_hidden_layers"] in (46, 62)
    scalar = known["hidden_size"] // known["num_attention_heads"] if large else known["head_dim"]
    window = known["sliding_window"] or known["max_position_embeddings"]  # transformers wants one
    return {"query_pre_attn_scalar": scalar, "sliding_window": window} | windows(told, known)


def gemma2(told: Mapping[str, Any], known: Mapping[str, Any]) -> dict[str, Any]:
    """The same for Gemma 2, whose first files do not tell the window."""
    return gemma(told, {**known, "sliding_window": known["sliding_window"] or 4096})


def gemma4(told: Mapping[str, Any], known: Mapping[str, Any]) -> dict[str, Any]:
    """Layers with a window and the others differ in the sizes and numbers of their heads, and in how positions turn."""
    which, heads, wide = (
        told[name] for name in ("attention.sliding_window_pattern", "attention.head_count_kv", "feed_forward_length")
    )
    of_kind = dict(zip(which, heads, strict=True)) if isinstance(heads, list) else dict.fromkeys(which, heads)
    return windows(told, known) | {
        "vocab_size_per_layer_input": known["vocab_size"],
        "intermediate_size": min(wide) if isinstance(wide, list) else wide,
        "use_double_wide_mlp": isinstance(wide, list) and min(wide) < max(wide),
        "enable_moe_block": "expert_count" in told,
        "num_key_value_heads": of_kind.get(True),
        "num_global_key_value_heads": of_kind.get(False),
        "rope_parameters": {
            "full_attention": {
                "rope_type": "proportional", "rope_theta": told["rope.freq_base"], "partial_rotary_factor": 0.25,
            },
            "sliding_attention": {"rope_type": "default", "rope_theta": told["rope.freq_base_swa"]},
        },
    }  # fmt: skip


def deepseek(told: Mapping[str, Any], known: Mapping[str, Any]) -> dict[str, Any]:
    """How DeepSeek V2 and V3 choose experts, and the sizes of their heads."""
    # Files made before heads were absorbed tell their sizes by the usual names, and no groups of experts.
    keys, values = (
        told.get(f"attention.{name}_length_mla", told.get(f"attention.{name}_length")) for name in ("key", "value")
    )
    groups, used = {256: (8, 4), 160: (8, 3)}.get(told["expert_count"], (1, 1))
    groups = told.get("expert_group_count", groups)
    return {
        "n_group": groups,
        "topk_group": told.get("expert_group_used_count", used),
        "topk_method": "group_limited_greedy" if groups > 1 else "greedy",
        "norm_topk_prob": told.get("expert_weights_norm", False),
        "routed_scaling_factor": told.get("expert_weights_scale", 1.0),
        "first_k_dense_replace": told.get("leading_dense_block_count", 0),
        "q_lora_rank": told.get("attention.q_lora_rank"),
        "qk_nope_head_dim": keys - known["qk_rope_head_dim"],
        "v_head_dim": values,
        "num_key_value_heads": known["num_attention_heads"],
        "head_dim": known["qk_rope_head_dim"],
    }


def glm4(told: Mapping[str, Any], known: Mapping[str, Any]) -> dict[str, Any]:
    """Nothing more.

    Raises:
        ValueError: It is the text part of a model for images, whose positions turn in another order.
    """
    if "rope.dimension_sections" in told:
        raise ValueError("its positions turn in sections as GLM-4V's and GLM-OCR's do, and only GLM-4's are known")
    return {}


def mamba(told: Mapping[str, Any], known: Mapping[str, Any]) -> dict[str, Any]:
    """Sizes of Mamba 2 layers, and which layers are others."""
    heads, inner = told["ssm.time_step_rank"], told["ssm.inner_size"]
    which = [bool(one) for one in told["attention.head_count_kv"]]
    return {
        "mamba_d_head": inner // heads,
        "mamba_expand": inner // known["hidden_size"],
        "attn_layer_indices": [layer for layer, one in enumerate(which) if one],
    }


def granite(told: Mapping[str, Any], known: Mapping[str, Any]) -> dict[str, Any]:
    """The same of Granite 4, with its kinds of layers."""
    return mamba(told, known) | {
        "layer_types": ["attention" if one else "mamba" for one in told["attention.head_count_kv"]],
        "position_embedding_type": "rope" if told.get("rope.scaling.finetuned", True) else "nope",
        "num_local_experts": told.get("expert_count", 0),
        "shared_intermediate_size": told.get("expert_shared_feed_forward_length", told["feed_forward_length"]),
    }


def falcon_h1(told: Mapping[str, Any], known: Mapping[str, Any]) -> dict[str, Any]:
    """Falcon-H1's multipliers are in its weights."""
    names = "embedding", "lm_head", "key", "attention_in", "attention_out", "ssm_in", "ssm_out"
    return {
        **dict.fromkeys((f"{name}_multiplier" for name in names), 1.0),
        "mlp_multipliers": [1.0] * 2,
        "ssm_multipliers": [1.0] * 5,
        "mamba_norm_before_gate": False,
        "mamba_d_head": told["ssm.inner_size"] // told["ssm.time_step_rank"],
    }


def llama4(told: Mapping[str, Any], known: Mapping[str, Any]) -> dict[str, Any]:
    """All but Maverick, with its 128 experts, have norms of queries and keys, as in llama.cpp."""
    if not told.get("expert_count"):
        raise ValueError("a Llama 4 without experts, as MobileLLM is, is not known")
    return {"use_qk_norm": told["expert_count"] < 128}


def mixers(told: Mapping[str, Any], known: Mapping[str, Any]) -> dict[str, Any]:
    """Nemotron-H's kinds of layers, and the size of its Mamba 2 heads."""
    if isinstance(told.get("expert_used_count"), list):
        raise ValueError("its layers differ in how many experts they use, which transformers' Nemotron-H does not know")
    wide = "moe" if "expert_count" in told else "mlp"
    each = zip(told["attention.head_count_kv"], told["feed_forward_length"], strict=True)
    layers = islice(each, known["num_hidden_layers"])  # without those of multi-token prediction
    return {
        "mamba_head_dim": told["ssm.inner_size"] // told["ssm.time_step_rank"],
        "layers_block_type": [
            "full_attention" if heads else wide if width else "linear_attention" for heads, width in layers
        ],
    }
