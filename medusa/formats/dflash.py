"""DFlash drafts, as z-lab publishes them and as the ``speculators`` package holds them.

A block begins with the root's embedding and goes on with that of a mask token; each row but the first guesses the token
at its own position. Tensors are those of DSpark drafts (``medusa.formats.dspark``) without a correction.

Source: z-lab/dflash, dflash/model.py of April 2026; speculators/models/dflash of 0.9.
"""

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from medusa.formats.draft import ReadOnlyDraft
from medusa.formats.dspark import MOST_ROWS, TAPS, read_block
from medusa.heads import HeadsConfig
from medusa.sampling import is_whole

OWN = "dflash_config"
KNOWN = {"mask_token_id", "target_layer_ids", "block_size", "use_swa", "swa_window_size"}
"""Keys of ``dflash_config``; others change what a draft computes."""
WINDOWED = "sliding_attention"


class Dflash(ReadOnlyDraft):
    """A block of rows without a correction."""

    name = "dflash"
    title = "DFlash draft"
    summary = "z-lab's DFlash, vLLM, SGLang and the speculators package: drafts of the kind DFlash"
    architectures = ("block",)

    def heads(self, values: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> tuple[HeadsConfig, dict[str, Tensor]]:
        """See ``StoredDraft``."""
        if "speculators_model_type" not in values:
            values = _as_the_package_has_it(values)
        size, from_anchor = values["block_size"], bool(values.get("sample_from_anchor"))
        if not is_whole(size) or not 2 <= size <= MOST_ROWS:
            raise ValueError(f"its block_size ({size!r}) is not a number from 2 to {MOST_ROWS}")
        windows, decoder = _windows(values)
        own = {"num_heads": size - (not from_anchor), "skip_root": not from_anchor, "layer_windows": windows}
        return read_block(dict(values) | {"transformer_layer_config": decoder}, tensors, rank=0, **own)


def _windows(values: Mapping[str, Any]) -> tuple[tuple[int, ...], dict[str, Any]]:
    """The window of each layer (none if no layer has one), and the decoder's config without windows."""
    decoder = dict(values["transformer_layer_config"])
    kinds, size = decoder.pop("layer_types", None) or [], decoder.pop("sliding_window", None)
    used = decoder.get("use_sliding_window", True)  # false: transformers' config of Qwen 3 drops the window
    decoder["use_sliding_window"] = False
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
