"""Options and conversations: what they refuse, what leaves the context, what a file must hold."""

import json
from pathlib import Path

import pytest

from medusa.serve.chat.conversation import Conversation, GenerationOptions, Turn, load, save

THREE_TURNS = Conversation("be brief", [Turn("q1", "a1"), Turn("q2", "a2"), Turn("q3", "a3")])


def test_prompt_has_system_and_what_was_not_forgotten():
    contents = [message["content"] for message in THREE_TURNS.prompt("q4", forget=2)]
    assert contents == ["be brief", "q3", "a3", "q4"]
    assert [message["role"] for message in THREE_TURNS.messages()] == ["system", *["user", "assistant"] * 3]


@pytest.mark.parametrize(("longest", "forgotten"), [(99, 0), (8, 0), (7, 1), (5, 2), (2, 3), (1, 4)])
def test_fewest_turns_are_forgotten(longest, forgotten):
    assert THREE_TURNS.turns_to_forget("q4", lambda messages: len(messages) <= longest) == forgotten


def test_saved_conversation_comes_back(tmp_path):
    path = tmp_path / "chat.json"
    path.write_text("older")
    conversation = Conversation("kürz", [Turn("q\n1", "a1")])
    save(path, conversation, GenerationOptions(temperature=0.5, nodes=8))
    assert load(path) == (conversation, GenerationOptions(temperature=0.5, nodes=8))
    assert "kürz" in path.read_text(encoding="utf-8")
    assert list(tmp_path.iterdir()) == [path]
    path.write_text('{"messages": []}')
    assert load(path) == (Conversation(), GenerationOptions()), "settings may be absent"


def test_failed_save_leaves_the_old_file(tmp_path, monkeypatch):
    path = tmp_path / "chat.json"
    path.write_text("older")

    def fail(self, target):
        raise OSError("disk full")

    monkeypatch.setattr(Path, "replace", fail)
    with pytest.raises(OSError, match="disk full"):
        save(path, Conversation(), GenerationOptions())
    assert path.read_text() == "older"
    assert list(tmp_path.iterdir()) == [path]


USER = {"role": "user", "content": "q"}
ASSISTANT = {"role": "assistant", "content": "a"}


@pytest.mark.parametrize(
    ("content", "complaint"),
    [
        (b"\xff\xfe", "is not valid JSON"),
        (b"{", "is not valid JSON"),
        (b"[" * 100_000, "is not valid JSON"),
        ([], "is not a JSON object"),
        ({"messages": [], "settings": 3}, "settings must be an object"),
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
def test_load_refuses(tmp_path, content, complaint):
    path = tmp_path / "chat.json"
    path.write_bytes(content if isinstance(content, bytes) else json.dumps(content).encode())
    with pytest.raises(ValueError, match=rf"conversation \({path}\) .*{complaint}.*; name a file that /save wrote"):
        load(path)
