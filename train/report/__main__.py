"""`medusa report RUN [--json FILE]`: the figures of a run as a table and as a picture."""

import argparse
import logging
import math
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from shutil import copyfile
from typing import Any

from medusa.train.report import read_report, write_report


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line.

    Returns:
        Exit status: 0 done, 1 failure, 2 wrong use.
    """
    logging.basicConfig(format="%(message)s", level=logging.INFO, stream=sys.stderr)
    parser = argparse.ArgumentParser(
        prog="medusa report", description="Writes training.json and training.png of a run, and prints a table."
    )
    parser.add_argument("run", help="run directory, as runs/demo; the run may still be under way")
    parser.add_argument("--json", metavar="FILE", help="write the figures here too")
    options = parser.parse_args(arguments)
    try:
        path = write_report(options.run)
        if options.json and Path(options.json).resolve() != path.resolve():
            copyfile(path, options.json)
        print("\n".join(_table(read_report(options.run))))
    except (ValueError, OSError) as error:
        logging.getLogger("medusa.train").error("%s", error)
        return 1
    return 0


def _table(report: Mapping[str, Any]) -> Iterator[str]:
    totals, curves = report["totals"], report["curves"]
    yield f"{report['run']}: " + ", ".join(f"{name} {value}" for name, value in report["recipe"].items())
    yield (
        f"{totals['steps']:,} steps, {totals['epochs']:.2f} epochs, {totals['useful_tokens']:,} useful tokens in "
        f"{totals['train_seconds']:,.0f} s ({totals['useful_tokens_per_s']:,.0f} tokens/s)"
    )
    yield "\n    step      loss  top-1 of each head in training"
    every = max(1, len(curves["step"]) // 10)
    lines = list(zip(curves["step"], curves["loss"], curves["head_top1"], strict=True))
    for step, loss, top1 in lines[::-every][::-1]:
        yield f"{step:>8,}  {loss:>8.3f}  {_shares(top1)}"
    if report["evaluations"]:
        yield "\n    step  tokens per step  held-out top-1 of each head, then acceptance by depth"
    for record in report["evaluations"]:
        served = record.get("heldout_tokens_per_step", math.nan)
        accepted = record.get("heldout_acceptance", [])
        yield f"{record['step']:>8,}  {served:>15.3f}  {_shares(record['heldout_top1'])}   {_shares(accepted)}".rstrip()


def _shares(values: Sequence[float]) -> str:
    return " ".join(f"{value:.3f}" for value in values)


if __name__ == "__main__":
    sys.exit(main())
