"""What command lines have in common: values that several commands take, and where messages go."""

import argparse
import logging
from collections.abc import Callable


def at_least(low: int) -> Callable[[str], int]:
    """A parser of whole numbers from ``low`` on."""

    def parse(text: str) -> int:
        if not (text.isascii() and text.isdigit()) or int(text) < low:
            raise argparse.ArgumentTypeError(f"value ({text}) must be a whole number of at least {low}")
        return int(text)

    return parse


def show_messages() -> None:
    """Warnings go to stderr, and so does what a base that is downloaded says meanwhile."""
    logging.basicConfig(format="%(message)s", level=logging.WARNING)
    logging.getLogger("medusa.base.smollm2").setLevel(logging.INFO)
