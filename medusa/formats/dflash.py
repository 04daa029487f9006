"""DFlash drafts, as z-lab publishes them and as the ``speculators`` package holds them.

A block begins with the root's embedding and goes on with that of a mask token; each row but the first guesses the token
at its own position. Tensors are those of DSpark drafts (``medusa.formats.dspark``) without a correction.

Source: z-lab/dflash, dflash/model.py of April 2026; speculators/models/dflash of 0.9.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, NoReturn

from torch import Tensor

from medusa.formats.base import Export
from medusa.formats.draft import StoredDraft
from medusa.formats.dspark import MOST_ROWS, OUTPUT, TAPS, state_of
from medusa.formats.eagle3_layer import layer_of
from medusa.heads import HeadsConfig
from medusa.sampling import is_whole

OWN = "dflash_config"
KNOWN = {"mask_token_id", "target_layer_ids", "block_size", "use_swa", "swa_window_size"}
"""Keys of ``dflash_config``; others change what a draft computes."""
WINDOWED = "sliding_attention"


class Dflash(StoredDraft):
    """A block of rows without a correction; read, but not written, since such heads are not trained here."""

    name = "dflash"
    title = "DFlash draft"
    summary = "z-lab's DFlash, vLLM, SGLang and the speculators package: drafts of the kind DFlash"
    architectures = ("block",)

    def obstacle(self, config: HeadsConfig) -> str:
        """See ``Format``: it is not written."""
        return "is only read; copy the draft's own folder"

    def write(self, export: Export, directory: Path) -> NoReturn:
        """See ``Format``; the obstacle is found first."""
        raise ValueError(f"format {self.name!r} {self.obstacle(export.heads.config)}")

    def heads(self, values: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> tuple[HeadsConfig, dict[str, Tensor]]:
        """See ``StoredDraft``."""
        if "speculators_model_type" not in values:
            values = _as_the_package_has_it(values)
        size, from_anchor = values["block_size"], bool(values.get("sample_from_anchor"))
        if not is_whole(size) or not 2 <= size <= MOST_ROWS:
            raise ValueError(f"its block_size ({size!r}) is not a number from 2 to {MOST_ROWS}")
        if 0 in values[TAPS]:
            raise ValueError("it reads the base's embeddings as a layer, which heads here do not support")
        told = values["speculators_config"]
        windows, of_layer = _windows(values)
        layer, decoder = layer_of(of_layer, {"norm_features": False, "norm_heads": True})
        whole = values["draft_vocab_size"] == decoder.vocab_size
        config = HeadsConfig(
            hidden_size=decoder.hidden_size,
            vocab_size=decoder.vocab_size,
            num_heads=size - (not from_anchor),
            num_layers=decoder.num_hidden_layers,
            own_lm_heads=OUTPUT in tensors,
            base=str(told["verifier"].get("name_or_path") or ""),
            architecture="block",
            feature_layers=tuple(values[TAPS]),
            rank=0,
            draft_vocab_size=0 if whole else values["draft_vocab_size"],
            layer=layer,
            mask_token=int(values["mask_token_id"]),
            skip_root=not from_anchor,
            layer_windows=windows,
        )
        return config, state_of(config, tensors)


def _windows(values: Mapping[str, Any]) -> tuple[tuple[int, ...], dict[str, Any]]:
    """The window of each layer (none if no layer has one), and the decoder's config without windows."""
    decoder = dict(values["transformer_layer_config"])
    kinds, size = decoder.pop("layer_types", None) or [], decoder.pop("sliding_window", None)
    used = decoder.get("use_sliding_window", True)  # false: transformers' config of Qwen 3 drops the window
    decoder |= {"target_hidden_size": values.get("target_hidden_size"), "use_sliding_window": False}
    if unknown := set(kinds) - {WINDOWED, "full_attention"}:
        raise ValueError(f"its layers are of the kinds {', '.join(sorted(unknown))}, which heads here do not support")
    if WINDOWED not in kinds or not used:
        return (), decoder
    if not values.get("sliding_window_non_causal"):
        raise ValueError("its layers with windows do not see later rows of a block, which heads here do not support")
    if not is_whole(size) or size < values["block_size"] or len(kinds) != decoder["num_hidden_layers"]:
        raise ValueError(
            f"its window ({size!r}) is no number that holds a block, or its layer_types are not its layers'"
        )
    return tuple(size * (kind == WINDOWED) for kind in kinds), decoder


def _as_the_package_has_it(values: Mapping[str, Any]) -> dict[str, Any]:
    """Convert z-lab's config, a decoder's config with more keys and layers counted from 0, to the package's form."""
    own = values[OWN]
    if more := sorted(key for key in own if key not in KNOWN and own[key]):
        raise ValueError(f"it has {', '.join(more)} in its {OWN}, which heads here do not support")
    decoder = dict(values)
    if own.get("use_swa"):  # Model Optimizer's
        layers = [WINDOWED] * values["num_hidden_layers"]
        decoder |= {"layer_types": layers, "sliding_window": own["swa_window_size"], "use_sliding_window": True}
    if not all(map(is_whole, own["target_layer_ids"])):
        raise ValueError(f"its target_layer_ids ({own['target_layer_ids']}) are not numbers of layers")
    return {
        "block_size": values.get("block_size") or own["block_size"],
        "mask_token_id": own["mask_token_id"],
        TAPS: [index + 1 for index in own["target_layer_ids"]],
        "draft_vocab_size": values["vocab_size"],
        "transformer_layer_config": decoder,
        "target_hidden_size": values.get("target_hidden_size"),
        "sliding_window_non_causal": True,
        "speculators_config": {"verifier": {}},
    }
