"""Heads that go on from the weights of others (`heads.init_from`)."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from transformers import LlamaConfig

from medusa import HeadsConfig, build_heads
from medusa.formats import load_heads
from medusa.heads.layer import LayerConfig
from medusa.train.fresh_heads import start_from
from medusa.train.recipe_file import RecipeError
from tests.train.jobs import run

pytestmark = pytest.mark.usefixtures("no_pictures")

RECURRENT = {"heads.architecture": "recurrent", "heads.feature_layers": 1, "data.heldout": "", "optim.steps": 2}


@pytest.fixture(scope="module")
def trained(recipe: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("trained") / "run"
    assert run(recipe, directory, **RECURRENT, **{"heads.draft_vocab": 12}) == 0
    return directory / "heads"


def test_weights_are_theirs_and_the_draft_vocabulary_is_chosen_anew(
    recipe: Path, trained: Path, tmp_path: Path
) -> None:
    values = RECURRENT | {"heads.draft_vocab": 9, "heads.num_heads": 5, "optim.lr": 0.0}
    assert run(recipe, tmp_path / "run", **values, **{"heads.init_from": trained}) == 0
    theirs, heads = load_heads(trained), load_heads(tmp_path / "run" / "heads")
    assert len(heads.draft_ids) == 9
    assert heads.config.num_heads == 5, "all depths of recurrent heads share their weights"
    for (name, ours), other in zip(heads.named_parameters(), theirs.parameters(), strict=True):
        assert torch.equal(ours, other), name


def test_weights_that_are_not_finite_are_refused(trained: Path) -> None:
    heads, odd = load_heads(trained), load_heads(trained)
    start_from(heads, odd, "odd")
    next(odd.parameters()).data.fill_(float("nan"))
    with pytest.raises(ValueError, match="with numbers that are not finite; train them again"):
        start_from(heads, odd, "odd")


def test_a_share_of_their_weights_stays(recipe: Path, trained: Path, tmp_path: Path) -> None:
    values = RECURRENT | {"heads.draft_vocab": 12, "heads.init_from": trained}
    for name, share in (("none", 0.0), ("some", 0.25)):
        assert run(recipe, tmp_path / name, **values, **{"heads.init_share": share}) == 0
    first, new, mixed = (
        dict(load_heads(path).named_parameters())
        for path in (trained, tmp_path / "none/heads", tmp_path / "some/heads")
    )
    assert any(not torch.equal(first[name], new[name]) for name in first)
    for name, weight in mixed.items():
        torch.testing.assert_close(weight, 0.25 * first[name] + 0.75 * new[name], msg=name)


def test_a_draft_vocabulary_may_be_left_out(recipe: Path, trained: Path, tmp_path: Path) -> None:
    assert run(recipe, tmp_path / "run", **RECURRENT, **{"heads.init_from": trained, "optim.lr": 0.0}) == 0
    assert load_heads(tmp_path / "run" / "heads").draft_ids is None


def test_heads_that_own_a_matrix_keep_their_vocabulary(recipe: Path, tmp_path: Path) -> None:
    values = {"heads.own_lm_heads": True, "heads.draft_vocab": 12, "data.heldout": "", "optim.steps": 1}
    assert run(recipe, tmp_path / "first", **values) == 0
    theirs = load_heads(tmp_path / "first/heads")
    other_data = {"data.limit": 2, "optim.lr": 0.0, "heads.init_from": tmp_path / "first/heads"}
    assert run(recipe, tmp_path / "second", **values, **other_data) == 0
    heads = load_heads(tmp_path / "second/heads")
    assert torch.equal(heads.draft_ids, theirs.draft_ids)
    assert torch.equal(heads.lm_heads, theirs.lm_heads)


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        (
            {"heads.architecture": "hydra", "heads.feature_layers": 0},
            "has architecture recurrent, and the recipe hydra",
        ),
        ({"heads.feature_layers": 0}, "has feature_layers"),
        ({"heads.num_layers": 2}, "has num_layers 1, and the recipe 2"),
        ({"heads.init_from": "nowhere"}, "nowhere"),
    ],
)
def test_heads_of_another_shape_are_refused(
    recipe: Path, trained: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture, changed: dict[str, object],
    message: str,
) -> None:  # fmt: skip
    assert run(recipe, tmp_path / "run", **(RECURRENT | {"heads.init_from": trained} | changed)) in (1, 2)
    assert message in caplog.text


def test_sizes_of_tensors_and_of_their_own_vocabulary_are_told(
    recipe: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    values = {"data.heldout": "", "optim.steps": 1, "heads.own_lm_heads": True}
    assert run(recipe, tmp_path / "first", **values) == 0
    values["heads.init_from"] = tmp_path / "first/heads"
    assert run(recipe, tmp_path / "second", **values, **{"heads.num_heads": 4}) == 2
    assert "has lm_heads of (3, 257, 32), and the recipe's heads of (4, 257, 32)" in caplog.text
    assert run(recipe, tmp_path / "second", **values, **{"heads.draft_vocab": 9}) == 2
    assert "has draft_vocab_size 0, and the recipe 9" in caplog.text


def test_blocks_begin_alike() -> None:
    layer = LayerConfig.of(LlamaConfig(hidden_size=32, num_attention_heads=4), norm_features=False, norm_heads=True)
    config = HeadsConfig(32, 50, 2, architecture="block", feature_layers=(1, 2, 3), layer=layer, rank=4)
    ours, theirs = build_heads(config), build_heads(replace(config, mask_token=3))
    with pytest.raises(RecipeError, match=r"\(theirs\) has mask_token 3, and the recipe None"):
        start_from(ours, theirs, "theirs")
