"""Where the tensors of a checkpoint stand in the model: transformers renames some, and joins those of experts."""

import re
from typing import NamedTuple

from transformers import PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import WeightConverter, WeightRenaming, rename_source_key


class Place(NamedTuple):
    """The place of a stored tensor.

    Attributes:
        name: The model's tensor.
        order: Among those that it is joined of: number of the expert, and which of the expert's tensors it is.
    """

    name: str
    order: tuple[int, int] = (0, 0)


class Places:
    """The places of a model's tensors."""

    def __init__(self, model: PreTrainedModel) -> None:
        steps = get_model_conversion_mapping(model)
        self._renamings = [step for step in steps if isinstance(step, WeightRenaming)]
        self._converters = [step for step in steps if isinstance(step, WeightConverter)]
        self._orders = {
            pattern: (number, re.compile(re.escape(pattern.lstrip("^")).replace(r"\*", r"(\d+)")))
            for step in self._converters
            for number, pattern in enumerate(step.source_patterns)
            if pattern.count("*") == 1
        }

    def of(self, key: str) -> Place:
        """The place of a stored tensor with this name."""
        name, pattern = rename_source_key(key, self._renamings, self._converters)
        if pattern not in self._orders:
            return Place(rename_source_key(key, self._renamings, [])[0])
        number, form = self._orders[pattern]
        expert = form.search(rename_source_key(key, self._renamings, [])[0])
        return Place(name, (int(expert[1]), number)) if expert else Place(name)
