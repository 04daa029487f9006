"""The chat in a real (pseudo) terminal, as a process of its own, with a fake model."""

import os
import pty
import re
import select
import subprocess
import sys
import termios
import time
from pathlib import Path

import pytest

SCRIPT = Path(__file__).with_name("fake_model.py")
ROOT = Path(__file__).parents[2]
GREEN = "\x1b[32m"


# A background job (of a CI, say) is started with Ctrl-C ignored; a terminal's own program never is.
LAUNCH = (
    "import os, runpy, signal, sys; signal.signal(signal.SIGINT, signal.default_int_handler); os.login_tty(0);"
    "del sys.argv[0]; runpy.run_path(sys.argv[0], run_name='__main__')"
)


class Screen:
    """A chat process with its terminal; ``expect`` reads on until a text appears."""

    def __init__(self, columns=80, **environ):
        self._master, slave = pty.openpty()
        termios.tcsetwinsize(slave, (24, columns))
        self.process = subprocess.Popen(
            [sys.executable, "-c", LAUNCH, str(SCRIPT), "--colour"],
            env={"PYTHONPATH": str(ROOT), "TERM": "xterm", "HOME": "/nonexistent"} | environ,
            stdin=slave, stdout=slave, stderr=slave,
        )  # fmt: skip
        os.close(slave)
        self.text = ""

    def type(self, text):
        os.write(self._master, text.encode())

    def expect(self, pattern):
        """Everything up to the end of the pattern; what is read once is not seen again."""
        while not (match := re.search(pattern, self.text)):
            ready, _, _ = select.select([self._master], [], [], 5)
            assert ready, f"no {pattern!r} in {self.text!r}"
            self.text += os.read(self._master, 65536).decode(errors="replace")  # an OSError where the chat has ended
        seen, self.text = self.text[: match.end()], self.text[match.end() :]
        return seen


@pytest.fixture
def start():
    """Start a chat, up to its first prompt."""
    screens = []

    def run(**options):
        screens.append(Screen(**options))
        return screens[-1], screens[-1].expect(">>> ")

    yield run
    for screen in screens:
        screen.process.kill()
        screen.process.wait()
        os.close(screen._master)


@pytest.fixture
def screen(start):
    return start()[0]


def test_interrupts_and_leaving(screen):
    time.sleep(1)  # readline shows the prompt a moment before it waits for input, and loses a signal in between
    screen.type("\x03")
    screen.expect("/bye or Ctrl-D")
    screen.expect(">>> ")
    screen.type("hello\n")
    screen.expect("word3")
    screen.type("\x03")
    answer = screen.expect(">>> ")
    assert "interrupted" in answer
    assert "word200" not in answer
    screen.type("again\n")
    screen.expect(r"(?s)again\r\n.*again\r\n.*eos")
    screen.type("/stats\n")
    screen.expect("2 turns")
    screen.expect(">>> ")
    screen.type("\x04")
    assert screen.process.wait(timeout=5) == 0


def test_drafted_words_are_coloured_where_that_is_asked(screen):
    screen.type("/max 9\nhello\n")
    answer = screen.expect("word4")
    assert [f"{GREEN}word{number} " in answer for number in range(4)] == [False, True, False, True]
    screen.type("/colour off\nhello\n")
    screen.expect("colour = off")
    assert GREEN not in screen.expect("re: hello")


def test_words_move_to_the_next_line_whole(start):
    screen, _ = start(columns=40, NO_COLOR="1")
    screen.type("/max 12\nhello\n")
    screen.expect("re: hello|word0 ")
    answer = re.sub(r"\S*\x1b\[\d+D\x1b\[K", "", screen.expect("length"))
    lines = answer.split("\r\n")
    assert lines[0].split()[-1] == "word5", lines
    assert lines[1].split()[-1] == "word11"


def test_keys_during_an_answer_are_not_in_it_but_on_the_next_line(screen):
    screen.type("/max 60\nhello\n")
    screen.expect("word9 ")
    screen.type("typed ahead")
    assert "typed" not in screen.expect(r"length \(")
    screen.expect(">>> .*typed ahead")


def test_lines_are_recalled_by_the_next_chat_and_nobody_else(start, tmp_path):
    screen, _ = start(HOME=str(tmp_path))
    screen.type("/nodes 3\n/bye\n")
    assert screen.process.wait(timeout=5) == 0
    screen, _ = start(HOME=str(tmp_path))
    screen.type("\x1b[A\x1b[A\n")
    screen.expect("nodes = 3")
    assert (tmp_path / "history").stat().st_mode & 0o777 == 0o600


def test_line_editing_completes_commands_and_recalls_lines(screen):
    screen.type("/set no\t16\n")
    screen.expect("nodes = 16")
    screen.type("/no\t16\n")
    screen.expect("nodes = 16")
    screen.expect(">>> ")
    screen.type("\x1b[A\x7f\n")
    screen.expect("nodes = 1\\b")


def test_pasted_lines_are_one_message(screen):
    screen.type("/max 1\n")
    screen.expect(">>> ")
    screen.type("\x1b[200~/one\ntwo\x1b[201~\n")
    screen.expect(r"length")
    screen.expect(">>> ")
    screen.type("/stats\n")
    screen.expect("1 turn,")


@pytest.mark.parametrize("environ", [{"NO_COLOR": "1"}, {"TERM": "dumb"}])
def test_no_codes_where_none_are_wanted(start, environ):
    screen, greeting = start(**environ)
    assert "Colours are off" in greeting
    screen.type("hello\n")
    assert not re.search(r"\x1b\[\d+m", screen.expect("word6"))
