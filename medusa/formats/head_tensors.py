"""Tensors of Medusa heads by the names of other engines.

FasterDecoding/Medusa, for K heads of L layers, D the hidden size and V the vocabulary: ``{k}.{l}.linear.weight``
[D, D], ``{k}.{l}.linear.bias`` [D], and the head's own output layer, if it has one, ``{k}.{L}.weight`` [V, D].

vLLM: ``blocks.{k}.layers.{l}.weight``, ``blocks.{k}.layers.{l}.bias`` and ``lm_heads.{k}.weight``; beside them
``lm_head.weight`` [V, D], a copy of the base's output layer that all heads share, and ``token_map`` [V], the ids of the
tokens that heads can draft.
"""

import re
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor

from medusa.heads import DraftHeads

PREFIX = re.compile(r"medusa_heads?\.")
LAYER = re.compile(r"(?:(\d{1,4})\.(\d{1,4})\.linear|blocks\.(\d{1,4})\.layers\.(\d{1,4}))\.(weight|bias)", re.ASCII)
OUTPUT = re.compile(r"(?:(\d{1,4})\.\d{1,4}|lm_heads\.(\d{1,4}))\.weight", re.ASCII)


@dataclass
class HeadTensors:
    """Tensors of Medusa heads, by their role."""

    directory: Path
    weights: dict[tuple[int, int], Tensor] = field(default_factory=dict)
    """[D, D] by layer and head."""
    biases: dict[tuple[int, int], Tensor] = field(default_factory=dict)
    """[D] by layer and head."""
    outputs: dict[int, Tensor] = field(default_factory=dict)
    """Output layers [V, D] by head, if each has its own."""
    base_output: Tensor | None = None
    """The base's output layer [V, D]."""
    token_map: Tensor | None = None
    """Token ids of the V rows, if these are not the whole vocabulary."""

    @property
    def num_heads(self) -> int:
        """K, the number of heads."""
        return len({head for _, head in self.weights})

    @property
    def num_layers(self) -> int:
        """L, the number of layers of a head."""
        return len({layer for layer, _ in self.weights})

    @property
    def hidden_size(self) -> int:
        """D, the hidden size."""
        return len(self.weights[0, 0])

    def add(self, name: str, tensor: Tensor) -> None:
        """Add a tensor by its name.

        Raises:
            ValueError: The name is not one of Medusa heads.
        """
        name = PREFIX.sub("", name, count=1)
        if found := LAYER.fullmatch(name):
            head, layer, kind = (group for group in found.groups() if group is not None)
            (self.weights if kind == "weight" else self.biases)[int(layer), int(head)] = tensor
        elif found := OUTPUT.fullmatch(name):
            self.outputs[int(found[1] or found[2])] = tensor
        elif name == "lm_head.weight":
            self.base_output = tensor
        elif name == "token_map":
            self.token_map = tensor
        else:
            raise ValueError(
                f"heads directory ({self.directory}) holds a tensor that is not one of Medusa heads ({name!r}); give a"
                " folder that holds heads alone"
            )

    def share_output(self) -> None:
        """Use the first head's output layer as the base's, which all heads share."""
        if self.base_output is None:
            self.base_output = self.outputs.get(0)
        self.outputs.clear()

    def check(self) -> None:
        """Raise ValueError if a tensor is missing or has a wrong shape."""
        grid = {(layer, head) for layer in range(self.num_layers) for head in range(self.num_heads)}
        if not grid or set(self.weights) != grid or not set(self.biases) <= grid:
            raise self._damaged("tensors of some layers or heads are missing")
        if self.outputs and set(self.outputs) != set(range(self.num_heads)):
            raise self._damaged("some heads have an output layer and some have none")
        size = self.weights[0, 0].shape[-1:]
        if not all(tensor.is_floating_point() for tensor in [*self.weights.values(), *self.all_outputs]):
            raise self._damaged("weights are not floating point numbers")
        if {weight.shape for weight in self.weights.values()} != {torch.Size([*size, *size])}:
            raise self._damaged("weights of layers are not square matrices of one size")
        if not {bias.shape for bias in self.biases.values()} <= {size}:
            raise self._damaged("biases do not fit the weights")
        outputs = {output.shape for output in self.all_outputs}
        if len(outputs) > 1 or any(len(shape) != 2 or shape[1:] != size for shape in outputs):
            raise self._damaged("output layers do not fit the weights")
        if self.token_map is not None:
            self._check_token_map(self.token_map)

    def _check_token_map(self, token_map: Tensor) -> None:
        if token_map.dim() != 1 or not len(token_map) or token_map.is_floating_point():
            raise self._damaged("token_map is not a list of token ids")
        for rows in map(len, self.all_outputs):
            if rows != len(token_map) and not (token_map.min() >= 0 and token_map.max() < rows):
                raise self._damaged("token_map does not fit the output layer")

    def _damaged(self, why: str) -> ValueError:
        return ValueError(f"heads in {self.directory} are damaged: {why}; copy the folder again")

    @property
    def all_outputs(self) -> list[Tensor]:
        """All output layers."""
        return [*self.outputs.values(), *([] if self.base_output is None else [self.base_output])]

    def state(self) -> dict[str, Tensor]:
        """The state dict of ``MedusaHeads``: missing biases are 0, and columns are sorted by token id."""
        places, shape = sorted(self.weights), (self.num_layers, self.num_heads)
        no_bias = self.weights[0, 0].new_zeros(self.hidden_size)
        state = {
            "weight": torch.stack([self.weights[place] for place in places]).unflatten(0, shape),
            "bias": torch.stack([self.biases.get(place, no_bias) for place in places]).unflatten(0, shape),
        }
        outputs = [self.outputs[head] for head in sorted(self.outputs)]
        if self.token_map is not None:
            state["draft_ids"], order = self.token_map.long().sort()
            whole = any(len(output) > len(order) for output in outputs)
            outputs = [output[state["draft_ids"] if whole else order] for output in outputs]
        if outputs:
            state["lm_heads"] = torch.stack(outputs)
        return state


def head_tensors(heads: DraftHeads, layer_name: str, output_name: str) -> dict[str, Tensor]:
    """The tensors of Medusa heads by the names of an engine, in their dtype.

    Args:
        heads: Heads of the architecture "medusa".
        layer_name: Name of a layer, with {head} and {layer}.
        output_name: Name of a head's own output layer, with {head} and {layer}.
    """
    state, config = heads.state_dict(), heads.config
    tensors = {}
    for head in range(config.num_heads):
        for layer in range(config.num_layers):
            name = layer_name.format(head=head, layer=layer)
            tensors[f"{name}.weight"] = state["weight"][layer, head].clone()
            tensors[f"{name}.bias"] = state["bias"][layer, head].clone()
        if config.own_lm_heads:
            name = output_name.format(head=head, layer=config.num_layers)
            tensors[f"{name}.weight"] = state["lm_heads"][head].clone()
    return tensors
