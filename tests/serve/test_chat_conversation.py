"""Settings and conversations: what they refuse, what leaves the context, what a file must hold."""

import json
from pathlib import Path
from typing import Any

import pytest

from serve.chat.conversation import Conversation, Settings, Turn, load, save

THREE_TURNS = [Turn("q1", "a1"), Turn("q2", "a2"), Turn("q3", "a3")]


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("temperature", -0.1),
        ("temperature", float("nan")),
        ("temperature", float("inf")),
        ("temperature", "hot"),
        ("temperature", True),
        ("top_p", 0.0),
        ("top_p", 1.1),
        ("top_k", -1),
        ("max_new_tokens", 0),
        ("max_new_tokens", 2.5),
        ("seed", -1),
        ("nodes", 0),
        ("acceptance", "hopeful"),
    ],
)
def test_settings_refuse(name: str, value: Any) -> None:
    with pytest.raises(ValueError, match=rf"{name} \('?{value}'?\) (must be|is not known)"):
        Settings(**{name: value})


@pytest.mark.parametrize(("acceptance", "temperature"), [("greedy", 0.5), ("sampling", 0.0), ("typical", 0.0)])
def test_rule_and_temperature_must_agree(acceptance: str, temperature: float) -> None:
    with pytest.raises(ValueError, match=rf"acceptance \({acceptance}\) does not go with temperature"):
        Settings(acceptance=acceptance, temperature=temperature)


def test_prompt_has_system_and_what_was_not_forgotten() -> None:
    conversation = Conversation("be brief", list(THREE_TURNS))
    contents = [message["content"] for message in conversation.prompt("q4", forget=2)]
    assert contents == ["be brief", "q3", "a3", "q4"]
    assert [message["role"] for message in conversation.messages()] == ["system", *["user", "assistant"] * 3]


@pytest.mark.parametrize(("longest", "forgotten"), [(99, 0), (8, 0), (7, 1), (5, 2), (2, 3), (1, 4)])
def test_fewest_turns_are_forgotten(longest: int, forgotten: int) -> None:
    conversation = Conversation("be brief", list(THREE_TURNS))
    assert conversation.turns_to_forget("q4", lambda messages: len(messages) <= longest) == forgotten


def test_saved_conversation_comes_back(tmp_path: Path) -> None:
    path = tmp_path / "chat.json"
    path.write_text("older")
    conversation = Conversation("kürz", [Turn("q\n1", "a1")])
    save(path, conversation, Settings(temperature=0.5, nodes=8))
    assert load(path) == (conversation, Settings(temperature=0.5, nodes=8))
    assert "kürz" in path.read_text(encoding="utf-8")
    assert list(tmp_path.iterdir()) == [path]


def test_failed_save_leaves_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "chat.json"
    path.write_text("older")

    def fail(self: Path, target: Path) -> None:
        raise OSError("disk full")

    monkeypatch.setattr(Path, "replace", fail)
    with pytest.raises(OSError, match="disk full"):
        save(path, Conversation(), Settings())
    assert path.read_text() == "older"
    assert list(tmp_path.iterdir()) == [path]


def test_settings_may_be_absent(tmp_path: Path) -> None:
    path = tmp_path / "chat.json"
    path.write_text('{"messages": []}')
    assert load(path) == (Conversation(), Settings())


USER = {"role": "user", "content": "q"}
ASSISTANT = {"role": "assistant", "content": "a"}


@pytest.mark.parametrize(
    ("content", "complaint"),
    [
        (b"\xff\xfe", "not UTF-8 text"),
        (b"{", "not JSON"),
        (b"[" * 100_000, "not JSON"),
        ([], "expected an object"),
        ({"messages": [], "settings": 3}, "expected an object"),
        ({}, "messages must be a list"),
        ({"messages": [3]}, r"messages\[0\] must be"),
        ({"messages": [USER, {"role": "assistant"}]}, r"messages\[1\] must be"),
        ({"messages": [USER]}, "must alternate"),
        ({"messages": [ASSISTANT, USER]}, "must alternate"),
        ({"messages": [USER, ASSISTANT, USER, USER]}, "must alternate"),
        ({"messages": [], "settings": {"temperature": "hot"}}, "temperature"),
        ({"messages": [], "settings": {"colour": "red"}}, "colour"),
    ],
)
def test_load_refuses(tmp_path: Path, content: Any, complaint: str) -> None:
    path = tmp_path / "chat.json"
    path.write_bytes(content if isinstance(content, bytes) else json.dumps(content).encode())
    with pytest.raises(ValueError, match=complaint) as raised:
        load(path)
    assert str(path) in str(raised.value)
