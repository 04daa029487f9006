"""Tables of reports on narrow terminals."""

import argparse

import pytest

from medusa.benchmarks.report import Table, publish


@pytest.mark.parametrize("columns", [20, 40, 200])
def test_figures_stay_whole_on_a_narrow_terminal(columns, monkeypatch, capsys):
    figures = ["1234.56 ms", "5.97", "18%", "0.571, 0.4 to 0.7"]
    table = Table("steps", ["a name of several words", *"abcd"], [["the first line of them", *figures]])
    monkeypatch.setenv("COLUMNS", str(columns))
    monkeypatch.setattr("sys.stdout.isatty", lambda: True, raising=False)
    publish(argparse.Namespace(), {}, [table])
    (line,) = [line for line in capsys.readouterr().out.splitlines() if figures[0] in line]
    assert all(figure in line for figure in figures)
