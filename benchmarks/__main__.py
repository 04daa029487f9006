"""``medusa bench``: measures decoding on this machine, and compares it with bounds."""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from medusa.benchmarks.arguments import build_parser
from medusa.data.arguments import exit_status, show_messages


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line.

    Returns:
        Exit status: 0 done, 1 failure, 2 wrong use, 130 Ctrl-C.
    """
    words = sys.argv[1:] if arguments is None else arguments
    options = build_parser().parse_args(words, argparse.Namespace(words=words))
    show_messages()

    def run() -> None:
        from medusa.benchmarks.accept.command import accept  # imports torch, which help and usage errors do not need
        from medusa.benchmarks.run.command import run as compare
        from medusa.benchmarks.run.command import tune
        from medusa.benchmarks.step.command import attention, step

        for name in ("json", "picture", "markdown", "out"):
            if path := getattr(options, name, None):
                Path(path).parent.mkdir(parents=True, exist_ok=True)  # a wrong path fails before the work starts
        commands = {"run": compare, "accept": accept, "tune": tune, "step": step, "attention": attention}
        commands[options.command](options)

    return exit_status(run)


if __name__ == "__main__":
    sys.exit(main())
