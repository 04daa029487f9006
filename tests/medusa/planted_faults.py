"""What a base may do wrong over tree rows, in all layers or in one, and what is only rounded differently."""

import torch

from medusa.attention import Scoring, hook
from medusa.attention.backends import build
from medusa.attention.contract import TreePlan
from medusa.cache.layer import PassLayer

NODES, TREES = 5, 2
"""Nodes of the check's trees, and how many there are: the passes before it are right."""


def plant(monkeypatch, base, kind: str, layers=None) -> None:
    """Make some layers (None = all) of a base with the step's plan compute something else.

    Args:
        monkeypatch: Takes it back.
        base: The base.
        kind: "mask", "sibling", "row", "hole", "position", or "rounding", which is no fault.
        layers: Which, counted from 0.
    """
    chosen = range(base.num_layers) if layers is None else layers
    if kind == "row":
        update = PassLayer.update

        def write(self, keys, values, *rest):
            if keys.shape[2] % NODES == 0 and self._cache.layers.index(self) in chosen:
                order = [first + node for first in range(0, keys.shape[2], NODES) for node in (0, 2, 1, 3, 4)]
                keys, values = keys[:, :, order], values[:, :, order]
            return update(self, keys, values, *rest)

        monkeypatch.setattr(PassLayer, "update", write)
        return
    calls, attend_rows = iter(range(1 << 30)), hook.attend_rows

    def attend(plan: TreePlan, query, key, value, scoring: Scoring):
        wrong = query.shape[0] == TREES * NODES and next(calls) % base.num_layers in chosen
        return (FAULTS[kind] if wrong else attend_rows)(plan, query, key, value, scoring)

    if kind != "position":
        monkeypatch.setattr(hook, "attend_rows", attend)
        return

    def shift(attention, args, options):
        rows = options.get("hidden_states", args[0] if args else None)
        if options.get("tree_plan") is None or rows.shape[1] != TREES * NODES:
            return None
        positions_SN = options["tree_plan"].lengths[:, None] + torch.arange(NODES)
        turned = base.decoder.rotary_emb(rows, position_ids=positions_SN.view(1, -1))
        return args, options | {"position_embeddings": turned}

    for layer in chosen:
        monkeypatch.setitem(base.decoder.layers[layer].self_attn._forward_pre_hooks, -1, shift)
        monkeypatch.setitem(base.decoder.layers[layer].self_attn._forward_pre_hooks_with_kwargs, -1, True)


def changed(plan: TreePlan, ancestors_RN) -> TreePlan:
    """The same plan with other ancestors; for the reference, which reads these and not the parents."""
    backend = build("reference", plan.lengths.device)
    other = TreePlan(plan.drafts, plan.lengths, plan.kv_length, plan.table, backend, plan.spans)
    other.__dict__["ancestors"] = ancestors_RN
    return other


def mask(plan, *rest):
    """Rows see all rows before them, as in plain text."""
    return attend_rows(changed(plan, torch.ones_like(plan.ancestors[:NODES]).tril().repeat(TREES, 1)), *rest)


def sibling(plan, *rest):
    """One row sees one sibling too."""
    ancestors_RN = plan.ancestors.clone()
    ancestors_RN[2::NODES, 1] = True
    return attend_rows(changed(plan, ancestors_RN), *rest)


def hole(plan, query, key, value, scoring):
    """The newest cached position is the one before it."""
    newest, before = (plan.table.places(plan.lengths[:, None] - back).flatten() for back in (1, 2))
    key, value = key.clone(), value.clone()
    for arena in (key, value):
        arena.flatten(0, 1)[newest] = arena.flatten(0, 1)[before]
    return attend_rows(plan, query, key, value, scoring)


def rounding(plan, query, key, value, scoring):
    """Equally right: queries, keys, values and outputs are off by half a unit in the last place of their dtype."""

    def rounded(rows):
        generator = torch.Generator().manual_seed(rows.numel())
        noise = torch.randn(rows.shape, generator=generator) * torch.finfo(rows.dtype).eps / 4
        return (rows.float() * (1 + noise)).to(rows.dtype)

    return rounded(attend_rows(plan, rounded(query), rounded(key), rounded(value), scoring))


attend_rows = hook.attend_rows
FAULTS = {"mask": mask, "sibling": sibling, "hole": hole, "rounding": rounding}
KINDS = (*(kind for kind in FAULTS if kind != "rounding"), "row", "position")
