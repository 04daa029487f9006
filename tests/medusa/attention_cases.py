"""Inputs for attention backends and what must come out, computed row by row in float64."""

from dataclasses import dataclass, replace
from itertools import product

import torch
from torch import Tensor

from medusa.attention import Scoring, TreeAttention, TreePlan
from medusa.attention.contract import BlockTable
from medusa.tree import Draft

HIDDEN = 7
"""Positions of ``kv_length`` beyond the longest sequence, and blocks of the pool that are nobody's."""


@dataclass(frozen=True)
class Case:
    """One layer's attention.

    Attributes:
        nodes: Of all trees, or of each.
        shape: Of all trees, or of each: see ``parents_of``.
        size: Positions of a block.
    """

    nodes: int | tuple[int, ...] = 8
    groups: int = 2
    dim: int = 64
    lengths: tuple[int, ...] = (65, 0)
    shape: str | tuple[str, ...] = "random"
    window: int | None = None
    softcap: float | None = None
    sinks: bool = False
    dim_v: int | None = None
    kv_heads: int = 2
    seed: int = 0
    chunk: int | None = None
    size: int = 32

    def __str__(self) -> str:
        changed = (f"{name}={value}" for name, value in vars(self).items() if value != getattr(Case, name))
        return ",".join(changed).replace(" ", "") or "plain"

    @property
    def sizes(self) -> tuple[int, ...]:
        """Nodes of each tree."""
        return (self.nodes,) * len(self.lengths) if isinstance(self.nodes, int) else self.nodes

    @property
    def ends(self) -> list[int]:
        """Positions of each sequence, those of its tree among them."""
        return [length + nodes for length, nodes in zip(self.lengths, self.sizes, strict=True)]

    @property
    def shapes(self) -> tuple[str, ...]:
        """Shape of each tree."""
        return (self.shape,) * len(self.lengths) if isinstance(self.shape, str) else self.shape


@dataclass
class Layer:
    """The tensors of a case; keys and values stand in a pool's blocks in any order."""

    drafts: list[Draft]
    lengths: Tensor
    kv_length: int
    table: BlockTable
    query: Tensor
    key: Tensor
    value: Tensor
    scoring: Scoring

    def plan(self, backend: TreeAttention, **options: object) -> TreePlan:
        """A pass over the trees."""
        return TreePlan(self.drafts, self.lengths, self.kv_length, self.table, backend, **options)  # type: ignore[arg-type]

    @property
    def inputs(self) -> tuple[Tensor, Tensor, Tensor, Scoring]:
        """Queries, keys, values and scoring, as a backend takes them."""
        return self.query, self.key, self.value, self.scoring

    def run(self, backend: TreeAttention) -> Tensor:
        """The backend's output, after it had the chance to object."""
        assert backend.objection(*self.inputs) is None
        return backend.attend(self.plan(backend), *self.inputs)

    def side_by_side(self, arena: Tensor, sequence: int, count: int) -> Tensor:
        """[count, Hkv, D] of the first positions of one sequence."""
        places_1P = self.places(sequence, torch.arange(count, device=arena.device))
        return arena.flatten(0, 1)[places_1P]

    def places(self, sequence: int, positions_P: Tensor) -> Tensor:
        """[P] where positions of a sequence stand."""
        blocks_1W = self.table.blocks[sequence, None]
        return BlockTable(blocks_1W, self.table.size).places(positions_P[None])[0]

    def adopt(self, other: "Layer") -> None:
        """Take over another layer's trees, queries, keys and values, each sequence into the blocks that it has here."""
        self.drafts, self.query, self.scoring = other.drafts, other.query, other.scoring
        for sequence, (length, (parents, _)) in enumerate(zip(self.lengths.tolist(), self.trees(), strict=True)):
            end = length + len(parents)
            places = self.places(sequence, torch.arange(end, device=self.query.device))
            for own, theirs in ((self.key, other.key), (self.value, other.value)):
                own.flatten(0, 1)[places] = other.side_by_side(theirs, sequence, end)

    def trees(self) -> list[tuple[list[int], list[int]]]:
        """Parents and depths of each tree."""
        return [
            (draft.parents[b, :size].tolist(), draft.depths[b, :size].tolist())
            for draft in self.drafts
            for b, size in enumerate(draft.row_sizes)
        ]

    def expected(self) -> Tensor:
        """[R, H, Dv] float64: softmax over the keys that each row may see, found by walking up from it."""
        groups, rows, queries = self.query.shape[1] // self.key.shape[2], [], iter(self.query.double())
        for sequence, (length, (parents, depths)) in enumerate(zip(self.lengths.tolist(), self.trees(), strict=True)):
            positions = [*range(length), *(length + depth for depth in depths)]
            keys, values = (
                self.side_by_side(arena, sequence, len(positions)).double().repeat_interleave(groups, 1)
                for arena in (self.key, self.value)
            )
            for node, depth in enumerate(depths):
                near = range(len(parents)) if self.drafts[0].together else path(parents, node)
                seen = [*range(length), *(length + other for other in near)]
                seen = [place for place in seen if self._near(length + depth, positions[place])]
                scores_HS = torch.einsum("hd,shd->hs", next(queries), keys[seen]) * self.scoring.scaling
                rows.append(self._weigh(scores_HS, values[seen]))
        return torch.stack(rows)

    def _near(self, position: int, other: int) -> bool:
        """Whether a row's window or chunk reaches an earlier position."""
        window, chunk = self.scoring.window, self.scoring.chunk
        return (window is None or position - other < window) and (chunk is None or position // chunk == other // chunk)

    def _weigh(self, scores_HS: Tensor, value_SHD: Tensor) -> Tensor:
        if self.scoring.softcap is not None:
            scores_HS = self.scoring.softcap * torch.tanh(scores_HS / self.scoring.softcap)
        if self.scoring.sinks is not None:
            scores_HS = torch.cat([scores_HS, self.scoring.sinks.double()[:, None]], dim=1)
        return torch.einsum("hs,shd->hd", scores_HS.softmax(-1)[:, : len(value_SHD)], value_SHD)


def path(parents: list[int], node: int) -> list[int]:
    """The node and its ancestors, the root first."""
    return [node] if node == 0 else [*path(parents, parents[node]), node]


def parents_of(shape: str, nodes: int, generator: torch.Generator) -> list[int]:
    """Parents of a tree: a chain, a star, random, or one path over the borders of mask words."""
    if shape == "borders":
        stops = [stop for stop in (31, 32, 63, 64, 95, 96) if stop < nodes]
        above = dict(zip(stops, [0, *stops], strict=False))
        return [above.get(node, max((stop for stop in stops if stop < node), default=0)) for node in range(nodes)]
    draw = {
        "chain": lambda node: node - 1,
        "star": lambda node: 0,
        "random": lambda node: int(torch.randint(node, (), generator=generator)),
    }[shape]
    return [0, *(draw(node) for node in range(1, nodes))]


def make_draft(shape: str, batch: int, nodes: int, generator: torch.Generator, device: str) -> Draft:
    """Trees of one shape and size; chains are those of prompts, "together" are blocks of rows that see each other."""
    tokens = torch.zeros(batch, nodes, dtype=torch.int64, device=device)
    if shape in ("chain", "together"):
        return replace(Draft.chain(tokens), together=shape == "together")
    parents = torch.tensor([parents_of(shape, nodes, generator) for _ in range(batch)])
    return Draft.of(tokens, parents, nodes)


def make_drafts(case: Case, generator: torch.Generator, device: str) -> list[Draft]:
    """One draft of all trees, or one of each where these differ."""
    if len({*zip(case.sizes, case.shapes, strict=True)}) == 1:
        return [make_draft(case.shapes[0], len(case.sizes), case.sizes[0], generator, device)]
    trees = zip(case.sizes, case.shapes, strict=True)
    return [make_draft(shape, 1, nodes, generator, device) for nodes, shape in trees]


def make_table(case: Case, generator: torch.Generator, device: str) -> tuple[BlockTable, int]:
    """Blocks of each sequence, shuffled, and how many blocks there are; where a sequence has none, somebody else's."""
    needed = [-(-end // case.size) for end in case.ends]
    order = torch.randperm(sum(needed) + HIDDEN, generator=generator)
    width, hidden = -(-(max(case.ends) + HIDDEN) // case.size), order[sum(needed) :]
    table = hidden[torch.randint(HIDDEN, (len(needed), width), generator=generator)]
    for sequence, blocks in enumerate(order[: sum(needed)].split(needed)):
        table[sequence, : len(blocks)] = blocks
    return BlockTable(table.to(device), case.size), len(order)


def make(case: Case, dtype: torch.dtype, poison: float = float("nan"), device: str = "cpu") -> Layer:
    """Random tensors; what no sequence has written is ``poison``."""
    generator = torch.Generator().manual_seed(case.seed)
    heads, dim_v = case.kv_heads * case.groups, case.dim_v or case.dim
    query = torch.randn(sum(case.sizes), heads, case.dim, generator=generator).to(device, dtype)
    sinks = torch.randn(heads, generator=generator).to(device, dtype) if case.sinks else None
    drafts, (table, count) = make_drafts(case, generator, device), make_table(case, generator, device)
    written = torch.zeros(count * case.size, dtype=torch.bool)
    layer = Layer(
        drafts, torch.tensor(case.lengths, device=device), max(case.ends) + HIDDEN, table, query, query, query,
        Scoring(case.dim**-0.5, case.window, case.softcap, sinks, case.chunk),
    )  # fmt: skip
    for sequence, end in enumerate(case.ends):
        written[layer.places(sequence, torch.arange(end, device=device)).cpu()] = True
    arenas = []
    for dim in (case.dim, dim_v):
        arena = torch.randn(count * case.size, case.kv_heads, dim, generator=generator)
        arena[~written] = poison
        arenas.append(arena.unflatten(0, (count, case.size)).to(device, dtype))
    return replace(layer, key=arenas[0], value=arenas[1])


FEATURES = {
    "window": Case(window=5, lengths=(33, 3), groups=1),
    "wide window": Case(window=40, lengths=(70,)),
    "softcap": Case(softcap=1.5),
    "sinks": Case(sinks=True),
    "all": Case(window=9, softcap=1.5, sinks=True),
    "mixed": Case(nodes=(40, 1, 8), shape=("chain", "star", "random"), lengths=(64, 33, 0), window=9, sinks=True),
    "narrow values": Case(dim=64, dim_v=32),
    "chunks": Case(chunk=16, nodes=26, shape="chain", lengths=(40, 0)),
}
"""Not every backend computes all of them."""

MIXED = [
    Case(nodes=(70, 1, 8, 1), shape=("chain", "star", "random", "star"), lengths=(31, 65, 0, 32)),
    Case(nodes=(8, 33, 8), groups=4, lengths=(64, 0, 1), kv_heads=1, size=16),
    Case(nodes=(1, 26, 1, 100), shape=("star", "borders", "star", "borders"), dim=96, groups=1, lengths=(0, 63, 1, 33)),
]
"""Chunks of prompts, trees and plain rows in one pass."""

THIN = [
    Case(),
    Case(nodes=1, groups=4, lengths=(64, 1)),
    Case(nodes=26, groups=1, dim=96, lengths=(63, 0), shape="chain"),
    Case(nodes=32, groups=4, lengths=(64,), kv_heads=1),
    Case(nodes=70, dim=128, groups=1, lengths=(65,), shape="borders", kv_heads=1),
    Case(nodes=17, groups=8, kv_heads=1, dim=256, lengths=(31,), shape="star"),
    Case(nodes=7, groups=3, lengths=(126, 0), shape="together"),
    *MIXED,
]


def grid() -> list[Case]:
    """Every value of each axis with every value of each other axis, and trees of several sizes.

    The columns i, j, i + j, i + 2j, i + 3j (mod 5) hold every pair of values in any two of them: 25 cases.
    """
    axes = {
        "nodes": (1, 8, 26, 40, 70),
        "lengths": ((64, 17), (65, 200), (0,), (1,), (63, 0)),
        "groups": (1, 4, 8),
        "dim": (64, 96, 128, 256),
        "shape": ("random", "chain", "star", "borders"),
    }
    cases = []
    for i, j in product(range(5), repeat=2):
        columns = zip(axes.items(), (i, j, i + j, i + 2 * j, i + 3 * j), strict=True)
        values = {name: axis[column % 5 % len(axis)] for (name, axis), column in columns}
        rows = values["nodes"] * values["groups"]
        cases.append(Case(**values, kv_heads=1 if rows > 26 else 2))
    sizes = Case(nodes=(1, 40, 8, 26), groups=4, lengths=(32, 31, 33, 0))
    return [*cases, sizes, Case(nodes=40, groups=4)]  # several blocks of rows for each of several key heads
