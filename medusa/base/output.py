"""A base's output layer: from hidden states to logits, with the family's scale and soft cap."""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig

from medusa.cpu.native import LinearKernel, NativeLinear, is_plain, native_linear
from medusa.cpu.packed import Packed, PackedLinear
from medusa.gpu.packed import PackedLinear as GpuLinear
from medusa.gpu.packed import expand


def state_size(config: PreTrainedConfig) -> int:
    """D, the width of last hidden states, which the output layer reads.

    OPT-350M's layers are wider: it projects the output of the last layer to the width of its embeddings.
    """
    return int(getattr(config, "word_embed_proj_dim", None) or config.hidden_size)


class Matrices(NamedTuple):
    """The weights at both ends of a base that computes nothing more there.

    Attributes:
        embeddings: [V, D], packed or not.
        scale: Factor on embeddings, to whose dtype the product is rounded.
        weight: [V, D] weight of the output layer, packed (in either order) or not.
        bias: [V] bias of the output layer, or None.
    """

    embeddings: Tensor | Packed
    scale: float
    weight: Tensor | Packed
    bias: Tensor | None


class OutputLayer:
    """Logits of last hidden states [..., D] of any dtype.

    Args:
        lm_head: The linear layer [V, D]; its weights are not copied.
        config: Config of the language model.

    Attributes:
        scale: The family's factor on logits.
    """

    def __init__(self, lm_head: nn.Module, config: PreTrainedConfig) -> None:
        self._lm_head = lm_head
        self.scale = float(getattr(config, "logit_scale", None) or 1.0)
        scaling = float(getattr(config, "logits_scaling", None) or 1.0)  # Granite's divides
        self.scale *= scaling if config.model_type == "hyperclovax" else 1 / scaling
        self._cap: float | None = getattr(config, "final_logit_softcapping", None)
        self._kernel: LinearKernel | None = None
        if isinstance(lm_head, NativeLinear):
            self._kernel = LinearKernel.of(lm_head.weight, lm_head.bias)
        elif isinstance(lm_head, PackedLinear):
            self._kernel = lm_head.kernel

    @property
    def weight(self) -> Tensor:
        """The weight [V, D]."""
        weight: Tensor = self._lm_head.weight  # type: ignore[assignment]
        return weight

    @property
    def device(self) -> torch.device:
        """The device on which it computes, also if its weights are offloaded until they are needed."""
        if isinstance(self._lm_head, PackedLinear | GpuLinear):
            return self._lm_head.packed.device
        device = self.weight.device
        return torch.device(self._lm_head._hf_hook.execution_device) if device.type == "meta" else device  # type: ignore[union-attr, arg-type]

    @property
    def linear(self) -> bool:
        """Whether logits are a linear function of hidden states, apart from a constant: no soft cap bends them."""
        return not self._cap

    @property
    def matrices(self) -> tuple[Tensor | Packed, Tensor | None] | None:
        """Weight and bias, if logits are hidden state times weight plus bias and nothing more; otherwise None."""
        layer = self._lm_head
        if self.scale != 1.0 or self._cap or isinstance(layer, GpuLinear):
            return None
        if isinstance(layer, PackedLinear):
            return layer.packed, layer.bias
        return (layer.weight, layer.bias) if is_plain(layer) else None

    def __call__(self, hidden: Tensor) -> Tensor:
        """Logits [..., V]."""
        if self._kernel is not None:
            return self._as_given(self._kernel(hidden.to(self._kernel.dtype)))
        dtype = self._lm_head.dtype if isinstance(self._lm_head, GpuLinear) else self.weight.dtype
        return self._as_given(self._lm_head(hidden.to(dtype)))

    def of(self, tokens: Tensor, pack: bool = False) -> Callable[[Tensor], Tensor]:
        """A function that computes only the columns of these tokens, see ``BaseModel.logits_of``."""
        layer = self._lm_head
        if isinstance(layer, PackedLinear | GpuLinear):
            index = tokens.to(layer.packed.device)
            weight = layer.packed.rows(index) if isinstance(layer, PackedLinear) else expand(layer.packed, index)
        elif self.weight.device.type == "meta":
            return lambda hidden: self(hidden)[..., tokens]
        else:
            index = tokens.to(self.weight.device)
            weight = self.weight[index]
        bias = getattr(layer, "bias", None)
        bias = None if bias is None else bias[index]
        linear = native_linear(weight, bias) if pack else lambda x: nn.functional.linear(x, weight, bias)
        return lambda hidden: self._as_given(linear(hidden.to(weight.dtype)))

    def _as_given(self, logits: Tensor) -> Tensor:
        if self.scale != 1.0:
            logits = logits * self.scale
        if self._cap:
            logits = self._cap * torch.tanh(logits / self._cap)
        return logits
