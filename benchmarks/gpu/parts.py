"""What ``./launch.sh gpu-check`` tries: commands, their time limits, and the one line that each comes down to.

Standard library only, as in ``benchmarks.gpu.check``.
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
    bench = ("-m", "benchmarks.decoding")
    step, replay, demo = (work / f"{name}.json" for name in ("step", "replay", "demo/report"))
    sizes = ("--batch", "1,16,64", "--nodes", "8,16,32,64", "--rounds", "5")
    step_words = ("step", *shape, *sizes, "--baseline", "--profile", "--picture", str(out / "step.png"))

    def attention(name: str, context: str, batch: str) -> Part:
        report = work / f"attention-{name}.json"
        words = (*shape, "--context", context, "--batch", batch, "--nodes", "1,64", "--rounds", "5")
        return Part((*bench, "attention", *words, "--json", str(report)), 40, report, _attention_figure)

    small_demo = ("--fresh", "--train-prompts", "600", "--prompts", "4", "--rounds", "1")
    return {
        "tests": Part(("-m", "pytest", "-q", "tests/gpu", "-m", "gpu"), 120),
        "step": Part((*bench, *step_words, "--json", str(step)), 120, step, _step_figure),
        **{f"attention-{name}": attention(name, context, batch) for name, context, batch in ATTENTION},
        "replay": Part((*bench, "replay", *shape, "--json", str(replay)), 60, replay, _replay_figure),
        "demo": Part(("-m", "serve.demo", "--run", str(demo.parent), *small_demo), 200, demo, _demo_figure, False),
    }


def _step_figure(report: Report) -> str:
    rows = {(row["batch"], row["nodes"]): row for row in report["rows"]}
    plain, tree, baseline = rows[1, 1], rows[1, 64], report["baseline"][0]
    return (
        f"plain {plain['step_ms']:.2f} ms, {plain['roofline_share']:.0%} of {report['bandwidth_gb_per_s']:.0f} GB/s,"
        f" {baseline['plain_over_transformers']:.2f}x over transformers; N = 64: {tree['step_overhead']:.2f}x"
    )


def _attention_figure(report: Report) -> str:
    best: dict[str, float] = {}
    for row in report["rows"]:
        best[row["backend"]] = max(row["share_of_bound"], best.get(row["backend"], 0.0))
    return "best share of the bound: " + ", ".join(f"{name} {share:.0%}" for name, share in best.items())


def _replay_figure(report: Report) -> str:
    row = report["rows"][0]
    tokens = f"{row['replay_tokens_per_step']:.2f} tokens per step"
    return f"REPLAY, N = {row['nodes']}: {row['replay_speedup']:.2f}x over plain at {tokens}"


def _demo_figure(report: Report) -> str:
    same = report["identical_outputs"]
    return (
        f"{report['tokens_per_step']:.2f} tokens per step, {report['speedup']:.2f}x over plain,"
        f" {same['count']} of {same['total']} outputs identical"
    )
