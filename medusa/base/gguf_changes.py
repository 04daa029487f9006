"""The changes by which transformers' newer loader makes a model's tensors from those of a GGUF file (Qwen 3.5, LFM2).

The loader itself holds the whole model, and expands it in 16 bits, with more rounding than llama.cpp; here its list of
changes is applied to one tensor at a time, in float32.
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from transformers import PretrainedConfig
from transformers.core_model_loading import WeightConverter, WeightRenaming, rename_source_key


class Changes:
    """The changes of one family.

    Args:
        family: llama.cpp's name of it.
        config: The model's config.
    """

    def __init__(self, family: str, config: PretrainedConfig) -> None:
        from transformers.integrations.gguf.utils import get_gguf_conversion_mapping

        steps = get_gguf_conversion_mapping(family, config)
        self._renamings = [step for step in steps if isinstance(step, WeightRenaming)]
        self._converters = [step for step in steps if isinstance(step, WeightConverter)]
        self._by_pattern = {pattern: step for step in self._converters for pattern in step.source_patterns}

    @staticmethod
    def known(family: str) -> bool:
        """Whether transformers has such a list for a family."""
        from transformers.integrations.gguf import is_gguf_arch_supported

        return bool(is_gguf_arch_supported(family))

    def name(self, stored: str) -> str:
        """The model's name for a tensor of the file."""
        return self._find(stored)[0]

    def values(self, stored: Mapping[str, Tensor]) -> Tensor:
        """The model's values, from those of the file in float32; of several tensors if they become one."""
        found = {self._find(name): tensor for name, tensor in stored.items()}
        (name, _, step), *_ = found
        tensors = {pattern or name: tensor for (_, pattern, _), tensor in found.items()}
        for change in () if step is None else step.operations:
            sources = step.source_patterns if len(tensors) > 1 else list(tensors)
            tensors = change.convert(tensors, source_patterns=sources, target_patterns=[name])
        (tensor,) = tensors.values()
        return tensor

    def rows(self, stored: str, shape: tuple[int, ...]) -> Tensor:
        """int64 [O]: where the model's rows stand in a matrix [O, I] of the file, if only rows change places."""
        places = torch.arange(shape[0])[:, None].expand(shape)
        return self.values({stored: places})[:, 0].clone()

    def _find(self, stored: str) -> tuple[str, str | None, Any]:
        """The model's name for a tensor of the file, and the pattern and the change that meet it."""
        name, pattern = rename_source_key(stored, self._renamings, self._converters)
        return name, pattern, self._by_pattern.get(pattern)
