"""Chat with a base and its heads in a terminal, or through pipes: ``medusa chat``."""

import argparse
import io
import os
import sys
from collections.abc import Sequence
from dataclasses import fields, replace
from pathlib import Path

from medusa.data.arguments import ending_at_once, show_messages
from medusa.files import cache_directory
from medusa.serve.chat.commands import COMMANDS
from medusa.serve.chat.conversation import Conversation, GenerationOptions
from medusa.serve.chat.repl import Repl
from medusa.serve.chat.terminal import Terminal
from medusa.serve.flags import add_flags, from_flags
from medusa.serve.model_options import DEFAULT_HEADS, ModelOptions, describe

HERE = (*(each.name for each in fields(ModelOptions)), "tree", "ngrams")
"""Flags that only apply to a model in this process."""
EPILOG = """\
With a terminal: /? lists the commands, Ctrl-C stops an answer, Ctrl-D leaves.
Without one: every line of the input is a message; answers go to stdout, everything else to stderr. If a line fails, the
others are answered, and the exit status is 1.

  medusa chat --temperature 0.8 --colour
  medusa chat --endpoint http://localhost:8000/v1
  echo 'Write a Python function that reverses a list.' | medusa chat
"""


def build_parser() -> argparse.ArgumentParser:
    """The command line; flags that other commands share have the same meaning there."""
    parser = argparse.ArgumentParser(
        prog="medusa chat",
        description="Chat with a base model that decodes several tokens per step with its heads.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add_flags(parser.add_argument_group("model"), ModelOptions)
    add = parser.add_argument_group("a server instead of a local model").add_argument
    text = "address of medusa serve or vLLM, as http://localhost:8000/v1; MEDUSA_API_KEY is its key (default: none)"
    add("--endpoint", metavar="URL", help=text)
    add("--model", metavar="NAME", help="name of the model on the server (default: its first model)")
    answers = parser.add_argument_group("answers")
    answers.add_argument("--system", default="", metavar="TEXT", help="system prompt (default: none)")
    add_flags(answers, GenerationOptions)
    add = parser.add_argument_group("files").add_argument
    text = "draft the static tree of a file, instead of --nodes and --drafter (default: a new tree in each step)"
    add("--tree", metavar="FILE", help=text)
    text = "drafter and nodes from medusa bench tune, instead of --nodes and --drafter (default: none)"
    add("--settings", metavar="FILE", help=text)
    text = "completions to draft from (drafter ngram); read at the start if the file exists, written at the end"
    add("--ngrams", metavar="FILE", help=f"{text} (default: kept in memory)")
    text = "do not keep the lines that you type (default: they are kept in the cache directory for the next chat)"
    parser.add_argument("--no-history", action="store_true", help=text)
    parser.add_argument("--colour", action="store_true", help="colour the text that was drafted (default: off)")
    return parser


def _read_flags(argv: Sequence[str] | None) -> tuple[argparse.Namespace, GenerationOptions]:
    """Parse the flags; contradicting flags are wrong use."""
    parser = build_parser()
    args = parser.parse_args(argv)
    here = [f"--{name.replace('_', '-')}" for name in HERE if getattr(args, name) != parser.get_default(name)]
    if args.endpoint and here:
        parser.error(f"endpoint ({args.endpoint}) is a remote model; leave {', '.join(here)} out")
    if args.model and not args.endpoint:
        parser.error(f"model ({args.model}) is a model of a server; name the server with --endpoint")
    if args.tree and args.settings:
        parser.error(f"tree ({args.tree}) and settings ({args.settings}) both say what is drafted; leave one out")
    for name in ("tree", "settings"):
        if (file := getattr(args, name)) and (args.nodes is not None or args.drafter is not None):
            parser.error(f"{name} ({file}) replaces --nodes and --drafter; leave them out")
    try:
        return args, from_flags(GenerationOptions, args)
    except ValueError as error:
        parser.error(str(error))


def main(argv: Sequence[str] | None = None) -> int:
    """Run the chat.

    Returns:
        Exit status: 0 at the end of the input, 1 for a failure (without a terminal, that of a single line too), 2 for
        wrong use, 130 after Ctrl-C outside of an answer.
    """
    args, settings = _read_flags(argv)
    show_messages()
    for stream in (sys.stdin, sys.stdout):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")
    history = None if args.no_history else cache_directory() / "chat_history"
    terminal = Terminal(sys.stdin, sys.stdout, sys.stderr, colour=args.colour, history=history)
    try:
        if args.settings:
            from medusa import load_settings

            found = load_settings(args.settings)
            settings = replace(settings, drafter=found.drafter, nodes=found.nodes)
        failed = (_talk_to_server if args.endpoint else _talk_to_model)(args, terminal, settings)
    except (OSError, ValueError, RuntimeError) as error:
        if isinstance(error, BrokenPipeError):
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        else:
            terminal.error(str(error))
        return 1
    except KeyboardInterrupt:
        return 130
    return int(failed and not terminal.interactive)


def _talk_to_server(args: argparse.Namespace, terminal: Terminal, settings: GenerationOptions) -> bool:
    """Chat with a server's model; returns whether a line failed."""
    from medusa.serve.chat.remote import RemoteModel

    model = RemoteModel(args.endpoint, args.model or "", os.environ.get("MEDUSA_API_KEY", ""))
    title = f"model  {model.base.name} at {args.endpoint} ({model.base.context_length:,} tokens of context)"
    repl = Repl(model, terminal, COMMANDS, Conversation(args.system), settings, title)
    repl.run()
    return repl.failed


def _talk_to_model(args: argparse.Namespace, terminal: Terminal, settings: GenerationOptions) -> bool:
    """Chat with a model in this process; returns whether a line failed."""
    from medusa import Prefix, load_tree
    from medusa.drafters.ngram import NgramCache

    tree = load_tree(args.tree) if args.tree else None
    options = _offered(terminal, from_flags(ModelOptions, args))
    with ending_at_once():
        model = options.load()
    if args.ngrams and Path(args.ngrams).exists():  # before drafters are made
        model.drafters.parts.ngrams = NgramCache.load(args.ngrams, vocab_size=model.base.vocab_size)
    model.drafters.remembering = bool(args.ngrams)
    title = describe(model, options.heads_or_default())
    if settings.nodes is None and tree is None:
        title += "\n" + model.explain(settings.drafter)
    repl = Repl(model, terminal, COMMANDS, Conversation(args.system), settings, title, Prefix(), tree)
    try:
        repl.run()
    finally:
        if args.ngrams:
            model.ngrams.save(args.ngrams)
    return repl.failed


def _offered(terminal: Terminal, options: ModelOptions) -> ModelOptions:
    """Offer SmolLM2 if the default heads do not exist yet; returns the options that the user chooses."""
    missing = options.heads_or_default() == DEFAULT_HEADS and not Path(DEFAULT_HEADS).is_dir()
    if not missing or not terminal.interactive:
        return options
    terminal.note(f"There are no heads in {DEFAULT_HEADS} yet; ./launch.sh trains them in some ten minutes.")
    try:
        answer = terminal.read("Talk to smollm2, whose heads are here? It is downloaded once, 93 to 270 MB. [Y/n] ")
    except EOFError:
        answer = "no"
    return replace(options, base="smollm2") if answer.strip().lower() in ("", "y", "yes") else options


if __name__ == "__main__":
    sys.exit(main())
