"""The contract of tree attention: a step's plan, a layer's numbers, and whoever computes.

A step makes one ``TreePlan``; every layer then asks the plan's backend for the attention of its N tree rows over
L cached rows and the rows' own ancestors.
"""

from collections.abc import Mapping
from functools import cached_property
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from medusa.attention.spans import Span
from medusa.tree import Draft

WORD = 32
"""Bits of a mask word."""


class Scoring(NamedTuple):
    """How a layer turns products of queries and keys into weights.

    Attributes:
        scaling: Factor on the products.
        window: Sliding window in tokens, by position and not by row; None = full attention.
        softcap: Scores become ``softcap * tanh(score / softcap)`` where given.
        sinks: [H] score of a key that every row sees and that has no value, where given.
        chunk: A row sees its own chunk of this many positions only; None = no chunks.
    """

    scaling: float
    window: int | None = None
    softcap: float | None = None
    sinks: Tensor | None = None
    chunk: int | None = None


class BlockTable(NamedTuple):
    """Where the cache rows of sequences stand that are kept in blocks, anywhere in a layer's buffers.

    Attributes:
        blocks: [slots, W] int64, the blocks of each sequence in order; any number where it has none.
        rows: Rows of a block.
    """

    blocks: Tensor
    rows: int

    def places(self, positions_BN: Tensor) -> Tensor:
        """[B, N] rows of the flattened buffers that hold these positions of the first B slots."""
        return self.blocks.gather(1, positions_BN // self.rows) * self.rows + positions_BN % self.rows


class TreeAttention(Protocol):
    """Computes the attention of one layer over tree rows.

    On a GPU nothing in it waits for the device, and its shapes follow from tensors' shapes and ``plan.kv_length``
    alone: the call can be captured in a CUDA graph. True lengths are read from ``plan.lengths`` on the device.
    """

    name: str
    dtypes: frozenset[torch.dtype]
    """Of queries, keys and values."""
    recordable: bool
    """The call can be captured in a CUDA graph; always so on a GPU."""

    def __init__(self, device: torch.device) -> None:
        """Prepare for a device.

        Raises:
            BackendUnavailableError: It does not run there.
        """

    def objection(self, query: Tensor, key: Tensor, value: Tensor, scoring: Scoring) -> str | None:
        """Why this backend cannot compute such a layer (the reference then does), None if it can."""

    def attend(self, plan: "TreePlan", query: Tensor, key: Tensor, value: Tensor, scoring: Scoring) -> Tensor:
        """Attention of tree rows; rows beyond a sequence's L + N count for nothing.

        Args:
            plan: The step's plan; what a backend derives from it is made at the first layer and kept.
            query: [B, H, N, D].
            key: [B, Hkv, S, D] view of [slots, capacity, Hkv, D] with S = ``plan.kv_length``; the tree rows of a
                sequence are already written at rows L .. L+N-1.
            value: [B, Hkv, S, Dv], likewise. Where the plan has a table, which the exact backend alone is given, both
                are [1, Hkv, rows of all blocks, D] instead.
            scoring: The layer's numbers.

        Returns:
            [B, H, N, Dv] in the dtype of the query; which strides it has is the backend's choice.
        """


class BackendUnavailableError(ValueError):
    """A backend does not run here: its package or its device is missing."""


class KernelError(RuntimeError):
    """A backend's kernel for such a layer cannot run on this device; ``objection`` says so from now on."""


class TreePlan:
    """What the N tree rows of each sequence may attend to: L cached rows and their own ancestors.

    Made once per step, on the device and without waiting for it; every form of the mask is built when a layer first
    asks for it and shared by the layers after it.

    Attributes:
        draft: The trees.
        lengths: [B] int64, L of every sequence.
        kv_length: S, rows of the cache that attention reads: at least every L + N. A host number; with a fixed bucket
            here all shapes are fixed.
        backend: Who computes.
        spans: Windows and chunks by layer index; layers that are missing see all that stands before.
        table: Where cached rows and tree rows stand that are in blocks; None = side by side.
    """

    def __init__(
        self,
        draft: Draft,
        lengths_B: Tensor,
        kv_length: int,
        backend: TreeAttention,
        spans: Mapping[int | None, Span] | None = None,
        table: BlockTable | None = None,
    ) -> None:
        self.draft = draft
        self.lengths = lengths_B
        self.kv_length = kv_length
        self.backend = backend
        self.spans = spans or {}
        self.table = table
        self._biases: dict[tuple[object, ...], Tensor] = {}

    def span(self, layer: int | None) -> Span:
        """Window and chunk of the layer of that index."""
        return self.spans.get(layer, Span())

    def bias(
        self,
        groups: int,
        dtype: torch.dtype,
        device: torch.device,
        window: int | None = None,
        chunk: int | None = None,
    ) -> Tensor:
        """Additive mask [B, 1, groups * N, S]: 0 where a row may look, -inf elsewhere.

        Args:
            groups: Query heads per key head; the rows repeat for each of them.
            dtype: The dtype of the queries.
            device: Their device: the layers of a base may be spread over several.
            window: Sliding window in tokens, by position and not by row; None for full attention.
            chunk: Rows see their own chunk of this many positions only; None for other layers.
        """
        key = (groups, dtype, device, window, chunk)
        if key not in self._biases:
            visible_BNS = self._visible(window, chunk).to(device)
            zero = torch.zeros((), dtype=dtype, device=device)
            self._biases[key] = torch.where(visible_BNS, zero, float("-inf")).repeat(1, groups, 1)[:, None]
        return self._biases[key]

    @cached_property
    def words(self) -> Tensor:
        """[B, N, ceil(N / 32)] int32: bit j % 32 of word j // 32 of row i says whether j is i or an ancestor of i."""
        return pack_bits(self.draft.ancestors)

    @cached_property
    def lengths_int32(self) -> Tensor:
        """[B] int32, L of every sequence."""
        return self.lengths.to(torch.int32)

    @cached_property
    def depths_int32(self) -> Tensor:
        """[B, N] int32, contiguous: a node's position is L + its depth."""
        return self.draft.depths.to(torch.int32).contiguous()

    @cached_property
    def tree_rows(self) -> Tensor:
        """[B, N] int64: the cache row of every node."""
        nodes = self.draft.tokens.shape[1]
        return self.lengths[:, None] + torch.arange(nodes, device=self.lengths.device)

    @cached_property
    def positions(self) -> Tensor:
        """[B, N] int64: the position of every node."""
        return self.lengths[:, None] + self.draft.depths

    def gathered(self, rows: Tensor) -> Tensor:
        """[B, Hkv, S, D] of keys or values [1, Hkv, rows of all blocks, D]; 0 where nothing has been written."""
        assert self.table is not None, "rows are in blocks"
        positions_S = torch.arange(self.kv_length, device=rows.device)
        written_BS = positions_S < self.lengths[:, None] + self.draft.tokens.shape[1]
        places_BS = self.table.places(torch.where(written_BS, positions_S, 0))
        side_by_side = rows[0][:, places_BS].transpose(0, 1)
        return torch.where(written_BS[:, None, :, None], side_by_side, 0)

    def _visible(self, window: int | None, chunk: int | None) -> Tensor:
        """[B, N, S] bool."""
        draft, lengths_B11 = self.draft, self.lengths[:, None, None]
        batch, nodes = draft.tokens.shape
        rows_S = torch.arange(self.kv_length, device=draft.tokens.device)
        visible_BNS = (rows_S < lengths_B11).expand(batch, nodes, -1).clone()
        visible_BNS.scatter_(2, self.tree_rows[:, None].expand(-1, nodes, -1), draft.ancestors)
        if window is None and chunk is None:
            return visible_BNS
        key_positions_BS = rows_S.expand(batch, -1).clone().scatter_(1, self.tree_rows, self.positions)
        first_BN = self.positions // chunk * chunk if chunk is not None else self.positions - window + 1  # type: ignore[operator]
        return visible_BNS & (key_positions_BS[:, None] >= first_BN[:, :, None])


def pack_bits(mask: Tensor) -> Tensor:
    """Bool [..., N] as int32 words [..., ceil(N / 32)]; bits beyond N are 0."""
    padded = torch.nn.functional.pad(mask, (0, -mask.shape[-1] % WORD)).unflatten(-1, (-1, WORD))
    words: Tensor = (padded.long() << torch.arange(WORD, device=mask.device)).sum(-1)
    return words.to(torch.int32)  # bit 31 becomes the sign
