"""The demo's results: a table for each base, report.json and the picture."""

import sys
from pathlib import Path
from typing import Any

from medusa.benchmarks.demo import LABELS

COLUMNS = ("tokens_per_s", "tokens_per_step", "speedup", "speedup_over_transformers")
"""Columns of the table: figures of a way to decode."""


def publish(run: Path, report: dict[str, Any]) -> None:
    """Write the report and the picture, and print the tables and the next steps."""
    from medusa.files import write_json

    path, picture = run / "report.json", run / "report.png"
    write_json(path, report)
    try:
        from medusa.benchmarks.demo.picture import draw
    except ImportError as error:  # without matplotlib the report is still complete
        print(f"no picture: {error}", file=sys.stderr)
    else:
        draw(report, picture)
    show("the embedded base", report)
    if report.get("smollm2"):
        show("SmolLM2-135M-Instruct", report["smollm2"])
    print(f"report: {path}    picture: {picture}" if picture.is_file() else f"report: {path}")
    print("next:   ./launch.sh chat --base smollm2 --colour    talk to the real model and see what was guessed")
    print("        ./launch.sh chat --colour                   talk to the small one")
    print("        ./launch.sh train --recipe train/recipes/embedded.yaml --recipe.run runs/medusa \\")
    print("            --recipe.heads.architecture medusa      train another design on the same answers")


def show(base: str, figures: dict[str, Any]) -> None:
    """Print the table of ``benchmarks.demo.figures.measured``."""
    from rich.console import Console
    from rich.table import Table

    engine = f"{figures['dtype']}, {'fused pass, ' if figures['fused'] else ''}{figures['threads']} threads"
    table = Table(title=f"{base}: {figures['prompts']} prompts, greedy, {engine}")
    for heading in ("decoding", "tokens/s", "tokens per step", "over plain", "over transformers"):
        table.add_column(heading, justify="left" if heading == "decoding" else "right")
    over = figures["plain_speedup_over_transformers"]
    rows = [
        ("transformers generate", figures["hf_tokens_per_s"], 1.0, 1 / over, 1.0),
        ("plain, this engine", figures["plain_tokens_per_s"], 1.0, 1.0, over),
    ]
    rows += [(LABELS[name], *(row[key] for key in COLUMNS)) for name, row in reversed(figures["drafters"].items())]
    for name, speed, steps, over_plain, over_transformers in rows:
        table.add_row(name, f"{speed:.0f}", f"{steps:.2f}", f"{over_plain:.2f}x", f"{over_transformers:.2f}x")
    Console().print(table)
    same = ", ".join(f"{LABELS[name]} {row['identical_outputs']}" for name, row in figures["drafters"].items())
    print(f"identical to plain decoding, of {figures['prompts']} outputs: {same}")
    share = figures["repeated_4grams"]
    print(f"{share:.0%} of the 4-grams repeat the same answer: the more, the better lookup works")
