"""``./launch.sh gpu-check``: tries this project on a GPU machine that has torch and transformers, and no network.

Parts run one after the other, each in its own process with its own time limit and log; one that fails does not stop the
others. The last thing printed is a short table; ``report.json`` holds everything. Standard library only: the parts need
more, and say so themselves.
"""

import argparse
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from benchmarks.gpu.check import ROOT, WHEELS, WORK, check
from benchmarks.gpu.parts import parts
from benchmarks.gpu.wheels import pack


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
        if options.pack:
            print(f"{WHEELS}: {pack(WHEELS, ROOT / 'constraints.txt') / 2**20:.1f} MiB of wheels")
            return 0
        if options.dry_run:
            for name, part in chosen.items():
                print(f"{name:<13} at most {part.limit:.0f} s: {part.command}")
            return 0
        return check(chosen, out, options.limit)
    except (OSError, ValueError) as error:
        print(error, file=sys.stderr)
        return 1
    except subprocess.CalledProcessError as error:
        print(f"{error.cmd[0]} failed (exit status {error.returncode}); its message is above", file=sys.stderr)
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
    add("--pack", action="store_true", help="where a network is: fill .wheels with what the other machine lacks")
    return parser


if __name__ == "__main__":
    sys.exit(main())
