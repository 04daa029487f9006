"""The interface of tree attention: the plan of a pass, the scoring of a layer, and the backend that computes.

A pass computes R rows: the nodes of trees, one tree after another, each behind the cached positions of its own
sequence. Trees differ in size: a plain decode step is a tree of one node, and a chunk of a prompt is a chain. A pass
makes one ``TreePlan``; every layer then calls the plan's backend for the attention of its rows.

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
    """How a layer computes attention weights from products of queries and keys.

    Attributes:
        scaling: Factor on the products.
        window: Sliding window in tokens, by position and not by place in the cache; None = full attention.
        softcap: Scores become ``softcap * tanh(score / softcap)``; None = they do not change.
        sinks: [H] score of a key without a value that every row sees; None = no such key.
        chunk: Positions of a chunk; a row sees only its own chunk; None = no chunks.
    """

    scaling: float
    window: int | None = None
    softcap: float | None = None
    sinks: Tensor | None = None
    chunk: int | None = None


class BlockTable(NamedTuple):
    """Where the keys and values of sequences are: place p of a sequence is place p % size of its block p // size.

    Attributes:
        blocks: [S, W] int64, the blocks of each sequence in order; any valid number after the last one.
        size: Positions of a block.
    """

    blocks: Tensor
    size: int

    def places(self, positions_SN: Tensor) -> Tensor:
        """Indices [S, N] of these places in keys or values [blocks * size, ...]."""
        return self.blocks.gather(1, positions_SN // self.size) * self.size + positions_SN % self.size


class TreeAttention(Protocol):
    """Computes the attention of one layer over the rows of a pass.

    On a GPU the call never waits for the device, and its shapes depend only on shapes of tensors, ``plan.sizes`` and
    ``plan.kv_length``, so it can be captured in a CUDA graph. True lengths are read on the device.
    """

    name: str
    dtypes: frozenset[torch.dtype]
    """Supported dtypes of queries, keys and values."""
    recordable: bool
    """Whether the call can be captured in a CUDA graph; always true on a GPU."""

    def __init__(self, device: torch.device) -> None:
        """Prepare for a device.

        Raises:
            BackendUnavailableError: The backend does not run on it.
        """

    def objection(self, query: Tensor, key: Tensor, value: Tensor, scoring: Scoring) -> str | None:
        """Why this backend cannot compute such a layer, so that the reference does; None if it can."""

    def attend(self, plan: "TreePlan", query: Tensor, key: Tensor, value: Tensor, scoring: Scoring) -> Tensor:
        """Attention of the rows; contents of blocks beyond a sequence's L + n_s places are ignored.

        Args:
            plan: The plan of the pass; data that a backend derives from it are computed at the first layer and kept.
            query: [R, H, D] with any strides, the last one 1.
            key: [blocks, size, Hkv, D] contiguous, all keys of the layer in the pool, read through ``plan.table``. The
                rows' own keys are already written: node i of a tree is at place L + i of its sequence.
            value: [blocks, size, Hkv, Dv], all values, in the same layout.
            scoring: The scoring of the layer.

        Returns:
            [R, H, Dv].

        Raises:
            KernelError: The kernel for such a layer cannot run here.
        """


class BackendUnavailableError(ValueError):
    """A backend does not run here: its package or its device is missing."""


class KernelError(RuntimeError):
    """A backend's kernel for such a layer cannot run on this device; ``objection`` gives the reason from now on."""


class TreePlan:
    """The plan of a pass: every row attends to the cached positions of its sequence and to its own ancestors.

    It is made once per pass, on the device and without waiting for it. Derived data are computed when the first layer
    needs them, and shared by all later layers.

    Attributes:
        drafts: The trees; each draft is for one or several sequences, in order. Rows are in the order of trees, then of
            nodes.
        sizes: [S] number of nodes of each tree, on the host.
        firsts: [S + 1] index of each tree's first node among all nodes, then the number of all nodes; on the host.
        tokens: [R] int64 tokens of the rows.
        lengths: [S] int64 on the device, L of every sequence.
        kv_length: A number on the host that is at least every L + n_s; if it is fixed, all shapes are fixed.
        table: The blocks of cached positions and rows.
        backend: The attention backend.
        spans: Windows and chunks by layer index; layers that are missing see all earlier positions.
        computed: Number of nodes of each tree, from the root on, that earlier passes have computed; rows are the nodes
            after them. If it is not 0, there is one draft, and no layer has a window or chunks.
        together: All nodes of a tree see each other (``Draft.together``); there is one draft, and no layer has chunks.
            Windows count from each node's own position.
        gathered: Layers pass a copy of only these sequences' blocks, in the order of the table.
        skipped: [S] int64 number of positions of each text that the table and L leave out; None = none.
        reach: Larger than all positions of rows.
        texts: Line of each sequence in the pool's table, and its number of cached positions on the host; for layers
            that keep states.
        recurrent: Computes recurrent layers, if the pool keeps states; see ``medusa.recurrence``.
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
        self.skipped: Tensor | None = None
        self.reach = kv_length
        self.texts: Sequence[tuple[int, int]] = ()
        self.recurrent: Any = None
        self.firsts = [0, *accumulate(self.sizes)]
        self.tokens = self._rows([draft.tokens for draft in drafts])
        self._made: dict[Hashable, Any] = {}

    def once(self, form: Hashable, make: Callable[[], T]) -> T:
        """Data that a backend derives from the plan under this name; computed at the first call."""
        if form not in self._made:
            self._made[form] = make()
        made: T = self._made[form]
        return made

    def span(self, layer: int | None) -> Span:
        """Window and chunk of the layer with this index."""
        return self.spans.get(layer, Span())

    def alone(self, index: int) -> "TreePlan":
        """The plan of one of the sequences."""
        table, lengths_1 = BlockTable(self.table.blocks[index, None], self.table.size), self.lengths[index, None]
        for draft in self.drafts:
            if index < len(draft.tokens):
                break
            index -= len(draft.tokens)
        return TreePlan([draft.alone(index)], lengths_1, self.kv_length, table, self.backend, self.spans)

    def gathering(self) -> "TreePlan":
        """The plan for layers that compute on cached keys and values before attention reads them: they get a copy."""
        plan = TreePlan(self.drafts, self.lengths, self.kv_length, self.table, self.backend, self.spans)
        plan.gathered, count = True, len(self.sizes) * self.width
        numbers = torch.arange(count, device=self.lengths.device).view(-1, self.width)
        plan.table = BlockTable(numbers, self.table.size)
        return plan

    @property
    def width(self) -> int:
        """Number of blocks of each sequence that attention may read."""
        return -(-self.kv_length // self.table.size)

    @property
    def rows(self) -> int:
        """R, the number of rows."""
        return self.firsts[-1] - self.computed * len(self.sizes)

    @cached_property
    def parents(self) -> Tensor:
        """[all nodes] int64 index of the parent in the same tree, smaller than the node's own; 0 for a root."""
        if self.computed:
            return self.drafts[0].parents.flatten()
        return self._rows([draft.parents for draft in self.drafts])

    @cached_property
    def uniform(self) -> int | None:
        """Number of nodes of every tree; None if trees differ in size."""
        return self.sizes[0] if len(set(self.sizes)) == 1 else None

    @cached_property
    def depths(self) -> Tensor:
        """[R] int64 depth of each row: the number of edges from the root."""
        return self._rows([draft.depths for draft in self.drafts])

    @cached_property
    def sequences(self) -> Tensor:
        """[R] int64 index of each row's sequence."""
        index_S, device = torch.arange(len(self.sizes), device=self.lengths.device), self.lengths.device
        if self.uniform is not None:
            return index_S.repeat_interleave(self.uniform - self.computed)
        return index_S.repeat_interleave(torch.tensor(self.sizes, device=device), output_size=self.rows)

    @cached_property
    def nodes(self) -> Tensor:
        """[R] int64 index of each row among the nodes of its tree."""
        index_N = torch.arange(max(self.sizes), device=self.lengths.device)
        return self._rows([index_N[: draft.tokens.shape[1]].expand_as(draft.tokens) for draft in self.drafts])

    @cached_property
    def positions(self) -> Tensor:
        """[R] int64 position of each row in its text: L + depth, and what the table skips."""
        lengths_S = self.lengths if self.skipped is None else self.lengths + self.skipped
        return lengths_S[self.sequences] + self.depths

    @cached_property
    def places(self) -> Tensor:
        """[R] int64 index in keys or values [blocks * size, ...] of each row's own: place L + node."""
        at_R = self.lengths[self.sequences] + self.nodes
        blocks_R = self.table.blocks[self.sequences, at_R // self.table.size]
        return blocks_R * self.table.size + at_R % self.table.size

    @cached_property
    def ancestors(self) -> Tensor:
        """[R, max n_s] bool: whether node j of the row's tree is the row itself or an ancestor."""
        widest = max(draft.tokens.shape[1] for draft in self.drafts)
        masks = [draft.ancestors for draft in self.drafts]
        rows = self._rows([torch.nn.functional.pad(mask, (0, widest - mask.shape[-1])) for mask in masks])
        return rows[:, : max(self.sizes)]

    @cached_property
    def words(self) -> Tensor:
        """[R, ceil(max n_s / 32)] int32: ``ancestors`` as bits; node j is bit j % 32 of word j // 32."""
        return pack_bits(self.ancestors)

    def _rows(self, parts: Sequence[Tensor]) -> Tensor:
        """Values [R, ...] of the rows, from the values [b, N, ...] at each draft's nodes."""
        if self.computed:
            return parts[0][:, self.computed :].flatten(0, 1)
        if len(parts) == 1:
            return self.drafts[0].flat(parts[0])
        return torch.cat([draft.flat(part) for draft, part in zip(self.drafts, parts, strict=True)])


def pack_bits(mask: Tensor) -> Tensor:
    """Pack bool [..., N] into int32 words [..., ceil(N / 32)]; bits beyond N are 0."""
    padded = torch.nn.functional.pad(mask, (0, -mask.shape[-1] % WORD)).unflatten(-1, (-1, WORD))
    words: Tensor = (padded.long() << torch.arange(WORD, device=mask.device)).sum(-1)
    return words.to(torch.int32)  # bit 31 is the sign
