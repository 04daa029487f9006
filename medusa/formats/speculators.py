"""EAGLE-3 drafts in the format of the ``speculators`` package, for itself and for vLLM (``vllm serve DIR``).

Source: speculators/models/eagle3 of 0.9, and vllm/transformers_utils/configs/speculators/algos.py of vLLM 0.32. The two
have different defaults for ``norm_before_residual``, so a config without this key is an error.
"""

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from medusa.formats.base import Export
from medusa.formats.draft import DEFAULT_LAYERS, base_of, layers_read
from medusa.formats.eagle3 import TAPS, Eagle3, Told, norm_values
from medusa.formats.eagle3_layer import decoder_values, tensors_of
from medusa.formats.foreign import shape_values


class Speculators(Eagle3):
    """The layer of ``Eagle3`` with the package's config."""

    name = "speculators"
    summary = "the speculators package, and vLLM: vllm serve DIR"

    def tensors(self, export: Export) -> dict[str, Tensor]:
        """The tensors to write, including the base's embeddings, which the package would not initialise otherwise."""
        tensors, base = tensors_of(export, self.name), base_of(export, self.name)
        embeddings = base.model.get_input_embeddings().weight
        return tensors | {"embed_tokens.weight": embeddings.to(tensors["fc.weight"])}

    def values(self, export: Export) -> dict[str, Any]:
        """The values of the config to write."""
        config = export.heads.config
        return (
            norm_values(config)
            | package_values(export, "eagle3", self.name)
            | {
                "architectures": ["Eagle3Speculator"],
                "transformer_layer_config": decoder_values(export),
                TAPS: layers_read(export),
                "embed_requires_grad": False,
            }
        )

    def told(self, values: Mapping[str, Any]) -> Told:
        """Read a config."""
        if values.get("embed_requires_grad"):
            raise ValueError("its embeddings were trained, and heads here read the base's")
        if values.get("norm_before_residual") is None:
            raise ValueError("its config does not set norm_before_residual, which vLLM then takes as true")
        told, decoder = values["speculators_config"], values["transformer_layer_config"]
        return Told(
            decoder=decoder | {"target_hidden_size": values.get("target_hidden_size")},
            norms=values,
            layers=tuple(sorted(values.get(TAPS) or ())) or DEFAULT_LAYERS,
            depth=told["proposal_methods"][0]["speculative_tokens"],
            base=str(told["verifier"].get("name_or_path") or ""),
        )


def package_values(export: Export, kind: str, name: str) -> dict[str, Any]:
    """Config keys of the package for all kinds of drafts.

    Args:
        export: The heads and their base.
        kind: The package's name of the kind of draft.
        name: Name of the format.
    """
    config = export.heads.config
    return {
        "speculators_model_type": kind,
        "draft_vocab_size": config.output_size,
        "tie_word_embeddings": False,
        "speculators_config": {
            "algorithm": kind,
            "default_proposal_method": "greedy",
            "proposal_methods": [{"proposal_type": "greedy", "speculative_tokens": config.num_heads}],
            "verifier": {
                "name_or_path": shape_values(export)["base_model_name_or_path"],
                "architectures": base_of(export, name).model.config.architectures or [],
            },
        },
    }
