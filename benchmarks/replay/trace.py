"""Acceptance traces: how many tokens each step of real answers emitted."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from medusa import MedusaModel, Output, Tree
from medusa.files import read_object

SMOLLM2_TRACE = Path(__file__).parent / "traces" / "smollm2.json"
FORMAT = "medusa-trace"


@dataclass(frozen=True)
class Trace:
    """What the steps of real answers emitted."""

    emitted: tuple[int, ...]
    """Tokens per step, the base's own token included: at least 1 each."""
    provenance: dict[str, Any]
    """Base, heads, drafter, nodes, prompts: where it comes from."""

    @property
    def tokens_per_step(self) -> float:
        """Over the whole trace."""
        return sum(self.emitted) / len(self.emitted)

    @property
    def nodes(self) -> int | None:
        """The tree size that it was recorded with; None = it was found out on the way."""
        nodes = self.provenance.get("nodes")
        return nodes if isinstance(nodes, int) else None


def emitted_per_step(drafted: list[bool]) -> list[int]:
    """Tokens per step of an answer, from ``Output.drafted``; a last step that a limit cut is left out."""
    ends = [index for index, was_drafted in enumerate(drafted) if not was_drafted]
    return [end - before for before, end in zip([-1, *ends], ends, strict=False)]


def load_trace(path: str | Path) -> Trace:
    """Read a trace.

    Raises:
        FileNotFoundError: There is no such file.
        ValueError: It is not a trace.
    """
    values = read_object(Path(path), "trace", "record it again with medusa-bench trace")
    emitted = values.get("emitted") if values.get("format") == FORMAT else None
    if not isinstance(emitted, list) or not emitted or not all(isinstance(n, int) and n >= 1 for n in emitted):
        raise ValueError(f"trace ({path}) holds no numbers of tokens per step, each at least 1; record it again")
    return Trace(tuple(emitted), values.get("provenance", {}))


def save_trace(trace: Trace, path: str | Path) -> None:
    """Write a trace as one JSON file."""
    values = {"format": FORMAT, "provenance": trace.provenance, "emitted": list(trace.emitted)}
    Path(path).write_text(json.dumps(values) + "\n", encoding="utf-8")


def record(
    model: MedusaModel,
    prompts: Sequence[list[int]],
    max_new_tokens: int,
    nodes: int | None,
    drafter: str | None,
    tree: Tree | None = None,
) -> Trace:
    """Answer prompts greedily, one after the other, and note what every step emitted.

    Args:
        model: A base with trained heads.
        prompts: Token ids.
        max_new_tokens: Limit per answer.
        nodes: Tree budget, None = found out as it runs.
        drafter: As ``MedusaModel.start`` takes it.
        tree: A static tree in place of both.

    Raises:
        ValueError: The answers have no whole step.
    """
    outputs: list[Output] = [
        model.generate(prompt, max_new_tokens=max_new_tokens, nodes=nodes, drafter=drafter, tree=tree)
        for prompt in prompts
    ]
    emitted = tuple(count for output in outputs for count in emitted_per_step(output.drafted))
    if not emitted:
        raise ValueError("the answers have no whole step; give more prompts or a larger --max-new-tokens")
    provenance = {
        "base": "/".join(Path(model.base.name).parts[-2:]),
        "heads": f"{model.heads.config.num_heads} {model.heads.config.architecture}" if model.heads else "none",
        "drafter": drafter or ("static tree" if tree else "default"),
        "nodes": tree.nodes if tree else nodes or "auto",
        "dtype": str(model.base.dtype).removeprefix("torch."),
        "acceptance": "greedy",
        "answers": len(prompts),
        "max_new_tokens": max_new_tokens,
    }
    return Trace(emitted, provenance)
