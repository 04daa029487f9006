"""Heads for vLLM up to 0.32, the last version with Medusa, and one directory that vLLM, TGI and LoRAX all read.

Source: vllm/model_executor/models/medusa.py, transformers_utils/configs/medusa.py and config/speculative.py of 0.32.0.
vLLM does not read the output layer from the base: ``original_lm_head`` means that the heads include a copy of it. It
ignores biases unless ``medusa_fc_bias`` is set.
"""

import dataclasses
import functools
import shutil
import tempfile
from pathlib import Path
from typing import Any

from torch import Tensor

from medusa.base.model import BaseModel
from medusa.files import replace_file, write_json
from medusa.formats.base import CONFIG, Export, peek_config
from medusa.formats.foreign import PICKLE, Foreign, shape_values
from medusa.formats.head_tensors import head_tensors
from medusa.formats.original import SAFETENSORS, Tgi, original_tensors, original_values
from medusa.formats.tensor_files import stored_files
from medusa.heads import HeadsConfig

WEIGHTS = "model.safetensors"
BASE_OUTPUT = "lm_head.safetensors"


class Vllm(Foreign):
    """vLLM's own names of tensors; all versions with Medusa read them."""

    name = "vllm"
    summary = 'vLLM up to 0.32: speculative_config={"method": "medusa", "model": DIR, ..}'

    def ships_base(self, config: HeadsConfig) -> bool:
        """See ``Format``: the output layer that heads share."""
        return not config.own_lm_heads

    def obstacle(self, config: HeadsConfig) -> str:
        """See ``Format``: supports Medusa heads, with a draft vocabulary if they share the output layer."""
        if config.draft_vocab_size and config.own_lm_heads:
            return "cannot hold a draft vocabulary of heads that have their own output layers"
        whole = dataclasses.replace(config, draft_vocab_size=0)
        return super().obstacle(whole)

    def files(self, directory: Path) -> list[Path]:
        """See ``Foreign``."""
        return stored_files(directory, WEIGHTS, PICKLE)

    def matches(self, directory: Path) -> bool:
        """See ``Format``; decided by the model type. A config that also has the original's keys is ``Universal``."""
        values = peek_config(directory)
        return values.get("model_type") == "medusa" and "medusa_num_heads" not in values

    def write(self, export: Export, directory: Path) -> None:
        """See ``Format``: writes the weights with the parts of the base that they need, and the config."""
        config = export.heads.config
        values = shape_values(export) | vllm_values(config)
        values |= {"num_heads": config.num_heads, "num_hidden_layers": config.num_layers}
        tensors = head_tensors(export.heads, "blocks.{head}.layers.{layer}", "lm_heads.{head}")
        if not config.own_lm_heads:
            output = base_output(export, self.name)
            if export.heads.draft_ids is not None:
                tensors["token_map"] = export.heads.draft_ids
                output = output[export.heads.draft_ids.to(output.device)]
                values["truncated_vocab_size"] = config.draft_vocab_size
            tensors["lm_head.weight"] = output
        self.write_weights(directory, {WEIGHTS: tensors})
        write_json(directory / CONFIG, values)


class Universal(Tgi):
    """The original's names, both kinds of config keys, and a copy of the base's output layer in a separate file.

    vLLM reads all files; TGI reads only the file with the heads; LoRAX ignores names that it does not know.
    """

    name = "universal"
    summary = "vLLM 0.32, Text Generation Inference and LoRAX, one directory for all three"
    files = Foreign.files

    def ships_base(self, config: HeadsConfig) -> bool:
        """See ``Format``: the tokenizer too."""
        return True

    def matches(self, directory: Path) -> bool:
        """See ``Format``; decided by the model type and the original's keys."""
        values = peek_config(directory)
        return values.get("model_type") == "medusa" and "medusa_num_heads" in values

    def write(self, export: Export, directory: Path) -> None:
        """See ``Format``: writes weights, the needed parts of the base, its tokenizer if it is known, and config."""
        values = original_values(export) | vllm_values(export.heads.config)
        files = {SAFETENSORS: original_tensors(export)}
        if not export.heads.config.own_lm_heads:
            files[BASE_OUTPUT] = {"lm_heads.0.weight": base_output(export, self.name)}
        self.write_weights(directory, files)
        if export.base is not None:
            _write_tokenizer(export.base, directory)
        write_json(directory / CONFIG, values)


def vllm_values(config: HeadsConfig) -> dict[str, Any]:
    """Config keys that only vLLM reads."""
    return {"model_type": "medusa", "medusa_fc_bias": True, "original_lm_head": not config.own_lm_heads}


def base_output(export: Export, name: str) -> Tensor:
    """The base's output layer [V, D], if the format can store it.

    Raises:
        ValueError: No base is given, or its output layer is more than a matrix.
    """
    if export.base is None:
        raise ValueError(f"format {name!r} ships the output layer of the base and no base is given; give the base too")
    if getattr(export.base.model.get_output_embeddings(), "bias", None) is not None:
        raise ValueError(
            f"output layer of the base ({export.base.name}) has a bias and format {name!r} cannot hold it; choose"
            " another format"
        )
    return export.base.lm_head_weight


def _write_tokenizer(base: BaseModel, directory: Path) -> None:
    with tempfile.TemporaryDirectory() as beside:
        base.tokenizer.save_pretrained(beside)
        for source in filter(Path.is_file, Path(beside).rglob("*")):  # several chat templates are in a folder
            target = directory / source.relative_to(beside)
            target.parent.mkdir(exist_ok=True)
            replace_file(target, functools.partial(shutil.copyfile, source))
