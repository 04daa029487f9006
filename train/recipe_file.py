"""Reads a recipe: YAML file + command-line overrides -> `Recipe`; all errors are reported at once."""

import ast
import difflib
import inspect
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import Field, asdict, fields, is_dataclass
from functools import cache
from pathlib import Path
from typing import Any

import yaml

from medusa.data.files import common_files
from medusa.data.hub import is_saved
from medusa.data.yaml_file import read_yaml
from medusa.train.config import REMEMBERING, DataRecipe, HeadsRecipe, Recipe

LIMITED = {
    "last_layer": REMEMBERING, "window": REMEMBERING, "norm_features": REMEMBERING,
    "norm_output": ("attention",), "mask_token": ("block",),
}  # fmt: skip
"""Keys of ``heads`` that only some architectures have."""


class RecipeError(ValueError):
    """A recipe that cannot be run; the text lists all errors."""


Check = Callable[[Recipe], Iterable[str]]
"""Returns further mistakes of a recipe, one sentence each."""


def read_recipe(path: str | Path, overrides: Mapping[str, str] | None = None, also: Check | None = None) -> Recipe:
    """Read a YAML recipe and apply overrides.

    Args:
        path: the YAML file; keys that it leaves out keep their defaults.
        overrides: dotted key -> value as typed on the command line, e.g. {"optim.lr": "1e-3"}.
        also: finds further mistakes, which are reported with the others.

    Raises:
        RecipeError: the file cannot be read, or keys or values are wrong (all of them are named).
    """
    try:
        content = read_yaml(Path(path))
    except OSError as error:
        raise RecipeError(f"recipe ({path}) cannot be read: {error.strerror}; give an existing YAML file") from None
    except ValueError as error:
        raise RecipeError(f"recipe ({path}) is not YAML in UTF-8: {error}; correct the file") from None
    if not isinstance(content or {}, dict):
        raise RecipeError(f"recipe ({path}) holds a {type(content).__name__}; write `key: value` lines")
    sections = {entry.name for entry in fields(Recipe) if is_dataclass(entry.type)}
    values = {key: value for key, value in flatten(content or {}) if value is not None or key not in sections}
    texts = {key for key, entry in leaves(Recipe) if entry.type is str}
    for key, text in (overrides or {}).items():
        values[key] = text if key in texts else _scalar(text)
    return build_recipe(values, also)


def build_recipe(values: Mapping[str, Any], also: Check | None = None) -> Recipe:
    """Build a checked recipe from dotted keys, e.g. {"optim.lr": 1e-3}; ``also`` as for `read_recipe`.

    Raises:
        RecipeError: unknown keys or bad values; the text lists all of them.
    """
    known = dict(leaves(Recipe))
    errors: list[str] = []
    checked: dict[str, Any] = {}
    for key, value in values.items():
        if key not in known:
            errors.append(f"unknown key {key} ({value!r}){_nearest(key, known)}")
            continue
        try:
            checked[key] = _checked(key, value, known[key])
        except ValueError as error:
            errors.append(str(error))
    recipe = _assemble(checked)
    if not recipe.data.train and not any(error.startswith(("data.train", "unknown key data")) for error in errors):
        errors.append("data.train ('') names nothing; give a .jsonl file of training samples, or a Hub data set")
    errors += [*_conflicts(recipe), *_held_out_twice(recipe.data), *(also(recipe) if also else ())]
    if errors:
        raise RecipeError("\n".join(errors))
    return recipe


def _conflicts(recipe: Recipe) -> list[str]:
    """Errors of values that are valid separately, but not together."""
    joint, shard, cache = recipe.lora.rank > 0, recipe.base.shard, recipe.cache.mode
    mix, stage, heads = recipe.optim.mix_steps, recipe.engine.zero_stage, recipe.heads.architecture
    rules = [
        (joint and cache != "online",
         f"cache.mode ({cache}) keeps hidden states that adapters change; set it to online, or lora.rank to 0"),
        (joint and mix != 1,
         f"optim.mix_steps ({mix}) needs a base that stays the same; set it to 1, or lora.rank to 0"),
        (not joint and not mix and cache == "online",
         "optim.mix_steps (0) mixes all states, which cache.mode (online) does not keep; set cache.mode to offline"),
        (heads == "attention" and recipe.heads.num_layers > 1,
         f"heads.num_layers ({recipe.heads.num_layers}) is not for attention heads, which are one layer; set it to 1"),
        *((heads not in kinds and getattr(recipe.heads, key) != getattr(HeadsRecipe, key),
           f"heads.{key} is for {' and '.join(kinds)} heads, and heads.architecture is {heads}; leave it out")
          for key, kinds in LIMITED.items()),
        (heads in REMEMBERING and not mix,
         f"optim.mix_steps (0) lets {heads} heads read all documents in every step; set it to 4 or so"),
        (joint and stage == 3, "engine.zero_stage (3) cannot split adapters; set it to 0, 1 or 2, or lora.rank to 0"),
        (joint and shard, "base.shard holds a frozen base; set it to false, or lora.rank to 0"),
        (shard and cache != "online",
         f"cache.mode ({cache}) skips passes that processes share; set it to online, or base.shard to false"),
        (shard and recipe.base.quantise != "none",
         "base.shard cannot split a quantised base; set base.shard to false, or base.quantise to none"),
        (recipe.engine.offload and stage == 0,
         "engine.offload needs a partitioned optimizer; set engine.zero_stage to 1, 2 or 3"),
        (recipe.data.streaming and not recipe.data.limit,
         "data.streaming needs data.limit, the number of samples to read; set it"),
        (not recipe.run, "run ('') names nothing; give a directory for the files of the run"),
    ]  # fmt: skip
    return [text for broken, text in rules if broken]


def _held_out_twice(data: DataRecipe) -> list[str]:
    """An error if held-out files are training files too, under any name, as far as they exist."""
    train, heldout = Path(data.train), Path(data.heldout)
    if not data.train or not data.heldout:
        return []
    if train.exists() and heldout.exists() and not is_saved(train) and not is_saved(heldout):
        common = [f"{our}" if our == their else f"{our} is {their}" for our, their in common_files(train, heldout)]
    else:
        common = [data.train] if (train, data.train_split) == (heldout, data.heldout_split) else []
    if not common:
        return []
    what = f"data.train ({data.train}) holds {len(common)} of the held-out files ({'; '.join(common[:3])})"
    remedy = "move the held-out files elsewhere, or give another data.heldout"
    return [f"{what}, and heads would be measured on their own training data; {remedy}"]


def leaves(section: type[Any], prefix: str = "") -> Iterator[tuple[str, Field[Any]]]:
    """All values of a recipe class in order: (dotted key, dataclass field)."""
    for entry in fields(section):
        if is_dataclass(entry.type) and isinstance(entry.type, type):
            yield from leaves(entry.type, f"{prefix}{entry.name}.")
        else:
            yield f"{prefix}{entry.name}", entry


def differences(recipe: Recipe, stored: Mapping[str, Any]) -> list[str]:
    """Differences because of which a run that was started with `stored` cannot be resumed, one sentence each.

    A key that is not in `stored` is newer than the run, which then used what is now the default.
    """
    now, before = dict(flatten(asdict(recipe))), dict(flatten(stored))
    return [
        f"{key} is {now[key]!r}, the run was started with {then!r}"
        for key, entry in leaves(Recipe)
        if not entry.metadata.get("resume", False) and now[key] != (then := before.get(key, entry.default))
    ]


@cache
def describe() -> str:
    """All recipe keys with defaults, limits and units: the text of `--help`."""
    documents = _documents()
    lines = []
    for key, entry in leaves(Recipe):
        default = "required" if key == "data.train" else repr(entry.default)
        lines.append(f"  {key} = {default}{_limits_text(entry)}\n      {documents[key]}")
    return "\n".join(lines)


def flatten(values: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Dotted keys and values of a nested mapping."""
    for key, value in values.items():
        if isinstance(value, dict):
            yield from flatten(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


def _scalar(text: str) -> Any:
    try:
        return yaml.safe_load(text)
    except yaml.YAMLError:
        return text


def _nearest(key: str, known: Mapping[str, Any]) -> str:
    same_leaf = [name for name in known if name.rpartition(".")[2] == key.rpartition(".")[2]]
    names = same_leaf[:1] or difflib.get_close_matches(key, known, n=1, cutoff=0.6)
    return f"; did you mean {names[0]}?" if names else "; `--help` lists the keys"


def _checked(key: str, value: Any, entry: Field[Any]) -> Any:
    kind: type[Any] = entry.type  # type: ignore[assignment]
    if kind is str and isinstance(value, bool) and "off" in entry.metadata.get("choices", ()):
        value = value or "off"  # YAML 1.1 reads a bare `off` as false
    if kind is str and value is None:
        value = ""  # `key:` without a value
    if kind is float and not isinstance(value, bool):
        with suppress(TypeError, ValueError):
            value = float(value)  # YAML 1.1 reads 1e-3 as a string
    if not isinstance(value, kind) or (kind is not bool and isinstance(value, bool)):
        raise ValueError(f"{key} ({value!r}) is not {_KINDS[kind]}; give {_KINDS[kind]}")
    choices = entry.metadata.get("choices")
    if choices and value not in choices:
        raise ValueError(f"{key} ({value!r}) is not a choice; take one of {', '.join(choices)}")
    low, high = entry.metadata.get("low"), entry.metadata.get("high")
    # Written so that nan fails both comparisons.
    if value == math.inf or (low is not None and not value >= low) or (high is not None and not value <= high):
        raise ValueError(f"{key} ({value!r}) is out of range; stay within{_limits_text(entry)}")
    return value


_KINDS = {str: "a text", int: "an integer", float: "a number", bool: "true or false"}


def _limits_text(entry: Field[Any]) -> str:
    choices, low, high = (entry.metadata.get(name) for name in ("choices", "low", "high"))
    if choices:
        return f" [{' | '.join(choices)}]"
    if low is None and high is None:
        return ""
    return f" [{low} .. {'' if high is None else high}]"


def _assemble(values: Mapping[str, Any]) -> Recipe:
    """A recipe from checked values by their dotted keys."""
    nested: dict[str, dict[str, Any]] = {"": {}}
    for key, value in values.items():
        section, _, name = key.rpartition(".")
        nested.setdefault(section, {})[name] = value
    kinds: dict[str, Any] = {entry.name: entry.type for entry in fields(Recipe)}
    whole = nested.pop("")
    return Recipe(**whole, **{section: kinds[section](**own) for section, own in nested.items()})


def _documents(section: type[Any] = Recipe, prefix: str = "") -> dict[str, str]:
    """Attribute docstrings by dotted key; Python keeps them in the source only."""
    (body,) = ast.parse(inspect.getsource(section)).body
    assert isinstance(body, ast.ClassDef)
    found: dict[str, str] = {}
    for statement, following in zip(body.body, body.body[1:], strict=False):
        if isinstance(statement, ast.AnnAssign) and isinstance(following, ast.Expr):
            found[f"{prefix}{ast.unparse(statement.target)}"] = str(ast.literal_eval(following.value))
    for entry in fields(section):
        if is_dataclass(entry.type) and isinstance(entry.type, type):
            found |= _documents(entry.type, f"{prefix}{entry.name}.")
    return found


def parse_overrides(arguments: Sequence[str]) -> dict[str, str]:
    """Turn `--recipe.optim.lr 1e-3` or `--recipe.optim.lr=1e-3` into {"optim.lr": "1e-3"}.

    Raises:
        RecipeError: an argument is not an override, or has no value.
    """
    found: dict[str, str] = {}
    rest = list(arguments)
    while rest:
        flag, joined, value = rest.pop(0).partition("=")
        if not flag.startswith("--recipe."):
            raise RecipeError(f"argument ({flag}) is unknown; overrides look like --recipe.optim.lr 1e-3")
        if not joined and not rest:
            raise RecipeError(f"argument ({flag}) has no value; write {flag} VALUE")
        found[flag.removeprefix("--recipe.")] = value if joined else rest.pop(0)
    return found
