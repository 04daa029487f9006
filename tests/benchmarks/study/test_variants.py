"""Variants become recipes, or one clear message."""

from pathlib import Path

import pytest

from benchmarks.study.variants import DEFAULT, plan_runs, read_variants
from train.recipe_file import RecipeError

RECIPE = Path(__file__).parents[3] / "train/recipes/embedded.yaml"


def _write(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "variants.yaml"
    path.write_text(text, encoding="utf-8")
    return path


def test_all_designs_of_the_study_are_recipes(tmp_path: Path) -> None:
    runs = plan_runs(RECIPE, {"data.train": "x.jsonl"}, read_variants(DEFAULT), 2, tmp_path)
    assert runs[0].recipe.heads.architecture == "medusa"
    assert runs[0].recipe.optim.loss == "ce"
    assert len({run.directory for run in runs}) == len(runs) == 2 * len(read_variants(DEFAULT))
    assert [run.recipe.optim.seed for run in runs[:2]] == [0, 1]
    assert len({(run.recipe.optim.lr, run.recipe.optim.epochs, run.recipe.data.train) for run in runs}) == 1


def test_runs_that_read_the_same_layers_share_hidden_states(tmp_path: Path) -> None:
    variants = {"a": {}, "b": {"optim.loss": "kl"}, "c": {"heads.feature_layers": "2"}}
    variants |= {"d": {"heads.num_heads": "6"}, "e": {"data.row_tokens": "128"}}
    a, b, c, d, e = (run.recipe.cache for run in plan_runs(RECIPE, {}, variants, 1, tmp_path))
    assert a.mode == b.mode == "hybrid"
    assert a.directory == b.directory
    assert len({cache.directory for cache in (a, c, d, e)}) == 4
    (online,) = plan_runs(RECIPE, {"cache.mode": "online"}, {"a": {}}, 1, tmp_path)
    assert online.recipe.cache.mode == "online"


def test_only_some_designs_and_the_baseline(tmp_path: Path) -> None:
    path = _write(tmp_path, "a: {}\nb: {optim.loss: kl}\nc: {optim.lr: 1e-3}\n")
    assert read_variants(path, ["c"]) == {"a": {}, "c": {"optim.lr": "1e-3"}}


@pytest.mark.parametrize(
    ("text", "only", "message"),
    [
        ("a: {}", ["b"], "variant (b) is not in"),
        ("a: [1", [], "cannot be read"),
        ("- a", [], "must be lines of"),
        ("", [], "must be lines of"),
        ("a: {optim.loss: none}", [], "variant (a): optim.loss ('none') is not a choice"),
        ("a: {heads.depth: 2}", [], "variant (a): unknown key heads.depth"),
        ("a: {heads.architecture: oracle}", [], "variant (a): heads.architecture (oracle) is not known"),
        ("a: {}\nb: {base.name: other}", [], "variant (b): base is not that of the first variant"),
        (
            "a: {lora.rank: 4, cache.mode: online, optim.mix_steps: 1}",
            [],
            "lora.rank (4) changes the base",
        ),
    ],
)
def test_mistakes_are_named(tmp_path: Path, text: str, only: list[str], message: str) -> None:
    with pytest.raises(RecipeError) as error:
        plan_runs(RECIPE, {"data.train": "x"}, read_variants(_write(tmp_path, text), only), 1, tmp_path)
    assert message in str(error.value)


def test_a_file_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(RecipeError, match=r"nowhere\.yaml.*cannot be read"):
        read_variants(tmp_path / "nowhere.yaml")
