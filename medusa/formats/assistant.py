"""Gemma 4's assistants, as Google publishes them: checkpoints of transformers that draft for one size of Gemma 4."""

from collections.abc import Mapping
from typing import Any

from torch import Tensor
from transformers import AutoConfig

from medusa.formats.draft import ASSISTANT, ReadOnlyDraft
from medusa.heads import HeadsConfig
from medusa.heads.assistant_layers import AssistantConfig
from medusa.heads.layer import ROTARY

PASSES = 5
"""Depth of a draft; files do not give one, and drafts are cut where they are unlikely."""
OUTPUT = ("lm_head.weight", "model.embed_tokens.weight")
"""Names of the tied output layer."""
SHARED = (
    "hidden_size", "intermediate_size", "num_attention_heads", "layer_types", "sliding_window", "rms_norm_eps",
    "max_position_embeddings", "rope_parameters",
)  # fmt: skip
"""Settings that both configs name alike."""


class Assistant(ReadOnlyDraft):
    """Layers with queries only."""

    name = ASSISTANT
    title = "Gemma 4 assistant"
    summary = "transformers, vLLM, SGLang, llama.cpp: the assistant (MTP drafter) of a Gemma 4"
    architectures = ("assistant",)

    def heads(self, values: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> tuple[HeadsConfig, dict[str, Tensor]]:
        """See ``StoredDraft``; its files do not name the base."""
        config = AutoConfig.for_model(**values)
        layers = config.get_text_config()
        if layers.hidden_activation != "gelu_pytorch_tanh" or layers.attention_bias:
            raise ValueError("its layers have another activation, or biases, which heads here do not support")
        kinds = {turn["rope_type"] for turn in layers.rope_parameters.values()}
        if unknown := kinds - {*ROTARY, "proportional"}:
            raise ValueError(f"its positions are {', '.join(sorted(unknown))}, which heads here do not support")
        assistant = AssistantConfig(
            **{name: getattr(layers, name) for name in SHARED},
            head_dims={kind: layers.per_layer_config[index].head_dim for index, kind in enumerate(layers.layer_types)},
            num_centroids=config.num_centroids * config.use_ordered_embeddings,
            centroids_read=config.centroid_intermediate_top_k,
        )
        heads = HeadsConfig(
            hidden_size=config.backbone_hidden_size,
            vocab_size=layers.vocab_size,
            num_heads=PASSES,
            architecture="assistant",
            assistant=assistant,
        )
        return heads, _state(tensors)


def _state(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The state dict of ``AssistantHeads``."""
    known = {name: tensor.clone() for name, tensor in tensors.items()}
    outputs = [known.pop(name) for name in OUTPUT if name in known]
    state = {"tokens": outputs[0]}
    for name, tensor in known.items():
        for part in ("model.", "masked_embedding.", "self_attn.", "mlp."):
            name = name.replace(part, "")
        state[name] = tensor
    return state
