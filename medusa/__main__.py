"""``medusa COMMAND ...``: one program for everything that this package does."""

import sys
from collections.abc import Sequence
from importlib import import_module
from typing import NamedTuple

from medusa import __version__


class Command(NamedTuple):
    """One command: the module whose ``main`` runs it, the extra with its requirements, and a description."""

    module: str
    extra: str
    does: str


COMMANDS = {
    "chat": Command("serve.chat.__main__", "serve", "talk to a model with heads in the terminal"),
    "serve": Command("serve.server", "serve", "serve a model with heads over HTTP, as OpenAI's API, with a web page"),
    "heads": Command("train.own.command", "train", "make heads for your own model: answers, training, comparison"),
    "data": Command("data.__main__", "train", "make and inspect training data"),
    "train": Command("train.command", "train", "train heads (torchrun and DeepSpeed)"),
    "report": Command("train.report.__main__", "demo", "figures and curves of a training run"),
    "export": Command("io.command", "", "write heads for other engines, put them on the Hub, inspect heads"),
    "bench": Command("benchmarks.__main__", "demo", "measure drafters, decode steps and acceptance; tune settings"),
    "study": Command("benchmarks.study", "train", "train head designs one after the other, and compare them"),
    "doctor": Command("doctor.__main__", "", "show what this machine has, what runs fast on it, and what to fix"),
    "demo": Command("benchmarks.demo.__main__", "train,demo,smollm2", "train heads for a small model, compare speeds"),
}
"""Commands by name, in the order of the help; a command's module is imported when it is called."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line.

    Returns:
        The command's exit status; 2 if there is no such command.
    """
    words = list(sys.argv[1:] if arguments is None else arguments)
    name = words[0] if words else "--help"
    if name in ("-h", "--help", "help"):
        print(_usage())
        return 0
    if name == "--version":
        print(f"medusa {__version__}")
        return 0
    if name not in COMMANDS:
        print(f"medusa: unknown command ({name}); it must be one of {', '.join(COMMANDS)}", file=sys.stderr)
        return 2
    command = COMMANDS[name]
    try:
        status: int = import_module(f"medusa.{command.module}").main(words[1:])
    except ModuleNotFoundError as error:
        if not command.extra or not error.name or error.name.startswith("medusa"):
            raise
        remedy = f"pip install 'medusa-decoding[{command.extra}]'"
        print(f"medusa {name} needs a package that is not installed ({error.name}); {remedy}", file=sys.stderr)
        return 1
    return status


def _usage() -> str:
    commands = "\n".join(f"  {name:<8} {command.does}" for name, command in COMMANDS.items())
    return f"usage: medusa COMMAND [arguments]\n\n{commands}\n\n'medusa COMMAND --help' describes its arguments."


if __name__ == "__main__":
    sys.exit(main())
