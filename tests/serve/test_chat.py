"""The command line of the chat: flags, errors, exit statuses."""

import io
from pathlib import Path
from typing import Any

import pytest

from medusa import Tree
from medusa.io.tree_file import save_tree
from serve import chat
from serve.conversation import Settings
from tests.serve.fake_model import FakeModel

WRONG = [
    "--bogus",
    "--nodes 0",
    "--nodes x",
    "--temperature -1",
    "--acceptance no",
    "--drafter eagle",
    "--attention paged",
    "--acceptance typical",
    "--nodes 8 --tree tree.json",
    "--drafter heads --tree tree.json",
]


@pytest.mark.parametrize("flags", WRONG)
def test_wrong_use_exits_2(flags: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as raised:
        chat.main(flags.split())
    assert raised.value.code == 2
    assert flags.rsplit(maxsplit=1)[-1].lstrip("-") in capsys.readouterr().err


def test_missing_heads_exit_1_with_a_remedy(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert chat.main(["--heads", str(tmp_path / "nowhere")]) == 1
    streams = capsys.readouterr()
    assert streams.out == ""
    assert len(streams.err.splitlines()) == 1
    assert "nowhere" in streams.err
    assert "run ./launch.sh first" in streams.err


def test_a_static_tree_reaches_the_model(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model, path = FakeModel(), str(tmp_path / "tree.json")
    monkeypatch.setattr(chat, "load_model", lambda args: model)
    monkeypatch.setattr(chat, "describe", lambda model, heads: "")
    monkeypatch.setattr("sys.stdin", io.StringIO("hello\nagain\n"))
    assert chat.main(["--tree", path]) == 1
    assert f"tree ({path}) does not exist; make one with medusa-bench tree" in capsys.readouterr().err
    save_tree(Tree.full((2, 1)), path)
    assert chat.main(["--tree", path]) == 0
    assert model.trees == [Tree.full((2, 1))] * 2


def test_help_says_what_is_lossy(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as raised:
        chat.main(["--help"])
    assert raised.value.code == 0
    text = capsys.readouterr().out
    assert "LOSSY" in text
    assert "runs/demo/heads" in text
    assert "(default: 512)" in text
    assert "default: None" not in text


def test_flags_become_settings(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    model = FakeModel()
    monkeypatch.setattr(chat, "load_model", lambda args: model)
    monkeypatch.setattr(chat, "describe", lambda model, heads: "the banner")
    monkeypatch.setattr("sys.stdin", io.StringIO("hello\n"))
    flags: dict[str, Any] = {"max_new_tokens": 9, "temperature": 0.5, "top_p": 0.9, "top_k": 4, "seed": 5, "nodes": 8}
    flags |= {"drafter": "heads", "repetition_penalty": 1.2}
    argv = [text for name, value in flags.items() for text in (f"--{name.replace('_', '-')}", str(value))]
    assert chat.main([*argv, "--acceptance", "typical", "--system", "be brief"]) == 0
    assert Settings(**model.options[0]) == Settings(**flags, acceptance="typical")
    assert model.prompts[0][0] == {"role": "system", "content": "be brief"}
    streams = capsys.readouterr()
    assert streams.out == "re: hello\n"
    assert streams.err.startswith("the banner\n")


def test_attention_names_are_those_of_the_registry() -> None:
    attention = pytest.importorskip("medusa.attention")
    assert ("auto", *attention.BACKENDS) == chat.ATTENTION


def test_device_that_is_not_there(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    torch = pytest.importorskip("torch")
    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    assert chat.main(["--heads", str(tmp_path), "--device", "cuda:1"]) == 1
    assert "device (cuda:1) is not there" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("error", "status"), [(ValueError("hidden size"), 1), (OSError("corrupt"), 1), (KeyboardInterrupt(), 130)]
)
def test_failures_become_statuses(error: BaseException, status: int, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(args: Any) -> FakeModel:
        raise error

    monkeypatch.setattr(chat, "load_model", fail)
    assert chat.main([]) == status


def test_input_that_is_not_utf8_does_not_end_the_chat(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(chat, "load_model", lambda args: FakeModel())
    monkeypatch.setattr(chat, "describe", lambda model, heads: "")
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(b"caf\xe9\nhello\n"), "utf-8"))
    assert chat.main([]) == 0
    assert capsys.readouterr().out == "re: caf\ufffd\nre: hello\n"
