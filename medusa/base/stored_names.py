"""Where the tensors of a file stand in the model: transformers renames some, and joins or changes others."""

import re
from collections import defaultdict
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

from torch import Tensor
from transformers import PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import WeightConverter, WeightRenaming, WeightTransform, rename_source_key


class Steps:
    """transformers' steps from the tensors of a file to those of a model.

    Args:
        steps: Renamings come before changes; of these one at most meets a tensor.
    """

    def __init__(self, steps: Iterable[WeightTransform]) -> None:
        steps = list(steps)
        self._renamings = [step for step in steps if isinstance(step, WeightRenaming)]
        self._converters = [step for step in steps if isinstance(step, WeightConverter)]
        self._by_pattern = {pattern: step for step in self._converters for pattern in step.source_patterns}

    def find(self, stored: str) -> tuple[str, str | None, Any]:
        """The model's name for a tensor of the file, and the pattern and the change that meet it."""
        name, pattern = rename_source_key(stored, self._renamings, self._converters)
        return name, pattern, self._by_pattern.get(pattern)

    def renamed(self, stored: str) -> str:
        """The name before the change."""
        return str(rename_source_key(stored, self._renamings, [])[0])


def changed(change: Any, tensors: Mapping[str, Any], name: str) -> Tensor:
    """The model's tensor with this name, which a change makes of stored ones, by their patterns; None = no change."""
    made = dict(tensors)
    for operation in () if change is None else change.operations:
        sources = change.source_patterns if len(made) > 1 else list(made)
        made = operation.convert(made, source_patterns=sources, target_patterns=[name])
    found: Tensor
    (found,) = made.values()
    return found


class Place(NamedTuple):
    """The place of a stored tensor.

    Attributes:
        name: The model's tensor.
        order: Among those that it is joined of: number of the expert, and which of the expert's tensors it is.
    """

    name: str
    order: tuple[int, int] = (0, 0)


class Places(Steps):
    """The places of a model's tensors in its checkpoints."""

    def __init__(self, model: PreTrainedModel) -> None:
        super().__init__(get_model_conversion_mapping(model))

    def of(self, key: str) -> Place:
        """The place of a stored tensor with this name."""
        name, pattern, change = self.find(key)
        if pattern is None:
            return Place(name)
        form = re.escape(pattern.lstrip("^")).replace(r"\*", r"(\d+)")
        expert = re.search(form, self.renamed(key)) if pattern.count("*") == 1 else None
        return Place(name, (int(expert[1]) if expert else 0, change.source_patterns.index(pattern)))

    def joined(self, stored: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The model's tensors, made of stored ones as transformers makes them."""
        found, changes = dict[str, Tensor](), dict[str, Any]()
        parts = defaultdict[str, dict[tuple[int, int], Tensor]](dict)
        for key, tensor in stored.items():
            name, _, change = self.find(key)
            if change is None or len(change.target_patterns) > 1:
                found[name] = tensor
            else:
                changes[name], parts[name][self.of(key).order] = change, tensor
        for name, tensors in parts.items():
            patterns = defaultdict[int, list[Tensor]](list)
            for (_, number), tensor in sorted(tensors.items(), key=lambda one: one[0]):
                patterns[number].append(tensor)
            sources = changes[name].source_patterns
            found[name] = changed(changes[name], {sources[one]: patterns[one] for one in sorted(patterns)}, name)
        return found
