"""EAGLE-3 drafts as SafeAILab, SpecForge and Model Optimizer write them; vLLM, SGLang, OpenVINO and others read them.

Which layers of the base a draft reads is told in two ways that differ by one. ``eagle_config`` has indices of layers,
counted from 0, whose outputs are read (SpecForge trains so, SGLang adds 1). vLLM takes a key of the same name at the
top for indices of hidden states, of which 0 are the embeddings. We write both, and each reader finds its own. Without
either they are the hidden states 2, half of the layers, and the last but three.

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
"""Depth of a draft where the config does not say."""
NORMS = {
    "norm_jointly": "norm_before_fc", "norm_output": "norm_output", "norm_before_residual": "norm_before_residual",
}  # fmt: skip
"""Options of the layer by their names for them."""


class Told(NamedTuple):
    """What a config says.

    Attributes:
        decoder: Of the layer, as transformers has it.
        norms: By their names.
        layers: Feature layers, counted from 1.
        depth: Of a draft.
        base: Name of the base, "" = it does not say.
    """

    decoder: Mapping[str, Any]
    norms: Mapping[str, Any]
    layers: tuple[int, ...]
    depth: int
    base: str


class Eagle3(DraftFormat):
    """One decoder layer behind some layers of the base."""

    name = "eagle3"
    title = "EAGLE-3 draft"
    summary = 'vLLM, SGLang, OpenVINO: speculative_config={"method": "eagle3", "model": DIR, ..}'
    architectures = ("attention",)

    def tensors(self, export: Export) -> dict[str, Tensor]:
        """The weights."""
        named = tensors_of(export, self.name)
        return {name.replace("layers.0.", "midlayer."): tensor for name, tensor in named.items()}

    def values(self, export: Export) -> dict[str, Any]:
        """The config."""
        config, decoder, layers = export.heads.config, decoder_values(export), layers_read(export)
        rope = decoder["rope_parameters"]
        older = {"rope_theta": rope["rope_theta"]}  # who reads these keys does not read rope_parameters
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
        """What a config says."""
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
        """One layer, and no more."""
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
    """What the layer norms, by their names; vLLM and speculators read these keys."""
    layer = config.layer
    assert layer is not None, "attention heads have one"
    values: dict[str, bool] = {theirs: getattr(layer, ours) for ours, theirs in NORMS.items()}
    values["norm_before_fc"] = layer.norm_features and layer.norm_jointly
    return values | {"fc_norm": layer.norm_features and not layer.norm_jointly}
