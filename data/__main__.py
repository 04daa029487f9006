"""``medusa data``: ``regenerate`` makes training data, ``prompts`` and ``mix`` make prompts, ``inspect`` shows data."""

import argparse
import json
import logging
import os
import shutil
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from medusa.base.names import default_base
from medusa.data import load_tokenizer
from medusa.data.arguments import base_arguments
from medusa.data.exchange import Answerer, EndpointSettings, Prompt, Settings
from medusa.data.options import CHAT_COUNT, EMBEDDED_COUNT, parser
from medusa.files import digest_of_weights

if TYPE_CHECKING:
    from medusa.data.local import LocalAnswerer
    from medusa.data.stdlib import Split

SPLITS = ("train", "heldout")
CHAT: dict[str, "Split"] = {"chat": "train", "chat-heldout": "heldout"}
"""Names of prompts from ``data.chat_prompts``, and their side of the split."""


class UsageError(ValueError):
    """Options that are valid alone but not together."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line.

    Returns:
        Exit status: 0 done, 1 failure, 2 wrong use, 130 Ctrl-C.
    """
    logging.basicConfig(format="%(message)s", level=logging.INFO, stream=sys.stderr)
    logging.getLogger("httpx").setLevel(logging.WARNING)  # it logs every request
    logging.getLogger("huggingface_hub").propagate = False  # it has its own handler
    logger = logging.getLogger("medusa.data")
    options = parser().parse_args(arguments)
    try:
        COMMANDS[options.command](options, logger)
    except UsageError as error:
        logger.error("%s", error)
        return 2
    except KeyboardInterrupt:
        resumes = "" if options.command == "inspect" else "; the same command continues where it stopped"
        logger.error("stopped%s", resumes)
        return 130
    except (ValueError, OSError) as error:
        logger.error("%s", error)
        return 1
    return 0


def _regenerate(options: argparse.Namespace, logger: logging.Logger) -> None:
    _check(options)
    if _is_there(options.out, logger):
        return
    from medusa.data.regenerate import regenerate

    prompts, answerer, base = (_endpoint if options.endpoint else _local)(options)
    report = regenerate(prompts, answerer, options.out, _made_by(base, options))
    logger.info("%d tokens that the base wrote are in %s", report.tokens, options.out)


def _write_prompts(options: argparse.Namespace, logger: logging.Logger) -> None:
    if _is_there(options.out, logger):
        return
    from medusa.data.own_prompts import OwnPrompts, openings
    from medusa.data.regenerate import regenerate

    answerer = _answerer(options)
    own, begun = OwnPrompts(answerer.model, answerer), openings(answerer.model, options.count, options.seed)
    made_by = _made_by(answerer.model.base.name, options)
    report = regenerate(begun, own, options.out, made_by, own.record, distinct=True)
    logger.info("%d prompts that the base wrote are in %s", report.lines, options.out)


def _made_by(base: str, options: argparse.Namespace) -> dict[str, Any]:
    """All on which answers depend; a base in a local folder may have been trained again."""
    return {"base": base, "weights": digest_of_weights(Path(base)), **vars(_settings(options))}


def _is_there(out: str, logger: logging.Logger) -> bool:
    there = Path(out).exists()
    if there:
        logger.info("%s is there already; remove it to make it again", out)
    return there


def _settings(options: argparse.Namespace) -> Settings:
    return Settings(options.max_new_tokens, options.temperature, options.top_p, options.seed)


def _answerer(options: argparse.Namespace) -> "LocalAnswerer":
    """The base in this process, as answerer."""
    from transformers.utils.logging import disable_progress_bar

    from medusa import MedusaModel, load_settings
    from medusa.data.local import LocalAnswerer

    disable_progress_bar()
    options.base = options.base or (None if options.heads else default_base())
    model = MedusaModel.from_pretrained(options.heads, **base_arguments(options))
    speculation = load_settings(options.settings) if options.settings else None
    return LocalAnswerer(model, _settings(options), options.batch, speculation)


def _local(options: argparse.Namespace) -> tuple[list[Prompt], Answerer, str]:
    """Prompts, answerer and name of a base in this process."""
    from medusa.data.prompts import embedded_prompts, fitting

    answerer = _answerer(options)
    model = answerer.model
    if options.prompts in SPLITS:
        ids = embedded_prompts(model, options.prompts, options.count or EMBEDDED_COUNT, options.seed)
        prompts = [Prompt(ids=tuple(prompt)) for prompt in ids]
    else:
        prompts = _prompts(options)
    return fitting(model, prompts, options.max_new_tokens), answerer, model.base.name


def _endpoint(options: argparse.Namespace) -> tuple[list[Prompt], Answerer, str]:
    """Prompts, answerer and name of a base behind a server."""
    from medusa.data.chat_completions import ChatClient
    from medusa.data.endpoint import EndpointAnswerer

    model = options.model or options.base
    key = os.environ[options.api_key_env].strip() if options.api_key_env else None
    endpoint = EndpointSettings(options.concurrency, options.retries, options.timeout)
    connect = partial(ChatClient, options.endpoint, model, _settings(options), endpoint, key)
    answerer = EndpointAnswerer(connect, load_tokenizer(options.base), options.concurrency, options.seed)
    return _prompts(options), answerer, f"{model} (tokens of {options.base})"


def _check(options: argparse.Namespace) -> None:
    """Raise an error for options that are valid alone but not together."""
    variable = options.api_key_env
    others = ("heads", "draft-model", "settings") if options.endpoint else ("model", "api-key-env")
    given = [f"--{name}" for name in others if getattr(options, name.replace("-", "_"))]
    if given and options.endpoint:
        raise UsageError(f"{given[0]} is for a base in this process, and --endpoint names a server; leave one out")
    if given:
        raise UsageError(f"{given[0]} belongs to a server; give --endpoint too")
    if options.endpoint and not options.base:
        raise UsageError("--endpoint needs --base, the model that the server runs: its tokenizer makes the token ids")
    if options.endpoint and options.prompts in SPLITS:
        raise UsageError(f"--prompts ({options.prompts}) holds code to continue, and --endpoint chats; give a file")
    if variable and not os.environ.get(variable):
        raise UsageError(f"--api-key-env ({variable}) is not set; export {variable}=KEY")
    if options.streaming and not options.count:
        raise UsageError("--streaming needs --count, the number of prompts to read; give it")


def _prompts(options: argparse.Namespace) -> list[Prompt]:
    """The conversations of a source."""
    if options.prompts in CHAT:
        from medusa.data.chat_prompts import chat_prompts

        found = chat_prompts(CHAT[options.prompts], options.count or CHAT_COUNT, options.seed)
        return [Prompt(prompt.asked) for prompt in found]
    from medusa.data.prompts import conversations
    from medusa.data.sources import Source

    return list(
        conversations(Source(options.prompts, options.split, options.subset, options.streaming, options.count or 0))
    )


def _inspect(options: argparse.Namespace, logger: logging.Logger) -> None:
    from medusa.data.inspect import inspect

    if options.streaming and not options.limit:
        raise UsageError("--streaming needs --limit, the number of records to read; give it")
    inspect(options, logger)


def _mix(options: argparse.Namespace, logger: logging.Logger) -> None:
    out = Path(options.out)
    if _is_there(options.out, logger):
        return
    from medusa.data.mix import Mixer, report, table, write
    from medusa.data.mixture import Mixture
    from medusa.data.overlap import evaluation_texts

    mixture, tokenizer = Mixture.read(Path(options.mixture)), load_tokenizer(options.base)
    texts = [text for path in options.without for text in evaluation_texts(path)]
    mixer = Mixer(
        mixture, Path(options.sources), texts, lambda text: len(tokenizer(text, verbose=False).input_ids), options.seed
    )
    sides = {"heldout": mixer.mix(heldout=True), "train": mixer.mix(heldout=False)}
    unfinished = out.with_name(f"{out.name}.tmp")
    shutil.rmtree(unfinished, ignore_errors=True)
    for side, found in sides.items():
        write(found, unfinished / side, options.size)
    about = {"without": options.without, "seed": options.seed, **report(mixer, mixture, sides)}
    (unfinished / "report.json").write_text(json.dumps(about, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
    unfinished.rename(out)
    logger.info("%s", table(mixer))
    logger.info("%d prompts, and %d held-out ones, are in %s", len(sides["train"]), len(sides["heldout"]), out)


COMMANDS = {"inspect": _inspect, "mix": _mix, "prompts": _write_prompts, "regenerate": _regenerate}

if __name__ == "__main__":
    sys.exit(main())
