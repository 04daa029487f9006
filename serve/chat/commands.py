"""Commands of the chat: a table of names, help texts and functions."""

from collections.abc import Callable
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

from medusa.sampling import DRAFTERS, RULES
from serve.chat.conversation import Conversation, GenerationOptions, load, save, tree_budget
from serve.chat.repl import Command, Repl
from serve.chat.terminal import count


def _help(repl: Repl, _: str) -> None:
    for name, command in repl.commands.items():
        repl.terminal.note(f"  {f'/{name} {command.argument}':<17} {command.help}")
    repl.terminal.note('  Several lines: start with """ and end the last line with """.')
    repl.terminal.note("  Ctrl-C stops an answer and keeps what was written; Ctrl-D leaves.")


def _reset(repl: Repl, _: str) -> None:
    repl.switch(Conversation(repl.conversation.system))
    repl.terminal.note("The conversation starts anew.")


def _setting(name: str, parse: Callable[[str], Any]) -> Callable[[Repl, str], None]:
    """A command that shows one setting, or changes it when it is given a value."""

    def run(repl: Repl, argument: str) -> None:
        if argument:
            try:
                value = parse(argument)
            except ValueError:
                value = argument  # the options name the rule that it breaks
            repl.settings = replace(repl.settings, **{name: value})
        repl.terminal.note(f"{name} = {_shown(repl.settings, name)}")

    return run


def _shown(settings: GenerationOptions, name: str) -> object:
    value = getattr(settings, name)
    return "auto" if value is None else value


def _rule(text: str) -> str | None:
    return None if text == "auto" else text


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


def _stats(repl: Repl, _: str) -> None:
    outputs, turns = repl.outputs, len(repl.conversation.turns)
    tokens, steps = sum(len(output.tokens) for output in outputs), sum(output.steps for output in outputs)
    seconds = sum(output.seconds for output in outputs)
    known, read = (sum(getattr(output, name) for output in outputs) for name in ("cached_tokens", "prompt_tokens"))
    settings = ", ".join(f"{field.name} {_shown(repl.settings, field.name)}" for field in fields(repl.settings))
    speed = f"{tokens / max(seconds, 1e-9):.1f} tokens/s, {tokens / max(steps, 1):.2f} tokens/step"
    repl.terminal.note(
        f"  {count(len(outputs), 'answer')}, {count(tokens, 'token')} in {count(steps, 'step')} and {seconds:.1f} s:"
        f" {speed}\n"
        f"  {known:,} of {count(read, 'prompt token')} were known from the answer before\n"
        f"  conversation: {count(turns, 'turn')}, {count(repl.conversation_tokens(), 'token')};"
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


COMMANDS = {
    "help": Command("", "Show this list.", _help),
    "reset": Command("", "Forget the conversation; the system prompt stays.", _reset),
    "regen": Command("", "Answer the last message once more.", lambda repl, _: repl.regenerate()),
    "temp": Command("X", "Set the temperature; 0 is greedy.", _setting("temperature", float)),
    "penalty": Command("X", "Set the repetition penalty; 1 is off.", _setting("repetition_penalty", float)),
    "max": Command("N", "Set the longest answer, in tokens.", _setting("max_new_tokens", int)),
    "acceptance": Command("RULE", f"{', '.join(RULES)} (LOSSY) or auto.", _setting("acceptance", _rule)),
    "nodes": Command(
        "N", "Set the tree budget per step, in tokens, or auto; 1 is plain.", _setting("nodes", tree_budget)
    ),
    "drafter": Command("NAME", f"{', '.join(DRAFTERS)} or auto.", _setting("drafter", _rule)),
    "system": Command("TEXT", "Set the system prompt; off removes it.", _system),
    "colour": Command("on|off", "Colour the text that was guessed.", _colour),
    "stats": Command("", "Show speed, tokens per step, context and settings.", _stats),
    "save": Command("FILE", "Write the conversation and the settings as JSON.", _save),
    "load": Command("FILE", "Go on with a saved conversation and its settings.", _load),
    "exit": Command("", "Leave.", _exit),
}
