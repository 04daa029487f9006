"""Bodies of /v1/responses, and their conversion to a chat."""

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Discriminator, Field, StrictBool, StrictInt, Tag
from pydantic_core import PydanticCustomError

from medusa.serve.api.body import Body, ListOf, lacking
from medusa.serve.api.messages import (
    AllowedChoice,
    AllowedTools,
    Content,
    Function,
    FunctionCall,
    JsonSchema,
    Message,
    ResponseFormat,
    Tool,
    ToolCall,
)
from medusa.serve.api.protocol import ChatRequest, Shared

LOGPROBS = "message.output_text.logprobs"


class Item(Body):
    """Common fields of a conversation's entries; clients send back entries of answers."""

    id: str | None = None
    status: str | None = None


class Spoken(Item):
    """A message."""

    type: Literal["message"] = "message"
    role: Literal["system", "developer", "user", "assistant"]
    content: Content


class Call(Item):
    """A function call of the model."""

    type: Literal["function_call"]
    call_id: str
    name: str
    arguments: str


class Result(Item):
    """The result of a function call."""

    type: Literal["function_call_output"]
    call_id: str
    output: Content


class ThoughtPart(Body):
    """A part of a reasoning."""

    type: str
    text: str = ""


class Thought(Item):
    """The reasoning of a model."""

    type: Literal["reasoning"]
    summary: list[Any] | None = None
    content: ListOf[ThoughtPart] | None = None
    encrypted_content: str | None = None


def _kind(value: Any) -> str:
    kind = value.get("type") if isinstance(value, dict) else getattr(value, "type", None)
    return "message" if kind is None else str(kind)


Items = Annotated[
    Annotated[Spoken, Tag("message")]
    | Annotated[Call, Tag("function_call")]
    | Annotated[Result, Tag("function_call_output")]
    | Annotated[Thought, Tag("reasoning")],
    Discriminator(
        _kind,
        custom_error_type="item",
        custom_error_message="is of no supported type; give messages, function calls and their outputs",
    ),
]


class FunctionTool(Function):
    """A function that the model may call."""

    type: Literal["function"]


class OtherTool(Body):
    """A tool of OpenAI's own, or of a client; this server has none of them, and the model is not told of it."""

    unused = True
    type: str


Tools = Annotated[
    Annotated[FunctionTool, Tag("FunctionTool")] | Annotated[OtherTool, Tag("OtherTool")],
    Discriminator(lambda value: "FunctionTool" if _kind(value) == "function" else "OtherTool"),
]


def _functions_only(value: Any) -> Any:
    """Refuse to choose among tools that this server does not have."""
    if isinstance(value, dict) and value.get("type") != "function":
        message = "tools of type {kind} are not supported; give functions"
        raise PydanticCustomError("functions_only", message, {"kind": str(value.get("type"))[:40]})
    return value


class NamedTool(Body):
    """The function that the model must call."""

    type: Literal["function"]
    name: str


class NamedTools(Body):
    """The functions that the model may call, and whether it must call one."""

    type: Literal["allowed_tools"]
    mode: Literal["auto", "required"]
    tools: Annotated[ListOf[Annotated[NamedTool, BeforeValidator(_functions_only)]], Field(min_length=1)]


class TextFormat(JsonSchema):
    """The format of the answer."""

    type: Literal["text", "json_object", "json_schema"]
    schema_: dict[str, Any] | None = Field(None, alias="schema")  # type: ignore[assignment]


class Reasoning(Body):
    """Settings of the reasoning."""

    effort: Literal["none", "minimal", "low", "medium", "high", "xhigh"] | None = None


class Text(Body):
    """Settings of the answer's text."""

    format: TextFormat | None = None


class ResponsesRequest(Shared):
    """POST /v1/responses."""

    input: str | Annotated[ListOf[Items], Field(min_length=1)]
    instructions: str | None = None
    max_output_tokens: StrictInt | None = None
    text: Text | None = None
    reasoning: Reasoning | None = None
    tools: ListOf[Tools] | None = None
    """Those that are no functions are left out."""
    tool_choice: Literal["none", "auto", "required"] | NamedTool | NamedTools | None = None
    parallel_tool_calls: StrictBool | None = None
    top_logprobs: StrictInt | None = None
    include: ListOf[str] | None = None
    """With "message.output_text.logprobs" the answer has log-probabilities."""
    truncation: Literal["auto", "disabled"] | None = None
    """Input is never truncated: too long input is refused."""
    max_tool_calls: StrictInt | None = None
    """For tools of the server, which has none."""
    background: Annotated[Any, lacking("wait for the answer, or read it as a stream")] = None
    previous_response_id: Annotated[Any, lacking("answers are not kept; send the conversation as input")] = None
    conversation: Annotated[Any, lacking("conversations are not kept; send them as input")] = None
    prompt: Annotated[Any, lacking("prompts are not kept; send them as input")] = None

    @property
    def functions(self) -> list[FunctionTool]:
        """The tools that the model may use."""
        return [tool for tool in self.tools or () if isinstance(tool, FunctionTool)]

    @property
    def form(self) -> TextFormat | None:
        """The format of the answer; None = any text."""
        return None if self.text is None else self.text.format

    def chat(self) -> ChatRequest:
        """The request as a chat request."""
        shared = {name: getattr(self, name) for name in Shared.model_fields}
        logprobs = LOGPROBS in (self.include or ()) or self.top_logprobs is not None
        return ChatRequest(
            **shared,
            messages=self._messages(),
            max_completion_tokens=self.max_output_tokens,
            logprobs=logprobs or None,
            top_logprobs=self.top_logprobs,
            response_format=_format(self.form),
            tools=None if self.tools is None else [_tool(tool) for tool in self.functions],
            tool_choice=_choice(self.tool_choice) if self.functions or self.tool_choice != "auto" else None,
            parallel_tool_calls=self.parallel_tool_calls,
            reasoning_effort=None if self.reasoning is None else self.reasoning.effort,
        )

    def _messages(self) -> list[Message]:
        said = [] if self.instructions is None else [Message(role="system", content=self.instructions)]
        if isinstance(self.input, str):
            return [*said, Message(role="user", content=self.input)]
        thought = ""  # belongs to the next message or call of the model
        for item in self.input:
            match item:
                case Thought():
                    thought = "".join(part.text for part in item.content or ())
                    continue
                case Spoken():
                    said.append(Message(role=item.role, content=item.content))
                case Result():
                    said.append(Message(role="tool", content=item.output, tool_call_id=item.call_id))
                case Call():
                    if not said or said[-1].role != "assistant":
                        said.append(Message(role="assistant"))
                    function = FunctionCall(name=item.name, arguments=item.arguments)
                    said[-1].tool_calls = said[-1].tool_calls or []
                    said[-1].tool_calls.append(ToolCall(id=item.call_id, function=function))
            if thought and said[-1].role == "assistant" and not said[-1].reasoning_content:
                said[-1].reasoning_content = thought
            thought = ""
        return said or [Message(role="user", content="")]


def _tool(tool: FunctionTool) -> Tool:
    function = Function(name=tool.name, description=tool.description, parameters=tool.parameters, strict=tool.strict)
    return Tool(type="function", function=function)


def _choice(choice: str | NamedTool | NamedTools | None) -> Any:
    match choice:
        case NamedTool():
            return Tool(type="function", function=Function.model_construct(name=choice.name))
        case NamedTools():
            allowed = AllowedTools(mode=choice.mode, tools=[_choice(tool) for tool in choice.tools])
            return AllowedChoice(type=choice.type, allowed_tools=allowed)
    return choice


def _format(wanted: TextFormat | None) -> ResponseFormat | None:
    if wanted is None:
        return None
    schema = None if wanted.schema_ is None else JsonSchema(name=wanted.name, schema=wanted.schema_)
    return ResponseFormat(type=wanted.type, json_schema=schema)
