"""The demo's results: a table for each base, report.json and the picture."""

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from medusa.benchmarks.demo import AUTO, LABELS

COLUMNS = ("tokens_per_s", "tokens_per_step", "speedup", "speedup_over_transformers")
"""Columns of the table: figures of a way to decode."""
KIND = "tokens_per_step_"
"""Prefix of keys of a drafter's figures by kind of prompt."""


def publish(run: Path, report: dict[str, Any]) -> None:
    """Write the report and the picture, and print the tables and the next steps."""
    from medusa.benchmarks.picture import draw
    from medusa.files import write_json

    path, picture = run / "report.json", run / "report.png"
    write_json(path, report)
    bases = {"the embedded base": report}
    if report.get("smollm2"):
        bases["SmolLM2-135M-Instruct"] = report["smollm2"]
    try:
        draw("The demo: two bases, each decoded in five ways", _fields(bases), picture, columns=2)
    except ImportError as error:  # without matplotlib the report is still complete
        print(f"no picture: {error}", file=sys.stderr)
    for base, figures in bases.items():
        show(base, figures)
    print(f"report: {path}    picture: {picture}" if picture.is_file() else f"report: {path}")
    print("next:   ./launch.sh chat --base smollm2 --colour    talk to the real model and see what was guessed")
    print("        ./launch.sh chat --colour                   talk to the small one")
    print("        ./launch.sh train --recipe train/recipes/embedded.yaml --recipe.run runs/medusa \\")
    print("            --recipe.heads.architecture medusa      train another design on the same answers")


def show(base: str, figures: Mapping[str, Any]) -> None:
    """Print the table of ``benchmarks.demo.figures.measured``."""
    from rich.console import Console

    from medusa.benchmarks.report import Table

    engine = f"{figures['dtype']}, {'fused pass, ' if figures['fused'] else ''}{figures['threads']} threads"
    title = f"{base}: {figures['prompts']} prompts, greedy, {engine}"
    cells = [
        (name, f"{speed:.0f}", f"{steps:.2f}", f"{over_plain:.2f}x", f"{over_transformers:.2f}x")
        for name, speed, steps, over_plain, over_transformers in _rows(figures)
    ]
    headings = ("decoding", "tokens/s", "tokens per step", "over plain", "over transformers")
    Console().print(Table(title, headings, cells).shown())
    same = ", ".join(f"{LABELS[name]} {row['identical_outputs']}" for name, row in figures["drafters"].items())
    print(f"identical to plain decoding, of {figures['prompts']} outputs: {same}")
    share = figures["repeated_4grams"]
    print(f"{share:.0%} of the 4-grams repeat the same answer: the more, the better lookup works")


def _rows(figures: Mapping[str, Any]) -> list[tuple[Any, ...]]:
    """The name and the ``COLUMNS`` of each way to decode."""
    over, drafters = figures["plain_speedup_over_transformers"], reversed(figures["drafters"].items())
    return [
        ("transformers generate", figures["hf_tokens_per_s"], 1.0, 1 / over, 1.0),
        ("plain, this engine", figures["plain_tokens_per_s"], 1.0, 1.0, over),
        *((LABELS[name], *(row[key] for key in COLUMNS)) for name, row in drafters),
    ]


def _fields(bases: Mapping[str, Mapping[str, Any]]) -> list[Any]:
    """Speeds of each base, accuracies of the trained heads, and tokens per step of the real base by kind of prompt."""
    from medusa.benchmarks.picture import Field, Line

    found = []
    for base, figures in bases.items():
        ways, speeds = zip(*((name, speed) for name, speed, *_ in _rows(figures)), strict=True)
        found.append(Field({"": Line(ways, speeds)}, "", f"{base}:\ntokens per second", bars=True))
    trained, *real = bases.values()
    heads = range(1, len(trained["head_top1"]) + 1)
    ranks = {f"top {rank}": Line(heads, trained[f"head_top{rank}"]) for rank in (1, 5, 10)}
    found.append(Field(ranks, "head", "held-out accuracy of the trained heads"))
    for figures in real:
        rows = {name: figures["drafters"][name] for name in ("heads", AUTO)}
        kinds = sorted((key for key in rows[AUTO] if key.startswith(KIND)), key=lambda key: float(rows[AUTO][key]))
        names = [key.removeprefix(KIND) for key in kinds]
        lines = {LABELS[name]: Line(names, [row[key] for key in kinds]) for name, row in rows.items()}
        found.append(Field(lines, "what was asked", "tokens per step", bars=True))
    return found
