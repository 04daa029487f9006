"""``./launch.sh gpu-check``: tests this project on a GPU machine with torch and transformers, without a network.

Parts run one after the other, each in its own process with its own time limit and log; one that fails does not stop the
others. A short table is printed at the end; ``report.json`` holds all results. This program needs only the standard
library; parts that need more report what is missing.
"""

import argparse
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

from medusa.benchmarks.gpu.parts import Part, Report, parts
from medusa.benchmarks.process import Process, last_words
from medusa.files import CLONE, write_json

WORK = CLONE / ".cache" / "gpu-check"
NO_GPU = "skipped: no GPU"
PROBE = """
import json, platform, torch, transformers
gpu = torch.cuda.get_device_name(0) if torch.cuda.is_available() else None
versions = {"python": platform.python_version(), "torch": torch.__version__, "transformers": transformers.__version__}
print(json.dumps({"gpu": gpu, "versions": versions}))
"""

Environment = dict[str, str]


@dataclass
class Result:
    """The result of a part."""

    result: str = "passed"
    """"passed", or the reason why not."""
    seconds: float = 0.0
    figure: str = ""
    command: str = ""
    report: Report = field(default_factory=dict)
    """The part's own JSON report, if it wrote one."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line.

    Returns:
        Exit status: 0 if a part passed and none failed, 1 otherwise, 2 wrong use, 130 Ctrl-C.
    """
    parser = _parser()
    options = parser.parse_args(arguments)
    if options.limit < 1:
        parser.error(f"--limit ({options.limit}) must be at least 1 second")
    out = Path(options.out).resolve()
    chosen = {name: part for name, part in parts(WORK).items() if not options.only or name in options.only}
    try:
        if options.dry_run:
            for name, part in chosen.items():
                print(f"{name:<13} at most {part.limit:.0f} s: {part.command}")
            return 0
        return check(chosen, out, options.limit)
    except (OSError, ValueError) as error:
        print(error, file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="./launch.sh gpu-check", description=__doc__, formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    add = parser.add_argument
    add("--out", default="runs/gpu-check", metavar="DIR", help="where logs and report.json go")
    add("--limit", type=int, default=480, metavar="SECONDS", help="for all parts together")
    add("--only", nargs="+", choices=list(parts(WORK)), metavar="PART", help="these parts alone")
    add("--dry-run", action="store_true", help="only say what would run")
    return parser


def probe(environment: Environment) -> Report:
    """The GPU's name (None if there is none) and the versions of packages for the parts.

    Raises:
        ValueError: torch or transformers cannot be imported.
    """
    words = [sys.executable, "-c", PROBE]
    done = subprocess.run(words, capture_output=True, text=True, env=environment, cwd=CLONE, check=False)
    if done.returncode != 0:
        reason = (done.stderr.strip().splitlines() or ["no message"])[-1]
        raise ValueError(f"python ({sys.executable}) lacks torch or transformers: {reason}; name another with PYTHON=")
    machine: Report = json.loads(done.stdout.splitlines()[-1])
    return machine


def check(chosen: Mapping[str, Part], out: Path, limit: float) -> int:
    """Run parts; SIGTERM to this process ends the running part too.

    Args:
        chosen: Parts by name.
        out: Directory for a log per part and report.json; created if missing.
        limit: Seconds for all parts together.

    Returns:
        0 if a part passed and none failed, 1 otherwise.

    Raises:
        ValueError: torch or transformers cannot be imported.
    """
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # otherwise the running part would outlive this process
    deadline = time.monotonic() + limit
    for directory in (out, WORK):
        directory.mkdir(parents=True, exist_ok=True)
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join(filter(None, (str(CLONE), os.environ.get("PYTHONPATH", "")))),
        "MEDUSA_PYTHON": sys.executable,  # launch.sh uses this interpreter if a part calls it
    }
    report: Report = {"machine": probe(environment), "parts": {}}
    print(json.dumps(report["machine"]), flush=True)
    results = {}
    for name, part in chosen.items():
        left = deadline - time.monotonic()
        if part.needs_gpu and not report["machine"]["gpu"]:
            results[name] = Result(NO_GPU, command=part.command)
        elif left <= 0:
            results[name] = Result(f"skipped: the {limit:.0f} s have passed", command=part.command)
        else:
            print(f"{name}: {part.command}", flush=True)
            results[name] = run_part(part, out / f"{name}.log", min(part.limit, left), environment)
        report["parts"][name] = asdict(results[name])  # after every part, so that results survive a kill
        write_json(out / "report.json", report)
    for name, part in chosen.items():
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
    process = Process(part.command, [sys.executable, *part.words], log, environment, CLONE)
    try:
        status = process.wait(seconds)
        if status is None:
            result.result = f"stopped after {seconds:.0f} s"
        elif status != 0:
            result.result = f"failed: exit status {status}"
    finally:
        process.close()
    result.seconds = round(time.monotonic() - began, 1)
    result.figure = "".join(last_words(log)[-1:]).strip("= ")
    try:
        if part.report is not None and part.report.is_file():
            result.report = json.loads(part.report.read_text(encoding="utf-8"))
        if part.figure is not None and result.report and result.result == "passed":
            result.figure = part.figure(result.report)
    except (ValueError, LookupError) as error:  # a broken report of one part does not stop the others
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


if __name__ == "__main__":
    sys.exit(main())
