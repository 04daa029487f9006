"""The command line of the study."""

import argparse
from pathlib import Path

from benchmarks.study.variants import DEFAULT
from data.arguments import at_least

RECIPE = "train/recipes/embedded.yaml"
NODES, QUICK_NODES = [4, 8, 16, 32, 64], [8, 64]
SIZES = {
    "seeds": (3, "training runs of each design"),
    "train_prompts": (5400, "prompts that the base answers for training, half of them at temperature 1"),
    "prompts": (96, "held-out prompts that designs are measured on"),
    "max_new_tokens": (128, "tokens of an answer"),
    "speed_prompts": (6, "held-out prompts that speed is measured on"),
    "rounds": (3, "measurements of each speed, the median counts; 0 = no speed"),
}
QUICK = {"seeds": 1, "train_prompts": 160, "prompts": 16, "max_new_tokens": 32, "speed_prompts": 2, "rounds": 1}
"""What ``--quick`` does less of."""


def parser(quick: bool) -> argparse.ArgumentParser:
    """The parser; ``quick`` lowers its defaults."""
    command = argparse.ArgumentParser(
        prog="python -m benchmarks.study",
        description="Trains head designs on the same data and compares what they draft; a stopped study goes on. "
        "--recipe.KEY VALUE changes the recipe of all of them.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
        allow_abbrev=False,
    )
    add = command.add_argument
    add("--out", type=Path, default=Path("runs/study-quick" if quick else "runs/study"), help="directory of the study")
    add("--recipe", type=Path, default=Path(RECIPE), metavar="FILE", help="recipe that all designs share")
    add("--base", metavar="NAME", help="directory or Hub id of the base; default: the recipe's")
    text = "train.jsonl and heldout.jsonl, made (as train/) where missing; default: OUT/data"
    add("--data", type=Path, metavar="DIR", help=text)
    text = "designs: name -> recipe keys, the baseline first"
    add("--variants", type=Path, default=DEFAULT, metavar="FILE", help=text)
    add("--only", nargs="+", default=(), metavar="NAME", help="only these designs, and the baseline")
    nodes = QUICK_NODES if quick else NODES
    add("--nodes", type=at_least(2), nargs="+", default=nodes, metavar="N", help="sizes of dynamic trees")
    add("--processes", type=at_least(1), default=2, help="runs at a time; they share the cores")
    add("--quick", action="store_true", help="try everything in minutes; its figures mean nothing")
    for name, (size, text) in SIZES.items():
        default = QUICK[name] if quick else size
        add(f"--{name.replace('_', '-')}", type=at_least(0 if name == "rounds" else 1), default=default, help=text)
    return command
