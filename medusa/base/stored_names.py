"""Where the tensors of a checkpoint stand in the model: transformers renames some, and joins those of experts."""

import re
from collections import defaultdict
from collections.abc import Mapping
from typing import Any, NamedTuple

from torch import Tensor
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
        self._steps = {pattern: step for step in self._converters for pattern in step.source_patterns}

    def of(self, key: str) -> Place:
        """The place of a stored tensor with this name."""
        name, pattern = rename_source_key(key, self._renamings, self._converters)
        if pattern is None:
            return Place(name)
        number = self._steps[pattern].source_patterns.index(pattern)
        form = re.escape(pattern.lstrip("^")).replace(r"\*", r"(\d+)")
        expert = re.search(form, rename_source_key(key, self._renamings, [])[0]) if pattern.count("*") == 1 else None
        return Place(name, (int(expert[1]) if expert else 0, number))

    def joined(self, stored: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The model's tensors, made of stored ones as transformers makes them."""
        found, parts = dict[str, Tensor](), defaultdict[str, dict[tuple[int, int], str]](dict)
        for key, tensor in stored.items():
            name, pattern = rename_source_key(key, self._renamings, self._converters)
            if pattern is None or len(self._steps[pattern].target_patterns) > 1:
                found[name] = tensor
            else:
                parts[name][self.of(key).order] = key
        for name, keys in parts.items():
            first = next(iter(keys.values()))
            step = self._steps[rename_source_key(first, self._renamings, self._converters)[1] or ""]
            tensors = defaultdict[str, list[Tensor]](list)
            for (_, number), key in sorted(keys.items()):
                tensors[step.source_patterns[number]].append(stored[key])
            made: dict[str, Any] = {one: tensors[one] for one in step.source_patterns if one in tensors}
            for change in step.operations:
                sources = step.source_patterns if len(made) > 1 else list(made)
                made = change.convert(made, source_patterns=sources, target_patterns=step.target_patterns)
            (found[name],) = made.values()
        return found
