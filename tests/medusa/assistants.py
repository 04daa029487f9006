"""A small Gemma 4 and assistants for it, as transformers makes and runs them."""

import json
from pathlib import Path

import torch
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    DynamicCache,
    Gemma4AssistantConfig,
    Gemma4AssistantForCausalLM,
    Gemma4TextConfig,
)

from medusa import BaseModel
from medusa.loading.self_test import choose_decoding, fuse
from tests.medusa.test_conformance import SHAPE, make_uneven
from tests.medusa.test_model_drafter import words

KINDS = ["sliding_attention", "full_attention"]
BASES = {
    "layers that share keys": {"num_kv_shared_layers": 2, "hidden_size_per_layer_input": 8},
    "own keys": {"num_kv_shared_layers": 0, "hidden_size_per_layer_input": 0, "attention_k_eq_v": True},
}
"""As E2B and E4B have them, and as 31B."""
VOCABULARY = SHAPE["vocab_size"] - 2


def config_of_base(kind, **changes):
    shape = SHAPE | {"vocab_size": VOCABULARY, "vocab_size_per_layer_input": VOCABULARY, "sliding_window": 7}
    layers = {"num_hidden_layers": 6, "layer_types": KINDS * 3, "global_head_dim": 16}
    return AutoConfig.for_model("gemma4_text", **shape | layers | BASES[kind] | changes)


def gemma(kind="layers that share keys", attention="auto", dtype=torch.float32):
    """The base, and the transformers model that it is made of."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config_of_base(kind)).to(dtype).eval()
    make_uneven(model)
    return fuse(choose_decoding(BaseModel(model, words(VOCABULARY), "gemma", attention)))


def assistant(directory: Path, monkeypatch, centroids=8, **changes):
    """Write an assistant into a directory; returns transformers' model."""
    known = Gemma4TextConfig.kv_sharing_modes

    def modes(config):  # 5.23 refuses a config whose layers all share, as an assistant's do
        whole = config.num_kv_shared_layers == len(config.layer_types)
        return ["reuse"] * len(config.layer_types) if whole else known.fget(config)

    monkeypatch.setattr(Gemma4TextConfig, "kv_sharing_modes", property(modes))
    torch.manual_seed(1)
    layers = {
        "num_hidden_layers": 4, "layer_types": [*KINDS[:1] * 3, KINDS[1]], "num_kv_shared_layers": 4, "hidden_size": 16,
        "intermediate_size": 24, "global_head_dim": 16, "hidden_size_per_layer_input": 0, "sliding_window": 7,
        "vocab_size_per_layer_input": 0, "vocab_size": VOCABULARY,
    }  # fmt: skip
    config = Gemma4AssistantConfig(
        text_config=AutoConfig.for_model("gemma4_text", **SHAPE | layers | changes),
        backbone_hidden_size=SHAPE["hidden_size"], use_ordered_embeddings=bool(centroids), num_centroids=centroids or 8,
        centroid_intermediate_top_k=3,
    )  # fmt: skip
    model = Gemma4AssistantForCausalLM(config).eval()
    make_uneven(model)
    if centroids:
        ordering = model.masked_embedding.token_ordering
        ordering.copy_(torch.randperm(len(ordering)))
    model.set_attn_implementation("eager")
    model.save_pretrained(directory)
    return model


@torch.no_grad()
def logits_of(model, base, text, path):
    """Logits [V] below a path behind a text, by transformers' assistant over the base's keys and values, computed anew.

    The base computes the text without its last token. Every depth is at that token's position.
    """
    ids = torch.tensor([text[:-1]])
    cache = keys_and_values(base, ids)
    state, place = base.hidden_states(ids)[:, -1:], torch.tensor([[len(text) - 1]])
    for token in (text[-1], *path):
        inputs = torch.cat([base.embed(torch.tensor([[token]])), state], dim=-1)
        out = model(inputs_embeds=inputs, position_ids=place, shared_kv_states=cache, use_cache=False)
        state = out.last_hidden_state
    return out.logits[0, 0]


def keys_and_values(base, ids):
    """Keys and values of a text [1, G, T, d] by kind of layer, as transformers caches them."""
    cache = DynamicCache()  # without a config, layers keep what is behind their window
    base.model(ids, past_key_values=cache)
    return {kind: (cache.layers[layer].keys, cache.layers[layer].values) for kind, layer in base.key_layers.items()}


def as_published(directory: Path):
    """Google's config has the two head sizes by names of their own."""
    path = directory / "config.json"
    values = json.loads(path.read_text())
    layers = values["text_config"]
    layers["global_head_dim"] = next(iter(layers.pop("per_layer_config").values()))["head_dim"]
    path.write_text(json.dumps(values))
