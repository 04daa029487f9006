"""``./launch.sh gpu-check``: tries this project on a GPU machine that has torch and transformers, and no network.

Parts run one after the other, each in its own process with its own time limit and log; one that fails does not stop the
others. The last thing printed is a short table; ``report.json`` holds everything. Standard library only: the parts need
more, and say so themselves.
"""

import argparse
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from serve.wheels import install_missing, pack

ROOT = Path(__file__).parent.parent
WHEELS = ROOT / ".wheels"
WORK = ROOT / ".cache" / "gpu-check"
SITE = WORK / "site"
GRACE = 5.0
"""Seconds between asking a process to end and ending it."""
PROBE = """
import json, platform, torch, transformers
gpu = torch.cuda.get_device_name(0) if torch.cuda.is_available() else None
versions = {"python": platform.python_version(), "torch": torch.__version__, "transformers": transformers.__version__}
print(json.dumps({"gpu": gpu, "versions": versions}))
"""
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
    needs_gpu: bool = True


@dataclass
class Result:
    """What came of a part."""

    result: str = "passed"
    """passed, or why not."""
    seconds: float = 0.0
    figure: str = ""
    command: str = ""
    report: Report = field(default_factory=dict)
    """The part's own JSON report, where it wrote one."""


def parts(out: Path) -> dict[str, Part]:
    """All parts, in their order: what is short and tells most comes first."""
    shape = ("--shape", "llama-8b", "--dtype", "bfloat16", "--device", "cuda")
    bench = ("-m", "serve.bench")
    step, replay, attention, demo = (WORK / f"{name}.json" for name in ("step", "replay", "attention", "demo/report"))
    step_words = ("step", *shape, "--batch", "1,4", "--baseline", "--profile", "--picture", str(out / "step.png"))
    small_demo = ("--fresh", "--train-prompts", "600", "--prompts", "4", "--rounds", "1")
    return {
        "tests": Part(("-m", "pytest", "-q", "tests/gpu", "-m", "gpu"), 120),
        "step": Part((*bench, *step_words, "--json", str(step)), 120, step, _step_figure),
        "attention": Part((*bench, "attention", *shape, "--json", str(attention)), 60, attention, _attention_figure),
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


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line.

    Returns:
        Exit status: 0 if a part passed and none failed, 1 otherwise, 2 wrong use, 130 Ctrl-C.
    """
    options = _parser().parse_args(arguments)
    out = Path(options.out).resolve()
    chosen = {name: part for name, part in parts(out).items() if name in (options.only or parts(out))}
    try:
        if options.pack:
            print(f"{WHEELS}: {pack(WHEELS, ROOT / 'constraints.txt') / 2**20:.1f} MiB of wheels")
            return 0
        if options.dry_run:
            for name, part in chosen.items():
                print(f"{name:<10} at most {part.limit:.0f} s: {_command(part)}")
            return 0
        out.mkdir(parents=True, exist_ok=True)
        return _check(chosen, out, options.limit)
    except (OSError, ValueError) as error:
        print(error, file=sys.stderr)
        return 1
    except subprocess.CalledProcessError as error:
        print(f"{error.cmd[0]} failed (exit status {error.returncode}); its message is above", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130


def _check(chosen: dict[str, Part], out: Path, limit: float) -> int:
    began = time.monotonic()
    WORK.mkdir(parents=True, exist_ok=True)
    carried = install_missing(WHEELS, SITE)
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join([str(ROOT), str(SITE)]),
        "MEDUSA_PYTHON": sys.executable,  # what a part starts through launch.sh takes this interpreter as it is
    }
    machine = probe(environment) | {"carried": carried}
    print(json.dumps(machine), flush=True)
    results = {}
    for name, part in chosen.items():
        left = limit - (time.monotonic() - began)
        if part.needs_gpu and not machine["gpu"]:
            results[name] = Result("skipped: no GPU", command=_command(part))
        elif left <= 0:
            results[name] = Result(f"skipped: the {limit:.0f} s are over", command=_command(part))
        else:
            print(f"{name}: {_command(part)}", flush=True)
            results[name] = run_part(part, out / f"{name}.log", min(part.limit, left), environment)
    report = {"machine": machine, "seconds": round(time.monotonic() - began, 1)}
    report["parts"] = {name: asdict(result) for name, result in results.items()}
    (out / "report.json").write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")
    print(f"\nlogs and report.json: {out}\n\n{table(results)}")
    outcomes = [result.result for result in results.values()]
    return 0 if "passed" in outcomes and all(o == "passed" or o.startswith("skipped: no GPU") for o in outcomes) else 1


def probe(environment: dict[str, str]) -> Report:
    """The GPU's name (None where there is none) and the versions that the parts will see.

    Raises:
        ValueError: torch or transformers cannot be imported.
    """
    words = [sys.executable, "-c", PROBE]
    done = subprocess.run(words, capture_output=True, text=True, env=environment, cwd=ROOT, check=False)
    if done.returncode != 0:
        reason = (done.stderr.strip().splitlines() or ["no message"])[-1]
        raise ValueError(f"python ({sys.executable}) lacks torch or transformers: {reason}; name another with PYTHON=")
    machine: Report = json.loads(done.stdout.splitlines()[-1])
    return machine


def run_part(part: Part, log: Path, seconds: float, environment: dict[str, str]) -> Result:
    """Run a part to its end or for ``seconds``, with its output in ``log``."""
    if part.report is not None:
        part.report.unlink(missing_ok=True)
    result = Result(command=_command(part))
    began = time.monotonic()
    with log.open("wb") as file:
        words = [sys.executable, *part.words]
        process = subprocess.Popen(
            words, stdout=file, stderr=subprocess.STDOUT, cwd=ROOT, env=environment, start_new_session=True
        )
        try:
            status = process.wait(timeout=seconds)
            if status != 0:
                result.result = f"failed: exit status {status}"
        except subprocess.TimeoutExpired:
            result.result = f"stopped after {seconds:.0f} s"
        finally:
            _end(process)
    result.seconds = round(time.monotonic() - began, 1)
    if part.report is not None and part.report.is_file():
        result.report = json.loads(part.report.read_text(encoding="utf-8"))
    if part.figure is not None and result.report and result.result == "passed":
        result.figure = part.figure(result.report)
    else:
        result.figure = _last_line(log)
    return result


def table(results: dict[str, Result]) -> str:
    """One line per part: name, result, seconds, and its figure, or the last line of its log."""
    rows = [("part", "result", "seconds", "key figure")]
    rows += [(name, r.result, f"{r.seconds:.1f}", r.figure) for name, r in results.items()]
    widths = [max(len(row[column]) for row in rows) for column in range(3)]
    return "\n".join(
        f"{name:<{widths[0]}}  {result:<{widths[1]}}  {seconds:>{widths[2]}}  {figure}".rstrip()
        for name, result, seconds, figure in rows
    )


def _end(process: subprocess.Popen[bytes]) -> None:
    """End a process and what it started, if it still runs."""
    if process.poll() is not None:
        return
    os.killpg(process.pid, signal.SIGTERM)
    try:
        process.wait(GRACE)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def _last_line(log: Path) -> str:
    lines = log.read_text(encoding="utf-8", errors="replace").strip().splitlines()
    return lines[-1].strip("= ") if lines else ""


def _command(part: Part) -> str:
    return " ".join(["python", *part.words])


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="./launch.sh gpu-check", description=__doc__, formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    parser.add_argument("--out", default="runs/gpu-check", metavar="DIR", help="where logs and report.json go")
    parser.add_argument("--limit", type=float, default=480.0, metavar="SECONDS", help="for all parts together")
    parser.add_argument("--only", nargs="+", choices=list(parts(Path())), metavar="PART", help="these parts alone")
    parser.add_argument("--dry-run", action="store_true", help="only say what would run")
    parser.add_argument(
        "--pack", action="store_true", help="where a network is: fill .wheels with what the other machine lacks"
    )
    return parser


if __name__ == "__main__":
    sys.exit(main())
