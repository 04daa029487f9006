"""Several servers behind one address with Ray Serve: ``python -m medusa.serve.ray_app``.

``serve run medusa.serve.ray_app:app``, Ray's own command, does the same.

    client > Ray's proxy, one on each node (Retries) > replica: the application of medusa serve, engine included

There is one hop, and each replica batches for itself. The proxy sends a request to the less busy of two replicas
chosen by chance. Routing by prefix is left out: the proxy does not read bodies. So each replica has a prefix cache of
its own, and a conversation that comes to another one is computed there once more.

Ray itself sends a request again while no replica has taken it. Once one has, its death answers the client with status
500, and ``Retries`` is there for that: nothing is lost of which no text was sent yet. Streams that have begun break
off, without their last event.
"""

import argparse
import logging
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any

import ray
from ray import serve
from starlette.middleware import Middleware
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from medusa.data.arguments import at_least, show_messages
from medusa.serve.flags import add_flags, flag
from medusa.serve.model_options import ModelOptions
from medusa.serve.server import build_app, build_parser

if TYPE_CHECKING:
    from fastapi import FastAPI

logger = logging.getLogger(__name__)

PROXY = "RAY_SERVE_HTTP_PROXY_CALLBACK_IMPORT_PATH"
"""Where Ray's proxies look for middleware when they start."""
TRIES = 2
"""So that a request that kills its replica takes no more than two of them down."""
BESIDE = 16
"""Requests to a replica beside those in its batch and its queue: /health, /metrics, and those it refuses itself."""
OPENINGS = (b'"role":"assistant"', b"event: response.created", b"event: response.in_progress")
"""The events that begin a stream bring one of these, and no text."""
EPILOG = """\
  python -m medusa.serve.ray_app --base smollm2 --replicas 2
  serve run medusa.serve.ray_app:app base=smollm2 replicas=2

Ray runs on this machine alone unless RAY_ADDRESS names a cluster. There set
RAY_SERVE_HTTP_PROXY_CALLBACK_IMPORT_PATH=medusa.serve.ray_app:middleware on every node before 'ray start', so that
requests of a replica that dies go to another one; directories of heads and bases must be on every node.

API keys are read from the environment here, as by medusa serve. Heads cannot be loaded at run time.
"""


@dataclass(frozen=True)
class Scale:
    """How many replicas, and what each of them gets."""

    replicas: int = flag(1, "copies of the server", at_least(1), "N")
    max_replicas: int | None = flag(
        None, "start more under load, up to so many, and end them later (default: --replicas)", at_least(1), "N"
    )
    target_requests: int | None = flag(
        None,
        "requests per replica that more of them are started for (default: those that decode together)",
        at_least(1),
        "N",
    )
    processes: int = flag(
        1, "processes of a replica, on one node, that divide its base among them (tensor parallel)", at_least(1), "N"
    )
    gpus: float | None = flag(
        None,
        "GPUs of a replica, 0.5 = two share one (default: one for each process, or 0 where this machine has none)",
        float,
        "N",
    )
    cpus: int = flag(1, "cores of a process; on a CPU it computes with so many threads", at_least(1), "N")


def build_ray_parser() -> argparse.ArgumentParser:
    """The command line: that of medusa serve, and how many."""
    parser = build_parser()
    parser.prog, parser.epilog = "python -m medusa.serve.ray_app", EPILOG
    parser.description = "Serve from several replicas."
    add_flags(parser.add_argument_group("scale"), Scale)
    return parser


def app(args: dict[str, Any]) -> serve.Application:
    """The application from the flags of the command line, as ``serve run`` and Serve's YAML files give them.

    Args:
        args: Flags without dashes: ``{"base": "smollm2", "max_batch": 8, "int8": True, "more_heads": ["a=heads/a"]}``.

    Raises:
        ValueError: Replicas cannot be run so.
    """
    return build(build_ray_parser().parse_args(_flags(args)))


def build(args: argparse.Namespace) -> serve.Application:
    """Replicas that load what the flags name, when they start.

    Raises:
        ValueError: They cannot be run so.
    """
    if args.device.startswith("cuda:"):
        raise ValueError(f"device ({args.device}) cannot be chosen: Ray gives each replica its own GPUs; use cuda")
    if not args.port:
        raise ValueError("port (0) must be named, since Ray's proxies on all nodes share it; give one")
    if args.max_replicas is not None and args.max_replicas < args.replicas:
        raise ValueError(f"max-replicas ({args.max_replicas}) is below replicas ({args.replicas}); raise it")
    if args.target_requests is not None and args.max_replicas is None:
        raise ValueError(f"target-requests ({args.target_requests}) needs a range of replicas; add max-replicas")
    if args.tensor_parallel and args.processes == 1:
        raise ValueError("tensor-parallel divides the base of a replica among its processes; give their --processes")
    os.environ.setdefault(PROXY, "medusa.serve.ray_app:middleware")  # reaches a Ray that this process starts
    keys = {"MEDUSA_API_KEYS": os.environ.get("MEDUSA_API_KEYS", ""), "MEDUSA_ADMIN_KEY": ""}

    def load() -> "FastAPI":
        os.environ.update(keys)  # without an admin: heads would change in one replica of several
        if args.processes > 1:
            _start_ranks(args)
        return build_app(args)

    @serve.ingress(load)
    class Medusa:
        async def check_health(self) -> None:
            self.app.state.check_health()  # type: ignore[attr-defined]

    return serve.deployment(**options(args))(Medusa).bind()


def options(args: argparse.Namespace) -> dict[str, Any]:
    """What Ray is told about the replicas."""
    scale: dict[str, Any] = {"num_replicas": args.replicas}
    if args.max_replicas is not None:
        load = {"target_ongoing_requests": args.target_requests or args.max_batch}
        scale = {"autoscaling_config": {"min_replicas": args.replicas, "max_replicas": args.max_replicas, **load}}
    return scale | {
        "name": "Medusa",
        "max_ongoing_requests": args.max_batch + args.max_waiting + BESIDE,
        "graceful_shutdown_timeout_s": args.drain,
        "logging_config": {"enable_access_log": False},
        "ray_actor_options": {
            "num_cpus": args.cpus * args.processes,
            "num_gpus": _gpus(args) if args.gpus is None else args.gpus,
        },
    }


class Retries:
    """ASGI middleware of Ray's proxy: asks again when a replica has died before it said anything.

    An answer is held back until it brings text. When its replica dies Ray's proxy ends without one, or in the middle;
    nothing that was asked for has changed anything, so that it may be asked for twice.

    Args:
        app: Ray's proxy.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """One request, asked at most ``TRIES`` times."""
        heard: list[Message] = []
        for _ in range(TRIES if scope["type"] == "http" else 1):
            spoken = await self._asked(dict(scope), heard, receive, send)
            if spoken or any(message["type"] == "http.disconnect" for message in heard):
                return

    async def _asked(self, scope: Scope, heard: list[Message], receive: Receive, send: Send) -> bool:
        """Whether the client has got an answer, or the beginning of one."""
        again, held, speaking = iter(list(heard)), list[Message](), False

        async def hear() -> Message:
            for message in again:
                return message
            heard.append(await receive())
            return heard[-1]

        async def say(message: Message) -> None:
            nonlocal speaking
            if message["type"] == "http.response.start":  # Ray's request id and ours are the same
                message["headers"] = list(dict.fromkeys((name, value) for name, value in message["headers"]))
            held.append(message)
            speaking = speaking or _says_something(message)
            if speaking:
                for message in held:
                    await send(message)
                held.clear()

        await self._app(scope, hear, say)
        return speaking


def middleware() -> list[Middleware]:
    """What Ray's proxies call at their start; see ``PROXY``."""
    return [Middleware(Retries)]


def _says_something(message: Message) -> bool:
    if message["type"] != "http.response.body":
        return bool(message["type"] != "http.response.start")
    events = [event for event in message.get("body", b"").split(b"\n\n") if event]
    return not message.get("more_body") or any(not any(opening in event for opening in OPENINGS) for event in events)


def _gpus(args: argparse.Namespace) -> float:
    import torch

    return float(args.processes * (args.device != "cpu" and torch.cuda.is_available()))


def _start_ranks(args: argparse.Namespace) -> None:
    """Make this replica rank 0 of tensor parallel, as torchrun would, and start the others beside it.

    They end with the replica, and should one of them fail, the replica ends too and Ray starts another.
    """
    from torch.distributed.elastic.utils.distributed import get_free_port

    args.tensor_parallel = True
    given = {each.name: getattr(args, each.name) for each in fields(ModelOptions)}
    words = _flags({name: value for name, value in given.items() if value is not None})
    group = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(get_free_port()), "WORLD_SIZE": str(args.processes)}
    group |= {"PYTHONPATH": os.pathsep.join(sys.path), "OMP_NUM_THREADS": str(args.cpus)}
    for rank in range(1, args.processes):
        numbers = {"RANK": str(rank), "LOCAL_RANK": str(rank)}
        process = subprocess.Popen(
            [sys.executable, "-m", "medusa.serve.server", *words], env=os.environ | group | numbers
        )
        threading.Thread(target=lambda one: one.wait() and os._exit(1), args=(process,), daemon=True).start()
    os.environ.update(group, RANK="0", LOCAL_RANK="0")


def _flags(args: dict[str, Any]) -> list[str]:
    """As a command line; ``serve run`` gives words, YAML files give anything."""
    flags = []
    for name, value in args.items():
        if value in (False, "false"):
            continue
        flags.append(f"--{name.replace('_', '-')}")
        if value not in (True, "true"):
            flags += [str(item) for item in (value if isinstance(value, list) else [value])]
    return flags


def main(argv: Sequence[str] | None = None) -> int:
    """Serve until SIGTERM or Ctrl-C.

    Returns:
        Exit status: 0 at the end, 1 for a failure, 2 for wrong use.
    """
    args = build_ray_parser().parse_args(argv)
    show_messages()
    try:
        application = build(args)
        ray.init(os.environ.get("RAY_ADDRESS", "local"), include_dashboard=False, log_to_driver=False)
        serve.start(http_options={"host": args.host, "port": args.port})
        _start(application)
    except (OSError, ValueError, RuntimeError) as error:
        logger.error("%s", error)
        return 1
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, signal.default_int_handler)
    try:
        threading.Event().wait()
    except KeyboardInterrupt:
        with suppress(TimeoutError):  # after a minute
            serve.delete("default")  # waits for the streams, which a shutdown of the proxies would cut
        serve.shutdown()
    return 0


def _start(application: serve.Application) -> None:
    """Start the replicas.

    Raises:
        RuntimeError: They do not start; in the words of one of them.
    """
    try:
        serve.run(application)
    except RuntimeError as error:
        (status,) = serve.status().applications["default"].deployments.values()
        raise RuntimeError(status.message.strip().splitlines()[-1]) from error


if __name__ == "__main__":
    sys.exit(main())
