"""Common parts of all reports, and their output: JSON, tables, a picture."""

import argparse
import logging
import shlex
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from rich.console import Console
from rich.table import Table as Shown

from medusa.benchmarks.picture import Field, draw
from medusa.files import replace_text, write_json
from medusa.train.provenance import device_name, software

logger = logging.getLogger(__name__)

Report = dict[str, Any]
WIDTH = 180
"""Columns if the output is not a terminal."""
WIDEST = 1000
"""Columns of the widest table; wider than a terminal, its lines wrap."""


class Table(NamedTuple):
    """Cells below headings."""

    title: str
    headings: Sequence[str]
    cells: Sequence[Sequence[str]]
    note: str = ""
    """Sentences about the cells."""

    @classmethod
    def of(cls, title: str, columns: Sequence[tuple[str, str]], rows: Iterable[Mapping[str, Any]]) -> "Table":
        """Make a table from rows of a report: each column has a heading and a format of its cells ("{ms:.2f}")."""
        return cls(
            title, [name for name, _ in columns], [[cell.format_map(row) for _, cell in columns] for row in rows]
        )

    def markdown(self) -> str:
        """The table in Markdown."""
        lines = [self.headings, ["---"] * len(self.headings), *self.cells]
        table = "\n".join(f"| {' | '.join(line)} |" for line in lines)
        return "\n\n".join(filter(None, (f"**{self.title}**", table, self.note)))

    def shown(self, narrow: bool = False) -> Shown:
        """The table for a terminal; if that is narrow, columns of figures are as wide as their figures."""
        table = Shown(title=self.title, title_justify="left", caption=self.note, caption_justify="left")
        for place, heading in enumerate(self.headings):
            width = max((len(line[place]) for line in self.cells), default=None) if narrow and place else None
            table.add_column(heading, justify="right" if place else "left", overflow="fold", width=width)
        for line in self.cells:
            table.add_row(*line)
        return table


def environment(program: str, words: Sequence[str], device: torch.device) -> Report:
    """The command, the machine and the versions of a report."""
    return {
        "command": shlex.join([*program.split(), *words]),
        "device": str(device),
        "device_name": device_name(device),
        "threads": None if device.type == "cuda" else torch.get_num_threads(),
        **software(),
    }


def machine(report: Mapping[str, Any]) -> str:
    """The machine of a report, in one line."""
    threads = f", {report['threads']} threads" if report["threads"] else ""
    dtype = f", {report['dtype']}" if "dtype" in report else ""
    return f"{report['device_name']}{threads}{dtype}"


def rounding(report: Mapping[str, Any]) -> str:
    """What a title says of a base that multiplies in 8 bits, or whose weights are packed; "" of others."""
    return ", LOSSY products of 8 bits" if report.get("int8") else ", packed" if report.get("packed") else ""


def publish(
    options: argparse.Namespace, report: Report, tables: Sequence[Table], title: str = "", fields: Sequence[Field] = ()
) -> None:
    """Write, show and draw the report, according to the flags.

    Args:
        options: Flags ``json``, ``markdown`` and ``picture`` with names of files; a command may lack some.
        report: All figures.
        tables: The tables to show.
        title: Title of the picture.
        fields: Fields of the picture.
    """
    console = Console(width=None if sys.stdout.isatty() else WIDTH)
    written = {name: getattr(options, name, None) for name in ("json", "markdown", "picture")}
    if path := written["json"]:
        write_json(Path(path), report)
    if path := written["markdown"]:
        versions = ", ".join(f"{name} {version}" for name, version in report["versions"].items() if version)
        head = [f"`{report['command']}`", f"{machine(report)}; {versions}."]
        text = "\n\n".join([*head, *(table.markdown() for table in tables)])
        replace_text(Path(path), text + "\n")
    for table in tables:
        wide = console.options.update_width(WIDEST)
        narrow = console.measure(table.shown(), options=wide).maximum > console.width
        console.width = max(console.width, console.measure(table.shown(narrow), options=wide).minimum * narrow)
        console.print(table.shown(narrow))
    if path := written["picture"]:
        try:
            draw(title, fields, path)
        except ImportError as error:  # without matplotlib the report is still complete
            logger.warning("no picture: %s", error)
            written["picture"] = None
    if any(written.values()):
        console.print(f"written: {', '.join(str(path) for path in written.values() if path)}", soft_wrap=True)
