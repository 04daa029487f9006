"""What a base may do wrong over tree rows, in all layers or in one, and what is only rounded differently."""

import dataclasses

import torch

from medusa.attention import Scoring, hook
from medusa.attention.backends import build
from medusa.attention.contract import TreePlan
from medusa.cache.layer import PassLayer

NODES = 5
"""Nodes of the check's tree: the passes before it are right."""


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
                keys, values = keys[:, :, [0, 2, 1, 3, 4]], values[:, :, [0, 2, 1, 3, 4]]
            return update(self, keys, values, *rest)

        monkeypatch.setattr(PassLayer, "update", write)
        return
    calls, attend_rows = iter(range(1 << 30)), hook.attend_rows

    def attend(plan: TreePlan, query, key, value, scoring: Scoring):
        wrong = query.shape[2] == NODES and next(calls) % base.num_layers in chosen
        return (FAULTS[kind] if wrong else attend_rows)(plan, query, key, value, scoring)

    if kind != "position":
        monkeypatch.setattr(hook, "attend_rows", attend)
        return

    def shift(attention, args, options):
        rows = options.get("hidden_states", args[0] if args else None)
        if options.get("tree_plan") is None or rows.shape[1] != NODES:
            return None
        rows_BN = options["tree_plan"].lengths[:, None] + torch.arange(NODES)
        turned = base.decoder.rotary_emb(rows, position_ids=rows_BN)
        return args, options | {"position_embeddings": turned}

    for layer in chosen:
        monkeypatch.setitem(base.decoder.layers[layer].self_attn._forward_pre_hooks, -1, shift)
        monkeypatch.setitem(base.decoder.layers[layer].self_attn._forward_pre_hooks_with_kwargs, -1, True)


def changed(plan: TreePlan, ancestors) -> TreePlan:
    """The same plan with other ancestors, for the reference, which reads these and not the parents."""
    draft = dataclasses.replace(plan.draft)
    draft.__dict__["ancestors"] = ancestors
    return TreePlan(draft, plan.lengths, plan.kv_length, build("reference", plan.lengths.device), plan.spans)


def mask(plan, *rest):
    """Rows see all rows before them, as in plain text."""
    return attend_rows(changed(plan, torch.ones_like(plan.draft.ancestors).tril()), *rest)


def sibling(plan, *rest):
    """One row sees one sibling too."""
    ancestors = plan.draft.ancestors.clone()
    ancestors[:, 2, 1] = True
    return attend_rows(changed(plan, ancestors), *rest)


def hole(plan, query, key, value, scoring):
    """The newest cached row is the one before it."""
    key, value = key.clone(), value.clone()
    for slot, length in enumerate(plan.lengths.tolist()):
        key[slot, :, length - 1], value[slot, :, length - 1] = key[slot, :, length - 2], value[slot, :, length - 2]
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
