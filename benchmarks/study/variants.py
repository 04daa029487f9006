"""What a study trains: a recipe for every variant and seed, checked before any work is done."""

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import yaml

from train.config import Recipe
from train.recipe_file import RecipeError, read_recipe

DEFAULT = Path(__file__).with_name("variants.yaml")


@dataclass(frozen=True)
class Run:
    """One training run of a study."""

    variant: str
    seed: int
    overrides: dict[str, str]
    """Dotted recipe key -> value, as on the trainer's command line."""
    recipe: Recipe

    @property
    def name(self) -> str:
        """What the progress bar and errors call it."""
        return f"{self.variant}, seed {self.seed}"

    @property
    def directory(self) -> Path:
        """Its run directory."""
        return Path(self.recipe.run)


def read_variants(path: Path, only: Sequence[str] = ()) -> dict[str, dict[str, str]]:
    """Read a file of variants: name -> {dotted recipe key: value}.

    Args:
        path: a YAML file; its first variant is the baseline.
        only: names to keep beside the baseline; empty = all.

    Raises:
        RecipeError: the file cannot be read, or does not hold variants, or not those that are asked for.
    """
    try:
        content = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise RecipeError(
            f"variants ({path}) cannot be read: {' '.join(str(error).split())}; give a YAML file"
        ) from None
    if not isinstance(content, dict) or not content or not all(isinstance(keys, dict) for keys in content.values()):
        raise RecipeError(f"variants ({path}) must be lines of `name: {{recipe.key: value}}`; correct the file")
    unknown = [name for name in only if name not in content]
    if unknown:
        raise RecipeError(f"variant ({unknown[0]}) is not in {path}; choose of: {', '.join(content)}")
    baseline = next(iter(content))
    return {
        str(name): {str(key): str(value) for key, value in keys.items()}
        for name, keys in content.items()
        if not only or name in only or name == baseline
    }


def plan_runs(
    recipe: Path, common: Mapping[str, str], variants: Mapping[str, Mapping[str, str]], seeds: int, out: Path
) -> list[Run]:
    """The runs of a study: every variant with every seed, all else equal.

    Hidden states of the base are kept once for all runs that read the same ones.

    Args:
        recipe: the recipe file that all share.
        common: overrides for all of them.
        variants: overrides by name.
        seeds: number of seeds, 0 .. seeds - 1.
        out: directory of the study.

    Raises:
        RecipeError: names the variant and what is wrong with its recipe.
    """
    runs = []
    for name, keys in variants.items():
        for seed in range(seeds):
            directory = out / "runs" / name / f"seed-{seed}"
            chosen = {"cache.mode": "hybrid", "data.heldout": "", **common, **keys}
            kept = {"cache.directory": str(out / f"hidden-{_digest_of_states(chosen)}")}
            overrides = {**kept, **chosen, "optim.seed": str(seed), "run": str(directory)}
            try:
                runs.append(Run(name, seed, overrides, read_recipe(recipe, overrides)))
                _check_design(runs[-1].recipe, runs[0].recipe)
            except RecipeError as error:
                raise RecipeError(f"variant ({name}): {error}") from None
    return runs


def _digest_of_states(overrides: Mapping[str, str]) -> str:
    """Names the hidden states that a run reads, as far as overrides decide."""
    decisive = ("base.", "data.", "heads.num_heads", "heads.feature_layers")
    values = sorted((key, value) for key, value in overrides.items() if key.startswith(decisive))
    return hashlib.sha256(repr(values).encode()).hexdigest()[:8]


def _check_design(recipe: Recipe, first: Recipe) -> None:
    """Refuse heads that cannot be built, and those of another base than the one that wrote the texts."""
    from medusa.heads import ARCHITECTURES

    if recipe.heads.architecture not in ARCHITECTURES:
        raise RecipeError(
            f"heads.architecture ({recipe.heads.architecture}) is not known; choose of: {', '.join(ARCHITECTURES)}"
        )
    if recipe.base != first.base:
        raise RecipeError("base is not that of the first variant, whose texts all are measured on; give it to all")
    if recipe.lora.rank:
        raise RecipeError(f"lora.rank ({recipe.lora.rank}) changes the base, which wrote the texts; set it to 0")
