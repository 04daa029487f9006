"""``python -m medusa.benchmarks.serving``: load tests of OpenAI-compatible servers."""

import argparse
import json
import logging
import os
import shlex
import signal
import sys
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch

from medusa.base import smollm2
from medusa.benchmarks.picture import Field, Line, draw
from medusa.benchmarks.report import Table, environment, publish
from medusa.benchmarks.serving.client import Asking, first_model
from medusa.benchmarks.serving.compare import Plan, compare, load, medians, read_prompts
from medusa.benchmarks.serving.servers import NAMES, places
from medusa.benchmarks.serving.watch import Watch, curves
from medusa.data.arguments import at_least, exit_status

SECONDS = 40
"""Length of a level's window in seconds, unless requests are counted."""


def build_parser() -> argparse.ArgumentParser:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m medusa.benchmarks.serving", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    one = commands.add_parser("load", help="load a server that runs")
    add = one.add_argument
    add("url", help="its address up to /v1")
    add("--model", help="name of the model in requests (default: the first that the server names)")
    text = "ask for numbers of tokens with every chunk, as medusa serve and vLLM tell them (default: at the end)"
    add("--continuous-usage", action="store_true", help=text)
    add("--body", type=_object, default={}, metavar="JSON", help="further fields of every request")
    add("--api-key-env", default="", metavar="NAME", help="environment variable that holds the key")
    text = "draw memory, requests and tasks as /metrics tells them into this PNG file"
    add("--curves", metavar="FILE", help=text)
    several = commands.add_parser("compare", help="start servers of smollm2, and load them in turn")
    several.add_argument("environments", help="the directory that benchmarks/peers/setup.sh has filled")
    several.add_argument("--servers", nargs="+", choices=NAMES, default=NAMES, help="default: all")
    several.add_argument("--heads", help="trained heads of smollm2 (default: those that come with the clone)")
    for command in (one, several):
        _add_plan(command)
    return parser


def _add_plan(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--levels", type=at_least(1), nargs="+", default=[1, 4, 16, 64], help="clients at a time, one run each")
    add("--seconds", type=at_least(1), help=f"length of a run (default: {SECONDS} without --requests)")
    add("--requests", type=at_least(1), help="complete answers of a run, after the warm-up (default: any)")
    add("--max-tokens", type=at_least(1), default=128, help="length of answers (default: %(default)s)")
    add("--temperature", type=float, default=0.0, help="default: greedy")
    add("--prompts", metavar="FILE", help="records of prompt, or of turns (default: the clone's held-out prompts)")
    add("--count", type=at_least(1), default=2048, help="different prompts at most (default: %(default)s)")
    add("--rounds", type=at_least(1), default=1, help="all levels so often (default: %(default)s)")
    add("--json", metavar="FILE", help="write all figures to this file")
    add("--picture", metavar="FILE", help="draw them into this PNG file")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line.

    Returns:
        Exit status: 0 done, 1 failure, 2 wrong use, 130 Ctrl-C.
    """
    options = build_parser().parse_args(arguments)
    logging.getLogger("httpx").setLevel(logging.WARNING)  # it logs every request
    words = list(sys.argv[1:] if arguments is None else arguments)
    return exit_status(lambda: _run(options, words))


def _run(options: argparse.Namespace, words: Sequence[str]) -> None:
    seconds = options.seconds or (None if options.requests else SECONDS)
    plan = Plan(
        read_prompts(options.prompts, options.count), options.levels, options.max_tokens, seconds, options.requests,
        options.temperature, options.rounds,
    )  # fmt: skip
    report = environment("python -m medusa.benchmarks.serving", words, torch.device("cpu"))
    if options.command == "load":
        key = os.environ.get(options.api_key_env, "")
        asking = Asking(
            options.url, options.model or first_model(options.url, key), options.temperature, options.continuous_usage,
            options.body, key,
        )  # fmt: skip
        servers = {asking.model: lambda: nullcontext(asking)}
        with Watch(asking.url) if options.curves else nullcontext() as watch:
            rows = load(servers, plan)
        if watch is not None:
            report["watched"] = watch.samples
            draw(f"{asking.url} under load", curves(watch.samples), options.curves, columns=3)
            print("\n".join(watch.summary()), f"written: {options.curves}", sep="\n")
    else:
        there = Path(options.environments)
        known = places(there, smollm2.locate("smollm2"), options.heads)
        known = {name: known[name] for name in options.servers}
        report["servers"] = {name: shlex.join(place.command) for name, place in known.items()}
        rows = compare(known, plan, there)
    shown = medians(rows)
    title = f"answers of at most {options.max_tokens} tokens, temperature {options.temperature:g}"
    publish(options, {**report, "shown": shown, "figures": rows}, [_table(shown, title)], title, _fields(shown))
    if any(row["inter_token_of"] == "chunk" for row in shown):
        print("between tokens: this server does not report tokens per chunk, so times are between chunks")
    for row in rows:
        for message, count in row["error_messages"].items():
            print(f"{row['server']}, {row['clients']} clients: {count} x {message}")


def _table(rows: Sequence[Mapping[str, Any]], title: str) -> Table:
    columns = {
        "server": "server", "clients": "clients", "tokens/s": "tokens_per_second", "requests": "requests",
        "errors": "errors", "first token p50": "first_token_p50", "p99": "first_token_p99",
        "between tokens p50": "inter_token_p50", "p99 ": "inter_token_p99", "of": "inter_token_of",
        "whole p50": "end_to_end_p50", "p99  ": "end_to_end_p99", "tokens/chunk": "tokens_per_chunk",
    }  # fmt: skip
    return Table(f"{title}; times in ms", list(columns), [[_cell(n, row) for n in columns.values()] for row in rows])


def _cell(name: str, row: Mapping[str, Any]) -> str:
    value = row[name]
    if value is None:
        return "-"
    if name.endswith(("p50", "p99")):
        return f"{value * 1000:,.0f}"
    return str(value) if isinstance(value, str | int) else f"{value:,.2f}" if value < 10 else f"{value:,.0f}"


def _fields(rows: Sequence[Mapping[str, Any]]) -> list[Field]:
    """Speed and times by number of clients, with a line per server."""
    shown = {
        "tokens_per_second": "output tokens per second",
        "first_token_p50": "first token, median, seconds",
        "inter_token_p50": "between tokens, median, seconds",
    }
    fields = []
    for name, label in shown.items():
        lines = {}
        for server in dict.fromkeys(row["server"] for row in rows):
            known = [row for row in rows if row["server"] == server and row[name] is not None]
            lines[server] = Line([row["clients"] for row in known], [row[name] for row in known])
        fields.append(Field(lines, "clients", label, doubling=True, from_zero=name == "tokens_per_second"))
    return fields


def _object(text: str) -> dict[str, Any]:
    try:
        values = json.loads(text)
    except ValueError:
        values = None
    if not isinstance(values, dict):
        raise argparse.ArgumentTypeError(f"value ({text}) must be a JSON object")
    return values


if __name__ == "__main__":
    for number in (signal.SIGINT, signal.SIGTERM):  # also in the background, because stopped servers must end
        signal.signal(number, signal.default_int_handler)
    sys.exit(main())
