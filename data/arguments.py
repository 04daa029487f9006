"""Values on command lines that several commands take."""

import argparse
from collections.abc import Callable


def at_least(low: int) -> Callable[[str], int]:
    """A parser of whole numbers from ``low`` on."""

    def parse(text: str) -> int:
        if not (text.isascii() and text.isdigit()) or int(text) < low:
            raise argparse.ArgumentTypeError(f"value ({text}) must be a whole number of at least {low}")
        return int(text)

    return parse
