"""The command line of the chat: flags, errors, exit statuses."""

import io
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from medusa import BaseModel, DraftHeads, MedusaModel, Tree
from medusa.io.tree_file import save_tree
from serve.chat import __main__ as chat
from serve.model_options import ATTENTION

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


@pytest.fixture(scope="module")
def heads(base: BaseModel, make_heads: Callable[..., DraftHeads], tmp_path_factory: pytest.TempPathFactory) -> str:
    """Three heads of the tiny base, saved."""
    directory = tmp_path_factory.mktemp("chat") / "heads"
    MedusaModel(base, make_heads()).save_pretrained(directory)
    return str(directory)


@pytest.fixture
def say(heads: str, monkeypatch: pytest.MonkeyPatch) -> Callable[..., int]:
    """Run the chat over lines of input; returns its exit status."""

    def run(lines: bytes, *flags: str) -> int:
        monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(lines), "utf-8"))
        return chat.main(["--heads", heads, "--max-new-tokens", "12", *flags])

    return run


def test_a_static_tree_reaches_the_model(
    say: Callable[..., int], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "tree.json"
    assert say(b"hello\n", "--tree", str(path)) == 1
    assert f"tree ({path}) does not exist; make one with medusa.save_tree" in capsys.readouterr().err
    save_tree(Tree.full((2, 1)), path)
    assert say(b"hello\n", "--tree", str(path)) == 0
    assert capsys.readouterr().out
    save_tree(Tree.chain(4), path)
    say(b"hello\n", "--tree", str(path))
    assert "tree depth (4) exceeds the number of heads (3)" in capsys.readouterr().err


def test_help_says_what_is_lossy(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as raised:
        chat.main(["--help"])
    assert raised.value.code == 0
    text = capsys.readouterr().out
    assert "LOSSY" in text
    assert "runs/demo/heads" in text
    assert "(default: 512)" in text
    assert "default: None" not in text


def test_flags_reach_the_answer(say: Callable[..., int], heads: str, capsys: pytest.CaptureFixture[str]) -> None:
    options: dict[str, Any] = {"temperature": 0.9, "top_p": 0.9, "top_k": 40, "seed": 5, "nodes": 8}
    options |= {"drafter": "heads", "repetition_penalty": 1.2, "acceptance": "typical", "max_new_tokens": 30}
    flags = [text for name, value in options.items() for text in (f"--{name.replace('_', '-')}", str(value))]
    assert say(b"hello\n", *flags, "--system", "be brief", "--dtype", "float32") == 0
    streams = capsys.readouterr()
    assert "3 recurrent heads" in streams.err
    model = MedusaModel.from_pretrained(heads, dtype=torch.float32)
    messages = [{"role": "system", "content": "be brief"}, {"role": "user", "content": "hello"}]
    expected = model.generate(model.chat_prompt(messages), **options)
    assert streams.out.strip() == expected.text.strip()


def test_attention_names_are_those_of_the_registry() -> None:
    attention = pytest.importorskip("medusa.attention")
    assert ("auto", *attention.BACKENDS) == ATTENTION


def test_device_that_is_not_there(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    assert chat.main(["--heads", str(tmp_path), "--device", "cuda:1"]) == 1
    assert "device (cuda:1) is not there" in capsys.readouterr().err


def test_heads_that_cannot_be_used_are_one_message(
    say: Callable[..., int], heads: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    broken = shutil.copytree(heads, tmp_path / "broken")
    (broken / "heads.safetensors").write_bytes(b"no tensors")
    assert say(b"hello\n", "--heads", str(broken)) == 1
    assert len(capsys.readouterr().err.splitlines()) == 1


class Interrupted(io.StringIO):
    """An input at which Ctrl-C is pressed."""

    def readline(self, *_: object) -> str:
        raise KeyboardInterrupt


def test_ctrl_c_outside_of_an_answer(heads: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stdin", Interrupted())
    assert chat.main(["--heads", heads]) == 130


def test_input_that_is_not_utf8_does_not_end_the_chat(
    say: Callable[..., int], capsys: pytest.CaptureFixture[str]
) -> None:
    assert say("caf\ufffd\nhello\n".encode()) == 0
    expected = capsys.readouterr().out
    assert say(b"caf\xe9\nhello\n") == 0
    assert capsys.readouterr().out == expected
