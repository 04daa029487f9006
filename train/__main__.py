"""`python -m train --recipe FILE [--recipe.KEY VALUE ...]`: trains draft heads; torchrun starts several of it."""

import argparse
import logging
import os
import sys
from collections.abc import Sequence

from train.recipe_file import RecipeError, describe, parse_overrides, read_recipe


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line.

    Returns:
        Exit status: 0 done, 1 failure, 2 wrong use, 130 Ctrl-C.
    """
    talks = os.environ.get("RANK", "0") == "0"
    logging.basicConfig(format="%(message)s", stream=sys.stderr)
    logging.getLogger("train").setLevel(logging.INFO if talks else logging.CRITICAL)
    logger = logging.getLogger("train")
    options, rest = _parser().parse_known_args(arguments)
    try:
        recipe = read_recipe(options.recipe, parse_overrides(rest))
        if not options.check:
            from train.trainer import train

            train(recipe)
    except RecipeError as error:
        logger.error("%s", error)
        return 2
    except KeyboardInterrupt:
        logger.error("stopped; the same command goes on from the last checkpoint")
        return 130
    except (ValueError, OSError) as error:
        logger.error("%s", error)
        return 1
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="medusa-train",
        description="Trains draft heads on a frozen base; a run directory that has a checkpoint is resumed.",
        epilog=f"recipe keys, each also a flag (--recipe.KEY VALUE), with defaults:\n{describe()}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("--recipe", required=True, metavar="FILE", help="YAML file, e.g. train/recipes/embedded.yaml")
    parser.add_argument("--check", action="store_true", help="read the recipe, report its errors, and stop")
    return parser


if __name__ == "__main__":
    sys.exit(main())
