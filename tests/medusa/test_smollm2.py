"""SmolLM2 by name: from the Hub, else from a package; whole or not at all; and it says what it is."""

import logging
from pathlib import Path

import pytest

from data import load_tokenizer
from medusa import BaseModel, MedusaModel
from medusa.base import smollm2


@pytest.fixture
def no_hub(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(smollm2, "_from_hub", lambda cached: None)
    return tmp_path / "medusa" / "bases" / "smollm2-q4_1"


@pytest.fixture
def expanded(monkeypatch, no_hub, base_directory):
    """A small model in the place of the real one."""
    monkeypatch.setattr(smollm2, "_download", lambda directory: directory)
    monkeypatch.setattr(smollm2, "_convert", lambda gguf, directory: _copy(base_directory, directory))
    return no_hub


def _copy(source: Path, target: Path) -> None:
    target.mkdir()
    for file in source.iterdir():
        (target / file.name).write_bytes(file.read_bytes())


def test_the_short_name_is_the_name_on_the_hub(expanded, caplog):
    with caplog.at_level(logging.INFO, "medusa"):
        base = BaseModel.load("smollm2", device="cpu")
    assert base.name == smollm2.HUB_ID
    assert base.source == smollm2.EXPANDED and smollm2.EXPANDED in caplog.text
    assert load_tokenizer("smollm2").vocab_size == base.tokenizer.vocab_size


def test_heads_that_name_it_find_it_and_remember_which_weights_it_had(expanded, make_heads, tmp_path):
    base = BaseModel.load("smollm2", device="cpu")
    heads = make_heads(base=base.name, base_source=base.source)
    MedusaModel(base, heads).save_pretrained(tmp_path / "heads")
    loaded = MedusaModel.from_pretrained(tmp_path / "heads")
    assert loaded.base.name == smollm2.HUB_ID
    assert loaded.heads.config.base_source == smollm2.EXPANDED


def test_heads_of_other_weights_of_the_same_base_say_so(expanded, make_heads, tmp_path, caplog):
    base = BaseModel.load("smollm2", device="cpu")
    MedusaModel(base, make_heads(base=base.name, base_source=smollm2.ORIGINAL)).save_pretrained(tmp_path / "heads")
    with caplog.at_level(logging.WARNING, "medusa"):
        MedusaModel.from_pretrained(tmp_path / "heads")
    assert "trained on original weights" in caplog.text and "may be right less often" in caplog.text


def test_it_is_made_once(expanded, monkeypatch):
    assert smollm2.locate("smollm2") == smollm2.locate(smollm2.HUB_ID) == str(expanded)
    monkeypatch.setattr(smollm2, "_expand", lambda directory: pytest.fail("made again"))
    assert smollm2.locate("smollm2") == str(expanded)


def test_an_interrupted_expansion_leaves_nothing_behind(no_hub, monkeypatch):
    monkeypatch.setattr(smollm2, "_download", lambda directory: directory)

    def stop(gguf, directory):
        directory.mkdir()
        (directory / "config.json").write_text("{")
        raise KeyboardInterrupt

    monkeypatch.setattr(smollm2, "_convert", stop)
    with pytest.raises(KeyboardInterrupt):
        smollm2.locate("smollm2")
    assert [path.name for path in no_hub.parent.iterdir()] == [f"{no_hub.name}.lock"]


def test_without_hub_and_package_index_one_error_says_what_to_do(no_hub, monkeypatch):
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    with pytest.raises(OSError, match=r"base \(smollm2\) is not on this machine.*connect once, or name another base"):
        smollm2.locate("smollm2")


def test_another_file_than_the_known_one_is_refused(no_hub, monkeypatch, tmp_path):
    import zipfile

    def download(command, **_):
        with zipfile.ZipFile(Path(command[command.index("--dest") + 1]) / "it.whl", "w") as archive:
            archive.writestr(smollm2.GGUF, "something else")
        return type("Done", (), {"returncode": 0, "stderr": ""})

    monkeypatch.setattr(smollm2.subprocess, "run", download)
    with pytest.raises(OSError, match="is not the file that is known"):
        smollm2.locate("smollm2")
    assert not no_hub.exists()


def test_other_names_are_left_alone():
    assert smollm2.locate("some/base") == "some/base" == smollm2.full_name("some/base")


def test_what_a_killed_expansion_left_is_removed(expanded):
    left = expanded.parent / f"{expanded.name}-killed"
    left.mkdir(parents=True)
    smollm2.locate("smollm2")
    assert not left.exists() and expanded.is_dir()


@pytest.mark.slow
def test_the_real_model_answers(tmp_path, monkeypatch):
    """Made anew from the package, where a package index can be reached."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(smollm2, "_from_hub", lambda cached: None)
    try:
        model = MedusaModel.from_pretrained(None, base="smollm2", device="cpu")
    except OSError as error:
        pytest.skip(str(error))
    assert model.base.decoding == "tree"
    prompt = model.chat_prompt([{"role": "user", "content": "What is the capital of France?"}])
    assert "Paris" in model.generate(prompt, max_new_tokens=20).text
