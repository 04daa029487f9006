"""The command line of ``medusa data``."""

import argparse
from typing import Any

from medusa.base.names import default_base
from medusa.data.arguments import Defaults, add_base_flags, at_least, up_to
from medusa.data.exchange import BATCH, EndpointSettings, Settings

EMBEDDED_COUNT = 2000
"""Default number of prompts from the standard library."""
CHAT_COUNT = 6000
OWN_COUNT = 4000
A_BASE = 'directory, Hub id, "smollm2" or "embedded"'
A_SOURCE = "a file, a directory of files or a Hub data set"


def parser() -> argparse.ArgumentParser:
    """The parser of the whole command line; ``command`` is the name of the chosen subcommand."""
    top = argparse.ArgumentParser(prog="medusa data", description="Make training data for draft heads.")
    commands = top.add_subparsers(dest="command", required=True)
    for name, what, add_flags in (
        ("inspect", "show samples, mark the text that is trained on, and count tokens", _add_inspect),
        ("regenerate", "let the base answer prompts; its own answers are the training data", _add_regenerate),
        ("prompts", "let a chat base write prompts itself, for regenerate --prompts FILE", _add_prompts),
        ("mix", "mix prompts of many sources, without duplicates and without questions of evaluations", _add_mix),
    ):
        add_flags(commands.add_parser(name, help=what, formatter_class=Defaults))
    return top


def _add_inspect(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--base", default=default_base(), help=f"the base, for its tokenizer: {A_BASE}")
    add("--source", required=True, help=A_SOURCE)
    _add_source(parser)
    add("--limit", type=at_least(0), default=1000, help="records that are read; 0 = all")
    add("--index", type=at_least(0), default=0, help="first sample that is shown")
    add("--count", type=at_least(0), default=3, help="samples that are shown; 0 = only the figures")
    add("--row-tokens", type=at_least(1), default=1024, help="length of a packed row")
    add("--json", metavar="FILE", help="write samples and figures here instead")


def _add_regenerate(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--base", help=f"{A_BASE}; default in this process: {default_base()}")
    what = (
        '"train" or "heldout": prompts from the standard library; "chat" or "chat-heldout": questions and tasks of many'
        f" kinds, made from templates; or {A_SOURCE} of conversations, in which every user turn is answered"
    )
    add("--prompts", default="train", help=what)
    _add_source(parser)
    what = f"prompts; default: all of a source, {EMBEDDED_COUNT} of the standard library, {CHAT_COUNT} of chat"
    add("--count", type=at_least(1), default=None, help=what)
    add("--out", required=True, metavar="FILE", help="the .jsonl file to write")
    _add_sampling(parser, Settings())
    _add_here(parser.add_argument_group("the base runs in this process"))
    add = parser.add_argument_group("an OpenAI-compatible server runs the base").add_argument
    add("--endpoint", metavar="URL", help="its address, as http://localhost:8000/v1; --base then names the tokenizer")
    add("--model", metavar="NAME", help="name of the base on the server; default: that of --base")
    add("--api-key-env", metavar="VAR", help="environment variable that holds the key; default: no key")
    add("--concurrency", type=at_least(1), default=EndpointSettings.concurrency, help="requests under way at a time")
    add("--retries", type=at_least(0), default=EndpointSettings.retries, help="more tries of a request that failed")
    add("--timeout", type=up_to(86400.0), default=EndpointSettings.timeout, help="seconds per request")


def _add_prompts(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--base", required=True, help='a chat model: directory, Hub id, or "smollm2"')
    add("--count", type=at_least(1), default=OWN_COUNT, help="prompts to begin with; bad ones are left out")
    add("--out", required=True, metavar="FILE", help="the .jsonl file to write")
    _add_sampling(parser, Settings(256, 1.0, 0.9))
    _add_here(parser)


def _add_mix(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("mixture", metavar="FILE", help="a .yaml file that lists the sources, as data/mixtures/smollm2.yaml")
    add("--base", default=default_base(), help=f"the base, for its tokenizer: {A_BASE}")
    add("--sources", required=True, metavar="DIR", help="where the sources' files are")
    add("--out", required=True, metavar="DIR", help="directory to write: train/, heldout/ and report.json")
    what = "questions of an evaluation, in a file or directory; prompts that share words with one are left out"
    add("--without", action="append", default=[], metavar="FILE", help=what)
    add("--size", type=at_least(1), default=1000, help="prompts in each file")
    add("--seed", type=int, default=0, help="seed of the order and of the choice")


def _add_source(parser: Any) -> None:
    add = parser.add_argument
    add("--split", default="train", help="split of a Hub data set")
    add("--subset", default="", help="configuration of a Hub data set")
    add("--streaming", action="store_true", help="do not download a Hub data set whole; needs a number to read")


def _add_sampling(parser: Any, default: Settings) -> None:
    add = parser.add_argument
    add("--max-new-tokens", type=at_least(1), default=default.max_new_tokens, help="most tokens of an answer")
    add("--temperature", type=_temperature, default=default.temperature, help="0 = greedy")
    add(
        "--top-p",
        type=up_to(1.0),
        default=default.top_p,
        help="sample from the most likely tokens that together have this probability",
    )
    add("--seed", type=int, default=default.seed, help="seed of the choice of prompts and of sampling")


def _add_here(parser: Any) -> None:
    parser.add_argument("--batch", type=at_least(1), default=BATCH, help="prompts decoded together")
    add_base_flags(parser)
    what = "drafter and nodes from medusa bench tune; default: several prompts are decoded plainly"
    parser.add_argument("--settings", metavar="FILE", help=what)


def _temperature(text: str) -> float:
    return 0.0 if text in ("0", "0.0") else up_to(100.0)(text)
