"""The contract of tree attention: a pass's plan, a layer's numbers, and whoever computes.

A pass computes R rows: the nodes of trees, tree behind tree, each below the cached positions of its own sequence. Trees
differ in size: a plain decode step is a tree of one node, a chunk of a prompt a chain. A pass makes one ``TreePlan``;
every layer then asks the plan's backend for the attention of its rows.

Legend: S sequences, R rows of all trees, n_s nodes of a tree, L cached positions of a sequence, H heads, D head size.
"""

from collections.abc import Callable, Hashable, Mapping, Sequence
from functools import cached_property
from itertools import accumulate
from typing import Any, NamedTuple, Protocol, TypeVar

import torch
from torch import Tensor

from medusa.attention.spans import Span
from medusa.tree import Draft

T = TypeVar("T")

WORD = 32
"""Bits of a mask word."""


class Scoring(NamedTuple):
    """How a layer turns products of queries and keys into weights.

    Attributes:
        scaling: Factor on the products.
        window: Sliding window in tokens, by position and not by place in the cache; None = full attention.
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
    """Where the keys and values of sequences stand: place p of a sequence is place p % size of its block p // size.

    Attributes:
        blocks: [S, W] int64, the blocks of each sequence in order; any valid number where it has none.
        size: Positions of a block.
    """

    blocks: Tensor
    size: int

    def places(self, positions_SN: Tensor) -> Tensor:
        """[S, N] index of these places in keys or values [blocks * size, ...]."""
        return self.blocks.gather(1, positions_SN // self.size) * self.size + positions_SN % self.size


class TreeAttention(Protocol):
    """Computes the attention of one layer over the rows of a pass.

    On a GPU nothing in it waits for the device, and its shapes follow from tensors' shapes, ``plan.sizes`` and
    ``plan.kv_length`` alone: the call can be captured in a CUDA graph. True lengths are read on the device.
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
        """Attention of the rows; what stands in blocks beyond a sequence's L + n_s places counts for nothing.

        Args:
            plan: The pass's plan; what a backend derives from it is made at the first layer and kept.
            query: [R, H, D], any strides with the last 1.
            key: [blocks, size, Hkv, D] contiguous, the layer's whole part of the pool, read through ``plan.table``. The
                rows' own keys are already written, node i of a tree at place L + i of its sequence.
            value: [blocks, size, Hkv, Dv], likewise.
            scoring: The layer's numbers.

        Returns:
            [R, H, Dv].

        Raises:
            KernelError: The kernel for such a layer cannot run here.
        """


class BackendUnavailableError(ValueError):
    """A backend does not run here: its package or its device is missing."""


class KernelError(RuntimeError):
    """A backend's kernel for such a layer cannot run on this device; ``objection`` says so from now on."""


class TreePlan:
    """What the rows of a pass may attend to: each the cached positions of its sequence, and its own ancestors.

    Made once per pass, on the device and without waiting for it; every form of it is built when a layer first asks for
    it and shared by the layers after it.

    Attributes:
        drafts: The trees: of some sequences each, in order. Their rows follow one another, those of a tree in order.
        sizes: [S] nodes of each tree, numbers of the host.
        firsts: [S + 1] where the nodes of each tree begin among those of all, and their number; likewise.
        tokens: [R] int64.
        lengths: [S] int64 on the device, L of every sequence.
        kv_length: At least every L + n_s: a number of the host; with a fixed one here all shapes are fixed.
        table: Where cached positions and rows stand.
        backend: Who computes.
        spans: Windows and chunks by layer index; layers that are missing see all that stands before.
        computed: Nodes of each tree, the root first, that earlier passes have computed: the rows are those behind them.
            Trees are of one draft and one size then, and layers have no windows or chunks.
        together: Nodes of a tree see all of it (``Draft.together``); likewise.
        gathered: Layers hand over a copy of these sequences' blocks alone, in the order of the table.
    """

    def __init__(
        self,
        drafts: Sequence[Draft],
        lengths_S: Tensor,
        kv_length: int,
        table: BlockTable,
        backend: TreeAttention,
        spans: Mapping[int | None, Span] | None = None,
        computed: int = 0,
    ) -> None:
        self.drafts, self.computed, self.together = drafts, computed, drafts[0].together
        self.sizes = drafts[0].row_sizes if len(drafts) == 1 else [n for draft in drafts for n in draft.row_sizes]
        self.lengths = lengths_S
        self.kv_length = kv_length
        self.table = table
        self.backend = backend
        self.spans = spans or {}
        self.gathered = False
        self.firsts = [0, *accumulate(self.sizes)]
        self.tokens = self._rows([draft.tokens for draft in drafts])
        self._made: dict[Hashable, Any] = {}

    def once(self, form: Hashable, make: Callable[[], T]) -> T:
        """What a backend derives from the plan under that name, made when a layer first asks for it."""
        if form not in self._made:
            self._made[form] = make()
        made: T = self._made[form]
        return made

    def span(self, layer: int | None) -> Span:
        """Window and chunk of the layer of that index."""
        return self.spans.get(layer, Span())

    def alone(self, index: int) -> "TreePlan":
        """The plan of one of the sequences."""
        table, lengths_1 = BlockTable(self.table.blocks[index, None], self.table.size), self.lengths[index, None]
        for draft in self.drafts:
            if index < len(draft.tokens):
                break
            index -= len(draft.tokens)
        own = draft.select(torch.tensor([index], device=draft.tokens.device))
        return TreePlan([own], lengths_1, self.kv_length, table, self.backend, self.spans)

    def gathering(self) -> "TreePlan":
        """The plan for layers that compute on what is cached before their attention reads it: they get a copy."""
        plan = TreePlan(self.drafts, self.lengths, self.kv_length, self.table, self.backend, self.spans)
        plan.gathered, count = True, len(self.sizes) * self.width
        numbers = torch.arange(count, device=self.lengths.device).view(-1, self.width)
        plan.table = BlockTable(numbers, self.table.size)
        return plan

    @property
    def width(self) -> int:
        """Blocks of each sequence that attention may read."""
        return -(-self.kv_length // self.table.size)

    @property
    def rows(self) -> int:
        """R."""
        return self.firsts[-1] - self.computed * len(self.sizes)

    @cached_property
    def parents(self) -> Tensor:
        """[all nodes] int64 index of each one's parent among those of its tree, smaller than its own; 0 for a root."""
        if self.computed:
            return self.drafts[0].parents.flatten()
        return self._rows([draft.parents for draft in self.drafts])

    @cached_property
    def uniform(self) -> int | None:
        """Nodes of all trees where these are equal; None where they differ."""
        return self.sizes[0] if len(set(self.sizes)) == 1 else None

    @cached_property
    def depths(self) -> Tensor:
        """[R] int64 edges from the root."""
        return self._rows([draft.depths for draft in self.drafts])

    @cached_property
    def sequences(self) -> Tensor:
        """[R] int64 the sequence that each row belongs to."""
        index_S, device = torch.arange(len(self.sizes), device=self.lengths.device), self.lengths.device
        if self.uniform is not None:
            return index_S.repeat_interleave(self.uniform - self.computed)
        return index_S.repeat_interleave(torch.tensor(self.sizes, device=device), output_size=self.rows)

    @cached_property
    def nodes(self) -> Tensor:
        """[R] int64 index of each row among those of its tree."""
        index_N = torch.arange(max(self.sizes), device=self.lengths.device)
        return self._rows([index_N[: draft.tokens.shape[1]].expand_as(draft.tokens) for draft in self.drafts])

    @cached_property
    def positions(self) -> Tensor:
        """[R] int64: L + depth."""
        return self.lengths[self.sequences] + self.depths

    @cached_property
    def places(self) -> Tensor:
        """[R] int64 index in keys or values [blocks * size, ...] where each row's own go: place L + node."""
        at_R = self.lengths[self.sequences] + self.nodes
        blocks_R = self.table.blocks[self.sequences, at_R // self.table.size]
        return blocks_R * self.table.size + at_R % self.table.size

    @cached_property
    def ancestors(self) -> Tensor:
        """[R, max n_s] bool: node j of the row's tree is the row itself or an ancestor."""
        widest = max(draft.tokens.shape[1] for draft in self.drafts)
        masks = [draft.ancestors for draft in self.drafts]
        rows = self._rows([torch.nn.functional.pad(mask, (0, widest - mask.shape[-1])) for mask in masks])
        return rows[:, : max(self.sizes)]

    @cached_property
    def words(self) -> Tensor:
        """[R, ceil(max n_s / 32)] int32: bit j % 32 of word j // 32 says whether node j is the row or an ancestor."""
        return pack_bits(self.ancestors)

    def _rows(self, parts: Sequence[Tensor]) -> Tensor:
        """[R, ...] of what each draft has at its nodes [b, N, ...]."""
        if self.computed:
            return parts[0][:, self.computed :].flatten(0, 1)
        if len(parts) == 1:
            return self.drafts[0].flat(parts[0])
        return torch.cat([draft.flat(part) for draft, part in zip(self.drafts, parts, strict=True)])


def pack_bits(mask: Tensor) -> Tensor:
    """Bool [..., N] as int32 words [..., ceil(N / 32)]; bits beyond N are 0."""
    padded = torch.nn.functional.pad(mask, (0, -mask.shape[-1] % WORD)).unflatten(-1, (-1, WORD))
    words: Tensor = (padded.long() << torch.arange(WORD, device=mask.device)).sum(-1)
    return words.to(torch.int32)  # bit 31 becomes the sign
