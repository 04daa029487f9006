"""The parts of ``./launch.sh gpu-check``: commands, time limits, and a summary line of each.

Like ``benchmarks.gpu`` it needs no packages; parts that need some report what is missing.
"""

from collections.abc import Callable
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from medusa.benchmarks.gpu.paper import beside, key_figure

Report = dict[str, Any]


@dataclass(frozen=True)
class Part:
    """One test."""

    words: tuple[str, ...]
    """Arguments of the interpreter."""
    limit: float
    """Time limit in seconds."""
    report: Path | None = None
    """File of its JSON report."""
    figure: Callable[[Report], str] | None = None
    """Makes the summary line from the report; None = the last line of the log."""
    details: Callable[[Report], str] | None = None
    """Makes more lines from the report, shown above the last table."""
    needs_gpu: bool = True

    @property
    def command(self) -> str:
        """The command as a user would type it."""
        return " ".join(["python", *self.words])


def parts(work: Path) -> dict[str, Part]:
    """All parts, in order: short and informative ones come first.

    Args:
        work: Directory for reports and the demo's run.
    """
    shape = ("--shape", "llama-8b", "--dtype", "bfloat16", "--device", "cuda")
    step, packed, run, demo = (work / f"{name}.json" for name in ("step", "packed", "run", "demo/report"))
    step_words = ("-m", "medusa.benchmarks.gpu.paper", "--measure", str(step))
    few = ("--nodes", "1,16,64", "--batch", "1,16", "--context", "2048", "--rounds", "3", "--json", str(packed))
    small_run = ("--batch", "1,16", "--count", "16", "--rounds", "2", "--max-new-tokens", "64", "--json", str(run))
    together = ("-n", "8") if find_spec("xdist") else ()  # most of the time compiles kernels
    small_demo = ("--fresh", "--train-prompts", "600", "--prompts", "4", "--rounds", "1")
    return {
        "tests": Part(("-m", "pytest", "-q", "tests/gpu", "-m", "gpu", *together), 150 if together else 400),
        "step": Part(step_words, 240, step, key_figure, beside),
        "packed": Part(("-m", "medusa", "bench", "step", *shape, "--packed", *few), 120, packed, _packed_figure),
        "run": Part(("-m", "medusa", "bench", "run", *shape, *small_run), 120, run, _run_figure),
        "demo": Part(
            ("-m", "medusa.benchmarks.demo", "--run", str(demo.parent), *small_demo),
            200,
            demo,
            _demo_figure,
            needs_gpu=False,
        ),
    }


def _packed_figure(report: Report) -> str:
    times = [f"{row['batch']} x {row['nodes']}: {row['step_ms']:.1f}" for row in report["rows"]]
    return f"4 bits, requests x nodes: ms {', '.join(times)}"


def _run_figure(report: Report) -> str:
    speeds = {row["method"]: row["tokens_per_s"]["value"] for row in report["runs"][0]["rows"]}
    return f"plain {speeds['plain']:.0f} tokens/s, {speeds['plain'] / speeds['transformers']:.2f}x over transformers"


def _demo_figure(report: Report) -> str:
    same = report["identical_outputs"]
    return (
        f"{report['tokens_per_step']:.2f} tokens per step, {report['speedup']:.2f}x over plain,"
        f" {same['count']} of {same['total']} outputs identical"
    )
