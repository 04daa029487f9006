"""Formats of other projects for draft models that read layers of the base: one file of weights, and a config."""

from abc import abstractmethod
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar, NoReturn

import torch
from huggingface_hub.errors import StrictDataclassError
from torch import Tensor

from medusa.base.model import BaseModel
from medusa.files import write_json
from medusa.formats.base import CONFIG, Export, Format, peek_config, read_config_file
from medusa.formats.native import fill_heads
from medusa.formats.tensor_files import read_tensors, stored_files, write_tensors
from medusa.heads import DraftHeads, HeadsConfig

WEIGHTS = "model.safetensors"
PICKLE = "pytorch_model.bin"
DEFAULT_LAYERS = (2, 0, -3)
"""The default, in the form of ``HeadsConfig.feature_layers``."""
ASSISTANT = "gemma4-assistant"
OF_PACKAGE = {"eagle3": "speculators", "dspark": "dspark", "dflash": "dflash"}
"""Names of formats by the speculators package's names of the drafts."""
OF_OTHERS = {"Qwen3DSparkModel": "dspark", "DFlashDraftModel": "dflash"}
"""Names of formats by other projects' names of their models."""


class StoredDraft(Format):
    """The common part of reading these formats.

    Attributes:
        title: Name of such a draft, for errors.
    """

    title: ClassVar[str]

    def matches(self, directory: Path) -> bool:
        """See ``Format``; decided by the config."""
        return is_draft(peek_config(directory)) == self.name

    def read_config(self, directory: Path) -> HeadsConfig:
        """See ``Format``: read from the config, and from the tensors' shapes if they tell more."""
        return self._read(directory)[0]

    def load(self, directory: Path) -> DraftHeads:
        """See ``Format``; embeddings in the file are the base's and are left out."""
        config, state = self._read(directory)
        return fill_heads(config, state, directory / WEIGHTS)

    @abstractmethod
    def heads(self, values: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> tuple[HeadsConfig, dict[str, Tensor]]:
        """Shape and state of the heads with this config and these tensors.

        Raises:
            ValueError: This package cannot represent them. Missing keys raise KeyError or similar errors.
        """

    def _read(self, directory: Path) -> tuple[HeadsConfig, dict[str, Tensor]]:
        values = read_config_file(directory)
        tensors = read_tensors(stored_files(directory, WEIGHTS, PICKLE))
        try:
            return self.heads(values, tensors)
        except (AttributeError, KeyError, RuntimeError, TypeError) as error:
            why = f"{error} is missing or wrong"
        except (ValueError, StrictDataclassError) as error:  # the latter of a config of transformers
            why = " ".join(str(error).split())
        raise ValueError(f"{self.title} ({directory}) cannot be loaded: {why}; give another draft, or copy it again")


class ReadOnlyDraft(StoredDraft):
    """The common part of formats that are not written, since such heads are not trained here."""

    def obstacle(self, config: HeadsConfig) -> str:
        """See ``Format``."""
        return "is only read; copy the draft's own folder"

    def write(self, export: Export, directory: Path) -> NoReturn:
        """See ``Format``; the obstacle is found first."""
        raise ValueError(f"format {self.name!r} {self.obstacle(export.heads.config)}")


class DraftFormat(StoredDraft):
    """The common part of formats that are written too."""

    def ships_base(self, config: HeadsConfig) -> bool:
        """See ``Format``: its embeddings or its output layer."""
        return True

    def obstacle(self, config: HeadsConfig) -> str:
        """See ``Format``: the features that the readers do not support."""
        if reason := super().obstacle(config):
            return reason
        if not config.feature_layers:
            return "holds only heads that read feature layers, and these read the last hidden state"
        rising = config.feature_layers in (DEFAULT_LAYERS, tuple(sorted(config.feature_layers)))
        return "" if rising else "holds feature layers in rising order only, and these heads read them in another"

    def write(self, export: Export, directory: Path) -> None:
        """See ``Format``: writes the weights with the parts of the base that they need, and the config."""
        values, tensors = self.values(export), self.tensors(export)
        write_tensors(directory / WEIGHTS, tensors)
        (directory / PICKLE).unlink(missing_ok=True)
        dtype = str(tensors["fc.weight"].dtype).removeprefix("torch.")
        write_json(directory / CONFIG, values | {"dtype": dtype})

    @abstractmethod
    def tensors(self, export: Export) -> dict[str, Tensor]:
        """The tensors to write."""

    @abstractmethod
    def values(self, export: Export) -> dict[str, Any]:
        """The values of the config to write."""


def is_draft(values: Mapping[str, Any]) -> str:
    """The name of the format of a ``config.json``; "" = not a draft."""
    if kind := values.get("speculators_model_type"):
        return OF_PACKAGE.get(str(kind), "")
    if values.get("model_type") in ("gemma4_assistant", "gemma4_unified_assistant"):
        return ASSISTANT
    names = values.get("architectures")
    name = str(names[0]) if isinstance(names, list) and names else ""
    if name in OF_OTHERS:
        return OF_OTHERS[name]
    plain = "Eagle3" in name or (name == "LlamaForCausalLM" and "draft_vocab_size" in values)
    return "eagle3" if plain else ""


def layers_read(export: Export) -> list[int]:
    """Feature layers of an export, counted from 1.

    Raises:
        ValueError: They depend on the base, and none is given.
    """
    config = export.heads.config
    if export.base is not None:
        return list(config.layers_of(export.base.num_layers))
    if min(config.feature_layers) < 1:
        raise ValueError("which layers these heads read depends on the base and none is given; give the base too")
    return list(config.feature_layers)


def base_of(export: Export, name: str) -> BaseModel:
    """The base of an export to a format that needs it.

    Raises:
        ValueError: No base is given.
    """
    if export.base is None:
        raise ValueError(f"format {name!r} needs the base and no base is given; give it too")
    return export.base


def vocabulary_tensors(heads: DraftHeads) -> dict[str, Tensor]:
    """The draft vocabulary: ``d2t`` int64 [V], token id minus index, and ``t2d`` bool [vocabulary]."""
    if (ids_V := heads.draft_ids) is None:
        return {}
    known = torch.zeros(heads.config.vocab_size, dtype=torch.bool, device=ids_V.device)
    offsets_V = ids_V - torch.arange(len(ids_V), device=ids_V.device)
    return {"d2t": offsets_V, "t2d": known.index_fill_(0, ids_V, True)}


def ids_and_order(offsets_V: Tensor) -> tuple[Tensor, Tensor]:
    """Ascending token ids of ``d2t``, and the index of each in it."""
    ids, order = (torch.arange(len(offsets_V)) + offsets_V).sort()
    return ids, order
