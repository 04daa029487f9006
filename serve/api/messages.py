"""Conversations and tools in requests."""

from typing import Annotated, Any, Literal

from pydantic import AliasChoices, BeforeValidator, Field, StrictBool, StrictInt
from pydantic_core import PydanticCustomError

from medusa.serve.api.body import Body

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


Content = Annotated[str | list[Part], BeforeValidator(_text_only)]


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
    tool_calls: list[ToolCall] | None = None
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

    type: Literal["text", "json_object", "json_schema", "grammar"]
    json_schema: JsonSchema | None = None
    grammar: str | None = None
    """A grammar in EBNF; our own extension."""


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
    tools: Annotated[list[Tool], Field(min_length=1)]


class AllowedChoice(Body):
    """A ``tool_choice`` of some of the request's tools."""

    type: Literal["allowed_tools"]
    allowed_tools: AllowedTools
