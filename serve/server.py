"""Serve a base and its heads over HTTP, as OpenAI's API: ``medusa serve``."""

import argparse
import gc
import logging
import os
import signal
import sys
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from medusa.data.arguments import ending_at_once, show_messages
from medusa.serve.flags import add_flags, from_flags
from medusa.serve.model_options import ModelOptions, describe
from medusa.serve.plan import DryRun, show_plan
from medusa.serve.settings import ApiSettings, EngineSettings, Memory, Network

if TYPE_CHECKING:
    from fastapi import FastAPI

logger = logging.getLogger("medusa.serve.server")  # __name__ differs if this file is the program

EPILOG = """\
  medusa serve --base smollm2 --port 8000
  curl localhost:8000/v1/chat/completions -H 'Content-Type: application/json' \\
      -d '{"model": "smollm2", "messages": [{"role": "user", "content": "Hello"}], "stream": true}'

Keys are best given in the environment, which lists of processes do not show. MEDUSA_API_KEYS holds the keys that
clients may use, separated by commas (none = everyone may ask). MEDUSA_ADMIN_KEY holds the key that may load and remove
heads at run time (none = nobody may).
"""


TORCHRUNS_DRAIN = 20.0
"""Longest ``--drain`` under torchrun, which kills its processes 30 seconds after a signal."""


def build_parser() -> argparse.ArgumentParser:
    """The command line."""
    parser = argparse.ArgumentParser(
        prog="medusa serve",
        description="Serve a base model and its heads over HTTP, as OpenAI's API.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    model = parser.add_argument_group("model")
    add_flags(model, ModelOptions)
    text = "other heads on the same base, which requests choose as their model (default: none)"
    model.add_argument("--more-heads", nargs="+", default=[], metavar="NAME=DIR", help=text)
    text = "keys that clients may use, besides those in MEDUSA_API_KEYS (default: none)"
    parser.add_argument("--api-key", nargs="+", default=[], metavar="KEY", help=text)
    groups = {"limits": EngineSettings, "requests": ApiSettings, "memory": Memory, "network": Network}
    for title, kind in groups.items():
        add_flags(parser.add_argument_group(title), kind)
    return parser


def build_app(args: argparse.Namespace) -> "FastAPI":
    """Load the models that the flags name; returns the application.

    Raises:
        OSError: The heads or the base do not exist or cannot be read.
        ValueError: They do not fit together, or a flag is wrong.
    """
    from medusa.serve.api.app import create_app
    from medusa.serve.api.service import Service
    from medusa.serve.engine import Engine
    from medusa.serve.grammar import Grammars
    from medusa.serve.metrics import Metrics
    from medusa.serve.models import Models, read_heads
    from medusa.serve.recorder import Recorder

    api = from_flags(
        ApiSettings, args, api_keys=read_keys(args.api_key), admin_key=os.environ.get("MEDUSA_ADMIN_KEY", "")
    )
    paths = dict(_named(text) for text in args.more_heads)
    options = from_flags(ModelOptions, args)
    if len(paths) < len(args.more_heads):
        raise ValueError(f"--more-heads ({' '.join(args.more_heads)}) gives a name twice; choose other names")
    recorder = Recorder(args.record, args.record_most) if args.record else None
    model = options.load()
    name = args.name or args.base or Path(model.base.name).name
    if name in paths:
        raise ValueError(f"heads ({name}) have the name of the served model; choose another one, or set --name")
    logger.info("loaded\n%s", describe(model, options.heads_or_default()))
    if paths:
        model = model.with_heads({one: read_heads(path) for one, path in paths.items()})
    model.drafters.remembering = not args.no_ngrams
    if recorder is not None:
        logger.info("completed requests are recorded in %s", args.record)
    engine = Engine(model, from_flags(EngineSettings, args), Metrics(name), recorder)
    service = Service(engine, Models(engine, name, paths), Grammars(model.base), api)
    return create_app(service, args.drain)


def read_keys(given: Sequence[str]) -> frozenset[str]:
    """The keys that clients may use; empty = everyone may send requests.

    Args:
        given: Keys of the command line, which are added to those of the environment.

    Raises:
        ValueError: Keys are named, but all are empty.
    """
    named = os.environ.get("MEDUSA_API_KEYS", "")
    keys = frozenset(key.strip() for key in (*given, *named.split(",")) if key.strip())
    if (named or given) and not keys:
        raise ValueError(
            f"MEDUSA_API_KEYS ({named!r}) and --api-key name no key; give some, or leave both out to let everyone ask"
        )
    return keys


def _named(text: str) -> tuple[str, str]:
    name, _, path = text.partition("=")
    if not name or not path:
        raise ValueError(f"heads ({text}) must be given as NAME=DIR; correct it")
    return name, path


def main(argv: Sequence[str] | None = None) -> int:
    """Serve until SIGTERM or Ctrl-C.

    Returns:
        Exit status: 0 at the end, 1 for a failure, 2 for wrong use.
    """
    parser = build_parser()
    add_flags(parser.add_argument_group("plan"), DryRun)
    args = parser.parse_args(argv)
    if args.tensor_parallel:
        args.drain = min(args.drain, TORCHRUNS_DRAIN)
    show_messages("%(asctime)s %(message)s")
    logging.getLogger("medusa.serve").setLevel(logging.INFO)
    try:
        if args.dry_run:
            return show_plan(args)
        with ending_at_once():
            logger.info("loading")
            from medusa.serve.listening import Server, bind

            listening = bind(args.host, args.port)
            app = build_app(args)
        with listening:
            gc.freeze()  # loaded objects stay: later collections need not scan them
            signal.signal(signal.SIGTERM, signal.default_int_handler)
            with suppress(KeyboardInterrupt):  # Uvicorn raises the signal that ended it again
                Server(app, listening, args.drain).run()
    except ImportError as error:
        logger.error("%s; install the server with: pip install 'medusa-decoding[serve]'", error)
        return 1
    except (OSError, ValueError, RuntimeError) as error:
        logger.error("%s", error)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
