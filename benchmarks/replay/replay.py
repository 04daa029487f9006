"""``medusa-bench replay``: a recorded acceptance trace, forced through the real step of any shape.

How many tokens a step emits is a matter of trained heads; what a step costs is a matter of the shape. Where there is no
checkpoint of a shape, the speed that it would have with the acceptance of the trace can still be measured: draft,
verify, accept and commit are the real ones, only which tokens count as right is taken from the trace. The result says
nothing about the acceptance that heads of this shape would reach, and everything that shows it says "replay".
"""

from collections.abc import Callable, Mapping
from functools import partial
from statistics import median
from typing import Any

import torch
from torch import Tensor

from benchmarks.machine import ratio
from benchmarks.replay.trace import Trace
from benchmarks.step.rig import Rig, room_for
from medusa import BaseModel, Draft, DraftHeads
from medusa.acceptance import Rule, Verdict, greedy
from medusa.clock import alternate
from medusa.engine.graph import Record
from medusa.state import DecodeState

NODES = 16
"""Tree size where neither the user nor the trace names one: acceptance belongs to the size it was recorded with."""


class ForcedRule:
    """Computes what ``rule`` says, then lets exactly as many tokens pass as the trace wants, again and again.

    Where a tree is shallower than that, all of its deepest path passes. Any S steps in a row emit the same sum.

    Args:
        rule: The rule whose work is done.
        emitted_SB: [S, B] int64, tokens to emit in each of S steps by each sequence.
    """

    def __init__(self, rule: Rule, emitted_SB: Tensor) -> None:
        self._rule = rule
        self._emitted = emitted_SB
        self._step = torch.zeros(1, dtype=torch.int64, device=emitted_SB.device)  # on the device: nothing waits for it

    def __call__(self, draft: Draft, logits_BNV: Tensor, state: DecodeState) -> Verdict:
        """A verdict of one accepted path per sequence."""
        verdict = self._rule(draft, logits_BNV, state)
        wanted_B1 = self._emitted.index_select(0, self._step).T - 1
        self._step.add_(1).remainder_(len(self._emitted))
        depth_B1 = torch.minimum(wanted_B1, draft.depths.amax(1, keepdim=True))
        leaf_B11 = (draft.depths == depth_B1).int().argmax(1)[:, None, None]
        edges_BN = draft.ancestors.gather(1, leaf_B11.expand(-1, 1, draft.tokens.shape[1]))[:, 0]
        return Verdict(edges_BN, verdict.bonus)


def schedule(trace: Trace, steps: int, batch: int) -> Tensor:
    """[S, B] tokens to emit, from places spread evenly over the whole trace: its mean stays what it was."""
    places_SB = torch.arange(steps * batch).view(steps, batch) * len(trace.emitted) // (steps * batch)
    return torch.tensor(trace.emitted)[places_SB]


def measure_replay(
    base: BaseModel,
    heads: DraftHeads,
    trace: Trace,
    nodes: int,
    batch: int,
    context: int,
    steps: int,
    rounds: int,
    seed: int,
    record: Record | None = None,
    others: Mapping[str, Callable[[], float]] | None = None,
) -> dict[str, Any]:
    """Time a replay and plain decoding, alternately, both for ``steps`` steps from ``context`` cached tokens.

    Args:
        base: Prepared for decoding.
        heads: Its heads, which draft a fixed tree.
        trace: What to force.
        nodes: Tree size N.
        batch: Sequences B.
        steps: Steps per sample.
        rounds: Measured repetitions.
        context, seed, record: As ``Rig`` takes them.
        others: Seconds per token of plain decoding in other engines, measured in turn with these.

    Returns:
        A row of the report.
    """
    emitted_SB = schedule(trace, steps, batch)
    room = int(emitted_SB.sum(0).max()) + room_for(nodes, heads.config.num_heads, steps=0)
    rig = Rig(base, heads, batch, context, room, seed, record)
    drafter, plain = rig.drafter(nodes), rig.drafter(1)
    rule = ForcedRule(greedy, emitted_SB.to(base.device))  # one object: what is recorded belongs to it
    got = torch.tensor([[len(tokens) for tokens in step] for step in rig.run(drafter, rule, steps)])
    samples: dict[str, Callable[[], float]] = {
        "replay": partial(rig.step_seconds, drafter, rule, steps),
        "plain": partial(rig.step_seconds, plain, steps=steps),
        **(others or {}),
    }
    times = alternate(samples, rounds)
    tokens = int(got.sum())
    per_step, overhead = tokens / (steps * batch), ratio(times["replay"], times["plain"])
    row: dict[str, Any] = {
        "batch": batch,
        "nodes": nodes,
        "graph": rig.graph,
        "steps": steps,
        "replay_tokens_per_step": round(per_step, 4),
        "clamped_steps": int((got < emitted_SB).sum()),
        "replay_tokens_per_s": round(tokens / steps / median(times["replay"]), 2),
        "plain_tokens_per_s": round(batch / median(times["plain"]), 2),
        "step_overhead": round(overhead, 4),
        "replay_speedup": round(per_step / overhead, 4),
    }
    if others:
        row["others"] = [
            {
                "engine": name,
                "tokens_per_s": round(batch / median(times[name]), 2),
                "plain_over": round(ratio(times[name], times["plain"]), 4),
                "replay_over": round(per_step * ratio(times[name], times["replay"]), 4),
            }
            for name in others
        ]
    return row
