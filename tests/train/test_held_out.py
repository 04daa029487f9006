"""Held-out samples: apart from what is trained on, and read by one process."""

import json
import logging
import shutil
from pathlib import Path

import pytest
import torch
from transformers import PreTrainedTokenizerFast

from medusa import BaseModel
from medusa.data.packing import pack
from medusa.data.sources import read_samples
from medusa.train.config import DataRecipe, EvaluateRecipe
from medusa.train.evaluate import held_out_prompts, held_out_rows
from medusa.train.held_out import read_held_out
from medusa.train.recipe_file import RecipeError, build_recipe
from tests.train.jobs import finish, launch, metrics, run, write_recipe


def _errors(**data: str) -> str:
    with pytest.raises(RecipeError) as caught:
        build_recipe({f"data.{key}": value for key, value in data.items()})
    return str(caught.value)


def test_a_directory_that_holds_the_held_out_file_is_refused(tmp_path: Path, samples: Path, heldout: Path) -> None:
    directory = tmp_path / "all"
    directory.mkdir()
    shutil.copy(samples, directory)
    build_recipe({"data.train": str(directory), "data.heldout": str(heldout)})
    inside = shutil.copy(heldout, directory)
    said = _errors(train=str(directory), heldout=str(inside))
    assert f"data.train ({directory}) holds 1 of the held-out files ({inside})" in said
    assert "move the held-out files elsewhere" in said
    copied = _errors(train=str(directory), heldout=str(heldout))
    assert f"({inside} is {heldout})" in copied
    link = tmp_path / "link.jsonl"
    link.symlink_to(samples)
    assert f"({samples} is {link})" in _errors(train=str(samples), heldout=str(link))


def test_a_split_of_the_hub_is_not_held_out_of_itself() -> None:
    build_recipe({"data.train": "user/chats", "data.heldout": "user/chats"})  # train and test
    said = _errors(train="user/chats", heldout="user/chats", heldout_split="train")
    assert "data.train (user/chats) holds 1 of the held-out files (user/chats)" in said


def _mixed(path: Path, heldout: Path, samples: Path, own: int) -> Path:
    """64 samples, of which `own` are held out nowhere and the rest are trained on, written otherwise."""
    lines = heldout.read_text().splitlines()[:own]
    lines += [json.dumps({"response": (r := json.loads(line))["response"], "prompt": r["prompt"]})
              for line in samples.read_text().splitlines()[: 64 - own]]  # fmt: skip
    path.write_text("\n".join(lines) + "\n")
    return path


def test_many_equal_samples_are_refused(base: Path, samples: Path, heldout: Path, tmp_path: Path, caplog) -> None:
    mixed = _mixed(tmp_path / "mixed.jsonl", heldout, samples, own=50)
    recipe = write_recipe(tmp_path / "recipe.yaml", base, samples, {"data": {"heldout": str(mixed)}})
    assert run(recipe, tmp_path / "run") == 2
    assert f"data.train ({samples}) holds 14 of the 64 samples of data.heldout ({mixed})" in caplog.text
    assert "remove them from one of the two" in caplog.text


def test_a_few_equal_samples_are_left_out_of_the_evaluation(
    base: Path, tokenizer: PreTrainedTokenizerFast, samples: Path, heldout: Path, tmp_path: Path, caplog
) -> None:
    model = BaseModel.load(base, device="cpu")
    mixed = _mixed(tmp_path / "mixed.jsonl", heldout, samples, own=60)
    training = pack(read_samples(samples, tokenizer), 96)
    data = DataRecipe(train=str(samples), heldout=str(mixed), row_tokens=96)
    with caplog.at_level(logging.WARNING):
        read = read_held_out(data, EvaluateRecipe(rows=0, prompts=99), model, training)
    assert "holds 4 of the 64 samples" in caplog.text
    assert len(read.prompts) == 60
    alone = pack(read_samples(heldout, tokenizer)[:60], 96)
    assert torch.equal(read.rows.input_ids, alone.input_ids)


def test_what_evaluations_read_is_what_it_was(base: Path, tokenizer, samples: Path, heldout: Path) -> None:
    model = BaseModel.load(base, device="cpu")
    found = read_samples(heldout, tokenizer)
    packed = pack(found, 96)
    data = DataRecipe(train=str(samples), heldout=str(heldout), row_tokens=96)
    options = EvaluateRecipe(rows=5, prompts=7, max_new_tokens=model.context_length - 9)
    read = read_held_out(data, options, model, pack(found[:1], 96).take(torch.arange(0)))
    rows = held_out_rows(len(packed), 5)
    for name in ("input_ids", "position_ids", "loss_mask", "lengths"):
        assert torch.equal(getattr(read.rows, name), getattr(packed, name)[rows])
    assert read.prompts == held_out_prompts(found, 7, 9)


NOTING = """
import os, sys
from pathlib import Path
from medusa.train import held_out
from medusa.train.__main__ import main
read, readers = held_out.read_samples, Path(sys.argv.pop(1))
def noted(*arguments):
    with readers.open("a") as file:
        file.write(os.environ["RANK"])
    return read(*arguments)
held_out.read_samples = noted
sys.exit(main())
"""


@pytest.mark.slow
def test_only_one_of_two_processes_reads_them(base: Path, samples: Path, heldout: Path, tmp_path: Path) -> None:
    sections = {"data": {"heldout": str(heldout)}, "optim": {"steps": 2}, "evaluate": {"max_new_tokens": 4}}
    recipe, readers = write_recipe(tmp_path / "recipe.yaml", base, samples, sections), tmp_path / "readers"
    (tmp_path / "noting.py").write_text(NOTING)
    flags = ["--recipe", str(recipe), "--recipe.run", str(tmp_path / "2")]
    finish(launch([str(tmp_path / "noting.py"), str(readers), *flags]))
    assert readers.read_text() == "0"
    assert run(recipe, tmp_path / "1") == 0
    ours, theirs = metrics(tmp_path / "2")[-1], metrics(tmp_path / "1")[-1]
    assert ours["heldout_samples"] == theirs["heldout_samples"]
    assert ours["heldout_top10"] == pytest.approx(theirs["heldout_top10"], abs=0.01)
