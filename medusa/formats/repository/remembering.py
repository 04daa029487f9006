"""Heads that see the text, through layers with keys and values of their own.

Their rows are those of the model's cache: the row of a position reads the model's hidden state there. "attention" heads
apply one layer to its own output, once per depth (EAGLE-3). "block" heads compute a block of rows, one per depth, in
one pass (DFlash, DSpark).

Legend: B sequences, A new rows of their texts, L rows of the texts, m tree nodes of one level, n rows of a pass, K
heads, D hidden size, F = D * (1 + feature layers), R rank, H attention heads, G key heads, d their size.
"""

from abc import ABC, abstractmethod
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import linear, rms_norm, scaled_dot_product_attention, silu

from .base import HOLE, Base
from .layer import LayerConfig

BLOCK = 32
"""A window begins with a whole block, and the first block of a text is always seen."""
Angles = tuple[Tensor, Tensor]  # cosines and sines [B, 1, n, d]


class Memory(NamedTuple):
    """What the layers have computed of the texts. It only grows: drafted nodes never enter it."""

    positions: Tensor  # [B, L]; HOLE where there is no row
    keys: Tensor  # [layers, B, G, L, d]
    values: Tensor


class Layer:
    """A decoder layer like Llama's, in pieces."""

    def __init__(self, shape: LayerConfig, tensors: dict[str, Tensor], prefix: str = "") -> None:
        self._shape, self._tensors, self._prefix = shape, tensors, prefix

    def norm(self, name: str, x: Tensor) -> Tensor:
        """RMS norm of the last dimension."""
        return rms_norm(x, x.shape[-1:], self._tensors[f"{self._prefix}{name}_norm.weight"], self._shape.rms_norm_eps)

    def project(self, name: str, x: Tensor) -> Tensor:
        """A linear layer."""
        name = f"{self._prefix}{name}_proj"
        return linear(x, self._tensors[f"{name}.weight"], self._tensors.get(f"{name}.bias"))

    def query(self, normed: Tensor, angles: Angles) -> Tensor:
        """Rotated queries [B, H, n, d] of normed rows."""
        return self._turned("query", self._split("q", normed), angles)

    def key_value(self, normed: Tensor, angles: Angles) -> tuple[Tensor, Tensor]:
        """Rotated keys, and values [B, G, n, d] of normed rows."""
        return self._turned("key", self._split("k", normed), angles), self._split("v", normed)

    def finish(self, x: Tensor, query: Tensor, keys: Tensor, values: Tensor, seen: Tensor) -> Tensor:
        """The layer's output [B, n, D] for rows x, whose queries see the keys where ``seen`` [B, n, keys] is true."""
        mixed = scaled_dot_product_attention(query, keys, values, attn_mask=seen[:, None], enable_gqa=True)
        x = x + self.project("o", mixed.transpose(1, 2).flatten(2))
        normed = self.norm("mlp", x)
        out: Tensor = x + self.project("down", silu(self.project("gate", normed)) * self.project("up", normed))
        return out

    def _split(self, name: str, normed: Tensor) -> Tensor:
        heads: Tensor = self.project(name, normed).unflatten(-1, (-1, self._shape.head_dim))
        return heads.transpose(1, 2)

    def _turned(self, name: str, x: Tensor, angles: Angles) -> Tensor:
        x = self.norm(name, x) if self._shape.norm_heads else x
        left, right = x.chunk(2, dim=-1)
        return x * angles[0] + torch.cat([-right, left], dim=-1) * angles[1]


class Remembering(ABC):
    """The common part of both architectures: what their layers read, and what reads them."""

    def __init__(self, config: dict[str, Any], tensors: dict[str, Tensor]) -> None:
        self._shape, self._tensors = LayerConfig(**config["layer"]), tensors
        self._rotary = self._shape.rotary().to(tensors["output_norm.weight"].device)
        self._layer = Layer(self._shape, tensors)

    def remember(
        self, base: Base, memory: Memory | None, hidden_BAF: Tensor, tokens_BA: Tensor, positions_BA: Tensor
    ) -> Memory:
        """See ``Heads.remember``."""
        state_BAD = self._fuse(base, hidden_BAF)
        pairs = self._keys_values(base, state_BAD, tokens_BA, self._angles(positions_BA, state_BAD))
        new = Memory(positions_BA, *map(torch.stack, zip(*pairs, strict=True)))
        if memory is None:
            return new
        positions = torch.cat([memory.positions, new.positions], dim=1)
        return Memory(positions, *(torch.cat(both, dim=3) for both in zip(memory[1:], new[1:], strict=True)))

    @abstractmethod
    def begin(self, base: Base, memory: Memory, roots_B: Tensor, hidden_BF: Tensor) -> Any:
        """The state before the first level."""

    @abstractmethod
    def level(self, base: Base, head: int, state: Any, slots_Bm: Tensor, tokens_Bm: Tensor) -> tuple[Tensor, Any]:
        """Features [B, m, D] of m nodes, and the next state; see ``Heads``."""

    @abstractmethod
    def _keys_values(
        self, base: Base, state_BAD: Tensor, tokens_BA: Tensor, angles: Angles
    ) -> list[tuple[Tensor, Tensor]]:
        """Keys and values [B, G, A, d] of rows of texts, by layer."""

    def _fuse(self, base: Base, hidden: Tensor) -> Tensor:
        """The layers' input [..., D], made of the model's hidden states [..., F]."""
        if "fusion.weight" not in self._tensors:
            return hidden
        layers = hidden[..., base.hidden_size :].unflatten(-1, (-1, base.hidden_size))
        if self._shape.norm_features:
            normed = layers.shape[-2 if self._shape.norm_jointly else -1 :]
            layers = rms_norm(layers, normed, eps=self._shape.rms_norm_eps) * self._tensors["feature_norm"]
        return linear(layers.flatten(-2), self._tensors["fusion.weight"])

    def _seen(self, memory: Memory) -> Tensor:
        """The rows of the texts that drafted nodes see, bool [B, 1, L]."""
        seen_BL = memory.positions != HOLE
        if self._shape.window is not None:
            lengths_B1 = memory.positions.amax(1, keepdim=True) + 1
            start_B1 = (lengths_B1 - self._shape.window).clamp(min=0) // BLOCK * BLOCK
            seen_BL = seen_BL & ((memory.positions < BLOCK) | (memory.positions >= start_B1))
        return seen_BL[:, None]

    def _angles(self, positions_Bn: Tensor, like: Tensor) -> Angles:
        cosines, sines = self._rotary(like, positions_Bn)
        return cosines[:, None], sines[:, None]

    def _scaled(self, normed: Tensor) -> Tensor:
        """The input of the output layer."""
        return normed * self._tensors["gain"] if "gain" in self._tensors else normed


class Growth(NamedTuple):
    """A growing tree: the layer's input [B, m, D] below the last m nodes, and what these nodes see."""

    states: Tensor
    seen: Tensor  # [B, m, rows of the text and nodes]
    positions: Tensor  # [B, 1] of the text's last row
    keys: Tensor
    values: Tensor


class Attention(Remembering):
    """One layer, applied to its own output; a row also reads the token after it, so the text's last row is the root."""

    def begin(self, base: Base, memory: Memory, roots_B: Tensor, hidden_BF: Tensor) -> Growth:
        """The root's input; its key and value are the last ones of the text."""
        positions_B1, states_B1D = memory.positions.amax(1, keepdim=True), self._fuse(base, hidden_BF)[:, None]
        return Growth(states_B1D, self._seen(memory), positions_B1, memory.keys[0], memory.values[0])

    def level(self, base: Base, head: int, state: Growth, slots_Bm: Tensor, tokens_Bm: Tensor) -> tuple[Tensor, Growth]:
        """See ``Remembering``."""
        states, seen, positions, keys, values = state
        states, seen = (x.gather(1, slots_Bm[..., None].expand(-1, -1, x.shape[-1])) for x in (states, seen))
        read, angles = self._read(base, states, tokens_Bm), self._angles(positions + head, states)
        if head:
            pair = self._layer.key_value(read, angles)
            keys, values = (torch.cat(both, dim=2) for both in zip((keys, values), pair, strict=True))
            itself = torch.eye(seen.shape[1], dtype=torch.bool, device=seen.device).expand(len(seen), -1, -1)
            seen = torch.cat([seen, itself], dim=2)
        states = self._layer.norm("state", states) if self._shape.norm_before_residual else states
        out = self._layer.finish(states, self._layer.query(read, angles), keys, values, seen)
        normed = self._layer.norm("output", out)
        state = Growth(normed if self._shape.norm_output else out, seen, positions, keys, values)
        return self._scaled(normed), state

    def _keys_values(
        self, base: Base, state_BAD: Tensor, tokens_BA: Tensor, angles: Angles
    ) -> list[tuple[Tensor, Tensor]]:
        return [self._layer.key_value(self._read(base, state_BAD, tokens_BA), angles)]

    def _read(self, base: Base, states: Tensor, tokens: Tensor) -> Tensor:
        embedded = base.embed(tokens)
        return torch.cat([self._layer.norm("token", embedded), self._layer.norm("state", states)], dim=-1)


class Block(Remembering):
    """A block of K rows after the text, which see the text and each other; tokens add a correction."""

    def __init__(self, config: dict[str, Any], tensors: dict[str, Tensor]) -> None:
        super().__init__(config, tensors)
        self._count, self._mask, self._own = config["num_heads"], config["mask_token"], config["own_correction"]
        self._layers = [Layer(self._shape, tensors, f"layers.{index}.") for index in range(config["num_layers"])]

    def begin(self, base: Base, memory: Memory, roots_B: Tensor, hidden_BF: Tensor) -> Tensor:
        """Features [B, K, D] of all depths, without corrections."""
        x_BKD, ahead_K = self._rows(base, roots_B, hidden_BF), torch.arange(1, self._count + 1, device=roots_B.device)
        angles = self._angles(memory.positions.amax(1, keepdim=True) + ahead_K, x_BKD)
        text_BKL = self._seen(memory).expand(-1, self._count, -1)
        seen = torch.cat([text_BKL, text_BKL.new_ones(len(roots_B), self._count, self._count)], dim=2)
        for layer, keys, values in zip(self._layers, memory.keys, memory.values, strict=True):
            normed = layer.norm("input", x_BKD)
            key, value = layer.key_value(normed, angles)
            keys, values = torch.cat([keys, key], dim=2), torch.cat([values, value], dim=2)
            x_BKD = layer.finish(x_BKD, layer.query(normed, angles), keys, values, seen)
        return self._scaled(self._layer.norm("output", x_BKD))

    def level(self, base: Base, head: int, state: Tensor, slots_Bm: Tensor, tokens_Bm: Tensor) -> tuple[Tensor, Tensor]:
        """See ``Remembering``; an own correction [B, m, R] follows the features, because it reads no output layer."""
        features, down = state[:, head, None], self._tensors["down.weight"]
        if self._own:
            return torch.cat([features.expand(-1, tokens_Bm.shape[1], -1), down[tokens_Bm]], dim=-1), state
        return features + linear(linear(base.unit_embed(tokens_Bm), down), self._tensors["up.weight"]), state

    def _keys_values(
        self, base: Base, state_BAD: Tensor, tokens_BA: Tensor, angles: Angles
    ) -> list[tuple[Tensor, Tensor]]:
        normed_BAD = self._layer.norm("text", state_BAD)
        return [layer.key_value(normed_BAD, angles) for layer in self._layers]

    def _rows(self, base: Base, roots_B: Tensor, hidden_BF: Tensor) -> Tensor:
        """The block's rows [B, K, D] before the layers."""
        if self._mask is not None:
            unknown_BK = roots_B[:, None].new_full((len(roots_B), self._count - 1), self._mask)
            return base.embed(torch.cat([roots_B[:, None], unknown_BK], dim=1))
        root_BD = self._layer.project("root", self._layer.norm("root", base.embed(roots_B)))
        return (self._fuse(base, hidden_BF) + root_BD)[:, None] + self._tensors["depths"]
