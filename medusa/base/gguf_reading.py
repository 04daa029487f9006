"""Reads a model's tensors from a GGUF file, one at a time (``gguf_families``: the names, settings and changes)."""

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

    def _values(self, made_of: Sequence[Stored], shape: torch.Size) -> Tensor:
        values = self._changes.values({one.name: torch.from_numpy(one.numbers()) for one in made_of})
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
