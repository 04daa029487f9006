"""What ``./launch.sh gpu-check`` tries: commands, their time limits, and the one line that each comes down to.

Needs no package, as ``benchmarks.gpu.check``.
"""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.gpu.paper import beside, key_figure

Report = dict[str, Any]


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
    details: Callable[[Report], str] | None = None
    """More lines out of that report, shown above the last table."""
    needs_gpu: bool = True

    @property
    def command(self) -> str:
        """What a user would type."""
        return " ".join(["python", *self.words])


def parts(work: Path) -> dict[str, Part]:
    """All parts, in their order: what is short and tells most comes first.

    Args:
        work: Where reports and the demo's run go.
    """
    shape = ("--shape", "llama-8b", "--dtype", "bfloat16", "--device", "cuda")
    step, replay, demo = (work / f"{name}.json" for name in ("step", "replay", "demo/report"))
    small_demo = ("-m", "serve.demo", "--fresh", "--train-prompts", "600", "--prompts", "4", "--rounds", "1")
    return {
        "tests": Part(("-m", "pytest", "-q", "tests/gpu", "-m", "gpu"), 120),
        "step": Part(("-m", "benchmarks.gpu.paper", "--measure", str(step)), 240, step, key_figure, beside),
        "replay": Part(
            ("-m", "benchmarks.decoding", "replay", *shape, "--json", str(replay)), 60, replay, _replay_figure
        ),
        "demo": Part((*small_demo, "--run", str(demo.parent)), 200, demo, _demo_figure, needs_gpu=False),
    }


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
