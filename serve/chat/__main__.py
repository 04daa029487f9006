"""Chat with a base and its heads in a terminal, or through pipes: ``medusa-chat``."""

import argparse
import io
import os
import sys
from collections.abc import Sequence
from dataclasses import fields, replace
from pathlib import Path
from typing import TYPE_CHECKING

from data.arguments import show_messages
from medusa.sampling import RULES, sources
from serve.chat.commands import COMMANDS
from serve.chat.conversation import Conversation, Settings, tree_budget
from serve.chat.repl import Repl
from serve.chat.terminal import Terminal
from serve.model_options import add_model_options, describe, load_model

if TYPE_CHECKING:
    pass


EPILOG = """\
With a terminal: /help lists the commands, Ctrl-C stops an answer, Ctrl-D leaves.
Without one: every line of the input is a message; answers go to stdout, everything else to stderr.

  medusa-chat --temperature 0.8 --colour
  medusa-chat --endpoint http://localhost:8000/v1
  echo 'Write a Python function that reverses a list.' | medusa-chat
"""


def drafter_name(text: str) -> str:
    """A drafter's name as the user writes it.

    Raises:
        argparse.ArgumentTypeError: It is none.
    """
    try:
        sources(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from error
    return text


def build_parser() -> argparse.ArgumentParser:
    """The command line; every flag that other commands have too means the same there."""
    settings = Settings()
    parser = argparse.ArgumentParser(
        prog="medusa-chat",
        description="Chat with a base model that decodes several tokens per step with its heads.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add_model_options(parser.add_argument_group("model"))
    server = parser.add_argument_group("a server, in place of a model here")
    server.add_argument(
        "--endpoint",
        metavar="URL",
        help="of medusa-serve or vLLM, as http://localhost:8000/v1; MEDUSA_API_KEY is its key (default: none)",
    )
    server.add_argument("--model", metavar="NAME", help="as the server names it (default: its first)")
    answers = parser.add_argument_group("answers")
    answers.add_argument("--system", default="", metavar="TEXT", help="system prompt (default: none)")
    answers.add_argument(
        "--max-new-tokens",
        type=int,
        default=settings.max_new_tokens,
        metavar="N",
        help="longest answer, in tokens (default: %(default)s)",
    )
    answers.add_argument(
        "--temperature",
        type=float,
        default=settings.temperature,
        metavar="X",
        help="0 is greedy, above it tokens are sampled (default: %(default)s)",
    )
    answers.add_argument(
        "--top-p",
        type=float,
        default=settings.top_p,
        metavar="P",
        help="sample from the likeliest tokens with this much probability (default: %(default)s, off)",
    )
    answers.add_argument(
        "--top-k",
        type=int,
        default=settings.top_k,
        metavar="N",
        help="sample from this many likeliest tokens (default: %(default)s, off)",
    )
    answers.add_argument(
        "--repetition-penalty",
        type=float,
        default=settings.repetition_penalty,
        metavar="X",
        help="above 1, what occurred before becomes less likely (default: %(default)s, off)",
    )
    answers.add_argument(
        "--seed", type=int, default=settings.seed, metavar="N", help="of the sampling noise (default: %(default)s)"
    )
    decoding = parser.add_argument_group("decoding")
    decoding.add_argument(
        "--acceptance",
        choices=RULES,
        default=settings.acceptance,
        help="how draft tokens are accepted. greedy and sampling are lossless: the answer is that of the base alone."
        " speculative is lossless in distribution: answers are as likely as those of the base alone, but for a seed"
        " not the same. typical is LOSSY: faster, but answers can differ"
        " (default: greedy at temperature 0, else sampling)",
    )
    decoding.add_argument(
        "--nodes",
        type=tree_budget,
        default=settings.nodes,
        metavar="N",
        help="tree budget, in tokens per verify pass; 1 is plain decoding (default: auto, what brings the most tokens"
        " per second, found out as it runs)",
    )
    decoding.add_argument(
        "--drafter",
        type=drafter_name,
        default=settings.drafter,
        metavar="NAME",
        help="what guesses: heads, prompt-lookup (what followed the last words earlier in the text), ngram (and in"
        " earlier answers), draft-model, early-exit (the base's first layers), mtp, several of them joined by +; hybrid"
        " is heads+prompt-lookup; heads-sampled draws from the heads, for speculative acceptance. Under greedy and"
        " sampling the answer does not depend on it (default: auto, the fastest of what there is)",
    )
    decoding.add_argument(
        "--tree",
        metavar="FILE",
        help="draft the static tree of a file, in place of --nodes and --drafter (default: a tree per step)",
    )
    decoding.add_argument(
        "--settings",
        metavar="FILE",
        help="drafter and nodes that medusa-bench tune has found, in place of --nodes and --drafter (default: none)",
    )
    decoding.add_argument(
        "--ngrams",
        metavar="FILE",
        help="what the drafter ngram has learned: read at the start if the file is there, written at the end (default:"
        " kept in memory)",
    )
    parser.add_argument("--colour", action="store_true", help="colour the text that was guessed (default: off)")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run the chat.

    Returns:
        Exit status: 0 at the end of the input, 1 for a failure, 2 for wrong use, 130 after Ctrl-C outside of an answer.
    """
    parser = build_parser()
    args = parser.parse_args(argv)
    show_messages()
    try:
        settings = Settings(**{field.name: getattr(args, field.name) for field in fields(Settings)})
    except ValueError as error:
        parser.error(str(error))
    for name in ("tree", "settings"):
        if (file := getattr(args, name)) and (args.nodes is not None or args.drafter is not None):
            parser.error(f"{name} ({file}) takes the place of --nodes and --drafter; leave them out")
    loaded = ("heads", "base", "draft_model", "mtp", "tree", "ngrams")
    here = [f"--{name.replace('_', '-')}" for name in loaded if getattr(args, name)]
    if args.endpoint and here:
        parser.error(f"endpoint ({args.endpoint}) is a model elsewhere; leave {', '.join(here)} out")
    if args.model and not args.endpoint:
        parser.error(f"model ({args.model}) is one of a server; name the server with --endpoint")
    if args.tree and args.settings:
        parser.error(f"tree ({args.tree}) and settings ({args.settings}) both say what is drafted; leave one out")
    for stream in (sys.stdin, sys.stdout):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")
    terminal = Terminal(sys.stdin, sys.stdout, sys.stderr, colour=args.colour)
    try:
        from medusa import Prefix, load_settings, load_tree
        from medusa.drafters.ngram import NgramCache

        tree = load_tree(args.tree) if args.tree else None
        if args.settings:
            found = load_settings(args.settings)
            settings = replace(settings, drafter=found.drafter, nodes=found.nodes)
        if args.endpoint:
            _talk_to_server(args, terminal, settings)
            return 0
        model = load_model(args)

        title = describe(model, args.heads)
        if settings.nodes is None and tree is None:
            title += "\n" + model.explain(settings.drafter)
        if args.ngrams and Path(args.ngrams).exists():
            model.drafters.parts.ngrams = NgramCache.load(args.ngrams)
        try:
            Repl(model, terminal, COMMANDS, Conversation(args.system), settings, title, Prefix(), tree).run()
        finally:
            if args.ngrams:
                model.ngrams.save(args.ngrams)
    except (OSError, ValueError, RuntimeError) as error:
        if isinstance(error, BrokenPipeError):
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        else:
            terminal.error(str(error))
        return 1
    except KeyboardInterrupt:
        return 130
    return 0


def _talk_to_server(args: argparse.Namespace, terminal: Terminal, settings: Settings) -> None:
    from serve.chat.remote import RemoteModel

    model = RemoteModel(args.endpoint, args.model or "", os.environ.get("MEDUSA_API_KEY", ""))
    title = f"model  {model.base.name} at {args.endpoint} ({model.base.context_length:,} tokens of context)"
    Repl(model, terminal, COMMANDS, Conversation(args.system), settings, title).run()


if __name__ == "__main__":
    sys.exit(main())
