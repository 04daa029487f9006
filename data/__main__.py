"""``python -m data regenerate ...``: make training data; ``python -m data inspect ...``: look at it."""

import argparse
import logging
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from data import EMBEDDED, resolve_base_name

EMBEDDED_COUNT = 2000
"""Prompts from the standard library where no number is given."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line.

    Returns:
        Exit status: 0 done, 1 failure, 2 wrong use, 130 Ctrl-C.
    """
    logging.basicConfig(format="%(message)s", level=logging.INFO, stream=sys.stderr)
    logger = logging.getLogger("data")
    options = _parser().parse_args(arguments)
    try:
        options.run(options, logger)
    except KeyboardInterrupt:
        logger.error("stopped; the same command goes on where it was")
        return 130
    except (ValueError, OSError) as error:
        logger.error("%s", error)
        return 1
    return 0


def _regenerate(options: argparse.Namespace, logger: logging.Logger) -> None:
    if Path(options.out).exists():
        logger.info("%s is there already; remove it to make it again", options.out)
        return
    from transformers.utils.logging import disable_progress_bar

    from data.regenerate import Settings, embedded_prompts, file_prompts, regenerate
    from medusa import MedusaModel

    disable_progress_bar()
    model = MedusaModel.from_pretrained(None, base=resolve_base_name(options.base), device=options.device)
    if options.prompts in ("train", "heldout"):
        prompts = embedded_prompts(model, options.prompts, options.count or EMBEDDED_COUNT, options.seed)
    else:
        prompts = file_prompts(model, options.prompts)[: options.count]
    settings = Settings(options.max_new_tokens, options.temperature, options.seed, options.batch)
    tokens = regenerate(model, prompts, options.out, settings)
    logger.info("%d tokens that the base wrote are in %s", tokens, options.out)


def _inspect(options: argparse.Namespace, logger: logging.Logger) -> None:
    from data.inspect import inspect

    inspect(options, logger)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="medusa-data", description="Make training data for draft heads.")
    commands = parser.add_subparsers(dest="command", required=True)
    _add_inspect(commands)
    regenerate = commands.add_parser(
        "regenerate",
        help="let the base answer prompts; its own answers are the training data",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    regenerate.set_defaults(run=_regenerate)
    regenerate.add_argument("--base", default=EMBEDDED, help='directory, Hub id, or "embedded"')
    regenerate.add_argument(
        "--prompts",
        default="train",
        help='"train" or "heldout": prompts from the standard library; or a .jsonl file of conversations',
    )
    regenerate.add_argument(
        "--count", type=_positive, default=None, help=f"prompts; default: all of a file, {EMBEDDED_COUNT}"
    )
    regenerate.add_argument("--out", required=True, metavar="FILE", help="the .jsonl file to write")
    regenerate.add_argument("--max-new-tokens", type=_positive, default=128, help="tokens per answer")
    regenerate.add_argument("--temperature", type=float, default=0.0, help="0 = greedy")
    regenerate.add_argument("--seed", type=int, default=0, help="of the choice of prompts and of sampled answers")
    regenerate.add_argument("--batch", type=_positive, default=64, help="prompts decoded together")
    regenerate.add_argument("--device", default=None, help="cpu or cuda; default: cuda where there is one")
    return parser


def _add_inspect(commands: Any) -> None:
    parser = commands.add_parser(
        "inspect",
        help="show samples with what is trained on marked, and count tokens",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.set_defaults(run=_inspect)
    parser.add_argument("--base", default=EMBEDDED, help='whose tokenizer: directory, Hub id, or "embedded"')
    parser.add_argument("--source", required=True, help="a file, a directory of files, or a Hub data set")
    parser.add_argument("--split", default="train", help="of a Hub data set")
    parser.add_argument("--subset", default="", help="of a Hub data set")
    parser.add_argument("--streaming", action="store_true", help="do not download a Hub data set whole")
    parser.add_argument("--limit", type=_whole, default=1000, help="records that are read; 0 = all")
    parser.add_argument("--index", type=_whole, default=0, help="first sample that is shown")
    parser.add_argument("--count", type=_whole, default=3, help="samples that are shown")
    parser.add_argument("--row-tokens", type=_whole, default=1024, help="length of a packed row")
    parser.add_argument("--json", metavar="FILE", help="write samples and figures here instead")


def _whole(text: str) -> int:
    if not text.isdigit():
        raise argparse.ArgumentTypeError(f"value ({text}) must be a whole number of at least 0")
    return int(text)


def _positive(text: str) -> int:
    if not text.isdigit() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"value ({text}) must be a whole number of at least 1")
    return int(text)


if __name__ == "__main__":
    sys.exit(main())
