"""A Hub repository with which plain transformers can decode: native heads, and the code that reads them."""

import shutil
from functools import partial
from pathlib import Path

import torch
from torch import nn
from transformers import AutoModelForCausalLM, PretrainedConfig, PreTrainedModel

from medusa.attention import spans
from medusa.base import taps
from medusa.files import replace_file
from medusa.formats.base import Export
from medusa.formats.native import WEIGHTS, Native
from medusa.heads import HeadsConfig, layer
from medusa.loading import layer_check

CODE = "custom_generate"
"""The folder in which transformers looks for code."""
REPOSITORY = Path(__file__).with_name("repository")
"""The code, which is copied unchanged."""
SHARED = {path.name: path for path in (Path(str(module.__file__)) for module in (layer, layer_check, spans, taps))}
"""Files of this package that the code needs; they replace the files that import them."""


class CustomGenerate(Native):
    """``model.generate(custom_generate=DIR, trust_remote_code=True)`` decodes with the heads, without this package."""

    name = "custom-generate"
    summary = "plain transformers: model.generate(custom_generate=DIR, trust_remote_code=True)"
    architectures = ("medusa", "markov", "hydra", "recurrent", "attention", "block")

    def matches(self, directory: Path) -> bool:
        """See ``Format``; decided by the code and the weights."""
        return (directory / CODE / "generate.py").is_file() and (directory / WEIGHTS).is_file()

    def obstacle(self, config: HeadsConfig) -> str:
        """See ``Format``."""
        unknown = "cannot hold blocks as DFlash's"
        return super().obstacle(config) or (unknown if config.is_dflash else "")

    def base_obstacle(self, base: PretrainedConfig) -> str:
        """See ``Format``."""
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(base)
        return "cannot be used with models of a kind that has recurrent layers" if keeps_states(model) else ""

    def write(self, export: Export, directory: Path) -> None:
        """See ``Format``: writes the code, then the heads in the native format."""
        (directory / CODE).mkdir(exist_ok=True)
        for source in REPOSITORY.glob("*.*"):
            source = SHARED.get(source.name, source)
            replace_file(directory / CODE / source.name, partial(shutil.copyfile, source))
        super().write(export, directory)


def keeps_states(model: PreTrainedModel) -> bool:
    """Whether ``generate.py`` refuses a model for its recurrent layers; by the same test."""
    return bool(model._is_stateful) or any(isinstance(part, nn.Conv1d) for part in model.modules())
