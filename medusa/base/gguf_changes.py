"""The changes by which transformers' newer loader makes a model's tensors from those of a GGUF file (Qwen 3.5, LFM2).

The loader itself holds the whole model, and expands it in 16 bits, with more rounding than llama.cpp; here its list of
changes is applied to one tensor at a time, in float32.
"""

from collections.abc import Mapping

import torch
from torch import Tensor
from transformers import PretrainedConfig

from medusa.base.stored_names import Steps, changed


class Changes(Steps):
    """The changes of one family.

    Args:
        family: llama.cpp's name of it.
        config: The model's config.
    """

    def __init__(self, family: str, config: PretrainedConfig) -> None:
        from transformers.integrations.gguf.utils import get_gguf_conversion_mapping

        super().__init__(get_gguf_conversion_mapping(family, config))

    @staticmethod
    def known(family: str) -> bool:
        """Whether transformers has such a list for a family."""
        from transformers.integrations.gguf import is_gguf_arch_supported

        return bool(is_gguf_arch_supported(family))

    def name(self, stored: str) -> str:
        """The model's name for a tensor of the file."""
        return self.find(stored)[0]

    def values(self, stored: Mapping[str, Tensor]) -> Tensor:
        """The model's values, from those of the file in float32; of several tensors if they become one."""
        found = {self.find(name): tensor for name, tensor in stored.items()}
        (name, _, change), *_ = found
        return changed(change, {pattern or name: tensor for (_, pattern, _), tensor in found.items()}, name)

    def rows(self, stored: str, shape: tuple[int, ...]) -> Tensor:
        """int64 [O]: where the model's rows stand in a matrix [O, I] of the file, if only rows change places."""
        places = torch.arange(shape[0])[:, None].expand(shape)
        return self.values({stored: places})[:, 0].clone()
