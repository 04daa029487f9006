"""Shared parts of command lines: types of values that several commands have, and the output of messages."""

import argparse
import logging
import re
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from medusa.base.names import DTYPES, full_name


class Defaults(argparse.ArgumentDefaultsHelpFormatter):
    """Shows defaults where there are any."""

    def _get_help_string(self, action: argparse.Action) -> str | None:
        if action.required or action.default in (None, "", [], ()) or action.default is False:
            return action.help
        return super()._get_help_string(action)


def add_base_flags(parser: Any) -> None:
    """Add the flags of a base in this process except ``--base``; ``base_arguments`` reads them."""
    add = parser.add_argument
    add("--heads", metavar="DIR", help="heads that guess; default: none")
    add("--draft-model", metavar="NAME", help="a smaller model with the base's tokenizer that guesses; default: none")
    add("--dtype", choices=DTYPES, default="auto", help="what the base computes in; auto = its checkpoint's")
    add("--device", default="auto", help="cpu, cuda, cuda:1, ...; auto = cuda where there is one")


def base_arguments(options: Any) -> dict[str, Any]:
    """Arguments of ``MedusaModel.from_pretrained`` for these flags, or for fields with their names, except heads."""
    import torch

    return {
        "base": full_name(options.base) if options.base else None,
        "dtype": None if options.dtype == "auto" else getattr(torch, options.dtype),
        "device": None if options.device == "auto" else options.device,
        "draft_model": full_name(options.draft_model) if options.draft_model else None,
    }


def at_least(low: int) -> Callable[[str], int]:
    """A parser of whole numbers that are at least ``low``."""

    def parse(text: str) -> int:
        if not (text.isascii() and text.isdigit()) or int(text) < low:
            raise argparse.ArgumentTypeError(f"value ({text}) must be a whole number of at least {low}")
        return int(text)

    return parse


def up_to(high: float, what: str = "a number") -> Callable[[str], float]:
    """A parser of numbers above 0, up to ``high``; errors say ``what`` they are."""

    def parse(text: str) -> float:
        try:
            value = float(text)
        except ValueError:
            value = -1.0
        if not 0 < value <= high:
            raise argparse.ArgumentTypeError(f"value ({text}) must be {what} above 0, at most {high:g}")
        return value

    return parse


def seconds(text: str) -> float:
    """A parser of finite durations."""
    value = float(text)
    if not 0 <= value < float("inf"):
        raise argparse.ArgumentTypeError(f"value ({text}) must be a number of seconds from 0 on")
    return value


def memory_size(text: str) -> int:
    """Parse a size in bytes: 80GB (1e9 bytes each), 24GiB (2^30 bytes each), or a plain number such as 8e9."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?(?:e\d+)?)\s*(?:([kmgt])(i?)b?|b)?", text.strip().lower())
    if match is None or float(match[1]) <= 0:
        raise argparse.ArgumentTypeError(f"size ({text}) must be a positive number of bytes, as 80GB, 24GiB or 8e9")
    return int(float(match[1]) * (1024 if match[3] else 1000) ** ("kmgt".index(match[2]) + 1 if match[2] else 0))


def exit_status(action: Callable[[], object]) -> int:
    """Run a command; returns 0 for success, 1 for a failure with its message on stderr, 130 for Ctrl-C."""
    try:
        action()
    except (OSError, ValueError, RuntimeError) as error:
        sys.stderr.write(f"{error}\n")
        return 1
    except KeyboardInterrupt:
        return 130
    return 0


@contextmanager
def ending_at_once() -> Iterator[None]:
    """A context in which Ctrl-C ends the process at once, with the status of a signal; for loading.

    An exception would wait for long C++ calls, and libraries with lazy imports turn it into other errors.
    """
    before = signal.getsignal(signal.SIGINT)
    try:
        if before is signal.default_int_handler:  # background processes ignore it
            signal.signal(signal.SIGINT, signal.SIG_DFL)
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def show_messages(form: str = "%(message)s") -> None:
    """Show warnings on stderr in this form, and also messages during the download of a base."""
    logging.basicConfig(format=form, level=logging.WARNING)
    logging.getLogger("medusa.base.smollm2").setLevel(logging.INFO)
