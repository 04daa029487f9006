"""The chat with a small real model: later turns go on from the rows of the turns before."""

import io

import pytest

from medusa import Prefix
from medusa.cache import BLOCK
from medusa.cache.layer import PassLayer
from serve.chat.commands import COMMANDS
from serve.chat.conversation import Conversation, Settings
from serve.chat.repl import Repl
from serve.chat.terminal import Terminal


class Person(Terminal):
    """Behaves as if there were a person, yet reads the given lines."""

    def enable_line_editing(self, words):
        self.interactive = True

    def read(self, prompt):
        if line := self._stdin.readline():
            return line.rstrip("\n")
        raise EOFError


def chat(model, prefix, lines):
    """What the chat answered, and the repl at its end."""
    out, notes = io.StringIO(), io.StringIO()
    terminal = Person(io.StringIO(lines), out, notes, environ={})
    repl = Repl(
        model, terminal, COMMANDS, Conversation(), Settings(max_new_tokens=24, temperature=0.7, nodes=8), prefix=prefix
    )
    repl.run()
    return out.getvalue(), repl


def test_a_chat_says_the_same_and_computes_less(model):
    lines = f"hello{' there' * 6}\nand you?\n/regen\n/reset\nhello again\n"
    (out, repl), (expected, plain) = chat(model, Prefix(), lines), chat(model, None, lines)
    assert out == expected
    assert plain.totals.cached_tokens == 0
    # Bytes are tokens here, and odd ones do not survive as text: turns agree up to the first of them at least.
    assert repl.totals.cached_tokens >= BLOCK


@pytest.mark.parametrize("count", [1, 2, 3, 8, 11])
def test_after_an_interrupted_answer_the_chat_goes_on_right(model, monkeypatch, count):
    update, calls = PassLayer.update, 0

    def interrupted(*arguments, **options):
        nonlocal calls
        calls += 1
        if calls == count:
            raise KeyboardInterrupt
        return update(*arguments, **options)

    monkeypatch.setattr(PassLayer, "update", interrupted)
    outs = []
    for prefix in (Prefix(), None):
        calls = 0
        outs.append(chat(model, prefix, "hello\nand you?\nwell\n")[0])
    assert outs[0] == outs[1]


def test_stats_and_reset(model):
    prefix = Prefix()
    _, repl = chat(model, prefix, "hello\nhello\n/stats\n")
    known, asked = repl.totals.cached_tokens, repl.totals.prompt_tokens
    notes = repl.terminal._notes.getvalue()
    assert f"{known} of {asked} prompt tokens were known from the answer before" in notes
    assert prefix._pool is not None
    chat(model, prefix, "hello\n/reset\n")
    assert prefix._pool is None, "the memory is free again"
