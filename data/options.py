"""What ``python -m data`` takes."""

import argparse
from contextlib import suppress
from typing import Any

from data import EMBEDDED
from data.arguments import at_least
from data.exchange import BATCH, EndpointSettings, Settings

EMBEDDED_COUNT = 2000
"""Prompts from the standard library where no number is given."""
CHAT_COUNT = 6000
OWN_COUNT = 4000


def parser() -> argparse.ArgumentParser:
    """The whole command line; ``command`` is the name of the one that was chosen."""
    top = argparse.ArgumentParser(prog="medusa-data", description="Make training data for draft heads.")
    commands = top.add_subparsers(dest="command", required=True)
    _add_inspect(commands)
    _add_regenerate(commands)
    _add_prompts(commands)
    return top


def _command(commands: Any, name: str, what: str) -> argparse.ArgumentParser:
    added: argparse.ArgumentParser = commands.add_parser(
        name, help=what, formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    return added


def _add_regenerate(commands: Any) -> None:
    regenerate = _command(commands, "regenerate", "let the base answer prompts; its own answers are the training data")
    add = regenerate.add_argument
    add("--base", help=f'directory, Hub id, "smollm2", or "{EMBEDDED}", which is the default in this process')
    add(
        "--prompts",
        default="train",
        help='"train" or "heldout": prompts from the standard library; "chat" or "chat-heldout": questions and tasks of'
        " many kinds, made from templates; or a file, a directory of files or a Hub data set of conversations, every"
        " user turn of which is answered",
    )
    add("--split", default="train", help="of a Hub data set")
    add("--subset", default="", help="of a Hub data set")
    add("--streaming", action="store_true", help="do not download a Hub data set whole; needs --count")
    add(
        "--count",
        type=at_least(1),
        default=None,
        help=f"prompts; default: all of a source, {EMBEDDED_COUNT} of the standard library, {CHAT_COUNT} of chat",
    )
    add("--out", required=True, metavar="FILE", help="the .jsonl file to write")
    _add_sampling(regenerate, Settings())
    _add_here(regenerate.add_argument_group("the base runs in this process"))
    add = regenerate.add_argument_group("an OpenAI-compatible server runs the base").add_argument
    add("--endpoint", metavar="URL", help="its address, as http://localhost:8000/v1; --base then names the tokenizer")
    add("--model", metavar="NAME", help="the base's name on the server; default: that of --base")
    add("--api-key-env", metavar="VAR", help="environment variable that holds the key; default: no key")
    add("--concurrency", type=at_least(1), default=EndpointSettings.concurrency, help="requests under way at a time")
    add("--retries", type=at_least(0), default=EndpointSettings.retries, help="more tries of a request that failed")
    add("--timeout", type=_seconds, default=EndpointSettings.timeout, help="seconds per request")


def _add_prompts(commands: Any) -> None:
    what = "let a chat base write prompts itself, in the user's place: for regenerate --prompts FILE"
    prompts = _command(commands, "prompts", what)
    prompts.add_argument("--base", required=True, help='a chat model: directory, Hub id, or "smollm2"')
    prompts.add_argument("--count", type=at_least(1), default=OWN_COUNT, help="prompts to begin; bad ones are left out")
    prompts.add_argument("--out", required=True, metavar="FILE", help="the .jsonl file to write")
    _add_sampling(prompts, Settings(256, 1.0, 0.9))
    _add_here(prompts)


def _add_sampling(parser: Any, default: Settings) -> None:
    add = parser.add_argument
    add(
        "--max-new-tokens",
        type=at_least(1),
        default=default.max_new_tokens,
        help="most tokens that are written for each",
    )
    add("--temperature", type=_temperature, default=default.temperature, help="0 = greedy")
    add("--top-p", type=_share, default=default.top_p, help="draw from the likeliest tokens of this probability")
    add("--seed", type=int, default=default.seed, help="of the choice of prompts and of all that is drawn")


def _add_here(parser: Any) -> None:
    add = parser.add_argument
    add("--batch", type=at_least(1), default=BATCH, help="prompts decoded together")
    add("--heads", metavar="DIR", help="heads that guess; default: none")
    add("--draft-model", metavar="NAME", help="a smaller model with the base's tokenizer that guesses; default: none")
    text = "drafter and nodes that medusa-bench tune has found; default: several prompts are decoded plainly"
    add("--settings", metavar="FILE", help=text)
    add(
        "--dtype",
        choices=("float32", "bfloat16", "float16"),
        default=None,
        help="what the base computes in; default: its checkpoint's",
    )
    add("--device", default=None, help="cpu or cuda; default: cuda where there is one")


def _add_inspect(commands: Any) -> None:
    parser = _command(commands, "inspect", "show samples with what is trained on marked, and count tokens")
    parser.add_argument("--base", default=EMBEDDED, help='whose tokenizer: directory, Hub id, or "embedded"')
    parser.add_argument("--source", required=True, help="a file, a directory of files, or a Hub data set")
    parser.add_argument("--split", default="train", help="of a Hub data set")
    parser.add_argument("--subset", default="", help="of a Hub data set")
    parser.add_argument("--streaming", action="store_true", help="do not download a Hub data set whole")
    parser.add_argument("--limit", type=at_least(0), default=1000, help="records that are read; 0 = all")
    parser.add_argument("--index", type=at_least(0), default=0, help="first sample that is shown")
    parser.add_argument("--count", type=at_least(0), default=3, help="samples that are shown; 0 = only the figures")
    parser.add_argument("--row-tokens", type=at_least(1), default=1024, help="length of a packed row")
    parser.add_argument("--json", metavar="FILE", help="write samples and figures here instead")


def _temperature(text: str) -> float:
    return 0.0 if text in ("0", "0.0") else _number(text, 100.0)


def _share(text: str) -> float:
    return _number(text, 1.0)


def _seconds(text: str) -> float:
    return _number(text, 86400.0)


def _number(text: str, high: float) -> float:
    """A number above 0."""
    with suppress(ValueError):
        if 0 < (value := float(text)) <= high:
            return value
    raise argparse.ArgumentTypeError(f"value ({text}) must be a number above 0, at most {high:g}")
