"""What ``./launch.sh gpu-check`` tries: commands, their time limits, and the one line that each comes down to.

Standard library only, as in ``benchmarks.gpu``.
"""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

Report = dict[str, Any]

ATTENTION = (("2k", "2048", "1,16,64"), ("8k", "8192", "1,16"), ("32k", "32768", "1"))
"""Cached tokens, and the batch sizes that attention's backends are compared at."""


@dataclass(frozen=True)
class Part:
    """One thing to try."""

    words: tuple[str, ...]
    """Arguments of the interpreter."""
    limit: float
    """Seconds that it may take."""
    report: Path | None = None
    """Where it writes a JSON report."""
    figure: Callable[[Report], str] | None = None
    """One line out of that report; without one it is the last line of the log."""
    needs_gpu: bool = True

    @property
    def command(self) -> str:
        """What a user would type."""
        return " ".join(["python", *self.words])


def parts(out: Path, work: Path) -> dict[str, Part]:
    """All parts, in their order: what is short and tells most comes first.

    Args:
        out: Where pictures go.
        work: Where reports and the demo's run go.
    """
    shape = ("--shape", "llama-8b", "--dtype", "bfloat16", "--device", "cuda")
    bench = ("-m", "benchmarks")
    step, run, demo = (work / f"{name}.json" for name in ("step", "run", "demo/report"))
    sizes = ("--batch", "1,16,64", "--nodes", "8,16,32,64", "--rounds", "5")
    step_words = ("step", *shape, *sizes, "--profile", "--picture", str(out / "step.png"))
    accepted = ("--tokens-per-step", "2.29")  # of smollm2's heads with 8 nodes
    run_words = ("run", *shape, "--batch", "1,16", "--count", "16", "--rounds", "2", "--max-new-tokens", "64")

    def attention(name: str, context: str, batch: str) -> Part:
        report = work / f"attention-{name}.json"
        words = (*shape, "--context", context, "--batch", batch, "--nodes", "1,64", "--rounds", "5")
        return Part((*bench, "attention", *words, "--json", str(report)), 40, report, _attention_figure)

    small_demo = ("--fresh", "--train-prompts", "600", "--prompts", "4", "--rounds", "1")
    return {
        "tests": Part(("-m", "pytest", "-q", "tests/gpu", "-m", "gpu"), 120),
        "step": Part((*bench, *step_words, *accepted, "--json", str(step)), 120, step, _step_figure),
        **{f"attention-{name}": attention(name, context, batch) for name, context, batch in ATTENTION},
        "run": Part((*bench, *run_words, "--json", str(run)), 120, run, _run_figure),
        "demo": Part(("-m", "serve.demo", "--run", str(demo.parent), *small_demo), 200, demo, _demo_figure, False),
    }


def _step_figure(report: Report) -> str:
    rows = {(row["batch"], row["nodes"]): row for row in report["rows"]}
    plain, small, tree = rows[1, 1], rows[1, 8], rows[1, 64]
    return (
        f"plain {plain['step_ms']:.2f} ms, {plain['roofline_share']:.0%} of {report['bandwidth_gb_per_s']:.0f} GB/s;"
        f" N = 64: {tree['step_overhead']:.2f}x; PROJECTED at N = 8 with {report['tokens_per_step']} tokens per step:"
        f" {small['projected_speedup']:.2f}x"
    )


def _attention_figure(report: Report) -> str:
    best: dict[str, float] = {}
    for row in report["rows"]:
        best[row["backend"]] = max(row["share_of_bound"], best.get(row["backend"], 0.0))
    return "best share of the bound: " + ", ".join(f"{name} {share:.0%}" for name, share in best.items())


def _run_figure(report: Report) -> str:
    speeds = {row["method"]: row["tokens_per_s"]["value"] for row in report["runs"][0]["rows"]}
    return f"plain {speeds['plain']:.0f} tokens/s, {speeds['plain'] / speeds['transformers']:.2f}x over transformers"


def _demo_figure(report: Report) -> str:
    same = report["identical_outputs"]
    return (
        f"{report['tokens_per_step']:.2f} tokens per step, {report['speedup']:.2f}x over plain,"
        f" {same['count']} of {same['total']} outputs identical"
    )
