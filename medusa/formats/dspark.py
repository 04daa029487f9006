"""DSpark drafts in the format of the ``speculators`` package, for itself and for vLLM; DeepSpec's can be read too.

Tensors, with D the hidden size, n the number of the base's layers that are read, R the rank of the correction, V the
size of the draft vocabulary: ``fc.weight`` [D, n D], ``hidden_norm``, ``layers.{i}`` with Qwen 3's names, ``norm``,
``markov_head.markov_w1.weight`` [vocabulary, R], ``markov_head.markov_w2.weight`` [V, R]; if V is a part of the
vocabulary also ``lm_head.weight`` [V, D], ``d2t`` and ``t2d``.

Source: speculators/models/dspark and models/dflash of 0.9; vllm/model_executor/models/qwen3_dspark.py of 0.32. The two
have different defaults for ``sample_from_anchor``, so a config of the package without this key is an error.
"""

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from medusa.base.model import BaseModel
from medusa.formats.base import Export
from medusa.formats.draft import DraftFormat, base_of, ids_and_order, layers_read, vocabulary_tensors
from medusa.formats.eagle3_layer import NOT_READ, decoder_values, layer_of
from medusa.formats.speculators import package_values
from medusa.formats.vllm import base_output
from medusa.heads import DraftHeads, HeadsConfig
from medusa.heads.blocks import unit_embeddings
from medusa.heads.layer import LayerConfig
from medusa.heads.markov import behind_output
from medusa.sampling import is_whole

TAPS = "aux_hidden_state_layer_ids"
NAMES = {"fusion": "fc", "text_norm": "hidden_norm", "output_norm": "norm"}
"""The format's names of our modules."""
LAYER_NAMES = {
    "input_norm": "input_layernorm",
    "mlp_norm": "post_attention_layernorm",
    "query_norm": "self_attn.q_norm",
    "key_norm": "self_attn.k_norm",
    **{f"{name}_proj": f"self_attn.{name}_proj" for name in "qkvo"},
    **{f"{name}_proj": f"mlp.{name}_proj" for name in ("gate", "up", "down")},
}
"""The format's names of a layer's modules."""
BEFORE, AFTER = "markov_head.markov_w1.weight", "markov_head.markov_w2.weight"
OUTPUT = "lm_head.weight"
MOST_ROWS = 1024
"""Most rows of a block that are read, far more than any draft needs."""
CONFIDENCE = "confidence_head."


class Dspark(DraftFormat):
    """A block of rows, and a correction by the previous token."""

    name = "dspark"
    title = "DSpark draft"
    summary = "the speculators package, and vLLM: drafts of the kind DSpark"
    architectures = ("block",)

    def obstacle(self, config: HeadsConfig) -> str:
        """See ``Format``: rows, layers and norms that the format does not support."""
        if reason := super().obstacle(config):
            return reason
        layer = config.layer
        if config.mask_token is None or layer is None or layer.norm_features or not layer.norm_heads:
            return "holds blocks as DSpark has them, and these have other first rows or norms (heads.mask_token)"
        if config.is_dflash:
            return "holds blocks with a correction, whose first row guesses too, and these are DFlash's"
        if config.own_lm_heads and not config.draft_vocab_size:
            return "has the base's output layer for a whole vocabulary, and these heads have their own"
        return ""

    def tensors(self, export: Export) -> dict[str, Tensor]:
        """The weights; the heads' gain on the base's output layer becomes a part of the last norm."""
        heads, base = export.heads, base_of(export, self.name)
        output = base_output(export, self.name)
        if base.matrices is None or base.matrices.scale != 1:
            raise ValueError(
                f"base ({base.name}) scales or bounds its embeddings or logits, which format 'dspark' cannot hold;"
                " choose 'native'"
            )
        config, state = heads.config, heads.state_dict()
        tensors = {theirs: state[ours] for ours, theirs in _names(config)}
        if heads.gain is not None:
            tensors["norm.weight"] = tensors["norm.weight"] * state["gain"]
        tensors[BEFORE], tensors[AFTER] = _correction(heads, base)
        if heads.draft_ids is not None:
            shared = output[heads.draft_ids.to(output.device)].to(tensors["norm.weight"])
            tensors[OUTPUT] = shared if heads.lm_heads is None else state["lm_heads"][0]
        return tensors | vocabulary_tensors(heads)

    def values(self, export: Export) -> dict[str, Any]:
        """The values of the config to write."""
        config = export.heads.config
        return package_values(export, "dspark", self.name) | {
            "architectures": ["DSparkSpeculator"],
            "transformer_layer_config": decoder_values(export, config.num_layers),
            TAPS: layers_read(export),
            "block_size": config.num_heads,
            "mask_token_id": config.mask_token,
            "sample_from_anchor": True,
            "markov_rank": config.rank,
            "markov_head_type": "vanilla",
            "enable_confidence_head": False,
            "confidence_head_with_markov": False,
        }

    def heads(self, values: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> tuple[HeadsConfig, dict[str, Tensor]]:
        """Block heads with their own correction; the confidence head is left out."""
        if "speculators_model_type" not in values:
            values = _as_the_package_has_it(values)
        for right, what in (
            (values.get("sample_from_anchor"), "does not guess from its first row (sample_from_anchor)"),
            (values.get("markov_head_type") == "vanilla", "has another correction than one matrix behind a table"),
            (
                not is_whole(values["block_size"]) or values["block_size"] <= MOST_ROWS,
                f"guesses more than {MOST_ROWS} tokens ahead",
            ),
        ):
            if not right:
                raise ValueError(f"it {what}, which heads here do not support")
        shape = {"num_heads": values["block_size"], "rank": values["markov_rank"], "own_correction": True}
        return read_block(values, tensors, **shape)


def _as_the_package_has_it(values: Mapping[str, Any]) -> dict[str, Any]:
    """Convert a DeepSpec config, a decoder's config with more keys and layers counted from 0, to the package's form."""
    defaults = {"sample_from_anchor": True, "markov_head_type": "vanilla", "draft_vocab_size": values["vocab_size"]}
    layers = {TAPS: [index + 1 for index in values["target_layer_ids"]]}
    return defaults | dict(values) | layers | {
        "transformer_layer_config": dict(values), "speculators_config": {"verifier": {}},
    }  # fmt: skip


def _names(config: HeadsConfig) -> Iterator[tuple[str, str]]:
    """Names of our tensors that the format has too, and its names of them."""
    for ours, theirs in NAMES.items():
        yield f"{ours}.weight", f"{theirs}.weight"
    assert isinstance(config.layer, LayerConfig), "block heads have one"
    for index in range(config.num_layers):
        for ours, theirs in LAYER_NAMES.items():
            yield f"layers.{index}.{ours}.weight", f"layers.{index}.{theirs}.weight"
            if config.layer.attention_bias and theirs.startswith("self_attn") and ours.endswith("proj"):
                yield f"layers.{index}.{ours}.bias", f"layers.{index}.{theirs}.bias"


def _correction(heads: DraftHeads, base: BaseModel) -> tuple[Tensor, Tensor]:
    """Both matrices; computed from the base's embeddings and output layer if the heads have none of their own."""
    down, up = heads.state_dict()["down.weight"], heads.state_dict()["up.weight"]
    if heads.config.own_correction:
        return down, up
    tokens = torch.arange(heads.config.vocab_size, device=base.device)
    with torch.no_grad():
        before = torch.nn.functional.linear(unit_embeddings(tokens, base, down.dtype), down)
    return before, behind_output(heads, up, base)


def read_block(
    values: Mapping[str, Any], tensors: Mapping[str, Tensor], **own: Any
) -> tuple[HeadsConfig, dict[str, Tensor]]:
    """Block heads with a config of the package, these tensors, and these fields; see ``StoredDraft.heads``."""
    if 0 in values[TAPS]:
        raise ValueError("it reads the base's embeddings as a layer, which heads here do not support")
    told = values["speculators_config"]
    of_layer = values["transformer_layer_config"] | {"target_hidden_size": values.get("target_hidden_size")}
    layer, decoder = layer_of(of_layer, {"norm_features": False, "norm_heads": True})
    whole = values["draft_vocab_size"] == decoder.vocab_size
    config = HeadsConfig(
        hidden_size=decoder.hidden_size,
        vocab_size=decoder.vocab_size,
        num_layers=decoder.num_hidden_layers,
        own_lm_heads=OUTPUT in tensors,
        base=str(told["verifier"].get("name_or_path") or ""),
        architecture="block",
        feature_layers=tuple(values[TAPS]),
        draft_vocab_size=0 if whole else values["draft_vocab_size"],
        layer=layer,
        mask_token=int(values["mask_token_id"]),
        **own,
    )
    return config, _state(config, tensors)


def _state(config: HeadsConfig, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The state dict of ``BlockHeads``, with columns in the order of tokens."""
    known = {name: tensor.clone() for name, tensor in tensors.items() if not name.startswith(CONFIDENCE)}
    for name in NOT_READ:
        known.pop(name, None)
    state = {ours: known.pop(theirs) for ours, theirs in _names(config)}
    if config.rank:
        state |= {"down.weight": known.pop(BEFORE), "up.weight": known.pop(AFTER)}
    output, offsets_V = known.pop(OUTPUT, None), known.pop("d2t", None)
    if known:
        raise ValueError(f"it holds {', '.join(sorted(known))}, which its config does not mention")
    if config.draft_vocab_size:
        if output is None or offsets_V is None:
            raise ValueError("its output layer or its list of tokens (d2t) is missing")
        state["draft_ids"], order_V = ids_and_order(offsets_V)
        output = output[order_V]
        if config.rank:
            state["up.weight"] = state["up.weight"][order_V]
    if output is None:
        return state | {"gain": torch.ones_like(state["output_norm.weight"])}
    return state | {"lm_heads": output[None]}
