"""A model of a few lines for tests of the chat; run as a script, it is the chat itself with that model."""

import io
import os
import sys
import time
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace

from medusa.serve.chat.commands import COMMANDS
from medusa.serve.chat.conversation import Conversation, GenerationOptions
from medusa.serve.chat.repl import Repl
from medusa.serve.chat.terminal import Terminal


class FakePiece(str):
    """A word; every second one counts as drafted."""

    drafted = False


class FakeStream:
    """Yields the words of an answer; a word may be an exception to raise in its place."""

    def __init__(self, words, prompt_tokens, limit, delay):
        self._words, self._limit, self._delay = words, limit, delay
        self.output = SimpleNamespace(
            prompt_tokens=prompt_tokens, tokens=[], steps=0, seconds=0.5, tokens_per_second=10.0, tokens_per_step=2.0,
            finish_reason=None, cached_tokens=0,
        )  # fmt: skip

    def __iter__(self):
        for index, word in enumerate(self._words[: self._limit]):
            if isinstance(word, BaseException):
                raise word
            time.sleep(self._delay)
            piece = FakePiece(word)
            piece.drafted = index % 2 == 1
            self.output.tokens.append(index)
            self.output.steps += not piece.drafted
            yield piece
        self.output.finish_reason = "length" if len(self._words) > self._limit else "eos"


class FakeModel:
    """Answers "re: MESSAGE", or what ``answers`` holds; one token per character of the prompt."""

    def __init__(self, context=1000, answers=None, delay=0.0, tokenizer=None):
        self.base = SimpleNamespace(context_length=context, tokenizer=tokenizer)
        self.answers, self.delay = answers or [], delay
        self.prompts, self.options, self._rendered = [], [], {}

    def chat_prompt(self, messages):
        text = "".join(f"{message['role'][0]}:{message['content']}\n" for message in messages)
        self._rendered[text] = messages
        return list(map(ord, text))

    def stream(self, prompt, prefix=None, tree=None, **options):
        messages = self._rendered["".join(map(chr, prompt))]
        self.prompts.append(messages)
        self.options.append(options)
        words = self.answers.pop(0) if self.answers else ["re", ": ", messages[-1]["content"]]
        limit = min(options["max_new_tokens"], self.base.context_length - len(prompt))
        return FakeStream(words, len(prompt), limit, self.delay)


class Person(Terminal):
    """Behaves as if there were a person, yet reads the given lines."""

    def __init__(self, stdin, stdout, stderr, **options):
        super().__init__(stdin, stdout, stdout, **options)
        self.interactive = True

    def enable_line_editing(self, commands, words): ...

    def unechoed(self):
        return nullcontext()

    def read(self, prompt):
        if line := self._stdin.readline():
            return line.rstrip("\n")
        raise EOFError


class Chat:
    """A finished chat: what was written, and the state it ended in."""

    def __init__(self, lines, model=None, terminal=Terminal, system="", prefix=None, **settings):
        self.model = model or FakeModel()
        out, err = io.StringIO(), io.StringIO()
        face = terminal(io.StringIO(lines), out, err, colour=True, environ={})
        self.repl = Repl(self.model, face, COMMANDS, Conversation(system), GenerationOptions(**settings), prefix=prefix)
        try:
            self.repl.run()
        finally:
            self.out, self.err, self.turns = out.getvalue(), err.getvalue(), self.repl.conversation.turns

    def said(self, number):
        """Contents of the messages that the model was asked with."""
        return [message["content"] for message in self.model.prompts[number]]


if __name__ == "__main__":
    slow = FakeModel(answers=[[f"word{index} " for index in range(1000)]], delay=0.02)
    history = Path(os.environ["HOME"]) / "history"
    terminal = Terminal(sys.stdin, sys.stdout, sys.stderr, colour="--colour" in sys.argv, history=history)
    Repl(slow, terminal, COMMANDS, Conversation(), GenerationOptions(max_new_tokens=900), title="a fake model").run()
