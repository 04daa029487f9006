"""Heads for Text Generation Inference and LoRAX: the original's names in safetensors, either version of heads.

Source: text_generation_server/layers/medusa.py and speculative.py; lorax_server/adapters/medusa.py. Both compute heads
that share the output layer by one matrix product for all, and so of one layer only. TGI takes a config with
``architectures`` for another kind of drafter.
"""

from pathlib import Path

from medusa.formats.base import peek_config
from medusa.formats.foreign import Foreign
from medusa.formats.original import SAFETENSORS, MedusaV1, has_original_config
from medusa.heads import HeadsConfig


class Tgi(MedusaV1):
    """TGI takes the directory for the model's: it serves the base that the config names."""

    name = "tgi"
    summary = "Text Generation Inference: --model-id DIR"
    weights = SAFETENSORS

    def obstacle(self, config: HeadsConfig) -> str:
        """Medusa heads; those that share the output layer, of one layer."""
        deep = config.num_layers > 1 and not config.own_lm_heads
        return Foreign.obstacle(self, config) or ("holds shared heads of one layer only" if deep else "")

    def matches(self, directory: Path) -> bool:
        """By the config keys, and the name of the weights."""
        no_architectures = "architectures" not in peek_config(directory)
        return has_original_config(directory) and no_architectures and (directory / SAFETENSORS).is_file()

    def files(self, directory: Path) -> list[Path]:
        """The one file that is read."""
        return [directory / SAFETENSORS]


class Lorax(Tgi):
    """LoRAX loads heads when it starts and, those that share the output layer, with a request."""

    name = "lorax"
    summary = "LoRAX: --adapter-id DIR at the start, or adapter_id in a request"

    def matches(self, directory: Path) -> bool:
        """By the config keys; weights may have any name."""
        return has_original_config(directory) and bool(self.files(directory))

    def files(self, directory: Path) -> list[Path]:
        """All safetensors there are."""
        return sorted(directory.glob("*.safetensors"))
