"""Families of models verify trees exactly: against transformers' own eager attention over each path as plain text.

docs/families.md is this list as a table.
"""

import copy
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedConfig

from medusa import BaseModel, Tree
from medusa.attention import BACKENDS
from medusa.attention.backends import build
from medusa.budget.shape import read_shape
from medusa.loading.self_test import choose_decoding, fuse
from medusa.serve.engine import position_bytes
from medusa.tree import Draft, ancestor_mask
from tests.medusa.passes import prefill

SHAPE = {
    "vocab_size": 50, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 128, "initializer_range": 0.3,
    "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
WINDOW = {"sliding_window": 7}
"""Shorter than the texts of the test."""
STRETCHED = {
    "rope_type": "default", "rope_theta": 1e4, "original_max_position_embeddings": 8, "llama_4_scaling_beta": 0.5,
}  # fmt: skip
"""Queries are scaled from the eighth position on."""
EXPERTS = {"num_experts": 4, "num_local_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
CHUNKS = {
    "attention_chunk_size": 5, "layer_types": ["chunked_attention", "full_attention", "chunked_attention"],
    "no_rope_layers": [1, 0, 1], "floor_scale": 4, "attn_scale": 0.5, "intermediate_size_mlp": 48,
}  # fmt: skip
GPT = {"n_embd": 32, "n_head": 4, "n_layer": 3, "n_positions": 128, "n_inner": 48}
LATENT = {
    "kv_lora_rank": 16, "q_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 8,
    "num_key_value_heads": 4, "n_routed_experts": 4, "n_shared_experts": 1, "n_group": 1, "topk_group": 1,
    "first_k_dense_replace": 1,
}  # fmt: skip

DELTA = {
    "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 8, "linear_value_head_dim": 6,
    "linear_conv_kernel_dim": 4,
    "layer_types": ["linear_attention", "full_attention", "linear_attention"],
}  # fmt: skip
MAMBA = {
    "mamba_n_heads": 4, "mamba_d_head": 16, "mamba_d_state": 8, "mamba_n_groups": 2, "mamba_expand": 2,
    "mamba_chunk_size": 16,
}  # fmt: skip

FAMILIES = {
    "afmoe": WINDOW
    | EXPERTS
    | {"num_dense_layers": 1, "layer_types": ["sliding_attention", "full_attention", "sliding_attention"]},
    "arcee": {},
    "cohere": {"logit_scale": 0.5},
    "cohere2": WINDOW | {"logit_scale": 0.5},
    "deepseek_v2": EXPERTS | LATENT,
    "deepseek_v3": EXPERTS | LATENT,
    "ernie4_5": {},
    "exaone4": WINDOW | {"layer_types": ["sliding_attention", "sliding_attention", "full_attention"]},
    "falcon": {"alibi": False, "new_decoder_architecture": True, "num_kv_heads": 2},
    "gemma": {},
    "gemma2": WINDOW | {"attn_logit_softcapping": 5.0, "final_logit_softcapping": 8.0},
    "gemma3_text": WINDOW | {"layer_types": ["sliding_attention", "full_attention", "sliding_attention"]},
    "gemma4_text": WINDOW
    | {"layer_types": 2 * ["sliding_attention", "full_attention"], "num_hidden_layers": 4, "num_kv_shared_layers": 2}
    | {"use_double_wide_mlp": True, "global_head_dim": 16}
    | {"hidden_size_per_layer_input": 8, "vocab_size_per_layer_input": 50},
    "gemma4_text-31b": WINDOW
    | {"layer_types": ["sliding_attention", "full_attention", "full_attention"], "hidden_size_per_layer_input": 0}
    | {"global_head_dim": 16, "attention_k_eq_v": True, "num_global_key_value_heads": 1},
    "gemma4_text-26b": WINDOW
    | {"layer_types": ["sliding_attention", "full_attention", "full_attention"], "hidden_size_per_layer_input": 0}
    | EXPERTS
    | {"global_head_dim": 16, "enable_moe_block": True, "top_k_experts": 2},
    "glm": {"partial_rotary_factor": 0.5},
    "glm4": {"partial_rotary_factor": 0.5},
    "gpt2": GPT,
    "gpt_neox": {},
    "gpt_oss": WINDOW | EXPERTS | {"layer_types": ["sliding_attention", "full_attention", "sliding_attention"]},
    "gptj": GPT | {"rotary_dim": 4},
    "granite": {"logits_scaling": 2.0},
    "helium": {},
    "hyperclovax": {"logits_scaling": 0.5},
    "llama": {},
    "llama4_text": EXPERTS | CHUNKS,
    "ministral3": {"rope_parameters": STRETCHED},
    "mistral": WINDOW,
    "mixtral": EXPERTS,
    "olmoe": EXPERTS,
    "mpt": {"d_model": 32, "n_heads": 4, "n_layers": 3, "max_seq_len": 128},
    "nemotron": {},
    "olmo": {"clip_qkv": 0.5},
    "olmo2": {},
    "olmo3": WINDOW,
    "opt": {"ffn_dim": 48, "word_embed_proj_dim": 32},
    "opt-350m": {"ffn_dim": 48, "word_embed_proj_dim": 16, "do_layer_norm_before": False, "init_std": 0.3},
    "phi": {},
    "phi3": WINDOW,
    "phimoe": WINDOW | EXPERTS,
    "qwen2": {},
    "qwen2_moe": WINDOW
    | EXPERTS
    | {"use_sliding_window": True, "max_window_layers": 3, "shared_expert_intermediate_size": 24},
    "qwen3": {},
    "qwen3_moe": EXPERTS,
    "qwen3_5_text": DELTA,
    "qwen3_5_moe_text": DELTA | EXPERTS | {"shared_expert_intermediate_size": 24},
    "qwen3_next": DELTA | EXPERTS | {"shared_expert_intermediate_size": 24},
    "lfm2": {"layer_types": ["conv", "full_attention", "conv"]},
    "lfm2_moe": EXPERTS | {"layer_types": ["conv", "full_attention", "conv"], "num_dense_layers": 1},
    "olmo_hybrid": DELTA,
    "bamba": MAMBA | {"attn_layer_indices": [1]},
    "granitemoehybrid": MAMBA
    | EXPERTS
    | {"layer_types": ["mamba", "attention", "mamba"], "shared_intermediate_size": 24},
    "falcon_h1": MAMBA | {"mamba_d_ssm": 64},
    "nemotron_h": {
        "mamba_num_heads": 4,
        "mamba_head_dim": 16,
        "ssm_state_size": 8,
        "n_groups": 2,
        "chunk_size": 16,
        "hybrid_override_pattern": "M*-M",
        "num_hidden_layers": 4,
    },
    "zamba2": MAMBA | {"layers_block_type": ["mamba", "hybrid", "mamba"], "mamba_ngroups": 2},
    "seed_oss": {},
    "smollm3": {"no_rope_layers": [1, 0, 1]},
    "stablelm": {},
    "starcoder2": WINDOW,
}
SINGLE = (
    "afmoe",
    "deepseek_v2",
    "deepseek_v3",
    "gemma4_text-26b",
    "gpt_oss",
    "mixtral",
    "olmoe",
    "phimoe",
    "qwen2_moe",
    "qwen3_moe",
    "olmo_hybrid",
    "qwen3_next",
    "qwen3_5_moe_text",
    "lfm2_moe",
    "granitemoehybrid",
    "nemotron_h",
)
"""Grouped products of experts know no float64."""
EXPLICIT_MASK = ("falcon", "gptj", "mpt", "nemotron", "stablelm")
RECURRENT = (
    "bamba", "falcon_h1", "granitemoehybrid", "lfm2", "lfm2_moe", "nemotron_h", "olmo_hybrid", "qwen3_5_moe_text",
    "qwen3_5_text", "qwen3_next", "zamba2",
)  # fmt: skip
"""Some of their layers keep states."""
GATHERED = ("deepseek_v2", "deepseek_v3")
"""Their layers compute on what is cached before attention reads it."""
CHAINS = ("mpt",)
FUSED = (
    "bamba", "ernie4_5", "exaone4", "gemma", "gemma2", "gemma3_text", "gemma4_text", "gemma4_text-31b",
    "gemma4_text-26b", "glm", "glm4", "gpt_oss", "granite", "helium", "lfm2", "lfm2_moe", "llama", "ministral3",
    "mistral", "mixtral", "olmo2", "olmo3", "olmoe", "phi3", "qwen2", "qwen2_moe", "qwen3", "qwen3_5_moe_text",
    "qwen3_5_text", "qwen3_moe", "seed_oss", "smollm3",
)  # fmt: skip
"""The usual block, whose whole pass our kernels compute."""
REFUSED = ("bloom", "mamba")
"""tests/medusa/test_self_test.py"""
WINDOWED = (
    "afmoe", "cohere2", "exaone4", "gemma3_text", "gemma4_text", "gemma4_text-31b", "gemma4_text-26b", "gpt_oss",
    "mistral", "olmo3", "phi3", "phimoe", "qwen2_moe", "starcoder2",
)  # fmt: skip
REFERENCE_DOES: dict[str, dict[str, tuple[str, ...]]] = {
    "reference": {},
    "exact": {},
    "flash": dict.fromkeys(WINDOWED, ("windows",))
    | dict.fromkeys(GATHERED, ("its head sizes",))
    | {"gemma2": ("windows", "softcaps"), "llama4_text": ("chunks",)},
    "triton": {"llama4_text": ("chunks",)},
}
"""Layers that a backend hands over to the reference."""
WITHOUT_FLOAT64 = ("exact", "triton")
HAND_OVERS = {
    "windows": "a sliding window",
    "its head sizes": "head sizes",
    "softcaps": "cap scores",
    "chunks": "chunks",
}
"""How it says so."""
PROMPTS = [[3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5, 8, 7, 9, 11, 4], [7, 2, 9], [11]]
DOCUMENT = Path(__file__).parents[2] / "docs" / "families.md"


def config_of(family: str, **changes: Any) -> PreTrainedConfig:
    """A small config; what stands behind a hyphen in its name tells shapes of a family apart."""
    shape = SHAPE | FAMILIES.get(family, {}) | changes
    if family == "falcon":
        del shape["head_dim"]
    return AutoConfig.for_model(family.partition("-")[0], **shape)


def make_uneven(model: torch.nn.Module) -> None:
    """Weights of norms and factors of layers are all ones in a new model, so that leaving one out would not show."""
    for name, weight in [*model.named_parameters(), *model.named_buffers()]:
        if name.endswith(
            ("norm.weight", "norm_1.weight", "norm_2.weight", "layer_scalar", "router.scale", "expert_scale")
        ):
            weight.data = 0.5 + torch.rand_like(weight)


def tiny(family: str, backend: str = "reference") -> tuple[BaseModel, torch.nn.Module]:
    """A base of the family, and transformers' own model with the same random weights."""
    torch.manual_seed(0)
    config = config_of(family)
    dtype = torch.float32 if family in SINGLE or backend in WITHOUT_FLOAT64 else torch.float64
    model = AutoModelForCausalLM.from_config(config).to(dtype).eval()
    if family.startswith("gemma4"):
        make_uneven(model)
    oracle = copy.deepcopy(model)
    oracle.set_attn_implementation("eager")
    return BaseModel(model, None, family, backend), oracle


@pytest.fixture
def handed_over(monkeypatch) -> set[str]:
    """Why layers were computed by the reference instead of by the base's backend."""
    reasons: set[str] = set()

    def reference(instead_of: str, reason: str):
        reasons.add(reason)
        return build("reference", torch.device("cpu"))

    monkeypatch.setattr("medusa.attention.backends._reference", reference)
    return reasons


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize(
    "backend", [pytest.param(name, marks=pytest.mark.slow if name == "reference" else []) for name in BACKENDS]
)
@torch.inference_mode()
def test_tree_logits_are_those_of_the_path_as_text(family, backend, handed_over):
    if backend == "triton" and os.environ.get("TRITON_INTERPRET") != "1":
        pytest.skip("test_attention_triton.py runs this in a process whose Triton interprets its kernels")
    base, oracle = tiny(family, backend)
    interpreted = backend == "triton"  # a program per row and head, each milliseconds: fewer of them
    prompts, rounds = ([PROMPTS[0][:10], PROMPTS[1]], 1) if interpreted else (PROMPTS, 1)
    right = base.with_traits(
        decoding="chain" if family in CHAINS else "tree", gathered=family in GATHERED,
        explicit_mask=family in EXPLICIT_MASK,
    )  # fmt: skip
    if backend == "exact":  # the test at load asks no other backend anything else
        chosen = choose_decoding(base)
        assert chosen.traits == right.traits
        assert chosen.recurrent == (family in RECURRENT)
        assert position_bytes(chosen) == read_shape(base.model.config, base.dtype).cached_bytes, "as planned"
        assert (fused := fuse(right)).fused == (family in FUSED)
        first = 2 if family in RECURRENT else 1
        assert not fused.fused or fused.shallow(first).fused, "its first layers too"
        rounds = 2
    base = right
    single = family in SINGLE or backend in WITHOUT_FLOAT64
    close = {"atol": 2e-4, "rtol": 1e-4} if single else {"atol": 1e-5, "rtol": 1e-5}
    tree = Tree.chain(3) if family in CHAINS else Tree.full([2, 1, 1])
    sequences, state = prefill(base, prompts, chunk=16 if interpreted else 5)
    torch.testing.assert_close(state.hidden[0], base.hidden_states(torch.tensor(prompts[:1]))[0, -2], **close)
    texts = [list(prompt) for prompt in prompts]
    generator = torch.Generator().manual_seed(5)
    keep = torch.tensor([4, 2, 3])[: len(prompts)]
    above = ancestor_mask(tree.parents, tree.depth)
    leaves = sorted(set(range(tree.nodes)) - set(tree.parents.tolist()))
    paths = torch.stack([above[leaf].nonzero().flatten() for leaf in leaves])
    for _ in range(rounds):  # the second time over rows that a commit has moved together
        tokens = torch.randint(3, 50, (len(prompts), tree.nodes), generator=generator)
        tokens[:, 0] = torch.tensor([text[-1] for text in texts])
        draft = Draft.of(tokens, tree.parents.expand_as(tokens), tree.depth)
        plan = base.plan([(draft, sequences)])
        logits = base.logits(draft.spread(base.run(sequences[0].pool, plan)))
        for row, text in enumerate(texts):
            whole = torch.cat([torch.tensor([text]).expand(len(paths), -1), tokens[row, paths[:, 1:]]], dim=1)
            expected = oracle(input_ids=whole, use_cache=False).logits[:, len(text) - 1 :]
            torch.testing.assert_close(logits[row, paths], expected, **close)
        path = paths[-1].tolist()
        kept_path = torch.tensor([[path[i] if i < k else i for i in range(4)] for k in keep.tolist()])
        base.commit(sequences[0].pool, plan, kept_path, keep)
        for one, kept in zip(sequences, keep.tolist(), strict=True):
            one.length += kept
        for row, kept in enumerate(keep.tolist()):
            texts[row] += [*tokens[row, path[1:kept]].tolist(), 13]
    words = {word for word, part in HAND_OVERS.items() for reason in handed_over if part in reason}
    assert words == set(REFERENCE_DOES[backend].get(family, ()))


def how(family: str) -> str:
    return "chain, " * (family in CHAINS) + ("whole mask" if family in EXPLICIT_MASK else "plan")


def computes(family: str, backend: str) -> str:
    """What the document says that a backend computes."""
    if family in EXPLICIT_MASK:
        return "not asked"
    return "all but " + ", ".join(words) if (words := REFERENCE_DOES[backend].get(family)) else "all"


def test_the_document_lists_the_families_that_are_tested():
    lines = DOCUMENT.read_text(encoding="utf-8").splitlines()
    rows = [[cell.strip(" `") for cell in line.split("|")[1:-1]] for line in lines if line.startswith("| `")]
    table = {family: (how, *backends) for family, _, how, *backends in rows}
    expected = {
        family: (how(family), *(computes(family, name) for name in BACKENDS), "yes" * (family in FUSED))
        for family in FAMILIES
    }
    assert table == expected | dict.fromkeys(REFUSED, ("refused", *[""] * (len(BACKENDS) + 1)))
