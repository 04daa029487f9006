"""``medusa``: one program for all commands."""

import pytest

from medusa import __version__
from medusa.__main__ import COMMANDS, Command, main


@pytest.mark.parametrize("words", [[], ["help"], ["-h"], ["--help"]])
def test_help_names_all_commands(words, capsys):
    assert main(words) == 0
    shown = capsys.readouterr().out
    assert all(f"\n  {name} " in shown for name in COMMANDS)


def test_version(capsys):
    assert main(["--version"]) == 0
    assert capsys.readouterr().out == f"medusa {__version__}\n"


def test_an_unknown_command_is_refused(capsys):
    assert main(["trian"]) == 2
    assert "unknown command (trian); it must be one of chat, serve" in capsys.readouterr().err


def test_arguments_and_exit_status_are_the_commands(capsys):
    with pytest.raises(SystemExit) as ended:
        main(["export", "--help"])
    assert ended.value.code == 0
    assert "usage: medusa export" in capsys.readouterr().out


def test_a_missing_package_is_named_with_what_installs_it(monkeypatch, tmp_path, capsys):
    (tmp_path / "needs.py").write_text("import no_such_package")
    monkeypatch.setattr("medusa.__path__", [str(tmp_path)])
    monkeypatch.setitem(COMMANDS, "serve", Command("needs", "serve", ""))
    assert main(["serve"]) == 1
    message = "needs a package that is not installed (no_such_package); pip install 'medusa-decoding[serve]'"
    assert message in capsys.readouterr().err
