"""`medusa study`: trains variants of a recipe, and compares their evaluations.

All share base, data, order of rows and steps; a variant is a line of a YAML file with the keys in which it differs.
The same command continues a study that was stopped; the trainer continues unfinished runs.
"""

import argparse
import hashlib
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import mean
from typing import Any

from medusa.benchmarks.report import Table, environment, machine, publish
from medusa.data.arguments import Defaults, at_least
from medusa.data.yaml_file import read_yaml
from medusa.formats import load_provenance
from medusa.io.inspect import inspect_heads
from medusa.train.__main__ import main as train
from medusa.train.config import REMEMBERING
from medusa.train.recipe_file import RecipeError, parse_overrides, read_recipe
from medusa.train.run_directory import RunDirectory

RECIPE = Path(__file__).parents[1] / "train/recipes/embedded.yaml"
"""That of the demo, which has made the data."""
DECISIVE = ("base.", "data.", "heads.num_heads", "heads.feature_layers", "heads.last_layer")
"""Keys that affect the base's hidden states that a run reads, as its memory does (``REMEMBERING``)."""
COLUMNS = [
    ("heads", "{variant}"), ("parameters", "{parameters:,}"), ("tokens per step", "{tokens_per_step:.2f}"),
    ("of each seed", "{seeds}"), ("top-1 of each head", "{top1}"), ("seconds", "{seconds:.0f}"),
]  # fmt: skip


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line.

    Returns:
        Exit status: 0 done, 2 wrong use, otherwise that of the training run that failed.
    """
    words = list(sys.argv[1:] if arguments is None else arguments)
    options, rest = _parser().parse_known_args(words)
    try:
        variants = _variants(options.variants, options.only)
        runs = _plan(options, parse_overrides(rest), variants)
    except RecipeError as error:
        print(error, file=sys.stderr)
        return 2
    for name, seeds in runs.items():
        for overrides in seeds:
            flags = [word for key, value in overrides.items() for word in (f"--recipe.{key}", value)]
            print(f"{name}, seed {overrides['optim.seed']}: {overrides['run']}", flush=True)
            if status := train(["--recipe", str(options.recipe), *flags]):
                return status
    _publish(options, words, variants, {name: [Path(each["run"]) for each in seeds] for name, seeds in runs.items()})
    return 0


def _variants(path: Path, only: Sequence[str]) -> dict[str, dict[str, str]]:
    """The requested variants: name -> {dotted recipe key: value}."""
    try:
        content = read_yaml(path)
    except (OSError, ValueError) as error:
        raise RecipeError(f"variants ({path}) cannot be read: {error}; give a YAML file") from None
    if not isinstance(content, dict) or not content or not all(isinstance(keys, dict) for keys in content.values()):
        raise RecipeError(f"variants ({path}) must be lines of `name: {{recipe.key: value}}`; correct the file")
    if unknown := [name for name in only if name not in content]:
        raise RecipeError(f"variant ({unknown[0]}) is not in {path}; choose of: {', '.join(content)}")
    return {
        str(name): {str(key): "" if value is None else str(value) for key, value in content[name].items()}
        for name in only or content
    }


def _plan(
    options: argparse.Namespace, common: Mapping[str, str], variants: Mapping[str, Mapping[str, str]]
) -> dict[str, list[dict[str, str]]]:
    """The recipe keys of each run, by variant and seed, checked before the work starts."""
    runs: dict[str, list[dict[str, str]]] = {}
    for name, keys in variants.items():
        chosen = {"cache.mode": "hybrid", **common, **keys}
        states = repr(sorted((key, value) for key, value in chosen.items() if key.startswith(DECISIVE)))
        try:
            states += str(read_recipe(options.recipe, chosen).heads.architecture in REMEMBERING)
            kept = {"cache.directory": str(options.out / f"hidden-{hashlib.sha256(states.encode()).hexdigest()[:8]}")}
            runs[name] = [
                {**kept, **chosen, "optim.seed": str(seed), "run": str(options.out / name / f"seed-{seed}")}
                for seed in range(options.seeds)
            ]
            for overrides in runs[name]:
                recipe = read_recipe(options.recipe, overrides)
                if not recipe.data.heldout or not recipe.evaluate.prompts:
                    raise RecipeError("data.heldout and evaluate.prompts are what variants are compared on; set both")
                if recipe.base.shard:
                    raise RecipeError("base.shard leaves tokens per step unmeasured; set it to false")
        except RecipeError as error:
            raise RecipeError(f"variant ({name}): {error}") from None
    return runs


def _publish(
    options: argparse.Namespace, words: Sequence[str], variants: Mapping[str, Any], runs: Mapping[str, list[Path]]
) -> None:
    import torch

    rows = []
    for name, directories in runs.items():
        found = [(load_provenance(RunDirectory(run).heads) or {})["figures"] for run in directories]
        steps = [figures["heldout_tokens_per_step"] for figures in found]
        top1 = [mean(head) for head in zip(*(figures["heldout_top1"] for figures in found), strict=True)]
        rows.append({
            "variant": name,
            "parameters": inspect_heads(RunDirectory(directories[0]).heads)["parameters"],
            "tokens_per_step": mean(steps),
            "seeds": ", ".join(f"{value:.2f}" for value in steps),
            "top1": ", ".join(f"{value:.2f}" for value in top1),
            "seconds": mean(figures["train_seconds"] for figures in found),
            "figures": found,
        })  # fmt: skip
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    report = environment("medusa study", words, device) | {"variants": variants, "rows": rows}
    options.json, options.markdown = options.out / "report.json", options.out / "report.md"
    publish(options, report, [Table.of(f"study: {options.recipe}, {machine(report)}", COLUMNS, rows)])


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="medusa study", description=f"{__doc__}\n--recipe.KEY VALUE changes the recipe of all.",
        formatter_class=Defaults, allow_abbrev=False,
    )  # fmt: skip
    add = parser.add_argument
    add("--out", type=Path, default=Path("runs/study"), metavar="DIR", help="gets the runs, report.json and report.md")
    add("--recipe", type=Path, default=RECIPE, metavar="FILE", help="recipe that all variants start from")
    text = "variants: name -> recipe keys"
    add("--variants", type=Path, default=Path(__file__).with_name("variants.yaml"), metavar="FILE", help=text)
    add("--only", nargs="+", default=(), metavar="NAME", help="these variants alone")
    add("--seeds", type=at_least(1), default=1, help="training runs of each variant")
    return parser


if __name__ == "__main__":
    sys.exit(main())
