"""How a model writes reasoning and calls, which its chat template shows, and how such answers are read and enforced."""

from typing import Any, NamedTuple

from medusa.serve.api.call_forms import MISTRAL, BlockReader, CallForm, form_of
from medusa.serve.api.calls import CallReader
from medusa.serve.api.tools import Calls, json_form, parameters
from medusa.serve.reading import is_harmony, tags_of
from medusa.serve.reading.events import Reader
from medusa.serve.reading.harmony import CALLS, CHANNEL, ENDS, FINAL, MESSAGE, REASONING, TO, HarmonyReader
from medusa.serve.reading.thoughts import Tags, ThoughtReader

ANY, SPACES, LINE = (
    {"type": "any_text"},
    {"type": "regex", "pattern": r"[ \n]{0,3}"},
    {"type": "regex", "pattern": r"\n?"},
)


class Writing(NamedTuple):
    """How a model writes its answers.

    Attributes:
        tags: Those around the reasoning that it may write before it answers; None = it writes none.
        harmony: It writes messages on channels (GPT-OSS).
        xml: Calls have a tag for each argument (Qwen 3.5 and Qwen's coders).
        form: The form of calls if it is another one than those between ``<tool_call>`` tags.
    """

    tags: Tags | None = None
    harmony: bool = False
    xml: bool = False
    form: CallForm | None = None

    @classmethod
    def of(cls, template: str) -> "Writing":
        """The way that a chat template shows."""
        xml = "<function=" in template
        form = None if is_harmony(template) else form_of(template)
        return cls(tags_of(template), is_harmony(template), xml, form)

    @property
    def tagged(self) -> bool:
        """Whether answers are read by special tokens, which the text has to contain."""
        return self.harmony or (self.tags is not None and self.tags.special)

    @property
    def short_ids(self) -> bool:
        """Whether the template takes ids of calls with nine letters and digits only."""
        return self.form is MISTRAL

    def needs_special_tokens(self, calls: Calls) -> bool:
        """Whether the text of an answer has to contain special tokens."""
        return self.tagged or (bool(calls.tools) and self.form is not None)

    def reader(self, calls: Calls, prompt: str) -> Reader:
        """The reader of an answer to a prompt, which ends as this text does."""
        if self.harmony:
            return HarmonyReader(bool(calls.tools), calls.single)
        enforced = calls.required or calls.formed  # such calls stand between tags
        own = self.form if calls.tools and not enforced else None
        answer = CallReader(calls) if own is None else BlockReader(calls, own)
        return answer if self.tags is None else ThoughtReader(answer, self.tags, self.tags.begun(prompt))

    def calls(self, calls: Calls, free: bool) -> dict[str, Any]:
        """Calls in XGrammar's language of structural tags.

        Args:
            calls: The rules for tool calls of the request.
            free: Whether other text is allowed, also without any call.
        """
        if not self.harmony:
            return calls.structure(free, self.xml)
        forms = {tool.function.name: json_form(parameters(tool)) for tool in calls.tools}
        tags = {
            trigger: [
                {"type": "tag", "begin": f"{trigger}{name}{rest}{MESSAGE}", "content": form, "end": ""}
                for name, form in forms.items()
                if calls.name in ("", name)
            ]
            for trigger, rest in (
                (f"{CHANNEL}{CALLS} {TO}", " <|constrain|>json"),
                (f" {TO}", f"{CHANNEL}{CALLS} json"),
            )
        }
        if not free:
            return {"type": "or", "elements": next(iter(tags.values()))}
        both = [tag for own in tags.values() for tag in own]
        return {"type": "triggered_tags", "triggers": list(tags), "tags": both, "stop_after_first": True}

    def whole(self, form: dict[str, Any], prompt: str, calls: bool = False) -> dict[str, Any]:
        """An answer in a format, with the reasoning that may stand before it, in the same language.

        Args:
            form: The format.
            prompt: The end of the prompt.
            calls: Whether the format is that of calls.
        """
        if self.harmony:
            end, start = ENDS[:2]
            thoughts = {"type": "tag", "begin": f"{CHANNEL}{REASONING}{MESSAGE}", "content": ANY, "end": end}
            before = _sequence(thoughts, _text(f"{start}assistant"))
            final = () if calls else (_text(f"{CHANNEL}{FINAL}{MESSAGE}"),)
            return _sequence({"type": "optional", "content": before}, *final, form)
        if self.tags is None or prompt.rstrip().endswith(self.tags.end):
            return form
        begun = self.tags.begun(prompt)
        thoughts = {"type": "tag", "begin": "" if begun else self.tags.begin, "content": ANY, "end": self.tags.end}
        if begun:
            return _sequence(thoughts, SPACES, form)
        return _sequence({"type": "optional", "content": _sequence(LINE, thoughts, SPACES)}, form)


def _sequence(*elements: dict[str, Any]) -> dict[str, Any]:
    return {"type": "sequence", "elements": list(elements)}


def _text(text: str) -> dict[str, Any]:
    return {"type": "const_string", "value": text}
