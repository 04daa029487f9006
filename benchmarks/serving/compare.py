"""Levels of load on several servers, measured alternately."""

import asyncio
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

from tqdm import tqdm

from medusa.benchmarks.serving.client import Asking, Client
from medusa.benchmarks.serving.figures import summarize
from medusa.benchmarks.serving.load import Level, run_level
from medusa.benchmarks.serving.servers import Place, Server
from medusa.data.chat_prompts import chat_prompts
from medusa.data.files import file_records


def read_prompts(path: str | None, count: int) -> list[str]:
    """The first turns of ``count`` held-out prompts, or of at most ``count`` prompts of a file.

    Args:
        path: Records of {"prompt": ..}, or of {"turns": [..]} as in Spec-Bench and MT-bench, see ``file_records``;
            None = held-out prompts.
        count: Number of prompts.

    Raises:
        OSError: The file cannot be read.
        ValueError: A record is not a prompt, or there is none.
    """
    if path is None:
        return [prompt.turns[0] for prompt in chat_prompts("heldout", count)]
    prompts = []
    for place, record in file_records(path):
        try:
            prompts.append(str(record["prompt"] if "prompt" in record else record["turns"][0]))
        except (TypeError, KeyError, IndexError) as error:
            remedy = 'give lines of {"prompt": ..} or {"turns": [..]}'
            raise ValueError(f"{place} is not a prompt; {remedy}") from error
    return prompts[:count]


def part(prompts: list[str], number: int, of: int) -> list[str]:
    """All prompts, starting with part ``number`` of ``of`` parts, so that successive levels use different prompts."""
    start = len(prompts) * number // of
    return prompts[start:] + prompts[:start]


class Plan(NamedTuple):
    """The load for every server."""

    prompts: list[str]
    levels: Sequence[int]
    max_tokens: int
    seconds: float | None
    requests: int | None
    temperature: float = 0.0
    rounds: int = 1


Awake = Callable[[], AbstractContextManager[Asking]]
"""A context in which a server works; it gives the parameters of requests."""


def load(servers: Mapping[str, Awake], plan: Plan) -> list[dict[str, Any]]:
    """Measure all levels on all servers alternately in each round; returns a row per server, level and round."""
    rows = []
    steps = [(turn, at) for turn in range(plan.rounds) for at in range(len(plan.levels))]
    with tqdm(total=len(steps) * len(servers), unit="level") as progress:
        for turn, at in steps:
            for name, awake in servers.items():
                progress.set_description(f"{name}, {plan.levels[at]} clients")
                with awake() as asking:
                    rows.append({"server": name, "round": turn, **_measure(asking, plan, turn, at)})
                progress.update()
    return rows


def compare(places: Mapping[str, Place], plan: Plan, logs: Path) -> list[dict[str, Any]]:
    """Start servers, with logs in a directory, and ``load`` them; only the measured server runs."""
    with ExitStack() as stack:
        asked: dict[str, Awake] = {}
        for name, place in places.items():
            server = Server(name, place, logs / f"serving-{name}.log")
            stack.callback(server.process.close)
            asked[name] = partial(server.awake, plan.temperature)
        return load(asked, plan)


def medians(rows: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """A row per server and level, with medians over the rounds."""
    groups: dict[tuple[str, int], list[Mapping[str, Any]]] = {}
    for row in rows:
        groups.setdefault((row["server"], row["clients"]), []).append(row)
    return [{"server": server, "clients": clients, **_median(group)} for (server, clients), group in groups.items()]


def _median(group: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    values: dict[str, list[float | None]] = {
        f"{what}_{share}": [row[what][share] for row in group]
        for what in ("first_token", "inter_token", "end_to_end")
        for share in ("p50", "p99")
    }
    values |= {name: [row[name] for row in group] for name in ("tokens_per_second", "tokens_per_chunk")}
    known = {name: [value for value in column if value is not None] for name, column in values.items()}
    return {
        "requests": sum(row["requests"] for row in group),
        "errors": sum(row["errors"] for row in group),
        "inter_token_of": group[0]["inter_token_of"],
        **{name: median(column) if column else None for name, column in known.items()},
    }


def _measure(asking: Asking, plan: Plan, turn: int, at: int) -> dict[str, Any]:
    """Measure one level; every server gets the same prompts in the same order."""
    steps = len(plan.levels)
    prompts = part(plan.prompts, turn * steps + at, plan.rounds * steps)

    async def run() -> Level:
        async with Client(asking) as client:  # new connections, because a stopped server has closed the old ones
            return await run_level(client.ask, prompts, plan.levels[at], plan.max_tokens, plan.seconds, plan.requests)

    try:
        return summarize(asyncio.run(run()))
    except ExceptionGroup as group:  # errors of the clients' tasks
        raise group.exceptions[0] from group
