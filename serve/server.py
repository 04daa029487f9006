"""Serve a base and its heads over HTTP, as OpenAI's API: ``medusa-serve``."""

import argparse
import gc
import logging
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from data.arguments import at_least, show_messages
from serve.model_options import add_model_options, load_model
from serve.plan import add_plan_options, show_plan
from serve.settings import ApiSettings, EngineSettings

if TYPE_CHECKING:
    from fastapi import FastAPI

logger = logging.getLogger(__name__)

EPILOG = """\
  medusa-serve --base smollm2 --port 8000
  curl localhost:8000/v1/chat/completions -H 'Content-Type: application/json' \\
      -d '{"model": "smollm2", "messages": [{"role": "user", "content": "Hello"}], "stream": true}'

Keys are read from the environment, separated by commas: MEDUSA_API_KEYS of those that may ask (none = everyone),
MEDUSA_ADMIN_KEY of who may load and remove heads at run time (none = nobody).
"""


def build_parser() -> argparse.ArgumentParser:
    """The command line."""
    engine, api = EngineSettings(), ApiSettings()
    parser = argparse.ArgumentParser(
        prog="medusa-serve",
        description="Serve a base model and its heads over HTTP, as OpenAI's API.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add_model_options(parser.add_argument_group("model"))
    names = parser.add_argument_group("names")
    names.add_argument(
        "--name", default=api.name, metavar="NAME", help="name of the base in requests (default: its own, shortened)"
    )
    names.add_argument(
        "--more-heads",
        nargs="+",
        default=[],
        metavar="NAME=DIR",
        help="other heads on the same base, which requests choose as their model (default: none)",
    )
    limits = parser.add_argument_group("limits")
    limits.add_argument(
        "--max-batch",
        type=at_least(1),
        default=engine.max_batch,
        metavar="N",
        help="requests that decode together (default: %(default)s)",
    )
    limits.add_argument(
        "--max-waiting",
        type=at_least(0),
        default=engine.max_waiting,
        metavar="N",
        help="requests that wait for that; more get status 429 (default: %(default)s)",
    )
    limits.add_argument(
        "--cache-tokens",
        type=at_least(1),
        metavar="N",
        help="rows of the KV cache; requests wait until theirs fit (default: 40 %% of the memory)",
    )
    limits.add_argument(
        "--prefill-rows",
        type=at_least(1),
        default=engine.prefill_rows,
        metavar="N",
        help="prompt tokens that one pass computes between two decode steps: fewer keep streams smooth, more finish"
        " prompts sooner (default: %(default)s)",
    )
    limits.add_argument(
        "--max-n",
        type=at_least(1),
        default=api.max_n,
        metavar="N",
        help="completions of a request (default: %(default)s)",
    )
    limits.add_argument(
        "--max-body",
        type=at_least(1),
        default=api.max_body,
        metavar="BYTES",
        help="largest body (default: %(default)s)",
    )
    limits.add_argument(
        "--timeout", type=float, metavar="S", help="seconds that a request may take, waiting included (default: any)"
    )
    network = parser.add_argument_group("network")
    network.add_argument("--host", default="127.0.0.1", metavar="HOST", help="where to listen (default: %(default)s)")
    network.add_argument(
        "--port", type=at_least(0), default=8000, metavar="PORT", help="0 = any (default: %(default)s)"
    )
    network.add_argument(
        "--origins",
        nargs="+",
        default=list(api.origins),
        metavar="URL",
        help="web pages of other hosts that may ask, * = all (default: none)",
    )
    network.add_argument(
        "--drain",
        type=float,
        default=30.0,
        metavar="S",
        help="seconds that running requests may go on for after SIGTERM (default: %(default)s)",
    )
    parser.add_argument(
        "--spec-metrics",
        action="store_true",
        help="answers bring metrics.speculative_decoding unless they say otherwise (default: when asked for)",
    )
    return parser


def build_app(args: argparse.Namespace) -> "FastAPI":
    """Load what the flags name; the application.

    Raises:
        OSError: The heads or the base are not there or cannot be read.
        ValueError: They do not fit together, or a flag is wrong.
    """
    from serve.api.app import create_app
    from serve.api.service import Service
    from serve.engine import Engine
    from serve.grammar import Grammars
    from serve.metrics import Metrics
    from serve.models import Models, read_heads

    engine_settings = EngineSettings(args.max_batch, args.max_waiting, args.cache_tokens, args.prefill_rows)
    named = os.environ.get("MEDUSA_API_KEYS", "")
    keys = frozenset(key.strip() for key in named.split(",") if key.strip())
    if named and not keys:
        raise ValueError(f"MEDUSA_API_KEYS ({named!r}) names no key; give some, separated by commas, or unset it")
    api_settings = ApiSettings(
        args.name, keys, os.environ.get("MEDUSA_ADMIN_KEY", ""), tuple(args.origins), args.max_body, args.max_n,
        args.timeout, args.spec_metrics,
    )  # fmt: skip
    paths = dict(_named(text) for text in args.more_heads)
    model = load_model(args)
    if paths:
        model = model.with_heads({name: read_heads(path) for name, path in paths.items()})
    name = args.name or args.base or Path(model.base.name).name
    engine = Engine(model, engine_settings, Metrics(name))
    service = Service(engine, Models(engine, name, paths), Grammars(model.base), api_settings)
    return create_app(service, args.drain)


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
    add_plan_options(parser.add_argument_group("plan"))
    args = parser.parse_args(argv)
    show_messages()
    logging.getLogger("serve").setLevel(logging.INFO)
    try:
        if args.dry_run:
            return show_plan(args)
        import uvicorn

        app = build_app(args)
        gc.freeze()  # what is here stays: collections in the middle of steps need not look through it
        config = uvicorn.Config(
            app, args.host, args.port, log_level="warning", access_log=False, timeout_graceful_shutdown=int(args.drain)
        )
        logger.info("serving on http://%s:%d (web page, /v1, /docs, /metrics)", args.host, args.port)
        uvicorn.Server(config).run()
    except ImportError as error:
        logger.error("%s; install the server with: pip install 'medusa-decoding[serve]'", error)
        return 1
    except (OSError, ValueError, RuntimeError) as error:
        logger.error("%s", error)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
