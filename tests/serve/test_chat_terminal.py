"""The chat in a real (pseudo) terminal, as a process of its own, with a fake model."""

import os
import pty
import re
import select
import subprocess
import sys
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

    def __init__(self, **environ):
        self._master, slave = pty.openpty()
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

    def run(**environ):
        screens.append(Screen(**environ))
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
    screen.expect("/exit or Ctrl-D")
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


def test_line_editing_completes_commands_and_recalls_lines(screen):
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
