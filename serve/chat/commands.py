"""Commands of the chat and settings of ``/set``: tables of names, help texts and functions."""

from collections.abc import Callable, Sequence
from dataclasses import fields, replace
from pathlib import Path
from typing import Any, NamedTuple

from medusa.sampling import DRAFTERS, RULES
from medusa.serve.chat.conversation import Conversation, GenerationOptions, load, save, whole_or_auto
from medusa.serve.chat.repl import Command, Repl
from medusa.serve.chat.terminal import count


class Setting(NamedTuple):
    """A field of ``GenerationOptions``."""

    help: str
    parse: Callable[[str], Any]
    values: Sequence[str] = ()
    """The allowed values; empty for numbers."""


def _choice(text: str) -> str | None:
    return None if text == "auto" else text


SETTINGS = {
    "temperature": Setting("0 is greedy", float),
    "top_p": Setting("1 is off", float),
    "top_k": Setting("0 is off", int),
    "min_p": Setting("0 is off", float),
    "repetition_penalty": Setting("1 is off", float),
    "seed": Setting("of the sampling noise, or auto", whole_or_auto),
    "max_new_tokens": Setting("longest answer, in tokens", int),
    "nodes": Setting("tree budget per step, or auto; 1 is plain decoding", whole_or_auto),
    "drafter": Setting("what drafts; /set drafter lists the names", _choice, DRAFTERS),
    "acceptance": Setting("how guesses are judged; typical is LOSSY", _choice, RULES),
}
SHORT = {
    "temp": "temperature", "penalty": "repetition_penalty", "repeat_penalty": "repetition_penalty",
    "max": "max_new_tokens", "num_predict": "max_new_tokens",
}  # fmt: skip
"""Other names of settings, including ollama's."""


def _help(repl: Repl, _: str) -> None:
    for name, command in repl.commands.items():
        if command.help:
            repl.terminal.note(f"  {f'/{name} {command.argument}':<16} {command.help}")
    repl.terminal.note('  Several lines: start with """ and end the last line with """.')
    repl.terminal.note("  Ctrl-C stops an answer and keeps what was written; Ctrl-D leaves.")


def _clear(repl: Repl, _: str) -> None:
    repl.switch(Conversation(repl.conversation.system))
    repl.terminal.note("A new conversation starts.")


def _set(repl: Repl, argument: str) -> None:
    """Show all settings or one setting, or change one."""
    asked, _, text = argument.partition(" ")
    if asked == "parameter":  # ollama's /set parameter NAME VALUE
        asked, _, text = text.strip().partition(" ")
    name, text = SHORT.get(asked, asked), text.strip()
    if not name:
        for each, setting in SETTINGS.items():
            repl.terminal.note(f"  {each:<19} {_shown(repl.settings, each)!s:<6} {setting.help}")
        for show in OTHERS.values():
            show(repl, "")
    elif name in OTHERS:
        OTHERS[name](repl, text)
    elif name not in SETTINGS:
        raise ValueError(f"unknown setting ({name}); choose one of: {', '.join([*SETTINGS, *OTHERS])}")
    else:
        if text:
            _change(repl, asked, name, text)
        elif SETTINGS[name].values:
            repl.terminal.note(f"{name} can be {', '.join(SETTINGS[name].values)} or auto.")
        repl.terminal.note(f"{name} = {_shown(repl.settings, name)}")


def _change(repl: Repl, asked: str, name: str, text: str) -> None:
    """Change a setting; errors use the user's name of it."""
    try:
        value = SETTINGS[name].parse(text)
    except ValueError:
        value = text  # the options raise the error
    try:
        repl.settings = replace(repl.settings, **{name: value})
    except ValueError as error:
        raise ValueError(str(error).replace(name, asked, 1)) from None


def _shown(settings: GenerationOptions, name: str) -> object:
    value = getattr(settings, name)
    return "auto" if value is None else value


def _system(repl: Repl, argument: str) -> None:
    if argument:
        repl.conversation.system = "" if argument == "off" else argument
    repl.terminal.note(f"system = {repl.conversation.system or 'off'}")


def _colour(repl: Repl, argument: str) -> None:
    if argument not in ("", "on", "off"):
        raise ValueError(f"colour ({argument}) must be on or off")
    if argument:
        repl.terminal.colour = argument == "on"
    missing = "" if repl.terminal.ansi else " (without effect: no terminal, or NO_COLOR is set)"
    repl.terminal.note(f"colour = {'on' if repl.terminal.colour else 'off'}{missing}")


OTHERS: dict[str, Callable[[Repl, str], None]] = {"system": _system, "colour": _colour}
"""Settings that are not fields of the options."""


def _stats(repl: Repl, _: str) -> None:
    outputs, turns = repl.outputs, len(repl.conversation.turns)
    talked = len(repl.model.chat_prompt(repl.conversation.messages())) if turns else 0  # also what is left out by now
    tokens, steps = sum(len(output.tokens) for output in outputs), sum(output.steps for output in outputs)
    seconds = sum(output.seconds for output in outputs)
    known, read = (sum(getattr(output, name) for output in outputs) for name in ("cached_tokens", "prompt_tokens"))
    settings = ", ".join(f"{field.name} {_shown(repl.settings, field.name)}" for field in fields(repl.settings))
    speed = f"{tokens / max(seconds, 1e-9):.1f} tokens/s, {tokens / max(steps, 1):.2f} tokens/step"
    repl.terminal.note(
        f"  {count(len(outputs), 'answer')}, {count(tokens, 'token')} in {count(steps, 'step')} and {seconds:.1f} s:"
        f" {speed}\n"
        f"  {known:,} of {count(read, 'prompt token')} were known from the answer before\n"
        f"  conversation: {count(turns, 'turn')}, {count(talked, 'token')};"
        f" the context holds {repl.model.base.context_length:,}\n"
        f"  {settings}"
    )


def _save(repl: Repl, argument: str) -> None:
    path = _path(argument)
    save(path, repl.conversation, repl.settings)
    repl.terminal.note(f"Saved {count(len(repl.conversation.turns), 'turn')} to {path}.")


def _load(repl: Repl, argument: str) -> None:
    path = _path(argument)
    conversation, repl.settings = load(path)
    repl.switch(conversation)
    repl.terminal.note(f"Loaded {count(len(conversation.turns), 'turn')} and the settings from {path}.")


def _path(argument: str) -> Path:
    if not argument:
        raise ValueError("no file was named; write one after the command, as chat.json")
    return Path(argument).expanduser()


def _exit(_repl: Repl, _: str) -> None:
    raise EOFError


def _short(name: str) -> Command:
    return Command("VALUE", "", lambda repl, argument: _set(repl, f"{name} {argument}"))


LISTED = {
    "help": Command("", "Show this list; also /?.", _help),
    "clear": Command("", "Forget the conversation, but not the system prompt; also /reset.", _clear),
    "regen": Command("", "Answer the last message once more.", lambda repl, _: repl.regenerate()),
    "set": Command("NAME VALUE", "Change a setting; also /NAME VALUE. Alone it lists them.", _set),
    "stats": Command("", "Show speed, tokens per step, context and settings.", _stats),
    "save": Command("FILE", "Write the conversation and the settings as JSON.", _save),
    "load": Command("FILE", "Go on with a saved conversation and its settings.", _load),
    "bye": Command("", "Leave; also /exit, /quit.", _exit),
}
ALIASES = {"?": "help", "reset": "clear", "exit": "bye", "quit": "bye"}
COMMANDS = {
    **LISTED,
    **{other: LISTED[name]._replace(help="") for other, name in ALIASES.items()},
    **{name: _short(name) for name in (*SETTINGS, *SHORT, *OTHERS)},
}
"""All commands by name."""
