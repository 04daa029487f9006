"""LOSSY: linear layers that multiply integers of 8 bits, for CPUs. The result is another model than the base.

Inputs of these layers are rounded in each pass, with a scale for each ``RUN`` of a row (kernels/whole.h). Weights that
are packed (``medusa.cpu.packed``) keep their numbers, so only inputs are rounded, as in llama.cpp. Plain weights are
rounded once, like GGUF's Q8_0.

Products of integers are exact, so a row's result does not depend on other rows: with respect to the rounded model,
trees and batches are as lossless as with plain weights.
"""

from torch import Tensor, nn

from medusa.base.mixture_block import mixture_of
from medusa.cpu.experts import PackedExperts, are_known
from medusa.cpu.native import DTYPES, available, replace_linears
from medusa.cpu.packed import Packed, PackedEmbedding, PackedLinear


class Int8Linear(PackedLinear):
    """A frozen linear layer whose inputs are rounded to 8 bits; its weight is packed."""

    @classmethod
    def of(cls, linear: nn.Linear) -> "Int8Linear":
        """The layer with a plain layer's weights, rounded to 8 bits."""
        bias: Tensor | None = linear.bias
        return cls(Packed.rounded(linear.weight.detach()).for_here(int8=True), bias, linear.weight.dtype)


def round_linears(model: nn.Module, output: nn.Module | None = None) -> int:
    """Round the linear layers and the experts below ``model`` in place; returns their number.

    Args:
        model: Any model on a CPU, in a dtype that the kernels support.
        output: The output layer. It is not rounded if its weights are plain, because their errors would directly
            change the text.

    Raises:
        ValueError: The kernels do not run on this machine, or there is no linear layer.
    """
    if not available():
        raise ValueError("products of 8 bits (int8) need the C++ kernels, which are not available here; leave int8 out")
    # The one number of a gate has few weights to read, and all of its MLP's output depends on it; so do routers.
    kept = {output, *(one for one in model.modules() if isinstance(one, nn.Linear) and one.out_features == 1)}
    kept |= {parts.scores for part in model.modules() if (parts := mixture_of(part)) is not None}
    count = replace_linears(model, lambda linear: linear if linear in kept else Int8Linear.of(linear))
    reordered = dict[int, Packed]()  # embeddings may share their weight with the output layer
    found = [path for path, module in model.named_modules() if type(module) is PackedLinear or _are_experts(module)]
    for path in found:  # by their paths: what is replaced does not stay in memory
        module = model.get_submodule(path)
        if type(module) is PackedLinear:
            packed = reordered[id(module.packed)] = module.packed.for_here(int8=True)
            model.set_submodule(path, Int8Linear(packed, module.bias))
            count += 1
        else:
            experts = module if isinstance(module, PackedExperts) else PackedExperts.of(module)
            model.set_submodule(path, experts.rounded())
            count += 1
    for module in model.modules():
        if isinstance(module, PackedEmbedding):
            module.packed = reordered.get(id(module.packed), module.packed)
    if not count:
        raise ValueError(f"int8 rounds linear layers in {DTYPES} and there are none; leave int8 out")
    return count


def _are_experts(module: nn.Module) -> bool:
    return isinstance(module, PackedExperts) or are_known(module)
