import re
import shlex
from dataclasses import asdict, replace
from pathlib import Path

import pytest

from medusa.data.options import parser as data_parser
from medusa.train.config import Recipe
from medusa.train.recipe_file import (
    RecipeError,
    build_recipe,
    describe,
    differences,
    leaves,
    parse_overrides,
    read_recipe,
)

RECIPES = sorted((Path(__file__).parents[2] / "train" / "recipes").glob("*.yaml"))


def _write(path: Path, text: str) -> Path:
    path.write_text(text, encoding="utf-8")
    return path


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_every_shipped_recipe_is_valid(path: Path) -> None:
    assert read_recipe(path).data.train


@pytest.mark.parametrize("name", ["llama-3.1-8b", "mistral-7b", "qwen3-8b"])
def test_the_samples_of_a_recipe_are_made_by_the_command_in_its_comment(name: str) -> None:
    path = RECIPES[0].with_name(f"{name}.yaml")
    lines = path.read_text(encoding="utf-8").splitlines()
    comments = "\n".join(line.removeprefix("#") for line in lines if line.startswith("#")).replace("\\\n", "")
    (command,) = re.findall(r"^ *\./launch\.sh data (regenerate .*)", comments, re.MULTILINE)
    made, recipe = data_parser().parse_args(shlex.split(command, comments=True)), read_recipe(path)
    assert (made.base, made.out) == (recipe.base.name, recipe.data.train)


def test_the_handbook_names_keys_that_exist() -> None:
    text = (RECIPES[0].parents[2] / "docs" / "training.md").read_text(encoding="utf-8")
    keys = {key for key, _ in leaves(Recipe)}
    sections = "|".join({key.partition(".")[0] for key in keys if "." in key})
    named = re.findall(r"--recipe\.([\w.]+)", text) + re.findall(rf"`((?:{sections})\.[a-z_.]+)`", text)
    assert len(named) > 30
    assert set(named) - keys == {"heads.safetensors"}


def test_overrides_win_over_the_file_and_the_file_over_defaults(tmp_path: Path) -> None:
    path = _write(tmp_path / "r.yaml", "data: {train: a.jsonl}\noptim: {lr: 1e-2, micro_rows: 4}\nlog: {wandb: off}\n")
    recipe = read_recipe(path, parse_overrides(["--recipe.optim.lr", "1e-4", "--recipe.heads.own_lm_heads=true"]))
    assert recipe.optim.lr == 1e-4
    assert recipe.optim.micro_rows == 4
    assert recipe.heads.own_lm_heads is True
    assert recipe.log.wandb == "off"
    assert recipe.heads.num_heads == Recipe().heads.num_heads


def test_all_errors_are_shown_at_once(tmp_path: Path) -> None:
    path = _write(
        tmp_path / "r.yaml",
        "data: {trian: x}\noptim: {lr: fast, steps: -1, clip_norm: .nan, epochs: .inf, seed: 4294967296}\n"
        "engine: {precision: int8}\nhead: 1\nrun:\n",
    )
    with pytest.raises(RecipeError) as caught:
        read_recipe(path, {"heads.num_heads": "2.5", "engine.zero_stages": "1", "heads.lr": "1"})
    lines = str(caught.value).splitlines()
    expected = (
        ("data.trian", "did you mean data.train?"),
        ("optim.lr ('fast')", "a number"),
        ("optim.steps (-1)", "out of range"),
        ("optim.seed (4294967296)", "out of range"),
        ("run ('')", "give a directory"),
        ("optim.clip_norm (nan)", "out of range"),
        ("optim.epochs (inf)", "out of range"),
        ("engine.precision ('int8')", "auto, float32, bfloat16"),
        ("unknown key head (1)", ""),
        ("heads.num_heads (2.5)", "an integer"),
        ("engine.zero_stages", "did you mean engine.zero_stage?"),
        ("heads.lr", "did you mean optim.lr?"),
    )
    assert len(lines) == len(expected)
    for thing, remedy in expected:
        assert any(thing in line and remedy in line for line in lines), thing


def test_training_data_is_required() -> None:
    with pytest.raises(RecipeError, match=r"data\.train \(''\)"):
        build_recipe({})


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"a: [1", "is not YAML"),
        (b"- 1\n", "holds a list"),
        (b"a: \xff\n", "UTF-8"),
        (None, "No such file"),
        (b"optim: {lr: 1}\noptim: {steps: 1}\n", "optim is there twice"),
    ],
)
def test_an_unreadable_file_is_one_clear_error(tmp_path: Path, content: bytes | None, message: str) -> None:
    path = tmp_path / "r.yaml"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(RecipeError, match=message):
        read_recipe(path)


def test_empty_sections_and_texts_that_look_like_other_types(tmp_path: Path) -> None:
    path = _write(tmp_path / "r.yaml", "data: {train: x.jsonl}\noptim:\n")
    recipe = read_recipe(path, {"run": "2026-11-25", "log.wandb_project": "12", "cache.mode": "offline"})
    with pytest.raises(RecipeError, match=r"unknown key optm \(None\); did you mean"):
        read_recipe(_write(path, "data: {train: x.jsonl}\noptm:\n"))
    assert (recipe.run, recipe.log.wandb_project, recipe.cache.mode) == ("2026-11-25", "12", "offline")


def test_keys_of_other_heads_are_refused() -> None:
    with pytest.raises(RecipeError, match=r"heads\.window is for attention and block heads.* is medusa; leave it out"):
        build_recipe({"data.train": "x.jsonl", "heads.window": 9})


@pytest.mark.parametrize("arguments", [["--lr", "1"], ["--recipe.optim.lr"], ["extra"]])
def test_wrong_arguments(arguments: list[str]) -> None:
    with pytest.raises(RecipeError, match="argument"):
        parse_overrides(arguments)


def test_help_shows_every_key_with_its_docstring() -> None:
    text = describe()
    for key, _ in leaves(Recipe):
        assert f"  {key} = " in text
    assert "Tokens per packed row" in text
    assert "[auto | float32 | bfloat16]" in text


def test_differences_name_what_matters_only() -> None:
    recipe = build_recipe({"data.train": "x"})
    other = replace(recipe, run="elsewhere", optim=replace(recipe.optim, lr=0.5, micro_rows=1))
    assert differences(other, asdict(recipe)) == ["optim.lr is 0.5, the run was started with 0.001"]


def test_runs_from_before_a_key_had_its_default() -> None:
    recipe = Recipe()
    stored = asdict(recipe)
    del stored["heads"]["feature_layers"]
    assert differences(recipe, stored) == []
    changed = replace(recipe, heads=replace(recipe.heads, feature_layers=2))
    assert differences(changed, stored) == ["heads.feature_layers is 2, the run was started with 0"]
