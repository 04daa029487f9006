"""EAGLE-3 drafts in the format of SafeAILab, SpecForge and Model Optimizer; vLLM, SGLang, OpenVINO and others read it.

A config gives the layers of the base that a draft reads in two ways, whose numbers differ by one. ``eagle_config`` has
indices of layers, counted from 0, whose outputs are read (SpecForge trains with these; SGLang adds 1). vLLM reads a key
of the same name at the top level as indices of hidden states, where 0 is the embeddings. We write both, so each reader
finds its own. Without either, the hidden states are 2, half of the layers, and the number of layers minus 3.

Source: vllm/model_executor/models/llama_eagle3.py and v1/worker/gpu_model_runner.py of 0.32; sgl-project/SpecForge;
sglang/srt/models/llama.py, ``set_eagle3_layers_to_capture``.
"""

from collections.abc import Mapping
from typing import Any, NamedTuple

from torch import Tensor

from medusa.formats.base import Export
from medusa.formats.draft import DEFAULT_LAYERS, DraftFormat, layers_read
from medusa.formats.eagle3_layer import decoder_values, layer_of, state_of, tensors_of
from medusa.formats.foreign import shape_values
from medusa.heads import HeadsConfig

MODELS = {"llama": "LlamaForCausalLMEagle3", "qwen3": "Eagle3Qwen3ForCausalLM"}
TAPS = "eagle_aux_hidden_state_layer_ids"
DEPTH = "num_speculative_tokens"
PASSES = 5
"""Depth of a draft if the config does not give it."""
NORMS = {
    "norm_jointly": "norm_before_fc", "norm_output": "norm_output", "norm_before_residual": "norm_before_residual",
}  # fmt: skip
"""Options of our layer by the format's names."""


class Told(NamedTuple):
    """The content of a config.

    Attributes:
        decoder: The layer, as a config of transformers.
        norms: Options of norms, by the format's names.
        layers: Feature layers, counted from 1.
        depth: Depth of a draft.
        base: Name of the base; "" = not given.
    """

    decoder: Mapping[str, Any]
    norms: Mapping[str, Any]
    layers: tuple[int, ...]
    depth: int
    base: str


class Eagle3(DraftFormat):
    """One decoder layer that reads some layers of the base."""

    name = "eagle3"
    title = "EAGLE-3 draft"
    summary = 'vLLM, SGLang, OpenVINO: speculative_config={"method": "eagle3", "model": DIR, ..}'
    architectures = ("attention",)

    def tensors(self, export: Export) -> dict[str, Tensor]:
        """The tensors to write."""
        named = tensors_of(export, self.name)
        return {name.replace("layers.0.", "midlayer."): tensor for name, tensor in named.items()}

    def values(self, export: Export) -> dict[str, Any]:
        """The values of the config to write."""
        config, decoder, layers = export.heads.config, decoder_values(export), layers_read(export)
        rope = decoder["rope_parameters"]
        older = {"rope_theta": rope["rope_theta"]}  # readers of these keys do not read rope_parameters
        if rope["rope_type"] != "default":
            older["rope_scaling"] = {key: value for key, value in rope.items() if key != "rope_theta"}
        own = {
            "architectures": [MODELS[decoder["model_type"]]],
            "draft_vocab_size": config.output_size,
            TAPS: layers,
            "num_aux_hidden_states": len(layers),
            "eagle_config": {TAPS: [layer - 1 for layer in layers], "use_aux_hidden_state": True},
            DEPTH: config.num_heads,
        }
        return shape_values(export) | decoder | older | norm_values(config) | own

    def told(self, values: Mapping[str, Any]) -> Told:
        """Read a config."""
        inner = values.get("eagle_config") or {}
        layers = values.get(TAPS) or [index + 1 for index in inner.get(TAPS) or ()]
        return Told(
            decoder=values,
            norms=dict(values) | inner,
            layers=tuple(sorted(layers)) or DEFAULT_LAYERS,
            depth=values.get(DEPTH, PASSES),
            base=str(values.get("base_model_name_or_path") or ""),
        )

    def heads(self, values: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> tuple[HeadsConfig, dict[str, Tensor]]:
        """See ``DraftFormat``; drafts with more than one layer are an error."""
        told = self.told(values)
        if 0 in told.layers and told.layers != DEFAULT_LAYERS:
            raise ValueError("it reads the base's embeddings as a layer, which heads here do not support")
        options = {ours: bool(told.norms.get(theirs, False)) for ours, theirs in NORMS.items()}
        options["norm_features"] = options["norm_jointly"] or bool(told.norms.get("fc_norm", False))
        layer, decoder = layer_of(told.decoder, options)
        if decoder.num_hidden_layers != 1:
            raise ValueError(f"it has {decoder.num_hidden_layers} layers, which heads here do not support")
        state, size = state_of(tensors, layer, decoder.vocab_size), decoder.hidden_size
        config = HeadsConfig(
            hidden_size=size,
            vocab_size=decoder.vocab_size,
            num_heads=told.depth,
            own_lm_heads="lm_heads" in state,
            base=told.base,
            architecture="attention",
            feature_layers=told.layers,
            draft_vocab_size=len(state.get("draft_ids", ())),
            layer=layer,
        )
        if state["fusion.weight"].shape != (size, size * len(told.layers)):
            raise ValueError(f"its fc ({tuple(state['fusion.weight'].shape)}) does not read {len(told.layers)} layers")
        return config, state


def norm_values(config: HeadsConfig) -> dict[str, bool]:
    """Options of norms by the format's names; vLLM and speculators read these keys."""
    layer = config.layer
    assert layer is not None, "attention heads have one"
    values: dict[str, bool] = {theirs: getattr(layer, ours) for ours, theirs in NORMS.items()}
    values["norm_before_fc"] = layer.norm_features and layer.norm_jointly
    return values | {"fc_norm": layer.norm_features and not layer.norm_jointly}
