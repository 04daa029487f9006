"""Reads a model's tensors from a GGUF file through transformers, one at a time if the family allows it.

transformers decides names, shapes and values; it also undoes llama.cpp's changes (the order of rows in Llama's queries
and keys, norms plus 1).
"""

import logging
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from tqdm import tqdm
from transformers import AutoModelForCausalLM, GgufConfig, PretrainedConfig, PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.initialization import no_init_weights

from medusa.base.gguf_changes import Changes
from medusa.base.gguf_config import complete_config
from medusa.base.gguf_tensors import Stored, stored_tensors
from medusa.cpu.packed import DTYPE

logger = logging.getLogger(__name__)


class Reading:
    """A GGUF file being read.

    Args:
        file: The file.

    Attributes:
        header: Single values of its header.
        outline: The model on the meta device, without values.

    Raises:
        ImportError: The package ``gguf`` is missing.
        ValueError: The file is damaged, or transformers does not know the family.
    """

    def __init__(self, file: Path):
        from transformers.modeling_gguf_pytorch_utils import TENSOR_PROCESSORS, TensorProcessor, get_gguf_hf_weights_map

        self._file = file
        self.header, self._stored = stored_tensors(file)
        self._family = str(self.header.get("general.architecture", "unknown"))
        values, _ = PretrainedConfig.get_config_dict(file.parent, gguf_file=file.name)
        config = complete_config(values, self.header, self._stored)
        with torch.device("meta"), no_init_weights():
            self.outline: PreTrainedModel = AutoModelForCausalLM.from_config(config, dtype=DTYPE)
        self._changes = Changes(self._family, config) if Changes.known(self._family) else None
        self._processor = TENSOR_PROCESSORS.get(self._family, TensorProcessor)(config=dict(values))
        if self._changes:
            self._names = {stored.name: self._changes.name(stored.name) for stored in self._stored}
            return
        try:
            self._names = get_gguf_hf_weights_map(self.outline, self._processor)
        except NotImplementedError:  # this family can only be read as a whole
            self._names = {}

    def name(self, stored: Stored) -> str:
        """The model's name for a tensor of the file; "" if transformers does not read it."""
        return self._names.get(stored.name) or self._names.get(stored.name.removesuffix(".weight")) or ""

    def singly(self) -> bool:
        """Whether each of the model's tensors can be made from a few of the file's tensors, without the others."""
        wanted, steps = tensors_of(self.outline), get_model_conversion_mapping(self.outline)
        changed = any(step.rename_source_key(name)[1] for step in steps for name in wanted)
        return not changed and wanted.keys() <= set(map(self.name, self._stored))

    def tensors(self) -> Iterator[tuple[str, Tensor, list[Stored]]]:
        """Name and values of each of the model's tensors, if ``singly``, with the file's tensors that it is made of.

        Raises:
            ValueError: A tensor has another shape, or a type that cannot be expanded.
        """
        wanted, parts = tensors_of(self.outline), defaultdict[str, list[Stored]](list)
        others = {one.name: name for one in self._stored if (name := self.name(one)) not in wanted}
        # The former are in the config, the latter are not the decoder's.
        if left_out := [
            one for one, name in others.items() if not (one.startswith("rope_f") or name.startswith("mtp."))
        ]:
            said = "GGUF file %s: transformers leaves out %s; texts may differ from those of llama.cpp"
            logger.warning(said, self._file.name, ", ".join(left_out))
        whole = Counter(self.name(stored) for stored in self._stored)
        for stored in tqdm(self._stored, desc=f"tensors of {self._file.name}", unit="", disable=None, leave=False):
            name = self.name(stored)
            if name not in wanted:
                continue
            parts[name].append(stored)
            if len(parts[name]) < whole[name]:
                continue  # half of a tensor: an experts' gate without its up projection
            if self._changes and len(stored.shape) == 2:
                parts[name] = [replace(stored, order=self._changes.rows(stored.name, stored.shape))]
            yield name, self._made(name, parts[name], wanted[name].shape), parts.pop(name)

    def _made(self, name: str, parts: Sequence[Stored], shape: torch.Size) -> Tensor:
        """One of the model's tensors, from the file's tensors that it is made of."""
        values = self._values(name, parts)
        if values.shape != shape:
            shapes = tuple(values.shape), tuple(shape)
            raise ValueError(f"tensor {parts[-1].name} has the shape {shapes[0]}, and the model's is {shapes[1]}")
        return values.to(DTYPE)

    def _values(self, name: str, parts: Sequence[Stored]) -> Tensor:
        """The same in float32, of any shape."""
        if self._changes:
            return self._changes.values({one.name: torch.from_numpy(one.numbers()) for one in parts})
        made = dict[str, Tensor]()
        for one in parts:
            done = self._processor.process(
                one.numbers(), one.name, tensor_key_mapping=self._names, parsed_parameters={"tensors": made}
            )
            if done.name in self._names:
                made[self._names[done.name]] = torch.from_numpy(np.require(done.weights, requirements=["C", "W"]))
        return made[name]

    def whole(self) -> PreTrainedModel:
        """Load the whole model into memory.

        Raises:
            ValueError: The file lacks tensors of the model.
        """
        model, told = AutoModelForCausalLM.from_pretrained(
            self._file.parent, gguf_file=self._file.name, config=self.outline.config, dtype=DTYPE,
            output_loading_info=True,
            quantization_config=GgufConfig(dequantize=True),
        )  # fmt: skip
        if missing := sorted(told["missing_keys"]):
            raise ValueError(f"it lacks {len(missing)} tensors of the model, for example {missing[0]}")
        return model

    def tensors_in(self, model: PreTrainedModel) -> Iterator[tuple[str, Tensor, list[Stored]]]:
        """Like ``tensors``, for a model that ``whole`` has loaded."""
        parts = defaultdict[str, list[Stored]](list)
        for stored in self._stored:
            parts[self.name(stored)].append(stored)
        for name, tensor in tensors_of(model).items():
            yield name, tensor, parts[name]


def tensors_of(model: PreTrainedModel) -> dict[str, Tensor]:
    """A model's tensors by name; tied tensors appear once."""
    found: dict[str, Tensor] = dict(model.state_dict())
    if model.config.tie_word_embeddings:
        for name in model._tied_weights_keys or ():
            found.pop(name, None)
    return found
