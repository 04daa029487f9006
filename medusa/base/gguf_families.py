"""The families of GGUF files: transformers' name of each, and llama.cpp's names of its tensors and settings.

Only the lists for Qwen 3.5 and LFM2 are transformers' own.
"""

from collections.abc import Callable, Container, Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

from transformers import PretrainedConfig
from transformers.core_model_loading import Transpose, WeightTransform
from transformers.integrations.gguf import gguf_conversion_mapping as theirs

from medusa.base import gguf_settings as settings
from medusa.base import gguf_steps as steps

Names = Mapping[str, str]


class Family(NamedTuple):
    """A family.

    Attributes:
        model_type: transformers' name.
        names: Parts of llama.cpp's names of tensors that are not in ``USUAL``, with transformers' names.
        settings: llama.cpp's names of settings that are not in ``SETTINGS``, with transformers' names.
        made: Changes of tensors, from the model's config.
        more: Further settings, from the file's (without the family's name) and from those that are known so far.
    """

    model_type: str
    names: Names = MappingProxyType({})
    settings: Names = MappingProxyType({})
    made: steps.Steps = lambda config: ()
    more: Callable[[Mapping[str, Any], Mapping[str, Any]], Mapping[str, Any]] = lambda told, known: {}

    def steps(self, config: PretrainedConfig) -> list[WeightTransform]:
        """What makes the model's tensors of those of a file."""
        extra = {f"blk.{config.num_hidden_layers}.": "mtp."}  # the layer of multi-token prediction
        return [*(steps.renaming(*pair) for pair in (extra | USUAL | dict(self.names)).items()), *self.made(config)]


USUAL = {
    "token_embd.": "model.embed_tokens.",
    "output.": "lm_head.",
    "output_norm.": "model.norm.",
    "blk.": "model.layers.",
    ".attn_q.": ".self_attn.q_proj.",
    ".attn_k.": ".self_attn.k_proj.",
    ".attn_v.": ".self_attn.v_proj.",
    ".attn_output.": ".self_attn.o_proj.",
    ".attn_q_norm.": ".self_attn.q_norm.",
    ".attn_k_norm.": ".self_attn.k_norm.",
    ".ffn_gate.": ".mlp.gate_proj.",
    ".ffn_up.": ".mlp.up_proj.",
    ".ffn_down.": ".mlp.down_proj.",
    ".attn_norm.": ".input_layernorm.",
    ".ffn_norm.": ".post_attention_layernorm.",
}
"""llama.cpp's names of tensors, or parts of them, with transformers' names."""
ROUTER = {".ffn_gate_inp.": ".mlp.gate."}
AFTER = {".post_attention_norm.": ".post_attention_layernorm."}
AROUND = AFTER | {".post_ffw_norm.": ".post_feedforward_layernorm."}
SANDWICH = AROUND | {".ffn_norm.": ".pre_feedforward_layernorm."}
SHARED_EXPERT = {f".ffn_{name}_shexp.": f".mlp.shared_expert.{name}_proj." for name in ("gate", "up", "down")} | {
    ".ffn_gate_inp_shexp.": ".mlp.shared_expert_gate."
}
SHARED_EXPERTS = {f".ffn_{name}_shexp.": f".mlp.shared_experts.{name}_proj." for name in ("gate", "up", "down")}
CONVOLUTIONS = {
    "token_embd_norm.": "model.embedding_norm.",
    ".attn_norm.": ".operator_norm.",
    ".ffn_norm.": ".ffn_norm.",
    ".attn_output.": ".self_attn.out_proj.",
    ".attn_q_norm.": ".self_attn.q_layernorm.",
    ".attn_k_norm.": ".self_attn.k_layernorm.",
    ".ffn_gate.": ".feed_forward.w1.",
    ".ffn_up.": ".feed_forward.w3.",
    ".ffn_down.": ".feed_forward.w2.",
    ".shortconv.in_proj.": ".conv.in_proj.",
    ".shortconv.out_proj.": ".conv.out_proj.",
    ".ffn_gate_inp.": ".feed_forward.gate.",
    ".exp_probs_b.bias": ".feed_forward.expert_bias",
}
LATENT = {
    ".attn_q_a.": ".self_attn.q_a_proj.",
    ".attn_q_a_norm.": ".self_attn.q_a_layernorm.",
    ".attn_q_b.": ".self_attn.q_b_proj.",
    ".attn_kv_a_mqa.": ".self_attn.kv_a_proj_with_mqa.",
    ".attn_kv_a_norm.": ".self_attn.kv_a_layernorm.",
    ".attn_kv_b.": ".self_attn.kv_b_proj.",
    ".exp_probs_b.bias": ".mlp.gate.e_score_correction_bias",
}
LATENT_SETTINGS = {
    "attention.kv_lora_rank": "kv_lora_rank",
    "rope.dimension_count": "qk_rope_head_dim",
    "expert_count": "n_routed_experts",
    "expert_shared_count": "n_shared_experts",
}
MAMBA_SETTINGS = {
    "ssm.conv_kernel": "mamba_d_conv",
    "ssm.state_size": "mamba_d_state",
    "ssm.group_count": "mamba_n_groups",
    "ssm.time_step_rank": "mamba_n_heads",
}
MIXERS = {
    "token_embd.": "model.embeddings.",
    "output_norm.": "model.norm_f.",
    ".attn_norm.": ".norm.",
    **{f".attn_{name}.": f".mixer.{name}_proj." for name in ("q", "k", "v")},
    ".attn_output.": ".mixer.o_proj.",
    **{f".ffn_{name}.": f".mixer.{name}_proj." for name in ("up", "down")},
    **{f".ffn_{name}_exps.weight": f".mixer.experts.{name}_proj" for name in ("up", "down")},
    **{f".ffn_{name}_shexp.": f".mixer.shared_experts.{name}_proj." for name in ("up", "down")},
    ".ffn_gate_inp.": ".mixer.gate.",
    ".exp_probs_b.bias": ".mixer.gate.e_score_correction_bias",
    ".ffn_latent_down.": ".mixer.fc1_latent_proj.",
    ".ffn_latent_up.": ".mixer.fc2_latent_proj.",
}
MIXERS_SETTINGS = {
    "ssm.conv_kernel": "conv_kernel",
    "ssm.state_size": "ssm_state_size",
    "ssm.group_count": "n_groups",
    "ssm.time_step_rank": "mamba_num_heads",
    "attention.layer_norm_epsilon": "layer_norm_epsilon",
    "attention.layer_norm_rms_epsilon": "layer_norm_epsilon",
    "expert_count": "n_routed_experts",
    "expert_shared_count": "n_shared_experts",
    "expert_shared_feed_forward_length": "moe_shared_expert_intermediate_size",
    "moe_latent_size": "moe_latent_size",
    "expert_weights_norm": "norm_topk_prob",
    "expert_weights_scale": "routed_scaling_factor",
}
SCALES = {
    "attention.scale": "attention_multiplier",
    "embedding_scale": "embedding_multiplier",
    "residual_scale": "residual_multiplier",
    "logit_scale": "logits_scaling",
}
NORMS = (".input_layernorm", ".post_attention_layernorm", "model.norm")
GEMMA_NORMS = (*NORMS, ".pre_feedforward_layernorm", ".post_feedforward_layernorm", ".q_norm", ".k_norm")

SIGMOID = 2
"""llama.cpp's number of a router that chooses experts by sigmoid, as DeepSeek V3's does; V2's is a softmax."""

FAMILIES = {
    "afmoe": Family(
        "afmoe",
        AFTER
        | SHARED_EXPERTS
        | {
            ".ffn_norm.": ".pre_mlp_layernorm.",
            ".post_ffw_norm.": ".post_mlp_layernorm.",
            ".attn_gate.": ".self_attn.gate_proj.",
            ".ffn_gate_inp.": ".mlp.router.gate.",
            ".exp_probs_b.bias": ".mlp.expert_bias",
        },
        {
            "leading_dense_block_count": "num_dense_layers",
            "expert_shared_count": "num_shared_experts",
            "expert_weights_scale": "route_scale",
        },
        steps.experts(),
        lambda told, known: {"mup_enabled": True},  # always in llama.cpp
    ),
    "arcee": Family("arcee", made=steps.turned),
    "bamba": Family(
        "bamba",
        {".ffn_norm.": ".pre_ff_layernorm.", "output_norm.": "model.final_layernorm."}
        | {f".ffn_{name}.": f".feed_forward.{name}_proj." for name in ("gate", "up", "down")},
        MAMBA_SETTINGS,
        steps.both(steps.turned, steps.mamba),
        settings.mamba,
    ),
    "cohere2": Family("cohere2", settings={"logit_scale": "logit_scale"}, more=settings.windows),
    "command-r": Family("cohere", settings={"logit_scale": "logit_scale"}),
    **{
        name: Family(
            model_type,
            LATENT | ROUTER | SHARED_EXPERTS,
            LATENT_SETTINGS,
            steps.both(steps.latent, steps.experts()),
            settings.deepseek,
        )
        for name, model_type in (("deepseek2", "deepseek_v3"), ("deepseek_v2", "deepseek_v2"))
    },
    "ernie4_5": Family("ernie4_5"),
    "exaone4": Family("exaone4", AROUND, more=settings.windows),
    "falcon-h1": Family(
        "falcon_h1",
        {".ffn_norm": ".pre_ff_layernorm.weight", "output_norm.": "model.final_layernorm."}
        | {f".ffn_{name}.": f".feed_forward.{name}_proj." for name in ("gate", "up", "down")},
        MAMBA_SETTINGS | {"ssm.inner_size": "mamba_d_ssm"},
        steps.mamba,
        settings.falcon_h1,
    ),
    "gemma": Family("gemma", made=steps.less_one(*NORMS)),
    "gemma2": Family(
        "gemma2",
        SANDWICH,
        {name: name for name in ("attn_logit_softcapping", "final_logit_softcapping")},
        steps.less_one(*GEMMA_NORMS),
        settings.gemma2,
    ),
    "gemma3": Family(
        "gemma3_text",
        SANDWICH,
        {"rope.freq_base_swa": "rope_local_base_freq", "final_logit_softcapping": "final_logit_softcapping"},
        steps.less_one(*GEMMA_NORMS),
        settings.gemma,
    ),
    "gemma4": Family(
        "gemma4_text",
        SANDWICH
        | {
            "per_layer_token_embd.": "model.embed_tokens_per_layer.",
            "per_layer_model_proj.": "model.per_layer_model_projection.",
            "per_layer_proj_norm.": "model.per_layer_projection_norm.",
            ".layer_output_scale.weight": ".layer_scalar",
            ".inp_gate.": ".per_layer_input_gate.",
            ".proj.": ".per_layer_projection.",
            ".post_norm.": ".post_per_layer_input_norm.",
            ".post_ffw_norm_1.": ".post_feedforward_layernorm_1.",
            ".post_ffw_norm_2.": ".post_feedforward_layernorm_2.",
            ".pre_ffw_norm_2.": ".pre_feedforward_layernorm_2.",
            ".ffn_gate_inp.weight": ".router.proj.weight",
            ".ffn_gate_inp.scale": ".router.scale",
            ".ffn_gate_up_exps.weight": ".experts.gate_up_proj",
            ".ffn_down_exps.weight": ".experts.down_proj",
            ".ffn_down_exps.scale": ".router.per_expert_scale",
        },
        {
            "attention.key_length": "global_head_dim",
            "attention.key_length_swa": "head_dim",
            "attention.shared_kv_layers": "num_kv_shared_layers",
            "embedding_length_per_layer_input": "hidden_size_per_layer_input",
            "final_logit_softcapping": "final_logit_softcapping",
            "expert_used_count": "top_k_experts",
        },
        more=settings.gemma4,
    ),
    "glm4": Family(
        "glm4",
        {
            ".post_attention_norm.": ".post_self_attn_layernorm.",
            ".post_ffw_norm.": ".post_mlp_layernorm.",
            ".ffn_up.": ".mlp.gate_up_proj.",
        },
        more=settings.glm4,
    ),
    "gpt2": Family(
        "gpt2",
        {
            "token_embd.": "transformer.wte.",
            "position_embd.": "transformer.wpe.",
            "output_norm.": "transformer.ln_f.",
            "blk.": "transformer.h.",
            ".attn_norm.": ".ln_1.",
            ".ffn_norm.": ".ln_2.",
            ".attn_output.": ".attn.c_proj.",
            ".ffn_up.": ".mlp.c_fc.",
            ".ffn_down.": ".mlp.c_proj.",
            ".attn_qkv.": ".attn.c_attn.",
        },
        {"feed_forward_length": "n_inner", "attention.layer_norm_epsilon": "layer_norm_epsilon"},
        lambda config: [
            steps.change(f".{name}.weight", f".{name}.weight", Transpose(0, 1))
            for name in ("c_attn", "attn.c_proj", "mlp.c_proj", "c_fc")
        ],
    ),
    "gpt-oss": Family(
        "gpt_oss",
        AFTER | {".ffn_gate_inp.": ".mlp.router.", ".attn_sinks.weight": ".self_attn.sinks"},
        {"expert_count": "num_local_experts", "expert_feed_forward_length": "intermediate_size"},
        steps.experts(),
    ),
    "granite": Family("granite", settings=SCALES, made=steps.turned),
    "granitehybrid": Family(
        "granitemoehybrid",
        {
            ".ffn_gate_inp.": ".block_sparse_moe.router.",
            ".ffn_down.": ".shared_mlp.output_linear.",
            ".ffn_down_shexp.": ".shared_mlp.output_linear.",
        },
        MAMBA_SETTINGS | SCALES,
        steps.both(
            steps.turned,
            steps.mamba,
            steps.experts("block_sparse_moe.experts"),
            lambda config: [
                steps.change(parts, ".shared_mlp.input_linear.weight", theirs.ConcatenateRows(dim=0))
                for parts in (
                    (".ffn_gate_shexp.weight", ".ffn_up_shexp.weight"),
                    (".mlp.gate_proj.weight", ".mlp.up_proj.weight"),
                )
            ],
        ),
        settings.granite,
    ),
    "lfm2moe": Family(
        "lfm2_moe",
        CONVOLUTIONS,
        {
            "shortconv.l_cache": "conv_L_cache",
            "attention.layer_norm_rms_epsilon": "norm_eps",
            "leading_dense_block_count": "num_dense_layers",
        },
        steps.both(steps.convolution, steps.experts("feed_forward.experts")),
        lambda told, known: {
            "layer_types": ["full_attention" if one else "conv" for one in told["attention.head_count_kv"]]
        },
    ),
    "llama": Family("llama", made=steps.turned),
    "llama4": Family(
        "llama4_text",
        {f".ffn_{name}_shexp.": f".feed_forward.shared_expert.{name}_proj." for name in ("gate", "up", "down")}
        | {f".ffn_{name}.": f".feed_forward.{name}_proj." for name in ("gate", "up", "down")}
        | {".ffn_gate_inp.": ".feed_forward.router."},
        {
            "feed_forward_length": "intermediate_size_mlp",
            "expert_feed_forward_length": "intermediate_size",
            "expert_count": "num_local_experts",
            "interleave_moe_layer_step": "interleave_moe_layer_step",
        },
        steps.experts("feed_forward.experts", Transpose(1, 2)),
        settings.llama4,
    ),
    "ministral3": Family("ministral3", made=steps.turned),
    "mistral3": Family("mistral", made=steps.turned),
    "mixtral": Family(
        "mixtral", ROUTER, {"expert_count": "num_local_experts"}, steps.both(steps.turned, steps.experts())
    ),
    "nemotron": Family(
        "nemotron",
        settings={"attention.layer_norm_epsilon": "norm_eps"},
        made=steps.less_one(*NORMS),
        # Files tell too few turned dimensions where heads are wider than usual, as in Minitron 8B.
        more=lambda told, known: {"partial_rotary_factor": 0.5},
    ),
    **dict.fromkeys(
        ("nemotron_h", "nemotron_h_moe"),
        Family("nemotron_h", MIXERS, MIXERS_SETTINGS, steps.mixers, settings.mixers),
    ),
    "olmo2": Family("olmo2", AROUND),
    "olmo3": Family("olmo3", AROUND, more=settings.windows),
    "olmoe": Family("olmoe", ROUTER, {"attention.clamp_kqv": "clip_qkv"}, steps.experts()),
    "phi2": Family(
        "phi",
        {
            ".attn_output.": ".self_attn.dense.",
            ".ffn_up.": ".mlp.fc1.",
            ".ffn_down.": ".mlp.fc2.",
            "output_norm.": "model.final_layernorm.",
        },
    ),
    "phi3": Family("phi3", {".attn_qkv.": ".self_attn.qkv_proj.", ".ffn_up.": ".mlp.gate_up_proj."}),
    "qwen2": Family("qwen2"),
    "qwen2moe": Family("qwen2_moe", ROUTER | SHARED_EXPERT, made=steps.both(steps.experts(), steps.shared_gate)),
    "qwen3": Family("qwen3"),
    "qwen3moe": Family("qwen3_moe", ROUTER, made=steps.experts(), more=lambda told, known: {"norm_topk_prob": True}),
    "qwen3next": Family(
        "qwen3_next",
        AFTER
        | ROUTER
        | SHARED_EXPERT
        | {
            ".ssm_a": ".linear_attn.A_log",
            ".ssm_ba.": ".linear_attn.in_proj_ba.",
            ".ssm_in.": ".linear_attn.in_proj_qkvz.",  # of files before 2026
            ".ssm_dt.bias": ".linear_attn.dt_bias",
            ".ssm_norm.": ".linear_attn.norm.",
            ".ssm_out.": ".linear_attn.out_proj.",
            ".ssm_conv1d.": ".linear_attn.conv1d.",
        },
        {
            "ssm.conv_kernel": "linear_conv_kernel_dim",
            "ssm.state_size": "linear_key_head_dim",
            "ssm.group_count": "linear_num_key_heads",
            "ssm.time_step_rank": "linear_num_value_heads",
            "full_attention_interval": "full_attention_interval",
        },
        steps.both(steps.delta, steps.experts(), steps.shared_gate, steps.less_one(*NORMS, ".q_norm", ".k_norm")),
        lambda told, known: {
            "linear_value_head_dim": told["ssm.inner_size"] // told["ssm.time_step_rank"],
            "norm_topk_prob": True,
        },
    ),
    "seed_oss": Family("seed_oss", AFTER),
    "smollm3": Family("smollm3", made=steps.turned),
    "stablelm": Family("stablelm"),
    "starcoder2": Family(
        "starcoder2",
        {".ffn_up.": ".mlp.c_fc.", ".ffn_down.": ".mlp.c_proj."},
        {"attention.layer_norm_epsilon": "norm_epsilon"},
        more=lambda told, known: {"sliding_window": told.get("attention.sliding_window")},
    ),
}
"""The families by llama.cpp's names, and where it has one name for several, by transformers'."""


def family_of(header: Mapping[str, Any], tensors: Container[str]) -> str:
    """The key of ``FAMILIES`` for a file with this header and these tensors; llama.cpp's name if there is none."""
    name = str(header.get("general.architecture", "unknown"))
    if name == "llama" and "blk.0.ffn_gate_inp.weight" in tensors:
        return "mixtral"
    if name == "mistral3" and header.get("mistral3.attention.temperature_scale"):
        return "ministral3"
    if name == "olmo2" and header.get("olmo2.attention.sliding_window"):
        return "olmo3"
    if name == "deepseek2":
        flash = header.get("deepseek2.vocab_size") == 154880  # GLM-4.7-Flash, whose files do not tell
        chosen = header.get("deepseek2.expert_gating_func", SIGMOID if flash else None)
        return name if chosen == SIGMOID else "deepseek_v2"
    if name == "granitehybrid" and "granitehybrid.embedding_scale" not in header:
        return "bamba"
    return name
