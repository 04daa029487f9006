"""How a model writes reasoning and calls, which its chat template shows, and how such answers are read and enforced."""

from typing import Any, NamedTuple

from medusa.serve.api.calls import CallReader
from medusa.serve.api.tools import Calls, json_form, parameters
from medusa.serve.reading import is_harmony, may_think
from medusa.serve.reading.events import Reader
from medusa.serve.reading.harmony import CALLS, CHANNEL, ENDS, FINAL, MESSAGE, REASONING, HarmonyReader
from medusa.serve.reading.thoughts import THINK, THOUGHT, ThoughtReader, begins_reasoning

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
        return cls(may_think(template), is_harmony(template), "<function=" in template)

    def reader(self, calls: Calls, prompt: str) -> Reader:
        """The reader of an answer to a prompt, which ends as this text does."""
        if self.harmony:
            return HarmonyReader(bool(calls.tools), calls.single)
        return ThoughtReader(CallReader(calls), begins_reasoning(prompt)) if self.thinks else CallReader(calls)

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
        begun = begins_reasoning(prompt)
        thoughts = {"type": "tag", "begin": "" if begun else THINK, "content": ANY, "end": THOUGHT}
        before = {"type": "sequence", "elements": [thoughts, SPACES]}
        return {"type": "sequence", "elements": [before if begun else {"type": "optional", "content": before}, form]}
