"""Command lines that documents and help texts show are accepted by the real parsers, which run nothing here."""

import argparse
import re
import shlex
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path

import pytest

from medusa.__main__ import COMMANDS, main
from medusa.train.config import Recipe
from medusa.train.recipe_file import leaves, parse_overrides

ROOT = Path(__file__).parents[1]
DOCUMENTS = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
SHELL = re.compile(r"^```(?:bash|sh)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
STARTS = (("./launch.sh",), ("medusa",), ("python", "-m", "medusa"), (".venv/bin/python", "-m", "medusa"))
OTHERS = ("test", "setup", "help")
"""Commands of launch.sh that no parser of ours reads."""
MODULE = re.compile(r"medusa\.[\w.]+")


class Parsed(Exception):  # noqa: N818 - it ends a command where its work would begin
    """What the outermost parser of a command made of its words."""


@pytest.fixture(autouse=True)
def parsers_end_the_command(monkeypatch):
    depth = 0

    def ending(method):
        def parse(self, *args, **kwargs):
            nonlocal depth
            depth += 1
            try:
                found = method(self, *args, **kwargs)
            finally:
                depth -= 1
            if depth == 0:
                raise Parsed(found)
            return found

        return parse

    for name in ("parse_args", "parse_known_args"):
        monkeypatch.setattr(argparse.ArgumentParser, name, ending(getattr(argparse.ArgumentParser, name)))


def command_lines(text):
    """Words of our commands in the lines of a text, without variables before and pipes behind them."""
    for line in text.replace("\\\n", " ").splitlines():
        lexer = shlex.shlex(line.strip().removeprefix("$ "), posix=True, punctuation_chars="|&;<>()")
        lexer.whitespace_split = True
        try:
            words = list(lexer)
        except ValueError:
            continue  # a text of several lines between quotes
        part = []
        for word in [*words, ";"]:
            if set(word) <= set("|&;<>()"):
                yield from one_of_ours(part)
                part = []
            else:
                part.append(word)


def one_of_ours(words):
    while words and (re.fullmatch(r"[A-Z_]+=.*", words[0]) or words[0] in ("do", "torchrun")):
        words = words[1:]
    if words[:1] == ["--nproc_per_node"]:  # of torchrun
        words = ["python", *words[2:]]
    for start in STARTS:
        if tuple(words[: len(start)]) == start:
            yield words[len(start) :]
    if words[:2] == ["python", "-m"] and MODULE.fullmatch("".join(words[2:3])):
        yield words[2:]


def refused(words):
    """Why a command would end at once, or None."""
    module = words[0] if words and MODULE.fullmatch(words[0]) else None
    if module is None and (words[0] if words else "demo") in OTHERS:
        return None
    if words[:1] == ["gpu-check"]:
        module = "medusa.benchmarks.gpu.__main__"
    elif module == "medusa.serve.ray_app" and find_spec("ray") is None:
        return None
    elif module and import_module(module).__spec__.submodule_search_locations:
        module += ".__main__"
    try:
        status = import_module(module).main(words[1:]) if module else main(words or ["demo"])
    except Parsed as parsed:
        return unknown_keys(parsed.args[0])
    except SystemExit as ended:
        return None if ended.code == 0 else f"exit status {ended.code}"
    return f"exit status {status}, without parsing"


def unknown_keys(found):
    """Recipe keys (--recipe.KEY) that there are not."""
    rest = found[1] if isinstance(found, tuple) else []
    unknown = parse_overrides(rest).keys() - dict(leaves(Recipe))
    return f"unknown recipe keys: {sorted(unknown)}" if unknown else None


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.stem)
def test_documents_show_commands_that_parse(document, capsys):
    blocks = "\n".join(SHELL.findall(document.read_text()))
    wrong = {shlex.join(words): why for words in command_lines(blocks) if (why := refused(words))}
    assert not wrong, capsys.readouterr().err


@pytest.mark.parametrize("command", COMMANDS)
def test_help_shows_commands_that_parse(command, capsys):
    with pytest.raises(SystemExit):
        main([command, "--help"])
    shown = capsys.readouterr().out
    lines = [words for words in command_lines(shown) if words and words[0] in COMMANDS]
    wrong = {shlex.join(words): why for words in lines if (why := refused(words))}
    assert not wrong, capsys.readouterr().err


@pytest.mark.parametrize(
    "line", ["./launch.sh chat --colur", "medusa bench jump", "medusa train --recipe a.yaml --recipe.optim.l 1"]
)
def test_a_wrong_line_is_found(line):
    (words,) = command_lines(line)
    assert refused(words)
