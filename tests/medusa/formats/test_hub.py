"""Heads on a stand-in of the Hub: pushed, pushed again, found by id, and every way in which that fails."""

import json
from pathlib import Path

import huggingface_hub.constants
import pytest
import torch

from medusa import MedusaModel
from medusa.base import smollm2
from medusa.formats import save_heads
from medusa.io.hub import CARD_MARK, fetch_heads, is_model, push
from tests.medusa.formats.hub_stand_in import TOKEN, USER, Repository, hub_stand_in
from tests.medusa.test_published import PROVENANCE, WORDS

REPO = f"{USER}/heads"


@pytest.fixture
def hub(tmp_path, monkeypatch):
    """The stand-in, with huggingface_hub set as HF_ENDPOINT, HF_HOME, HF_HUB_DISABLE_XET would set it at its import."""
    with hub_stand_in() as running:
        settings = {
            "ENDPOINT": running.url,
            "HUGGINGFACE_CO_URL_TEMPLATE": running.url + "/{repo_id}/resolve/{revision}/{filename}",
            "HF_URL_HOSTS": frozenset({"127.0.0.1"}),
            "HF_HUB_CACHE": str(tmp_path / "cache"),
            "HF_HUB_DISABLE_XET": True,
        }
        for name, value in settings.items():
            monkeypatch.setattr(huggingface_hub.constants, name, value)
        monkeypatch.setenv("HF_TOKEN", TOKEN)
        yield running


@pytest.fixture
def heads_directory(make_heads, tmp_path):
    directory = save_heads(make_heads(), tmp_path / "heads", {"note": "test"})
    (directory / "README.md").write_text(f"---\nlicense: mit\n---\n{CARD_MARK}\n# Heads\n")
    return directory


def on_disk(directory):
    return {
        path.relative_to(directory).as_posix(): path.read_bytes() for path in directory.rglob("*") if path.is_file()
    }


def test_pushed_heads_come_back_byte_for_byte(hub, heads_directory):
    (heads_directory / ".secret").write_text("stays here")
    assert push(heads_directory, REPO) == f"{hub.url}/{REPO}"
    sent = hub.files(REPO)
    expected = on_disk(heads_directory)
    del expected[".secret"]
    config = json.loads(expected["config.json"])
    config["base"] = f"./{Path(config['base']).name}"  # where the base lies on this disk is nobody's business
    del config["base_path"]
    expected["config.json"] = (json.dumps(config, indent=2) + "\n").encode()
    assert sent == expected | {".gitattributes": sent[".gitattributes"]}
    assert hub.repositories[REPO].messages == ["initial commit", "Draft heads"]
    assert not hub.repositories[REPO].private
    del expected["README.md"]  # nobody needs it to decode
    assert on_disk(fetch_heads(REPO)) == expected


def test_a_push_of_the_directory_of_training_says_nothing_private(hub, make_heads, tmp_path):
    source = save_heads(make_heads(), tmp_path / "heads", PROVENANCE)
    (source / "adapter").mkdir()
    (source / "adapter" / "adapter_config.json").write_text('{"base_model_name_or_path": "/home/ann/base"}')
    push(source, REPO)
    sent = hub.files(REPO)
    assert {"config.json", "provenance.json", "heads.safetensors", "adapter/adapter_config.json"} <= sent.keys()
    for name in (name for name in sent if name.endswith(".json")):
        assert not [word for word in (*WORDS, str(tmp_path)) if word in sent[name].decode()], name
    assert json.loads(sent["adapter/adapter_config.json"]) == {"base_model_name_or_path": "./base"}


def test_a_model_is_pushed_and_loaded_by_its_id(hub, model, base):
    page = model.push_to_hub(REPO, private=True, message="First")
    assert page == f"{hub.url}/{REPO}"
    assert hub.repositories[REPO].private
    assert hub.repositories[REPO].messages[-1] == "First"
    assert CARD_MARK in hub.files(REPO)["README.md"].decode()
    loaded = MedusaModel.from_pretrained(REPO, base=base.name, dtype=torch.float64, device="cpu")
    for name, tensor in model.heads.state_dict().items():
        assert torch.equal(loaded.heads.state_dict()[name], tensor)
    texts = [each.generate("def f(x):", nodes=8, max_new_tokens=16).text for each in (loaded, model)]
    assert texts[0] == texts[1]


def test_heads_keep_their_provenance_when_they_are_pushed_again(hub, model, base):
    model.push_to_hub(REPO, provenance={"note": "first"})
    loaded = MedusaModel.from_pretrained(REPO, base=base.name, device="cpu")
    loaded.push_to_hub(REPO, message="Again")
    assert json.loads(hub.files(REPO)["provenance.json"]) == {"note": "first"}
    loaded.push_to_hub(REPO, provenance={"note": "second"})
    assert json.loads(hub.files(REPO)["provenance.json"]) == {"note": "second"}


def test_a_push_is_one_commit_of_what_has_changed(hub, heads_directory, make_heads):
    push(heads_directory, REPO)
    before = dict(hub.repositories[REPO].commits), list(hub.uploaded)
    assert push(heads_directory, REPO) == f"{hub.url}/{REPO}"
    assert (hub.repositories[REPO].commits, hub.uploaded) == before, "nothing has"
    save_heads(make_heads(), heads_directory, {"note": "changed"})
    push(heads_directory, REPO, message="Again")
    assert len(hub.uploaded) == 1
    assert hub.repositories[REPO].messages == ["initial commit", "Draft heads", "Again"]
    assert json.loads(hub.files(REPO)["provenance.json"]) == {"note": "changed"}


def test_files_of_replaced_heads_go_and_other_files_stay(hub, heads_directory, make_heads, tmp_path):
    (heads_directory / "calibration.json").write_text("{}")
    (heads_directory / "medusa_lm_head.safetensors").write_bytes(b"of another format")
    (heads_directory / "picture.png").write_bytes(b"not ours")
    push(heads_directory, REPO)
    push(save_heads(make_heads(2), tmp_path / "others"), REPO)
    assert set(hub.files(REPO)) == {".gitattributes", "README.md", "config.json", "heads.safetensors", "picture.png"}


def test_files_that_no_push_has_left_stay(hub, heads_directory):
    push(heads_directory, REPO)
    repository = hub.repositories[REPO]
    theirs = {"model.safetensors": b"a model of another library", "model_index.json": b"{}"}
    repository.commit("main", theirs, "something else")
    push(heads_directory, REPO)
    assert theirs.items() <= hub.files(REPO).items()


def test_a_card_written_by_hand_stays(hub, heads_directory):
    card = heads_directory / "README.md"
    push(heads_directory, REPO)
    card.write_text(card.read_text().replace("# Heads", "# Newer"))
    push(heads_directory, REPO)
    assert "# Newer" in hub.files(REPO)["README.md"].decode()
    by_hand = b"---\nlicense: mit\n---\n# By hand\n"
    repository = hub.repositories[REPO]
    repository.commit("main", repository.commits[repository.branches["main"]] | {"README.md": by_hand}, "by hand")
    push(heads_directory, REPO)
    assert hub.files(REPO)["README.md"] == by_hand


def test_revisions_are_branches_of_their_own(hub, heads_directory, make_heads):
    push(heads_directory, REPO)
    save_heads(make_heads(2), heads_directory)
    for _ in range(2):
        assert push(heads_directory, REPO, revision="two heads") == f"{hub.url}/{REPO}/tree/two heads"
    assert json.loads((fetch_heads(REPO) / "config.json").read_text())["num_heads"] == 3
    assert json.loads((fetch_heads(REPO, "two heads") / "config.json").read_text())["num_heads"] == 2
    with pytest.raises(OSError, match="no such revision; name a branch"):
        fetch_heads(REPO, "three")


def test_private_heads_are_never_pushed_where_everyone_sees_them(hub, heads_directory):
    push(heads_directory, REPO)
    commits = len(hub.repositories[REPO].commits)
    with pytest.raises(ValueError, match="exists and is public"):
        push(heads_directory, REPO, private=True)
    assert len(hub.repositories[REPO].commits) == commits


def test_a_directory_is_taken_as_it_is(heads_directory, tmp_path, monkeypatch):
    (tmp_path / "empty").mkdir()
    monkeypatch.chdir(tmp_path / "empty")  # the clone may hold runs of its own
    assert fetch_heads(heads_directory) == heads_directory
    assert fetch_heads(str(heads_directory)) == heads_directory
    elsewhere = "./user/heads", "runs/demo/heads", "heads", "user/../heads"
    for nothing in (tmp_path / "nothing", Path("user/heads"), *elsewhere):
        with pytest.raises(FileNotFoundError, match=r"does not exist.*; train heads first .* or a Hub id"):
            fetch_heads(nothing)


def test_files_of_heads_are_downloaded_and_kept_for_a_time_without_the_hub(hub, heads_directory):
    (heads_directory / "pytorch_model-00001-of-00002.bin").write_bytes(b"a part of a base")
    push(heads_directory, REPO)
    fetched = on_disk(fetch_heads(REPO))
    assert not [name for name in fetched if name.endswith(".bin")]
    hub.broken = 503
    assert on_disk(fetch_heads(REPO)) == fetched


def refused(call):
    """The message of what is refused, which is one sentence, without token and address."""
    with pytest.raises(OSError) as refusal:  # noqa: PT011
        call()
    message = str(refusal.value)
    assert len(message.splitlines()) == 1
    assert TOKEN not in message
    assert "127.0.0.1" not in message
    return message


def test_a_whole_model_is_told_from_heads_and_used_without_the_hub(hub, heads_directory, tokenizer, tmp_path):
    push(heads_directory, REPO)
    hub.repositories["tester/llama"] = Repository(private=False)
    tokenizer.save_pretrained(tmp_path / "llama")
    files = {"config.json": b'{"model_type": "llama"}'} | on_disk(tmp_path / "llama")
    hub.repositories["tester/llama"].commit("main", files, "a model")
    assert is_model("tester/llama")
    assert not is_model(REPO)
    assert smollm2.locate("tester/llama") == "tester/llama"
    huggingface_hub.snapshot_download("tester/llama")
    hub.broken = 503
    assert on_disk(Path(smollm2.locate("tester/llama"))) == files
    assert is_model("tester/llama")


def test_what_the_hub_does_not_have(hub):
    message = refused(lambda: fetch_heads("tester/nothing"))
    assert message.startswith("heads (tester/nothing) is not on this machine, and the Hugging Face Hub does not")


@pytest.mark.parametrize(
    ("token", "said"), [(None, "the repository does not exist, or is private"), ("hf_wrong", "status 401")]
)
def test_private_heads_without_a_login(hub, heads_directory, monkeypatch, token, said):
    push(heads_directory, REPO, private=True)
    monkeypatch.delenv("HF_TOKEN")
    monkeypatch.setattr(huggingface_hub.constants, "HF_TOKEN_PATH", "/nowhere")
    if token:
        monkeypatch.setenv("HF_TOKEN", token)
    message = refused(lambda: fetch_heads(REPO))
    assert said in message
    assert "log in with `hf auth login`, or set HF_TOKEN" in message
    assert "hf_wrong" not in message


def test_pushing_without_the_right_to(hub, heads_directory, monkeypatch):
    message = refused(lambda: push(heads_directory, "somebody/heads"))
    assert message.startswith("heads cannot be pushed to the Hub (somebody/heads): this login has no permission")
    assert "rights to create a model under the namespace somebody" in message
    monkeypatch.setenv("HF_TOKEN", "hf_wrong")
    assert "status 401" in refused(lambda: push(heads_directory, REPO))
    with pytest.raises(ValueError, match="must be named with its owner; give user/heads"):
        push(heads_directory, "heads")
    assert not hub.repositories


def test_a_repository_of_another_model_is_not_touched(hub, heads_directory):
    push(heads_directory, REPO)
    repository = hub.repositories[REPO]
    llama = {"config.json": b'{"model_type": "llama"}', "model.safetensors": b"weights"}
    repository.commit("main", llama, "a model")
    with pytest.raises(ValueError, match="holds another model, which heads would damage; push to another one"):
        push(heads_directory, REPO)
    assert hub.files(REPO) == llama


def test_a_hub_that_is_not_there(hub, heads_directory, monkeypatch):
    hub.broken = 500
    assert "it answers with an error (status 500, no service); try again later" in refused(lambda: fetch_heads(REPO))
    monkeypatch.setattr(huggingface_hub.constants, "ENDPOINT", "http://user:password@127.0.0.1:9")
    for call in (lambda: fetch_heads(REPO), lambda: push(heads_directory, REPO)):
        message = refused(call)
        assert "it cannot be reached (" in message
        assert "password" not in message
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    assert "HF_HUB_OFFLINE is set" in refused(lambda: fetch_heads(REPO))


def test_a_card_that_the_hub_cannot_read_is_not_pushed(hub, heads_directory):
    (heads_directory / "README.md").write_text("---\nlicense: [mit\n---\n")
    with pytest.raises(ValueError, match="Invalid metadata in README"):
        push(heads_directory, REPO)
    assert hub.repositories[REPO].messages == ["initial commit"]
