"""Conversations and tools in requests."""

import json
from typing import Annotated, Any, Literal

from pydantic import AliasChoices, BeforeValidator, Field, StrictBool, StrictInt
from pydantic_core import PydanticCustomError

from medusa.serve.api.body import Body, ListOf, lacking

TEXT_PARTS = ("text", "refusal", "input_text", "output_text")


class Part(Body):
    """A part of a message; ``refusal`` replaces the text of a model that refused."""

    type: Literal["text", "refusal", "input_text", "output_text"]
    text: str = ""
    refusal: str = ""
    annotations: list[Any] | None = None
    """Clients send back annotations of answers."""
    logprobs: list[Any] | None = None


def _text_only(value: Any) -> Any:
    """Refuse pictures with a clear error."""
    if isinstance(value, list):
        for part in value:
            kind = part.get("type") if isinstance(part, dict) else None
            if isinstance(kind, str) and kind not in TEXT_PARTS:
                message = "this model reads text only, and a part is of another type ({kind}); leave it out"
                raise PydanticCustomError("text_only", message, {"kind": kind[:40]})
    return value


Content = Annotated[str | ListOf[Part], BeforeValidator(_text_only)]


def text_of(content: str | list[Part] | None) -> str:
    """The text of a message."""
    if isinstance(content, list):
        return "".join(part.text or part.refusal for part in content)
    return content or ""


class FunctionCall(Body):
    """A call that the model made."""

    name: str
    arguments: str
    """The arguments as JSON."""


class ToolCall(Body):
    """A call that the model made, with its id."""

    id: str
    index: StrictInt | None = None
    """Index in a stream; ignored here."""
    type: Literal["function"] = "function"
    function: FunctionCall


class Message(Body):
    """One entry of a conversation."""

    role: Literal["system", "developer", "user", "assistant", "tool", "function"]
    content: Content | None = None
    name: str | None = None
    tool_calls: ListOf[ToolCall] | None = None
    tool_call_id: str | None = None
    reasoning_content: Annotated[str | None, Field(validation_alias=AliasChoices("reasoning_content", "reasoning"))] = (
        None
    )
    """For templates that use it."""
    refusal: str | None = None
    """Clients send back this and the next fields of answers; without content the refusal is the text."""
    annotations: list[Any] | None = None
    audio: dict[str, Any] | None = None


class JsonSchema(Body):
    """A schema that the answer follows."""

    name: str = ""
    description: str | None = None
    schema_: dict[str, Any] = Field(alias="schema")
    strict: StrictBool | None = None


class ResponseFormat(Body):
    """The format of the answer."""

    type: Literal["text", "json_object", "json_schema", "grammar", "regex"]
    json_schema: JsonSchema | None = None
    grammar: str | None = None
    """A grammar in EBNF; our own extension, as the next one."""
    pattern: str | None = None
    """A regular expression for the whole answer."""


class StructuredOutputs(Body):
    """vLLM's way to ask for a format; one of these."""

    json_: dict[str, Any] | str | None = Field(None, alias="json")
    json_object: StrictBool | None = None
    regex: str | None = None
    choice: Annotated[ListOf[str], Field(min_length=1)] | None = None
    grammar: str | None = None
    structural_tag: Annotated[Any, lacking("give response_format or tools")] = None

    def form(self) -> ResponseFormat:
        """The same as a ``response_format``.

        Raises:
            ValueError: Not just one of the ways is given, or a schema is no JSON.
        """
        ways = {"json": self.json_, "regex": self.regex, "choice": self.choice, "grammar": self.grammar}
        given = [name for name, way in ways.items() if way is not None] + ["json_object"] * bool(self.json_object)
        if len(given) != 1:
            raise ValueError(f"structured_outputs ({', '.join(given) or 'empty'}) must have one of {', '.join(ways)}")
        if self.json_ is not None:
            schema = json.loads(self.json_) if isinstance(self.json_, str) else self.json_
            if not isinstance(schema, dict):
                raise ValueError("structured_outputs.json is no schema, which is a JSON object; correct it")
            return ResponseFormat(type="json_schema", json_schema=JsonSchema(schema=schema))
        if self.choice is not None:
            rule = " | ".join(json.dumps(text, ensure_ascii=False) for text in self.choice)
            return ResponseFormat(type="grammar", grammar=f"root ::= {rule}")
        if self.regex is not None:
            return ResponseFormat(type="regex", pattern=self.regex)
        return ResponseFormat(type="json_object" if self.json_object else "grammar", grammar=self.grammar)


class Function(Body):
    """A function that the model may call."""

    name: Annotated[str, Field(pattern=r"^[a-zA-Z0-9_.-]{1,64}$")]
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: StrictBool | None = None
    """Whether arguments must follow the schema."""


class Tool(Body):
    """A tool that the model may use, or as ``tool_choice`` the one that it must use."""

    type: Literal["function"]
    function: Function


class AllowedTools(Body):
    """The tools that the model may use, by name, and whether it must use one."""

    mode: Literal["auto", "required"]
    tools: Annotated[ListOf[Tool], Field(min_length=1)]


class AllowedChoice(Body):
    """A ``tool_choice`` of some of the request's tools."""

    type: Literal["allowed_tools"]
    allowed_tools: AllowedTools
