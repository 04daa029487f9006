"""Small GGUF files of Qwen 3.5, with experts too, and LFM2, as llama.cpp's converter writes them.

Names are others; in Qwen 3.5 norms are stored plus 1, and heads of values take turns.
"""

import re

import numpy as np
import torch
from gguf import GGMLQuantizationType, GGUFWriter, quantize
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.modeling_layers import MtpModel

SIZES = {
    "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 4, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 256, "initializer_range": 0.1,
}  # fmt: skip
QWEN = {
    "model_type": "qwen3_5_text", "head_dim": 16, "layer_types": ["linear_attention", "full_attention"] * 2,
    "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 16, "linear_value_head_dim": 16,
    "rope_parameters": {
        "rope_type": "default", "rope_theta": 1e6, "partial_rotary_factor": 0.5, "mrope_section": [2, 1, 1],
        "mrope_interleaved": True,
    },
    "tie_word_embeddings": True,
}  # fmt: skip
KINDS = {
    "qwen35": QWEN,
    "qwen35moe": QWEN | {
        "model_type": "qwen3_5_moe_text", "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32,
        "shared_expert_intermediate_size": 96,
    },
    "lfm2": {
        "model_type": "lfm2", "layer_types": ["conv", "conv", "full_attention", "conv"],
        "block_auto_adjust_ff_dim": False, "norm_eps": 1e-6,
    },
}  # fmt: skip
"""Configs by llama.cpp's names of the families."""
LFM2_NAMES = {
    "model.embed_tokens.": "token_embd.", "model.embedding_norm.": "token_embd_norm.", "model.layers.": "blk.",
    "operator_norm.": "attn_norm.", "self_attn.q_proj.": "attn_q.", "self_attn.k_proj.": "attn_k.",
    "self_attn.v_proj.": "attn_v.", "self_attn.out_proj.": "attn_output.", "self_attn.q_layernorm.": "attn_q_norm.",
    "self_attn.k_layernorm.": "attn_k_norm.", "feed_forward.w1.": "ffn_gate.", "feed_forward.w3.": "ffn_up.",
    "feed_forward.w2.": "ffn_down.", "conv.in_proj.": "shortconv.in_proj.", "conv.out_proj.": "shortconv.out_proj.",
    "conv.conv.": "shortconv.conv.",
}  # fmt: skip
NAMES = {
    "model.embed_tokens.": "token_embd.", "model.norm.": "output_norm.", "model.layers.": "blk.",
    "input_layernorm.": "attn_norm.", "post_attention_layernorm.": "post_attention_norm.",
    "self_attn.q_proj.": "attn_q.", "self_attn.k_proj.": "attn_k.", "self_attn.v_proj.": "attn_v.",
    "self_attn.o_proj.": "attn_output.", "self_attn.q_norm.": "attn_q_norm.", "self_attn.k_norm.": "attn_k_norm.",
    "mlp.experts.down_proj": "ffn_down_exps.weight", "mlp.shared_expert_gate.": "ffn_gate_inp_shexp.",
    "mlp.shared_expert.gate_proj.": "ffn_gate_shexp.", "mlp.shared_expert.up_proj.": "ffn_up_shexp.",
    "mlp.shared_expert.down_proj.": "ffn_down_shexp.", "mlp.gate.": "ffn_gate_inp.",
    "mlp.gate_proj.": "ffn_gate.", "mlp.up_proj.": "ffn_up.", "mlp.down_proj.": "ffn_down.",
    "linear_attn.in_proj_qkv.": "attn_qkv.", "linear_attn.in_proj_z.": "attn_gate.",
    "linear_attn.in_proj_a.": "ssm_alpha.", "linear_attn.in_proj_b.": "ssm_beta.",
    "linear_attn.conv1d.": "ssm_conv1d.", "linear_attn.norm.": "ssm_norm.", "linear_attn.out_proj.": "ssm_out.",
    "linear_attn.A_log": "ssm_a", "linear_attn.dt_bias": "ssm_dt.bias",
}  # fmt: skip
"""Parts of transformers' names, and llama.cpp's."""


def stored(name, weight, config):
    """llama.cpp's name and numbers of one of the model's tensors."""
    numbers = weight.float().numpy()
    for theirs, own in (LFM2_NAMES if config.model_type == "lfm2" else NAMES).items():
        name = name.replace(theirs, own)
    if config.model_type == "lfm2":
        return name, np.ascontiguousarray(numbers[:, 0] if "shortconv.conv." in name else numbers)
    heads = config.linear_num_value_heads
    if name.endswith("norm.weight") and "ssm_norm" not in name:
        numbers = numbers + 1
    if name.endswith("ssm_a"):
        numbers = -np.exp(numbers)
    if "ssm_conv1d" in name:
        numbers = numbers[:, 0]
    if "gate_inp_shexp" in name:
        numbers = numbers[0]
    tiled = np.arange(heads).reshape(config.linear_num_key_heads, -1).T.flatten()
    if re.search("ssm_(a|dt|alpha|beta)", name):
        numbers = numbers[tiled]
    elif "attn_gate" in name:
        numbers = numbers[_by_head(tiled, config)]
    elif "ssm_out" in name:
        numbers = numbers[:, _by_head(tiled, config)]
    elif "attn_qkv" in name or "ssm_conv1d" in name:
        before = 2 * config.linear_num_key_heads * config.linear_key_head_dim
        numbers = np.concatenate([numbers[:before], numbers[before:][_by_head(tiled, config)]])
    return name, np.ascontiguousarray(numbers)


def _by_head(order, config):
    size = config.linear_value_head_dim
    return (order[:, None] * size + np.arange(size)).flatten()


MTP_NAMES = {
    "mtp_block.": "", "enorm.": "nextn.enorm.", "hnorm.": "nextn.hnorm.", "eh_proj.": "nextn.eh_proj.",
    "post_norm.": "nextn.shared_head_norm.",
}  # fmt: skip


def mtp_of(model):
    """A random multi-token-prediction layer of a model, as tensors of one more layer.

    Their names in transformers' module are found by ``MTP_NAMES``.
    """
    model.config.num_mtp_layers, model.config.mtp_layer_types = 1, ["full_attention"]
    layer = MtpModel(model, 1).layers[0]
    found = dict[str, torch.Tensor]()
    for name, weight in layer.state_dict().items():
        torch.nn.init.normal_(weight, std=0.1)  # experts are memory that nobody has written
        own, theirs = next(names for names in MTP_NAMES.items() if name.startswith(names[0]))
        found[f"model.layers.{model.config.num_hidden_layers}.{theirs}{name.removeprefix(own)}"] = weight
    return found


def hybrid(family, tokenizer):
    """A random model."""
    config = AutoConfig.for_model(**SIZES | KINDS[family], vocab_size=len(tokenizer) + 1)
    model = AutoModelForCausalLM.from_config(config)
    for weight in model.parameters():
        weight.data += 0.1 * torch.rand_like(weight) * (weight.dim() == 1)  # norms that are not all the same
    return model


def write_hybrid(path, family, tokenizer, kind):
    """Write that model, matrices in blocks of this type; returns the path."""
    torch.manual_seed(0)
    letters = [*tokenizer.convert_ids_to_tokens(range(len(tokenizer))), "ab"]
    model = hybrid(family, tokenizer)
    config = model.config
    writer = GGUFWriter(path, family)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    layer = {} if family == "lfm2" else mtp_of(model)
    if layer:
        writer.add_uint32(f"{family}.nextn_predict_layers", 1)
    writer.add_block_count(config.num_hidden_layers + bool(layer))  # its block is counted too
    if family == "qwen35moe":
        writer.add_expert_count(config.num_experts)
        writer.add_expert_used_count(config.num_experts_per_tok)
        writer.add_expert_feed_forward_length(config.moe_intermediate_size)
        writer.add_expert_shared_feed_forward_length(config.shared_expert_intermediate_size)
    else:
        writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    if family == "lfm2":
        writer.add_head_count_kv([config.num_key_value_heads * ("att" in one) for one in config.layer_types])
        writer.add_layer_norm_rms_eps(config.norm_eps)
        writer.add_shortconv_l_cache(config.conv_L_cache)
    else:
        writer.add_head_count_kv(config.num_key_value_heads)
        writer.add_layer_norm_rms_eps(config.rms_norm_eps)
        writer.add_key_length(config.head_dim)
        writer.add_rope_dimension_count(int(config.head_dim * config.rope_parameters["partial_rotary_factor"]))
        writer.add_array(f"{family}.rope.dimension_sections", [*config.rope_parameters["mrope_section"], 0])
        writer.add_uint32(f"{family}.full_attention_interval", 2)
        writer.add_ssm_conv_kernel(config.linear_conv_kernel_dim)
        writer.add_ssm_state_size(config.linear_key_head_dim)
        writer.add_ssm_group_count(config.linear_num_key_heads)
        writer.add_ssm_time_step_rank(config.linear_num_value_heads)
        writer.add_ssm_inner_size(config.linear_num_value_heads * config.linear_value_head_dim)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(family)
    writer.add_token_list(letters)
    writer.add_token_types([3] + [1] * (len(letters) - 1))
    writer.add_token_merges(["a b"])
    writer.add_eos_token_id(0)
    writer.add_chat_template(tokenizer.chat_template)
    for own, weight in (model.state_dict() | layer).items():
        if own == "lm_head.weight":
            continue  # tied
        name, numbers = stored(own, weight, config)
        parts = {name: numbers}
        if own.endswith("experts.gate_up_proj"):
            layer, inner = name.removesuffix("mlp.experts.gate_up_proj"), config.moe_intermediate_size
            parts = {
                f"{layer}ffn_up_exps.weight": numbers[:, inner:],
                f"{layer}ffn_gate_exps.weight": numbers[:, :inner],
            }
        for part, values in parts.items():
            if values.ndim >= 2 and values.shape[-1] % 32 == 0 and not part.endswith("ffn_gate_inp.weight"):
                raw = GGMLQuantizationType[kind]
                writer.add_tensor(part, quantize(np.ascontiguousarray(values), raw), raw_dtype=raw)
            else:
                writer.add_tensor(part, values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path
