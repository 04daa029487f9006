"""Inputs for attention backends and what must come out, computed row by row in float64."""

import dataclasses
from dataclasses import dataclass
from itertools import product

import torch
from torch import Tensor

from medusa.attention import Scoring, TreeAttention, TreePlan
from medusa.tree import Draft

HIDDEN_ROWS = 7
"""Rows of the cache beyond S, and rows of S beyond the longest sequence."""


@dataclass(frozen=True)
class Case:
    """One layer's attention."""

    nodes: int = 8
    groups: int = 2
    dim: int = 64
    lengths: tuple[int, ...] = (65, 0)
    shape: str = "random"
    window: int | None = None
    softcap: float | None = None
    sinks: bool = False
    dim_v: int | None = None
    kv_heads: int = 2
    seed: int = 0

    def __str__(self) -> str:
        changed = (f"{name}={value}" for name, value in vars(self).items() if value != getattr(Case, name))
        return ",".join(changed).replace(" ", "") or "plain"


@dataclass
class Layer:
    """The tensors of a case: key and value are the views of larger buffers that a ``SlotCache`` hands out."""

    draft: Draft
    lengths: Tensor
    query: Tensor
    key: Tensor
    value: Tensor
    scoring: Scoring

    def run(self, backend: TreeAttention) -> Tensor:
        """The backend's output, after it had the chance to object."""
        assert backend.objection(self.query, self.key, self.value, self.scoring) is None
        plan = TreePlan(self.draft, self.lengths, self.key.shape[2], backend)
        return backend.attend(plan, self.query, self.key, self.value, self.scoring)

    def expected(self) -> Tensor:
        """[B, H, N, Dv] float64: softmax over the keys that each row may see, found by walking up from it."""
        groups = self.query.shape[1] // self.key.shape[1]
        key, value = (x.double().repeat_interleave(groups, 1) for x in (self.key, self.value))
        rows = []
        for b, length in enumerate(self.lengths.tolist()):
            parents, depths = self.draft.parents[b].tolist(), self.draft.depths[b].tolist()
            positions = [*range(length), *(length + depth for depth in depths)]
            for node in range(len(parents)):
                seen = [*range(length), *(length + ancestor for ancestor in path(parents, node))]
                if self.scoring.window is not None:
                    seen = [row for row in seen if length + depths[node] - positions[row] < self.scoring.window]
                scores_HS = torch.einsum("hd,hsd->hs", self.query[b, :, node].double(), key[b][:, seen])
                rows.append(self._weigh(scores_HS * self.scoring.scaling, value[b][:, seen]))
        return torch.stack(rows).unflatten(0, (len(self.lengths), -1)).transpose(1, 2)

    def _weigh(self, scores_HS: Tensor, value_HSD: Tensor) -> Tensor:
        if self.scoring.softcap is not None:
            scores_HS = self.scoring.softcap * torch.tanh(scores_HS / self.scoring.softcap)
        if self.scoring.sinks is not None:
            scores_HS = torch.cat([scores_HS, self.scoring.sinks.double()[:, None]], dim=1)
        return torch.einsum("hs,hsd->hd", scores_HS.softmax(-1)[:, : value_HSD.shape[1]], value_HSD)


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
    parents = torch.tensor([parents_of(shape, nodes, generator) for _ in range(batch)])
    return Draft.of(torch.zeros_like(parents, device=device), parents, nodes)


def make(case: Case, dtype: torch.dtype, poison: float = float("nan"), device: str = "cpu") -> Layer:
    """Random tensors; what stands behind a sequence's tree rows is ``poison``."""
    generator = torch.Generator().manual_seed(case.seed)
    batch, heads, dim_v = len(case.lengths), case.kv_heads * case.groups, case.dim_v or case.dim
    kv_length = max(case.lengths) + case.nodes + HIDDEN_ROWS
    query_BNHD = torch.randn(batch, case.nodes, heads, case.dim, generator=generator)
    views = []
    for dim in (case.dim, dim_v):
        buffer = torch.randn(batch + 1, kv_length + HIDDEN_ROWS, case.kv_heads, dim, generator=generator)
        for row, length in enumerate([*case.lengths, -case.nodes]):
            buffer[row, length + case.nodes :] = poison
        views.append(buffer.to(device, dtype)[:batch, :kv_length].transpose(1, 2))
    sinks = torch.randn(heads, generator=generator).to(device, dtype) if case.sinks else None
    draft = make_draft(case.shape, batch, case.nodes, generator, device)
    draft = dataclasses.replace(draft, tokens=draft.tokens.to(device), parents=draft.parents.to(device))
    scoring = Scoring(case.dim**-0.5, case.window, case.softcap, sinks)
    lengths = torch.tensor(case.lengths, device=device)
    return Layer(draft, lengths, query_BNHD.to(device, dtype).transpose(1, 2), views[0], views[1], scoring)


FEATURES = {
    "window": Case(window=5, lengths=(33, 3), groups=1),
    "wide window": Case(window=40, lengths=(70,)),
    "softcap": Case(softcap=1.5),
    "sinks": Case(sinks=True),
    "all": Case(window=9, softcap=1.5, sinks=True),
    "narrow values": Case(dim=64, dim_v=32),
}
"""Not every backend computes all of them."""

THIN = [
    Case(),
    Case(nodes=1, groups=4, lengths=(64, 1)),
    Case(nodes=26, groups=1, dim=96, lengths=(63, 0), shape="chain"),
    Case(nodes=32, groups=4, lengths=(64,), kv_heads=1),
    Case(nodes=70, dim=128, groups=1, lengths=(65,), shape="borders", kv_heads=1),
    Case(nodes=17, groups=8, kv_heads=1, dim=256, lengths=(31,), shape="star"),
]


def grid() -> list[Case]:
    """Every value of each axis with every value of each other axis, and a few more random trees.

    The columns i, j, i + j, i + 2j, i + 3j (mod 5) hold every pair of values in any two of them: 25 cases.
    """
    axes = {
        "nodes": (1, 8, 26, 64, 128),
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
        cases.append(Case(**values, kv_heads=1 if rows > 64 else 2))
    more = [Case(seed=seed, nodes=40) for seed in range(1, 5)]
    return [*cases, *more, Case(nodes=40, groups=4)]  # several blocks of rows for each of several key heads
