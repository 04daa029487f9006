"""The changes that make a model's tensors from those of a GGUF file, one tensor at a time, in float32."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from transformers import PretrainedConfig
from transformers.integrations.gguf.utils import get_gguf_conversion_mapping

from medusa.base.gguf_families import FAMILIES
from medusa.base.stored_names import Steps, changed


class Changes(Steps):
    """The changes of one family.

    Args:
        family: Its key in ``FAMILIES``, or llama.cpp's name if transformers has a list of changes for it.
        config: The model's config.
    """

    def __init__(self, family: str, config: PretrainedConfig) -> None:
        known = FAMILIES.get(family)
        super().__init__(known.steps(config) if known else get_gguf_conversion_mapping(family, config))

    def name(self, stored: str) -> str:
        """The model's name for a tensor of the file."""
        return self.find(stored)[0]

    def place(self, stored: str) -> int:
        """The place of a tensor of the file among those that one of the model's tensors is made of."""
        _, pattern, change = self.find(stored)
        return change.source_patterns.index(pattern) if change else 0

    def values(self, stored: Mapping[str, Tensor]) -> Tensor:
        """The model's values, from those of the file in float32; of several tensors if they become one."""
        found = {self.find(name): tensor for name, tensor in stored.items()}
        (name, _, change), *_ = found
        return changed(change, {pattern or name: tensor for (_, pattern, _), tensor in found.items()}, name)

    def rows(self, stored: Mapping[str, tuple[int, ...]]) -> Tensor | None:
        """Where the rows of one of the model's tensors stand in the file's tensors, one after the other.

        Args:
            stored: Their shapes.

        Returns:
            int64 [R]; None if its rows are not rows of the file.
        """
        _, _, change = self.find(next(iter(stored)))
        if min(map(len, stored.values())) < 2 or not all(map(_keeps_rows, change.operations if change else ())):
            return None
        places, count = dict[str, Tensor](), 0
        for name, shape in stored.items():
            some = torch.Size(shape[:-1]).numel()
            places[name] = torch.arange(count, count + some).view(*shape[:-1], 1)
            count += some
        return self.values(places).flatten()


def _keeps_rows(operation: Any) -> bool:
    """Whether an operation moves whole rows only."""
    return getattr(operation, "supports_packed", False) and not hasattr(operation, "input_permutation")
