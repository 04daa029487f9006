"""The chat loop through pipes, with a fake model."""

import io
import json
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any, TextIO

import pytest

from serve.chat.commands import COMMANDS
from serve.chat.conversation import Conversation, Settings, Turn
from serve.chat.repl import Repl
from serve.chat.terminal import Terminal
from tests.serve.fake_model import FakeModel


class Chat:
    """A finished chat: what was written, and the state it ended in."""

    def __init__(
        self,
        lines: str,
        model: FakeModel | None = None,
        terminal: type[Terminal] = Terminal,
        conversation: Conversation | None = None,
        **settings: Any,
    ) -> None:
        self.model = model or FakeModel()
        out, err = io.StringIO(), io.StringIO()
        face = terminal(io.StringIO(lines), out, err, colour=True, environ={})
        self.repl = Repl(self.model, face, COMMANDS, conversation or Conversation(), Settings(**settings))  # type: ignore[arg-type]
        try:
            self.repl.run()
        finally:
            self.out, self.err = out.getvalue(), err.getvalue()

    @property
    def turns(self) -> list[Turn]:
        return self.repl.conversation.turns


class FakeTerminal(Terminal):
    """Behaves as if there were a person, yet reads the given lines."""

    def __init__(self, stdin: TextIO, stdout: TextIO, stderr: TextIO, **options: Any) -> None:
        super().__init__(stdin, stdout, stdout, **options)
        self.interactive = True

    def enable_line_editing(self, words: Iterable[str]) -> None: ...

    def read(self, prompt: str) -> str:
        if line := self._stdin.readline():
            return line.rstrip("\n")
        raise EOFError


def test_one_message_per_line() -> None:
    chat = Chat("hello\n\n  \nagain\n")
    assert chat.out == "re: hello\nre: again\n"
    assert chat.turns == [Turn("hello", "re: hello"), Turn("again", "re: again")]
    assert [message["content"] for message in chat.model.prompts[1]] == ["hello", "re: hello", "again"]


def test_windows_line_ends_are_no_part_of_a_message() -> None:
    assert Chat("/max 2\r\nhello\r\n").turns[0].user == "hello"


def test_pipes_carry_no_codes_and_status_goes_to_stderr() -> None:
    chat = Chat("hello")
    assert "\x1b" not in chat.out + chat.err
    assert "[3 tokens, 10.0 tokens/s, 2.00 tokens/step, eos]" in chat.err


def test_block_is_one_message_and_no_command() -> None:
    chat = Chat('"""/one\n  two"""\n"""three"""\n"""\nopen')
    assert [turn.user for turn in chat.turns] == ["/one\n  two", "three", "open"]


def test_settings_reach_the_model() -> None:
    chat = Chat("/temp 0.5\n/penalty 1.5\n/nodes 1\n/max 2\nhello\n/nodes auto\nhello\n", top_p=0.9, seed=3)
    assert chat.model.options[0] == {
        "max_new_tokens": 2,
        "temperature": 0.5,
        "top_p": 0.9,
        "top_k": 0,
        "repetition_penalty": 1.5,
        "seed": 3,
        "acceptance": None,
        "nodes": 1,
        "drafter": None,
    }
    assert Chat("/drafter prompt-lookup\nhello\n").model.options[0]["drafter"] == "prompt-lookup"
    assert chat.model.options[1]["nodes"] is None
    assert chat.turns[0].answer == "re: "
    assert Chat("/temp 1\n/acceptance typical\nhello\n").model.options[0]["acceptance"] == "typical"
    assert Chat("/acceptance auto\nhello\n").model.options[0]["acceptance"] is None
    assert "length (/max)" in chat.err


@pytest.mark.parametrize(
    ("line", "complaint"),
    [
        ("/temp hot", "temperature (hot) must be"),
        ("/temp -1", "temperature (-1.0) must be"),
        ("/nodes 0", "nodes (0) must be"),
        ("/max 1.5", "max_new_tokens (1.5) must be"),
        ("/colour red", "colour (red) must be on or off"),
        ("/acceptance typical", "does not go with temperature 0.0"),
        ("/acceptance bold", "acceptance ('bold') is not known; choose one of: greedy"),
        ("/drafter eagle", "drafter ('eagle') is not known; choose one of: hybrid"),
        ("/drafter heads-sampled", "does not go with temperature 0.0"),
        ("/penalty 0", "repetition_penalty (0.0) must be"),
        ("/bogus", "unknown command (/bogus)"),
        ("/reset all", "/reset takes no argument (all)"),
        ("/regen", "there is no answer yet"),
        ("/save", "no file was named"),
        ("/load nowhere.json", "nowhere.json"),
        ("/save nowhere/chat.json", "nowhere"),
    ],
)
def test_wrong_command_is_one_error_and_the_chat_goes_on(line: str, complaint: str) -> None:
    chat = Chat(f"{line}\nhello\n")
    errors = [text for text in chat.err.splitlines() if text.startswith("error: ")]
    assert len(errors) == 1
    assert complaint in errors[0]
    assert chat.out == "re: hello\n"


def test_help_names_every_command() -> None:
    chat = Chat("/help\n")
    assert all(f"/{name}" in chat.err for name in COMMANDS)
    assert chat.out == ""


def test_exit_leaves_at_once() -> None:
    assert Chat("/exit\nhello\n").out == ""


def test_reset_keeps_the_system_prompt() -> None:
    chat = Chat("/system be brief\nhello\n/reset\nagain\n")
    assert [message["content"] for message in chat.model.prompts[1]] == ["be brief", "again"]
    assert Chat("/system off\nhello\n", conversation=Conversation("x")).model.prompts[0][0]["role"] == "user"


def test_regenerate_replaces_the_answer_and_changes_the_seed() -> None:
    model = FakeModel(answers=[["one"], ["two"], ["three"], ["four"]])
    chat = Chat("hello\n/regen\n/regen\nnext\n", model, temperature=1.0, seed=7)
    assert chat.turns == [Turn("hello", "three"), Turn("next", "four")]
    assert [options["seed"] for options in model.options] == [7, 8, 9, 7]
    assert [len(prompt) for prompt in model.prompts] == [1, 1, 1, 3]
    assert "gives the same answer" not in chat.err
    assert "gives the same answer" in Chat("hello\n/regen\n").err


def test_failed_answer_keeps_the_conversation() -> None:
    model = FakeModel(answers=[["one"], ["half ", RuntimeError("out of memory")], [ValueError("no")]])
    chat = Chat("hello\n/regen\nnext\nlast\n", model)
    assert chat.turns == [Turn("hello", "one"), Turn("last", "re: last")]
    assert "error: out of memory" in chat.err


def test_save_and_load(tmp_path: Path) -> None:
    path = tmp_path / "my chat.json"
    first = Chat(f"/system be brief\nhello\n/temp 0.5\n/save {path}\n")
    assert json.loads(path.read_text())["messages"][-1] == {"role": "assistant", "content": "re: hello"}
    second = Chat(f"/load {path}\nagain\n")
    assert second.repl.settings == first.repl.settings
    assert [message["content"] for message in second.model.prompts[0]] == ["be brief", "hello", "re: hello", "again"]


def test_oldest_turns_leave_a_full_context() -> None:
    chat = Chat(
        "a" * 20 + "\n" + "b" * 20 + "\n" + "c" * 20 + "\n", FakeModel(context=130), Terminal, Conversation("sys")
    )
    last_prompt = chat.model.prompts[2]
    last = [message["content"] for message in last_prompt]
    assert last == ["sys", "b" * 20, "re: " + "b" * 20, "c" * 20]
    assert chat.err.count("left it") == 1
    assert "the oldest 1 of 2 turns" in chat.err
    assert len(chat.turns) == 3
    assert len(chat.model.chat_prompt(last_prompt)) + 130 // 4 <= 130


def test_each_loss_of_turns_is_told_once() -> None:
    chat = Chat("a" * 20 + "\n" + "b" * 20 + "\n/max 1\n" + "c" * 20 + "\n" + "d\n", FakeModel(context=130))
    assert chat.err.count("left it") == 1


def test_status_tells_why_an_answer_is_cut() -> None:
    words = ["x"] * 100
    chat = Chat("hello\n/reset\n/max 5\nhello\n", FakeModel(context=50, answers=[words, words]))
    assert re.findall(r"length \(.*?\)", chat.err) == ["length (context full)", "length (/max)"]


def test_too_long_message_is_refused_and_changes_nothing() -> None:
    chat = Chat("hello\n" + "x" * 80 + "\nagain\n", FakeModel(context=100))
    assert "error: message (83 tokens with the system prompt) is too long" in chat.err
    assert [turn.user for turn in chat.turns] == ["hello", "again"]
    assert len(chat.model.prompts[1]) == 3


def test_interrupt_stops_the_answer_and_keeps_its_part() -> None:
    model = FakeModel(answers=[["half", KeyboardInterrupt()]])
    chat = Chat("hello\nagain\n", model, FakeTerminal)
    assert chat.turns == [Turn("hello", "half"), Turn("again", "re: again")]
    assert "[1 token," in chat.out
    assert "interrupted" in chat.out


def test_interrupt_before_the_first_piece_keeps_nothing() -> None:
    model = FakeModel(answers=[[KeyboardInterrupt()], ["one"], [KeyboardInterrupt()]])
    chat = Chat("hello\nagain\n/regen\n", model, FakeTerminal)
    assert chat.turns == [Turn("again", "one")]


def test_interrupt_ends_a_pipe() -> None:
    with pytest.raises(KeyboardInterrupt):
        Chat("hello\nagain\n", FakeModel(answers=[["half", KeyboardInterrupt()]]))


def test_stats_are_sums_over_whole_answers() -> None:
    chat = Chat("hello\nagain\n/stats\n")
    assert "2 answers, 6 tokens in 4 steps and 1.0 s: 6.0 tokens/s, 1.50 tokens/step" in chat.err
    assert "2 turns" in chat.err
    assert "the context holds 1,000" in chat.err


def test_typical_acceptance_is_announced() -> None:
    chat = Chat("hello\n", acceptance="typical", temperature=0.7)
    assert chat.err.startswith("Typical acceptance is on: LOSSY")
    assert "eos, typical (lossy)]" in chat.err
    assert "lossy" not in Chat("hello\n", acceptance="sampling", temperature=0.7).err.lower()


def test_every_answer_ends_its_line_once() -> None:
    assert Chat("a\nb\nc\n", FakeModel(answers=[["one\n"], [], ["three"]])).out == "one\n\nthree\n"
