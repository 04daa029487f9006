"""Reads a model's tensors from a GGUF file, one at a time (``gguf_families``: the names, settings and changes)."""

import copy
import logging
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor
from tqdm import tqdm
from transformers import AutoModelForCausalLM, PreTrainedModel
from transformers.initialization import no_init_weights

from medusa.base.gguf_changes import Changes
from medusa.base.gguf_config import read_config
from medusa.base.gguf_families import family_of
from medusa.base.gguf_tensors import Stored, stored_tensors
from medusa.cpu.experts import shape_in_order
from medusa.cpu.packed import DTYPE

logger = logging.getLogger(__name__)

MTP = "mtp.safetensors"
"""File with the multi-token-prediction layer in the directory of a base, if its GGUF file has one that can be used."""
WITH_MTP = ("qwen3_5_text", "qwen3_5_moe_text", "qwen3_next")
"""Families whose multi-token-prediction layer is read."""
MTP_NORMS = {"nextn.enorm": "enorm", "nextn.hnorm": "hnorm", "nextn.shared_head_norm": "post_norm"}
"""Norms of that layer, by llama.cpp's names and by transformers'."""


class Source(NamedTuple):
    """What one of the model's tensors is made of.

    Attributes:
        name: Its name in the model.
        shape: Its shape; that of experts is in the order of the kernel (``medusa.cpu.experts``).
        stored: The file's tensors.
        rows: int64, where its rows stand in these, one after the other; None if they are no rows of the file.
        values: Reads its values, of the model's dtype. ValueError: The file's have another shape, or an unknown type.
    """

    name: str
    shape: torch.Size
    stored: Sequence[Stored]
    rows: Tensor | None
    values: Callable[[], Tensor]


class Reading:
    """A GGUF file being read.

    Args:
        file: The file.

    Attributes:
        header: Values of its header, without long lists.
        outline: The model on the meta device, without values.

    Raises:
        ImportError: The package ``gguf`` is missing.
        ValueError: The file is damaged, its family is not known, or it lacks tensors of the model.
    """

    def __init__(self, file: Path):
        self._file = file
        self.header, self._stored = stored_tensors(file)
        config = read_config(file, self.header, self._stored)
        with torch.device("meta"), no_init_weights():
            self.outline: PreTrainedModel = AutoModelForCausalLM.from_config(config, dtype=DTYPE)
        tensors = [stored.name for stored in self._stored]
        self._changes = Changes(family_of(self.header, tensors), config)
        self._names = {name: self._changes.name(name) for name in tensors}
        if missing := tensors_of(self.outline).keys() - set(self._names.values()):
            raise ValueError(f"it lacks {len(missing)} tensors of the model, for example {min(missing)}")

    def tensors(self) -> Iterator[Source]:
        """The model's tensors, in the order of the file."""
        wanted, parts = tensors_of(self.outline), defaultdict[str, list[Stored]](list)
        others = {stored: name for stored, name in self._names.items() if name not in wanted}
        # The former are in the config, the latter are not the decoder's.
        if left_out := [
            one for one, name in others.items() if not (one.startswith("rope_f") or name.startswith("mtp."))
        ]:
            said = "GGUF file %s: %s are left out; texts may differ from those of llama.cpp"
            logger.warning(said, self._file.name, ", ".join(left_out))
        whole = Counter(self._names.values())
        for stored in tqdm(self._stored, desc=f"tensors of {self._file.name}", unit="", disable=None, leave=False):
            name = self._names[stored.name]
            if name not in wanted:
                continue
            parts[name].append(stored)
            if len(parts[name]) < whole[name]:
                continue  # half of a tensor: an experts' gate without its up projection
            made_of = sorted(parts.pop(name), key=lambda one: self._changes.place(one.name))
            path, _, own = name.rpartition(".")
            shape = shape_in_order(self.outline.get_submodule(path), own)
            rows = self._changes.rows({one.name: one.shape for one in made_of})
            yield Source(name, shape, made_of, rows, partial(self._values, made_of, shape))

    def mtp(self) -> dict[str, Tensor]:
        """The multi-token-prediction layer: values by name in transformers' ``MtpLayer``; none if there is not one.

        It is the block behind the last layer, and a layer with full attention of the same family. Experts are in the
        order of the kernel.
        """
        config = copy.deepcopy(self.outline.config)
        block = f"blk.{config.num_hidden_layers}."
        stored = {one.name.removeprefix(block): one for one in self._stored if one.name.startswith(block)}
        if config.model_type not in WITH_MTP or "nextn.eh_proj.weight" not in stored:
            return {}
        config.num_hidden_layers += 1
        config.layer_types = [*config.layer_types, "full_attention"]
        changes = Changes(family_of(self.header, [one.name for one in self._stored]), config)
        found = {"eh_proj.weight": stored.pop("nextn.eh_proj.weight").tensor().to(DTYPE)}
        for theirs, own in MTP_NORMS.items():  # as other norms, they may be 1 larger in the file
            norm = stored.pop(f"{theirs}.weight").tensor()
            found[f"{own}.weight"] = changes.values({f"{block}attn_norm.weight": norm}).to(DTYPE)
        parts = defaultdict[str, list[Stored]](list)
        for one in stored.values():
            parts[changes.name(one.name).removeprefix(f"model.layers.{config.num_hidden_layers - 1}.")].append(one)
        for name, some in parts.items():
            if "nextn." not in name:  # what is left there are copies of the embeddings and the output layer
                some.sort(key=lambda one: changes.place(one.name))
                values = changes.values({one.name: one.tensor() for one in some})
                found[f"mtp_block.{name}"] = values.to(DTYPE).contiguous()
        return found

    def _values(self, made_of: Sequence[Stored], shape: torch.Size) -> Tensor:
        values = self._changes.values({one.name: one.tensor() for one in made_of})
        if values.shape != shape:
            shapes = tuple(values.shape), tuple(shape)
            raise ValueError(f"tensor {made_of[-1].name} has the shape {shapes[0]}, and the model's is {shapes[1]}")
        return values.to(DTYPE)


def tensors_of(model: PreTrainedModel) -> dict[str, Tensor]:
    """A model's tensors by name; tied tensors appear once."""
    found: dict[str, Tensor] = dict(model.state_dict())
    if model.config.tie_word_embeddings:
        for name in model._tied_weights_keys or ():
            found.pop(name, None)
    return found
