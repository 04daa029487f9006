"""Small GGUF files of several families, as llama.cpp would name and store what is in them."""

import numpy as np
import torch
from gguf import GGMLQuantizationType, GGUFWriter, quantize
from transformers import AutoModelForCausalLM
from transformers.modeling_gguf_pytorch_utils import TENSOR_PROCESSORS, TensorProcessor, get_gguf_hf_weights_map

SIZES = {
    "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4, "head_dim": 16,
    "num_key_value_heads": 2, "moe_intermediate_size": 160, "shared_expert_intermediate_size": 32,
    "num_experts": 4, "num_experts_per_tok": 2,
}  # fmt: skip


def write_file(
    path,
    family,
    config_class,
    tokenizer,
    kind="Q4_1",
    without=(),
    extra=(),
    wrong=None,
    seed=0,
    sizes=(),
    blocks=None,
    describe=None,
    controls=(),
):
    """Write a random model; returns the file's path.

    Args:
        path: Where.
        family: llama.cpp's name.
        config_class: transformers' config.
        tokenizer: Its tokenizer.
        kind: Type of the matrices.
        without: Tensors that are left out, by llama.cpp's names.
        extra: Tensors that the model has no place for.
        wrong: Sizes that the file promises in place of ``SIZES``.
        seed: Of the weights.
        sizes: Other sizes than ``SIZES``.
        describe: Adds to the header.
        controls: Further control tokens.
        blocks: Gives the blocks of a matrix and their type, from its name and numbers; None = all are of ``kind``.
    """
    torch.manual_seed(seed)
    blocks = blocks or (lambda name, numbers: (quantize(numbers, GGMLQuantizationType[kind]), kind))
    letters = tokenizer.convert_ids_to_tokens(range(len(tokenizer)))
    sizes = SIZES | dict(sizes)
    model = AutoModelForCausalLM.from_config(
        config_class(vocab_size=len(letters) + 1 + len(controls), initializer_range=0.1, **sizes)
    )
    sizes |= wrong or {}
    writer = GGUFWriter(path, family)
    writer.add_context_length(256)
    writer.add_embedding_length(sizes["hidden_size"])
    writer.add_block_count(sizes["num_hidden_layers"])
    writer.add_feed_forward_length(sizes["intermediate_size"])
    writer.add_head_count(sizes["num_attention_heads"])
    writer.add_head_count_kv(sizes["num_key_value_heads"])
    writer.add_key_length(sizes["head_dim"])
    writer.add_value_length(sizes["head_dim"])
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(10_000)
    writer.add_sliding_window(64)
    writer.add_expert_count(sizes["num_experts"])
    writer.add_expert_used_count(sizes["num_experts_per_tok"])
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list([*letters, "ab", *controls])
    writer.add_token_types([3] + [1] * len(letters) + [3] * len(controls))
    writer.add_token_merges(["a b"])
    writer.add_eos_token_id(0)
    writer.add_chat_template(tokenizer.chat_template)
    if describe:
        describe(writer)
    weights = model.state_dict()
    names = get_gguf_hf_weights_map(model, TENSOR_PROCESSORS.get(family, TensorProcessor)())
    for name, own in names.items():
        weight = weights[own]
        if own == "lm_head.weight" or name in without:
            continue  # tied
        if "_exps" in name:
            name += ".weight"
        if "gate_inp_shexp" in name:
            weight = weight[0]
        if "gate_exps" in name or "up_exps" in name:
            weight = weight.chunk(2, 1)["up_exps" in name]
        numbers = weight.float().numpy() + 0.01 * np.float32(weight.dim() == 1)
        if weight.dim() == 1 or weight.shape[-1] % 32:
            writer.add_tensor(name, numbers)
        else:
            stored, own_kind = blocks(name, numbers)
            writer.add_tensor(name, stored, raw_dtype=GGMLQuantizationType[own_kind])
    for name in extra:
        writer.add_tensor(name, np.ones(8, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path
