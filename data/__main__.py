"""``python -m data regenerate ...``: make training data; ``prompts``: what to ask; ``inspect``: look at it."""

import argparse
import logging
import os
import sys
from collections.abc import Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from data import EMBEDDED, load_tokenizer, resolve_base_name
from data.arguments import at_least
from data.exchange import BATCH, Answerer, EndpointSettings, Prompt, Settings

if TYPE_CHECKING:
    from data.stdlib import Split
    from medusa import MedusaModel

EMBEDDED_COUNT = 2000
"""Prompts from the standard library where no number is given."""
SPLITS = ("train", "heldout")
CHAT: dict[str, "Split"] = {"chat": "train", "chat-heldout": "heldout"}
"""Prompts of ``data.chat_prompts``, and their side of the split."""
CHAT_COUNT = 6000
OWN_COUNT = 4000


class UsageError(ValueError):
    """Options that are right alone and wrong together."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line.

    Returns:
        Exit status: 0 done, 1 failure, 2 wrong use, 130 Ctrl-C.
    """
    logging.basicConfig(format="%(message)s", level=logging.INFO, stream=sys.stderr)
    logging.getLogger("httpx").setLevel(logging.WARNING)  # it logs every request
    logging.getLogger("huggingface_hub").propagate = False  # it has a handler of its own
    logger = logging.getLogger("data")
    options = _parser().parse_args(arguments)
    try:
        options.run(options, logger)
    except UsageError as error:
        logger.error("%s", error)
        return 2
    except KeyboardInterrupt:
        logger.error("stopped%s", "; the same command goes on where it was" if options.command != "inspect" else "")
        return 130
    except (ValueError, OSError) as error:
        logger.error("%s", error)
        return 1
    return 0


def _regenerate(options: argparse.Namespace, logger: logging.Logger) -> None:
    _check(options)
    if Path(options.out).exists():
        logger.info("%s is there already; remove it to make it again", options.out)
        return
    from data.regenerate import regenerate

    settings = Settings(options.max_new_tokens, options.temperature, options.top_p, options.seed)
    prompts, answerer, base = (_endpoint if options.endpoint else _local)(options, settings)
    report = regenerate(prompts, answerer, options.out, {"base": base, **vars(settings)})
    logger.info("%d tokens that the base wrote are in %s", report.tokens, options.out)


def _write_prompts(options: argparse.Namespace, logger: logging.Logger) -> None:
    if Path(options.out).exists():
        logger.info("%s is there already; remove it to make it again", options.out)
        return
    from data.local import LocalAnswerer
    from data.own_prompts import OwnPrompts, openings
    from data.regenerate import regenerate

    settings = Settings(options.max_new_tokens, options.temperature, options.top_p, options.seed)
    model = _model(options)
    own = OwnPrompts(model, LocalAnswerer(model, settings, options.batch))
    made_by = {"base": model.base.name, **vars(settings)}
    report = regenerate(openings(model, options.count, options.seed), own, options.out, made_by, own.record)
    logger.info("%d prompts that the base wrote are in %s", report.answered, options.out)


def _model(options: argparse.Namespace) -> "MedusaModel":
    """The base, which runs in this process."""
    import torch
    from transformers.utils.logging import disable_progress_bar

    from medusa import MedusaModel

    disable_progress_bar()
    base, dtype = resolve_base_name(options.base or EMBEDDED), getattr(torch, options.dtype) if options.dtype else None
    return MedusaModel.from_pretrained(None, base=base, dtype=dtype, device=options.device)


def _local(options: argparse.Namespace, settings: Settings) -> tuple[list[Prompt], Answerer, str]:
    """Prompts, who answers them, and the name of the base: it runs in this process."""
    from data.local import LocalAnswerer
    from data.prompts import embedded_prompts, fitting

    model = _model(options)
    if options.prompts in SPLITS:
        ids = embedded_prompts(model, options.prompts, options.count or EMBEDDED_COUNT, options.seed)
        prompts = [Prompt(ids=tuple(prompt)) for prompt in ids]
    else:
        prompts = _prompts(options)
    answerer = LocalAnswerer(model, settings, options.batch)
    return fitting(model, prompts, settings.max_new_tokens), answerer, model.base.name


def _endpoint(options: argparse.Namespace, settings: Settings) -> tuple[list[Prompt], Answerer, str]:
    """Prompts, who answers them, and the name of the base: a server runs it."""
    from data.chat_completions import ChatClient
    from data.endpoint import EndpointAnswerer

    model = options.model or options.base
    key = os.environ[options.api_key_env].strip() if options.api_key_env else None
    endpoint = EndpointSettings(options.concurrency, options.retries, options.timeout)
    connect = partial(ChatClient, options.endpoint, model, settings, endpoint, key)
    tokenizer = load_tokenizer(options.base)
    answerer = EndpointAnswerer(connect, tokenizer, options.concurrency, options.seed)
    return _prompts(options), answerer, f"{model} (tokens of {options.base})"


def _check(options: argparse.Namespace) -> None:
    """Raise what is wrong with options that are right alone."""
    variable = options.api_key_env
    if not options.endpoint:
        given = [f"--{name}" for name in ("model", "api-key-env") if getattr(options, name.replace("-", "_"))]
        if given:
            raise UsageError(f"{given[0]} belongs to a server; give --endpoint too")
    elif not options.base:
        raise UsageError("--endpoint needs --base, the model that the server runs: its tokenizer makes the token ids")
    elif options.prompts in SPLITS:
        raise UsageError(f"--prompts ({options.prompts}) holds code to continue, and --endpoint chats; give a file")
    if variable and not os.environ.get(variable):
        raise UsageError(f"--api-key-env ({variable}) is not set; export {variable}=KEY")
    if options.streaming and not options.count:
        raise UsageError("--streaming needs --count, the number of prompts to read; give it")


def _prompts(options: argparse.Namespace) -> list[Prompt]:
    """The conversations of a source."""
    if options.prompts in CHAT:
        from data.chat_prompts import chat_prompts

        found = chat_prompts(CHAT[options.prompts], options.count or CHAT_COUNT, options.seed)
        return [Prompt(prompt.asked) for prompt in found]
    from data.prompts import conversations
    from data.sources import Source

    return list(
        conversations(Source(options.prompts, options.split, options.subset, options.streaming, options.count or 0))
    )


def _inspect(options: argparse.Namespace, logger: logging.Logger) -> None:
    from data.inspect import inspect

    if options.streaming and not options.limit:
        raise UsageError("--streaming needs --limit, the number of records to read; give it")
    inspect(options, logger)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="medusa-data", description="Make training data for draft heads.")
    commands = parser.add_subparsers(dest="command", required=True)
    _add_inspect(commands)
    _add_regenerate(commands)
    _add_prompts(commands)
    return parser


def _add_regenerate(commands: Any) -> None:
    regenerate = commands.add_parser(
        "regenerate",
        help="let the base answer prompts; its own answers are the training data",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    regenerate.set_defaults(run=_regenerate)
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
    prompts = commands.add_parser(
        "prompts",
        help="let a chat base write prompts itself, in the user's place: for regenerate --prompts FILE",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    prompts.set_defaults(run=_write_prompts)
    prompts.add_argument("--base", required=True, help='a chat model: directory, Hub id, or "smollm2"')
    prompts.add_argument(
        "--count", type=at_least(1), default=OWN_COUNT, help="prompts to begin; about 1 in 5 is refused"
    )
    prompts.add_argument("--out", required=True, metavar="FILE", help="the .jsonl file to write")
    _add_sampling(prompts, Settings(256, 1.0, 0.9))
    _add_here(prompts)


def _add_sampling(parser: Any, default: Settings) -> None:
    add = parser.add_argument
    add("--max-new-tokens", type=at_least(1), default=default.max_new_tokens, help="tokens that are written at a time")
    add("--temperature", type=_temperature, default=default.temperature, help="0 = greedy")
    add("--top-p", type=_share, default=default.top_p, help="draw from the likeliest tokens of this probability")
    add("--seed", type=int, default=default.seed, help="of the choice of prompts and of all that is drawn")


def _add_here(parser: Any) -> None:
    add = parser.add_argument
    add("--batch", type=at_least(1), default=BATCH, help="prompts decoded together")
    add(
        "--dtype",
        choices=("float32", "bfloat16", "float16"),
        default=None,
        help="what the base computes in; default: its checkpoint's",
    )
    add("--device", default=None, help="cpu or cuda; default: cuda where there is one")


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


if __name__ == "__main__":
    sys.exit(main())
