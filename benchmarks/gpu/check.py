"""Runs parts one after the other, whatever becomes of each, and says what came of them. Standard library only."""

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path

from benchmarks.gpu.parts import Part, Report
from benchmarks.gpu.wheels import PYTHON_VERSION, install_missing

ROOT = Path(__file__).parents[2]
WHEELS = ROOT / ".wheels"
WORK = ROOT / ".cache" / "gpu-check"
NO_GPU = "skipped: no GPU"
GRACE = 5.0
"""Seconds between asking a process to end and ending it."""
PROBE = """
import json, platform, torch, transformers
gpu = torch.cuda.get_device_name(0) if torch.cuda.is_available() else None
versions = {"python": platform.python_version(), "torch": torch.__version__, "transformers": transformers.__version__}
print(json.dumps({"gpu": gpu, "versions": versions}))
"""

Environment = dict[str, str]


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


def probe(environment: Environment) -> Report:
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


def check(
    parts: Mapping[str, Part],
    out: Path,
    limit: float,
    wheels: Path = WHEELS,
    work: Path = WORK,
    probe: Callable[[Environment], Report] = probe,
) -> int:
    """Run parts, and end the one that runs where this process is asked to end (SIGTERM).

    Args:
        parts: By name.
        out: Gets a log per part and report.json; made if missing.
        limit: Seconds for all parts together.
        wheels: Packages that were carried here.
        work: Gets those of them that this interpreter lacks; made if missing.
        probe: Describes the machine.

    Returns:
        0 if a part passed and none failed, 1 otherwise.

    Raises:
        ValueError: torch or transformers cannot be imported.
    """
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # or else the part that runs would outlive this process
    deadline = time.monotonic() + limit
    site = work / "site"
    for directory in (out, work):
        directory.mkdir(parents=True, exist_ok=True)
    try:
        carried: list[str] | str = install_missing(wheels, site)
    except subprocess.CalledProcessError as error:  # most parts do without
        carried = f"failed: pip ended with {error.returncode}; wheels are for Python {PYTHON_VERSION}"
    paths = (str(ROOT), str(site), os.environ.get("PYTHONPATH", ""))
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join(filter(None, paths)),
        "MEDUSA_PYTHON": sys.executable,  # what a part starts through launch.sh takes this interpreter as it is
    }
    report: Report = {"machine": probe(environment) | {"carried": carried}, "parts": {}}
    print(json.dumps(report["machine"]), flush=True)
    results = {}
    for name, part in parts.items():
        left = deadline - time.monotonic()
        if part.needs_gpu and not report["machine"]["gpu"]:
            results[name] = Result(NO_GPU, command=part.command)
        elif left <= 0:
            results[name] = Result(f"skipped: the {limit:.0f} s are over", command=part.command)
        else:
            print(f"{name}: {part.command}", flush=True)
            results[name] = run_part(part, out / f"{name}.log", min(part.limit, left), environment)
        report["parts"][name] = asdict(results[name])  # after every part: what was found survives an end from outside
        (out / "report.json").write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")
    for name, part in parts.items():
        if part.details is not None and results[name].report:
            print(f"\n{part.details(results[name].report)}")
    print(f"\nlogs and report.json: {out}\n\n{table(results)}")
    outcomes = {result.result for result in results.values()}
    return 0 if "passed" in outcomes <= {"passed", NO_GPU} else 1


def run_part(part: Part, log: Path, seconds: float, environment: Environment) -> Result:
    """Run a part to its end or for ``seconds``, with its output in ``log``."""
    if part.report is not None:
        part.report.unlink(missing_ok=True)
    result = Result(command=part.command)
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


def table(results: Mapping[str, Result]) -> str:
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
