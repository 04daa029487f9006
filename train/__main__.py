"""`medusa train --recipe FILE [--recipe.KEY VALUE ...]`: trains draft heads; torchrun starts several of it."""

import argparse
import logging
import os
import sys
import time
from collections.abc import Sequence

from medusa.data.child import die_with_parent
from medusa.train.check import mistakes
from medusa.train.recipe_file import RecipeError, describe, parse_overrides, read_recipe
from medusa.train.stop import Stopped, StopRequest

GRACE = 10.0
"""Seconds that torchrun gets to end a process whose error only follows from another process's error."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line.

    Returns:
        Exit status: 0 done, 1 failure, 2 wrong use, 130 Ctrl-C, 143 SIGTERM (128 + the signal).
    """
    if "TORCHELASTIC_RUN_ID" in os.environ:
        die_with_parent()  # before torch is imported: an orphan would wait for its torchrun for half an hour
    talks = os.environ.get("RANK", "0") == "0"
    logging.basicConfig(format="%(message)s", stream=sys.stderr)
    for name in ("medusa.train", "medusa.base.smollm2"):
        logging.getLogger(name).setLevel(logging.INFO if talks else logging.CRITICAL)
    if not talks:
        logging.getLogger("medusa").setLevel(logging.ERROR)  # messages about the base are the same everywhere
    logger = logging.getLogger("medusa.train")
    options, rest = _parser().parse_known_args(arguments)
    stop = StopRequest()
    try:
        first = os.environ.get("LOCAL_RANK", "0") == "0"  # one process of a machine speaks for all
        recipe = read_recipe(options.recipe, parse_overrides(rest), mistakes if first else None)
        if not options.check:
            with stop.listening():
                from medusa.train.trainer import train

                train(recipe, stop)
    except KeyboardInterrupt:
        logger.error("stopped; the same command continues from the last checkpoint")
        return 130
    except Stopped as stopped:
        logger.error("%s", stopped)
        return 128 + stopped.number
    except (ValueError, OSError, MemoryError) as error:
        _report(error, stop)
        return 2 if isinstance(error, RecipeError) else 1
    return 0


def _report(error: Exception, stop: StopRequest) -> None:
    """Report an error once: process 0 reports errors that it caused or that all processes share."""
    logger = logging.getLogger("medusa.train")
    if os.environ.get("RANK", "0") != "0" or isinstance(error, ConnectionError):
        if stop.number:
            return
        time.sleep(GRACE + 0.5 * int(os.environ.get("LOCAL_RANK", "0")))  # torchrun's SIGTERM ends it here
    logger.critical("%s", error)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="medusa train",
        description="Trains draft heads on a frozen base; a run directory that has a checkpoint is resumed.",
        epilog=f"recipe keys, each also a flag (--recipe.KEY VALUE), with defaults:\n{describe()}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("--recipe", required=True, metavar="FILE", help="YAML file, e.g. train/recipes/embedded.yaml")
    parser.add_argument("--check", action="store_true", help="report all mistakes in recipe, base and files, and stop")
    return parser


if __name__ == "__main__":
    sys.exit(main())
