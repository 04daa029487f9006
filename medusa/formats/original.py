"""Formats of FasterDecoding/Medusa and of engines with similar formats; for names of tensors see ``head_tensors``.

In version 1 every head has an output layer; in version 2 heads share the base's. Text Generation Inference and LoRAX
read both in safetensors. They compute heads that share the output layer in one matrix product, so these may have only
one layer. TGI treats a config with ``architectures`` as another kind of drafter.

Source: text_generation_server/layers/medusa.py and speculative.py; lorax_server/adapters/medusa.py.
"""

from pathlib import Path
from typing import Any

from torch import Tensor

from medusa.files import write_json
from medusa.formats.base import CONFIG, Export, peek_config
from medusa.formats.foreign import PICKLE, Foreign, shape_values
from medusa.formats.head_tensors import head_tensors
from medusa.heads import HeadsConfig

SAFETENSORS = "medusa_lm_head.safetensors"


class Original(Foreign):
    """Weights in one file with the original's name, and the original's config."""

    weights: str
    """Name of the file that is written."""

    def files(self, directory: Path) -> list[Path]:
        """See ``Foreign``; if both files exist, the safetensors file."""
        path = directory / SAFETENSORS
        return [path if path.is_file() else directory / PICKLE]

    def write(self, export: Export, directory: Path) -> None:
        """See ``Format``: writes weights and config."""
        values = original_values(export)
        self.write_weights(directory, {self.weights: original_tensors(export)})
        write_json(directory / CONFIG, values)


class MedusaV1(Original):
    """Every head has its own output layer."""

    name = "medusa-v1"
    summary = "FasterDecoding/Medusa and TensorRT-LLM: an output layer per head"
    weights = PICKLE  # the original's code reads no other file
    own = True
    elsewise = "holds an output layer per head and these heads share the base's"

    def obstacle(self, config: HeadsConfig) -> str:
        """See ``Format``: supports Medusa heads with the output layers of this version."""
        return super().obstacle(config) or ("" if config.own_lm_heads == self.own else self.elsewise)

    def matches(self, directory: Path) -> bool:
        """See ``Format``; decided by the config keys, the version, and the name of the weights."""
        named = any((directory / name).is_file() for name in (PICKLE, SAFETENSORS))
        return named and _has_original_config(directory) and _is_version_2(directory) != self.own


class MedusaV2(MedusaV1):
    """All heads share the base's output layer."""

    name = "medusa-v2"
    summary = "FasterDecoding/Medusa, version 2: heads share the base's output layer"
    weights = SAFETENSORS
    own = False
    elsewise = "shares the base's output layer and these heads have their own"


class Tgi(Original):
    """TGI gets this directory as its model, and serves the base that the config names."""

    name = "tgi"
    summary = "Text Generation Inference: --model-id DIR"
    weights = SAFETENSORS

    def obstacle(self, config: HeadsConfig) -> str:
        """See ``Format``: supports Medusa heads; heads that share the output layer must have one layer."""
        deep = config.num_layers > 1 and not config.own_lm_heads
        return super().obstacle(config) or ("holds shared heads of one layer only" if deep else "")

    def matches(self, directory: Path) -> bool:
        """See ``Format``; decided by the config keys and the name of the weights."""
        no_architectures = "architectures" not in peek_config(directory)
        return _has_original_config(directory) and no_architectures and (directory / SAFETENSORS).is_file()

    def files(self, directory: Path) -> list[Path]:
        """See ``Foreign``; TGI reads only one file."""
        return [directory / SAFETENSORS]


class Lorax(Tgi):
    """LoRAX loads heads at its start, or with a request if they share the output layer."""

    name = "lorax"
    summary = "LoRAX: --adapter-id DIR at the start, or adapter_id in a request"

    def matches(self, directory: Path) -> bool:
        """See ``Format``; decided by the config keys, because weights may have any name."""
        return _has_original_config(directory) and bool(self.files(directory))

    def files(self, directory: Path) -> list[Path]:
        """See ``Foreign``; all safetensors."""
        return sorted(directory.glob("*.safetensors"))


def _has_original_config(directory: Path) -> bool:
    """Whether the original's code and engines with its format can read the config."""
    values = peek_config(directory)
    return "medusa_num_heads" in values and values.get("model_type") != "medusa"


def _is_version_2(directory: Path) -> bool:
    try:
        return float(peek_config(directory).get("version", 1)) >= 2
    except (TypeError, ValueError):
        return False


def original_tensors(export: Export) -> dict[str, Tensor]:
    """The heads' tensors by the original's names."""
    return head_tensors(export.heads, "{head}.{layer}.linear", "{head}.{layer}")


def original_values(export: Export) -> dict[str, Any]:
    """The original's config for the heads.

    Raises:
        ValueError: The heads name no base, or belong to another one.
    """
    config = export.heads.config
    return shape_values(export) | {
        "medusa_num_heads": config.num_heads,
        "medusa_num_layers": config.num_layers,
        "version": "1" if config.own_lm_heads else "2",
    }
