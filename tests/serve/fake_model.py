"""A model of a few lines for tests of the chat; run as a script, it is the chat itself with that model."""

import sys
import time
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

from serve.chat.commands import COMMANDS
from serve.chat.conversation import Conversation, Message, Settings
from serve.chat.repl import Repl
from serve.chat.terminal import Terminal


class FakePiece(str):
    """A word; every second one counts as drafted."""

    drafted = False


class FakeStream:
    """Yields the words of an answer; a word may be an exception to raise in its place."""

    def __init__(self, words: list[Any], prompt_tokens: int, limit: int, delay: float) -> None:
        self._words, self._limit, self._delay = words, limit, delay
        self.output = SimpleNamespace(
            prompt_tokens=prompt_tokens,
            tokens=[],
            steps=0,
            seconds=0.5,
            tokens_per_second=10.0,
            tokens_per_step=2.0,
            finish_reason=None,
            cached_tokens=0,
        )

    def __iter__(self) -> Iterator[FakePiece]:
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

    def __init__(self, context: int = 1000, answers: list[list[Any]] | None = None, delay: float = 0.0) -> None:
        self.base = SimpleNamespace(context_length=context)
        self.answers = answers or []
        self.delay = delay
        self.prompts: list[list[Message]] = []
        self.options: list[dict[str, Any]] = []
        self.trees: list[Any] = []
        self._rendered: dict[str, list[Message]] = {}

    def chat_prompt(self, messages: list[Message]) -> list[int]:
        text = "".join(f"{message['role'][0]}:{message['content']}\n" for message in messages)
        self._rendered[text] = messages
        return list(map(ord, text))

    def explain(self, drafter: str | None = None) -> str:
        return f"auto: {drafter or 'whoever is there'}"

    def stream(self, prompt: list[int], prefix: Any = None, tree: Any = None, **options: Any) -> FakeStream:
        messages = self._rendered["".join(map(chr, prompt))]
        self.prompts.append(messages)
        self.options.append(options)
        self.trees.append(tree)
        words = self.answers.pop(0) if self.answers else ["re", ": ", messages[-1]["content"]]
        limit = min(options["max_new_tokens"], self.base.context_length - len(prompt))
        return FakeStream(words, len(prompt), limit, self.delay)


if __name__ == "__main__":
    slow = FakeModel(answers=[[f"word{index} " for index in range(1000)]], delay=0.02)
    terminal = Terminal(sys.stdin, sys.stdout, sys.stderr, colour="--colour" in sys.argv)
    Repl(slow, terminal, COMMANDS, Conversation(), Settings(max_new_tokens=900), title="a fake model").run()  # type: ignore[arg-type]
