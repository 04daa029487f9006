"""``./launch.sh gpu-check``: tries this project on a GPU machine that has torch and transformers, and no network.

Parts run one after the other, each in its own process with its own time limit and log; one that fails does not stop the
others. The last thing printed is a short table; ``report.json`` holds everything. Standard library only: the parts need
more, and say so themselves.
"""

import argparse
import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

from serve.gpu_parts import Part, Report, parts
from serve.wheels import PYTHON_VERSION, install_missing, pack

ROOT = Path(__file__).parent.parent
WHEELS = ROOT / ".wheels"
WORK = ROOT / ".cache" / "gpu-check"
SITE = WORK / "site"
NO_GPU = "skipped: no GPU"
GRACE = 5.0
"""Seconds between asking a process to end and ending it."""
PROBE = """
import json, platform, torch, transformers
gpu = torch.cuda.get_device_name(0) if torch.cuda.is_available() else None
versions = {"python": platform.python_version(), "torch": torch.__version__, "transformers": transformers.__version__}
print(json.dumps({"gpu": gpu, "versions": versions}))
"""


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


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line.

    Returns:
        Exit status: 0 if a part passed and none failed, 1 otherwise, 2 wrong use, 130 Ctrl-C.
    """
    parser = _parser()
    options = parser.parse_args(arguments)
    if options.limit < 1:
        parser.error(f"--limit ({options.limit}) must be at least 1 second")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # or else the part that runs would outlive this process
    out = Path(options.out).resolve()
    chosen = {name: part for name, part in parts(out, WORK).items() if not options.only or name in options.only}
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
    deadline = time.monotonic() + limit
    WORK.mkdir(parents=True, exist_ok=True)
    try:
        carried: list[str] | str = install_missing(WHEELS, SITE)
    except subprocess.CalledProcessError as error:  # most parts do without
        carried = f"failed: pip ended with {error.returncode}; wheels are for Python {PYTHON_VERSION}"
    paths = (str(ROOT), str(SITE), os.environ.get("PYTHONPATH", ""))
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join(filter(None, paths)),
        "MEDUSA_PYTHON": sys.executable,  # what a part starts through launch.sh takes this interpreter as it is
    }
    report: Report = {"machine": probe(environment) | {"carried": carried}, "parts": {}}
    print(json.dumps(report["machine"]), flush=True)
    results = {}
    for name, part in chosen.items():
        left = deadline - time.monotonic()
        if part.needs_gpu and not report["machine"]["gpu"]:
            results[name] = Result(NO_GPU, command=_command(part))
        elif left <= 0:
            results[name] = Result(f"skipped: the {limit:.0f} s are over", command=_command(part))
        else:
            print(f"{name}: {_command(part)}", flush=True)
            results[name] = run_part(part, out / f"{name}.log", min(part.limit, left), environment)
        report["parts"][name] = asdict(results[name])  # after every part: what was found survives an end from outside
        (out / "report.json").write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")
    print(f"\nlogs and report.json: {out}\n\n{table(results)}")
    outcomes = {result.result for result in results.values()}
    return 0 if "passed" in outcomes <= {"passed", NO_GPU} else 1


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
    result.figure = _last_line(log)
    try:
        if part.report is not None and part.report.is_file():
            result.report = json.loads(part.report.read_text(encoding="utf-8"))
        if part.figure is not None and result.report and result.result == "passed":
            result.figure = part.figure(result.report)
    except (ValueError, LookupError) as error:  # one part's broken report does not stop the others
        result.result = f"failed: its report cannot be read ({error!r})"
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
    """End a process and what it started, whichever still run."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGTERM)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(GRACE)
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
    parser.add_argument("--limit", type=int, default=480, metavar="SECONDS", help="for all parts together")
    parser.add_argument(
        "--only", nargs="+", choices=list(parts(Path(), WORK)), metavar="PART", help="these parts alone"
    )
    parser.add_argument("--dry-run", action="store_true", help="only say what would run")
    parser.add_argument(
        "--pack", action="store_true", help="where a network is: fill .wheels with what the other machine lacks"
    )
    return parser


if __name__ == "__main__":
    sys.exit(main())
