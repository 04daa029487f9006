"""EAGLE-3 drafts as SafeAILab, SpecForge and Model Optimizer write them; vLLM, SGLang, OpenVINO and others read them.

Which layers of the base a draft reads is told in two ways that differ by one. ``eagle_config`` has indices of layers,
counted from 0, whose outputs are read (SpecForge trains so, SGLang adds 1). vLLM takes a key of the same name at the
top for indices of hidden states, of which 0 are the embeddings. We write both, and each reader finds its own. Without
either they are the hidden states 2, half of the layers, and the last but three.

Source: vllm/model_executor/models/llama_eagle3.py and v1/worker/gpu_model_runner.py of 0.32; sgl-project/SpecForge;
sglang/srt/models/llama.py, ``set_eagle3_layers_to_capture``.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from torch import Tensor

from medusa.files import write_json
from medusa.formats.base import CONFIG, Export, Format, peek_config, read_config_file
from medusa.formats.eagle3_layer import decoder_values, layer_of, state_of, tensors_of
from medusa.formats.foreign import shape_values
from medusa.formats.native import fill_heads
from medusa.formats.tensor_files import read_tensors, write_tensors
from medusa.heads import DraftHeads, HeadsConfig

MODELS = {"llama": "LlamaForCausalLMEagle3", "qwen3": "Eagle3Qwen3ForCausalLM"}
WEIGHTS = "model.safetensors"
PICKLE = "pytorch_model.bin"
TAPS = "eagle_aux_hidden_state_layer_ids"
DEFAULT_LAYERS = (2, 0, -3)
"""As ``HeadsConfig.feature_layers``."""
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


class Eagle3(Format):
    """One decoder layer behind some layers of the base."""

    name = "eagle3"
    summary = 'vLLM, SGLang, OpenVINO: speculative_config={"method": "eagle3", "model": DIR, ..}'
    ships_base = True
    architectures = ("attention",)

    def obstacle(self, config: HeadsConfig) -> str:
        """What the readers have no code for."""
        if reason := super().obstacle(config):
            return reason
        if not config.feature_layers:
            return "holds heads that read feature layers, and these read the last hidden state"
        rising = config.feature_layers in (DEFAULT_LAYERS, tuple(sorted(config.feature_layers)))
        return "" if rising else "holds feature layers in rising order, and these heads read them in another"

    def matches(self, directory: Path) -> bool:
        """By the config."""
        return is_draft(peek_config(directory)) == self.name

    def read_config(self, directory: Path) -> HeadsConfig:
        """From the config, and the tensors' shapes where they tell more."""
        return self._read(directory)[0]

    def load(self, directory: Path) -> DraftHeads:
        """The heads; embeddings beside them are the base's and are left out."""
        config, state = self._read(directory)
        return fill_heads(config, state, directory / WEIGHTS)

    def write(self, export: Export, directory: Path) -> None:
        """Weights with what they need of the base's output layer, and config."""
        values, tensors = self.values(export), self.tensors(export)
        write_tensors(directory / WEIGHTS, tensors)
        (directory / PICKLE).unlink(missing_ok=True)
        dtype = str(tensors["lm_head.weight"].dtype).removeprefix("torch.")
        write_json(directory / CONFIG, values | {"dtype": dtype})

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

    def _read(self, directory: Path) -> tuple[HeadsConfig, dict[str, Tensor]]:
        values = read_config_file(directory)
        tensors = read_tensors(sorted(directory.glob("*.safetensors")) or [directory / PICKLE])
        try:
            return _heads(self.told(values), tensors)
        except (AttributeError, KeyError, RuntimeError, TypeError) as error:
            why = f"{error} is missing or wrong"
        except ValueError as error:
            why = str(error)
        raise ValueError(f"EAGLE-3 draft ({directory}) cannot be loaded: {why}; give another draft, or copy it again")


def _heads(told: Told, tensors: Mapping[str, Tensor]) -> tuple[HeadsConfig, dict[str, Tensor]]:
    """Shape and state of the heads that a config and tensors are."""
    if 0 in told.layers and told.layers != DEFAULT_LAYERS:
        raise ValueError("it reads the base's embeddings as a layer, which heads here cannot")
    options = {ours: bool(told.norms.get(theirs, False)) for ours, theirs in NORMS.items()}
    options["norm_features"] = options["norm_jointly"] or bool(told.norms.get("fc_norm", False))
    layer, decoder = layer_of(told.decoder, options)
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


def layers_read(export: Export) -> list[int]:
    """Feature layers, counted from 1.

    Raises:
        ValueError: They depend on the base, and it is not given.
    """
    config = export.heads.config
    if export.base is not None:
        return list(config.layers_of(export.base.num_layers))
    if min(config.feature_layers) < 1:
        raise ValueError("which layers these heads read depends on the base and none is given; give the base too")
    return list(config.feature_layers)


def norm_values(config: HeadsConfig) -> dict[str, bool]:
    """What the layer norms, by their names; vLLM and speculators read these keys."""
    layer = config.layer
    assert layer is not None, "attention heads have one"
    values: dict[str, bool] = {theirs: getattr(layer, ours) for ours, theirs in NORMS.items()}
    values["norm_before_fc"] = layer.norm_features and layer.norm_jointly
    return values | {"fc_norm": layer.norm_features and not layer.norm_jointly}


def is_draft(values: Mapping[str, Any]) -> str:
    """The name of the format that a ``config.json`` is of; "" = it is no EAGLE-3 draft."""
    if kind := values.get("speculators_model_type"):
        return "speculators" if kind == "eagle3" else ""
    names = values.get("architectures")
    name = str(names[0]) if isinstance(names, list) and names else ""
    plain = "Eagle3" in name or (name == "LlamaForCausalLM" and "draft_vocab_size" in values)
    return "eagle3" if plain else ""
