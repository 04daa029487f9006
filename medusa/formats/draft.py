"""Drafts of others that read layers of the base: weights in one file, and a config of their readers' beside it."""

from abc import abstractmethod
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor

from medusa.base.model import BaseModel
from medusa.files import write_json
from medusa.formats.base import CONFIG, Export, Format, peek_config, read_config_file
from medusa.formats.native import fill_heads
from medusa.formats.tensor_files import read_tensors, write_tensors
from medusa.heads import DraftHeads, HeadsConfig

WEIGHTS = "model.safetensors"
PICKLE = "pytorch_model.bin"
DEFAULT_LAYERS = (2, 0, -3)
"""As ``HeadsConfig.feature_layers``."""
OF_PACKAGE = {"eagle3": "speculators", "dspark": "dspark"}
"""Formats by what the speculators package calls the drafts."""


class DraftFormat(Format):
    """What is the same for all of them.

    Attributes:
        title: Of such a draft, for errors.
    """

    title: ClassVar[str]
    ships_base = True

    def obstacle(self, config: HeadsConfig) -> str:
        """What the readers have no code for."""
        if reason := super().obstacle(config):
            return reason
        if not config.feature_layers:
            return "holds only heads that read feature layers, and these read the last hidden state"
        rising = config.feature_layers in (DEFAULT_LAYERS, tuple(sorted(config.feature_layers)))
        return "" if rising else "holds feature layers in rising order only, and these heads read them in another"

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
        """Weights with what they need of the base, and config."""
        values, tensors = self.values(export), self.tensors(export)
        write_tensors(directory / WEIGHTS, tensors)
        (directory / PICKLE).unlink(missing_ok=True)
        dtype = str(tensors["fc.weight"].dtype).removeprefix("torch.")
        write_json(directory / CONFIG, values | {"dtype": dtype})

    @abstractmethod
    def tensors(self, export: Export) -> dict[str, Tensor]:
        """The weights."""

    @abstractmethod
    def values(self, export: Export) -> dict[str, Any]:
        """The config."""

    @abstractmethod
    def heads(self, values: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> tuple[HeadsConfig, dict[str, Tensor]]:
        """Shape and state of the heads that a config and tensors are.

        Raises:
            ValueError: Heads here cannot be them; KeyError and its like where something is missing.
        """

    def _read(self, directory: Path) -> tuple[HeadsConfig, dict[str, Tensor]]:
        values = read_config_file(directory)
        tensors = read_tensors(sorted(directory.glob("*.safetensors")) or [directory / PICKLE])
        try:
            return self.heads(values, tensors)
        except (AttributeError, KeyError, RuntimeError, TypeError) as error:
            why = f"{error} is missing or wrong"
        except ValueError as error:
            why = str(error)
        raise ValueError(f"{self.title} ({directory}) cannot be loaded: {why}; give another draft, or copy it again")


def is_draft(values: Mapping[str, Any]) -> str:
    """The name of the format that a ``config.json`` is of; "" = it is no draft."""
    if kind := values.get("speculators_model_type"):
        return OF_PACKAGE.get(str(kind), "")
    names = values.get("architectures")
    name = str(names[0]) if isinstance(names, list) and names else ""
    if name == "Qwen3DSparkModel":
        return "dspark"
    plain = "Eagle3" in name or (name == "LlamaForCausalLM" and "draft_vocab_size" in values)
    return "eagle3" if plain else ""


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


def base_of(export: Export, name: str) -> BaseModel:
    """The base, for a format of this name that cannot be written without it.

    Raises:
        ValueError: It is not given.
    """
    if export.base is None:
        raise ValueError(f"format {name!r} needs the base and no base is given; give it too")
    return export.base


def vocabulary_tensors(heads: DraftHeads) -> dict[str, Tensor]:
    """Which tokens are drafted: ``d2t`` int64 [V], token id minus place, and ``t2d`` bool [vocabulary]."""
    if (ids_V := heads.draft_ids) is None:
        return {}
    known = torch.zeros(heads.config.vocab_size, dtype=torch.bool, device=ids_V.device)
    offsets_V = ids_V - torch.arange(len(ids_V), device=ids_V.device)
    return {"d2t": offsets_V, "t2d": known.index_fill_(0, ids_V, True)}


def ids_and_order(offsets_V: Tensor) -> tuple[Tensor, Tensor]:
    """Token ids, ascending, and where each stood, of ``d2t``."""
    ids, order = (torch.arange(len(offsets_V)) + offsets_V).sort()
    return ids, order
