"""What command lines have in common: values that several commands take, and where messages go."""

import argparse
import logging
import sys
from collections.abc import Callable


def at_least(low: int) -> Callable[[str], int]:
    """A parser of whole numbers from ``low`` on."""

    def parse(text: str) -> int:
        if not (text.isascii() and text.isdigit()) or int(text) < low:
            raise argparse.ArgumentTypeError(f"value ({text}) must be a whole number of at least {low}")
        return int(text)

    return parse


def exit_status(action: Callable[[], object]) -> int:
    """Run a command: 0 done, 1 a failure whose message is on stderr, 130 Ctrl-C."""
    try:
        action()
    except (OSError, ValueError, RuntimeError) as error:
        sys.stderr.write(f"{error}\n")
        return 1
    except KeyboardInterrupt:
        return 130
    return 0


def show_messages() -> None:
    """Warnings go to stderr, and so does what a base that is downloaded says meanwhile."""
    logging.basicConfig(format="%(message)s", level=logging.WARNING)
    logging.getLogger("medusa.base.smollm2").setLevel(logging.INFO)
