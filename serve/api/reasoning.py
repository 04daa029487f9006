"""How a model writes reasoning and calls, which its chat template shows, and how such answers are read and enforced."""

from collections.abc import Iterator
from typing import Any, NamedTuple

from medusa.serve.api.calls import CallReader
from medusa.serve.api.harmony import CALLS, CHANNEL, ENDS, FINAL, MESSAGE, REASONING, HarmonyReader
from medusa.serve.api.reading import Event, Reader, Reasoned, held
from medusa.serve.api.tools import Calls, json_form, parameters

THINK, THOUGHT = "<think>", "</think>"
ANY, SPACES = {"type": "any_text"}, {"type": "regex", "pattern": r"\n{0,2}"}


class Writing(NamedTuple):
    """How a model writes its answers.

    Attributes:
        thinks: It may reason between ``<think>`` tags before it answers (Qwen 3, DeepSeek-R1, SmolLM3 and others).
        harmony: It writes messages on channels (GPT-OSS).
        xml: Calls have a tag for each argument (Qwen 3.5 and Qwen's coders).
    """

    thinks: bool = False
    harmony: bool = False
    xml: bool = False

    @classmethod
    def of(cls, template: str) -> "Writing":
        """The way that a chat template shows."""
        harmony = CHANNEL in template and MESSAGE in template
        return cls(THOUGHT in template and not harmony, harmony, "<function=" in template)

    def reader(self, calls: Calls, prompt: str) -> Reader:
        """The reader of an answer to a prompt, which ends as this text does."""
        if self.harmony:
            return HarmonyReader(calls)
        return ThoughtReader(CallReader(calls), _thinks(prompt)) if self.thinks else CallReader(calls)

    def calls(self, calls: Calls, free: bool) -> dict[str, Any]:
        """Calls in XGrammar's language of structural tags.

        Args:
            calls: The rules for tool calls of the request.
            free: Whether other text is allowed, also without any call.
        """
        if not self.harmony:
            return calls.structure(free, self.xml)
        begin, end = f"{CHANNEL}{CALLS} to=functions.", f" <|constrain|>json{MESSAGE}"
        tools = {tool.function.name: json_form(parameters(tool)) for tool in calls.tools}
        wanted = {name: form for name, form in tools.items() if calls.name in ("", name)}
        tags = [
            {"type": "tag", "begin": f"{begin}{name}{end}", "content": form, "end": ""} for name, form in wanted.items()
        ]
        if free:
            return {"type": "triggered_tags", "triggers": [begin], "tags": tags, "stop_after_first": True}
        return {"type": "or", "elements": tags}

    def whole(self, form: dict[str, Any], prompt: str, calls: bool = False) -> dict[str, Any]:
        """An answer in a format, with the reasoning that may stand before it, in the same language.

        Args:
            form: The format.
            prompt: The end of the prompt.
            calls: Whether the format is that of calls.
        """
        if self.harmony:
            start, final = f"{CHANNEL}{REASONING}{MESSAGE}", "" if calls else f"{CHANNEL}{FINAL}{MESSAGE}"
            thoughts = {"type": "tag", "begin": start, "content": ANY, "end": f"{ENDS[0]}{ENDS[1]}assistant"}
            named = [{"type": "const_string", "value": final}] if final else []
            return {"type": "sequence", "elements": [{"type": "optional", "content": thoughts}, *named, form]}
        if not self.thinks or prompt.rstrip().endswith(THOUGHT):
            return form
        begun = _thinks(prompt)
        thoughts = {"type": "tag", "begin": "" if begun else THINK, "content": ANY, "end": THOUGHT}
        before = {"type": "sequence", "elements": [thoughts, SPACES]}
        return {"type": "sequence", "elements": [before if begun else {"type": "optional", "content": before}, form]}


class ThoughtReader(Reader):
    """Reads reasoning, and gives the rest to another reader.

    Args:
        answer: Reads what follows the reasoning.
        thinking: Whether the prompt has begun the reasoning.
    """

    def __init__(self, answer: CallReader, thinking: bool) -> None:
        super().__init__()
        self._answer = answer
        if thinking:
            self._state, self._then = self._spaces, self._reasoning

    def _begin(self, last: bool) -> Iterator[Event]:
        """The first tag, or no reasoning."""
        begun = self._rest.lstrip()
        if begun.startswith(THINK):
            self._rest, self._state, self._then = begun.removeprefix(THINK), self._spaces, self._reasoning
        elif last or not THINK.startswith(begun):
            self._state = self._after
        yield from ()

    def _reasoning(self, last: bool) -> Iterator[Event]:
        """Reasoning up to the last tag; white space around it is left out."""
        said, tag, rest = self._rest.partition(THOUGHT)
        if tag:
            yield Reasoned(said.rstrip())
            self._rest, self._state, self._then = rest, self._spaces, self._after
            return
        said = said if last else said[: len(said) - held(said, THOUGHT)]
        yield Reasoned(self._take(len(said.rstrip())))

    def _spaces(self, last: bool) -> Iterator[Event]:
        """White space is left out, and the next state begins behind it."""
        self._rest = self._rest.lstrip()
        self._state = self._then if self._rest or last else self._state
        yield from ()

    def _after(self, last: bool) -> Iterator[Event]:
        text = self._take(len(self._rest))
        yield from self._answer.read(text, last)
        self.called = self._answer.called


def _thinks(prompt: str) -> bool:
    """Whether a prompt begins the reasoning of the answer."""
    return prompt.rstrip().endswith(THINK)
