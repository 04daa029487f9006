"""What clients send. Fields are OpenAI's, some of vLLM's, and our own ``speculation``; any other is refused.

Ranges of sampling parameters are checked by ``SamplingParams``, so that they are the same everywhere.
"""

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, StrictBool, StrictFloat, StrictInt, model_validator

Number = StrictInt | StrictFloat
Stop = Annotated[str, Field(max_length=1024)]
Token = Annotated[StrictInt, Field(ge=0)]


class Body(BaseModel):
    """Unknown fields are errors: what is not supported is refused, never ignored."""

    model_config = ConfigDict(extra="forbid")

    @model_validator(mode="before")
    @classmethod
    def _without_nulls(cls, value: Any) -> Any:
        """Null asks for nothing: clients send back answers with all their empty fields."""
        if not isinstance(value, dict):
            return value
        known = {field.alias or name for name, field in cls.model_fields.items()}
        return {name: inner for name, inner in value.items() if inner is not None or name in known}


class SpeculationBody(Body):
    """How this request is drafted; greedy and sampled text does not depend on it."""

    enabled: StrictBool = True
    """False = plain decoding."""
    drafter: str | None = None
    """"hybrid", "heads", "prompt-lookup", ...; null = what is fastest."""
    nodes: StrictInt | None = None
    """Tree budget with the root; null = what is fastest."""
    tree: list[list[StrictInt]] | None = None
    """A static tree of rank paths for heads: [[0], [1], [0, 0]]."""
    acceptance: str | None = None
    """"greedy", "sampling", "speculative", or "typical", which is LOSSY; null = lossless."""
    epsilon: Number | None = None
    """Of typical acceptance, as the next one."""
    delta: Number | None = None
    metrics: StrictBool | None = None
    """Report ``metrics.speculative_decoding`` with the answer; null = as the server is set."""
    trace: StrictBool = False
    """Chunks of a stream tell which text was drafted: ``pieces``, [text, drafted] each."""


class StreamOptions(Body):
    """What a stream tells beside the text."""

    include_usage: StrictBool = False
    """A last chunk with the numbers of tokens."""
    continuous_usage_stats: StrictBool = False
    """They come with every chunk."""


class Sampling(Body):
    """What both kinds of completion share."""

    model: str | None = None
    """A name of /v1/models: the base with its own heads, or others by their name."""
    n: Annotated[StrictInt, Field(ge=1)] | None = None
    stream: StrictBool | None = None
    stream_options: StreamOptions | None = None
    max_tokens: StrictInt | None = None
    temperature: Number | None = None
    top_p: Number | None = None
    top_k: StrictInt | None = None
    """0 or -1 = all."""
    min_p: Number | None = None
    repetition_penalty: Number | None = None
    presence_penalty: Number | None = None
    frequency_penalty: Number | None = None
    logit_bias: Annotated[dict[str, Number], Field(max_length=1024)] | None = None
    """By token id."""
    seed: StrictInt | None = None
    """null = another one each time, told as ``seed`` of the answer; completion i of n has seed + i."""
    stop: Stop | Annotated[list[Stop], Field(max_length=16)] | None = None
    ignore_eos: StrictBool | None = None
    user: str | None = None
    """Fairness is between users of an API key, or of none."""
    priority: StrictInt | None = None
    """Lower numbers come first."""
    timeout: Annotated[Number, Field(gt=0, le=1_000_000)] | None = None
    """Seconds, waiting included."""
    speculation: SpeculationBody | None = None
    metadata: dict[str, str] | None = None
    """Means nothing for the text, nor do the next ones: clients send them of their own accord."""
    store: StrictBool | None = None
    service_tier: str | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    return_token_ids: StrictBool | None = None
    """Tell the token ids of prompt and completions."""


class TextPart(Body):
    """A part of a message."""

    type: Literal["text"]
    text: str


class FunctionCall(Body):
    """A call that the model made."""

    name: str
    arguments: str
    """JSON."""


class ToolCall(Body):
    """A call that the model made, with its id."""

    id: str
    index: StrictInt | None = None
    """Of pieces of a stream; means nothing here."""
    type: Literal["function"] = "function"
    function: FunctionCall


class Message(Body):
    """One entry of a conversation."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | list[TextPart] | None = None
    name: str | None = None
    tool_calls: list[ToolCall] | None = None
    tool_call_id: str | None = None
    refusal: str | None = None
    """OpenAI's clients send back what they got."""


class JsonSchema(Body):
    """A schema that the answer follows."""

    name: str = ""
    description: str | None = None
    schema_: dict[str, Any] = Field(alias="schema")
    strict: StrictBool | None = None


class ResponseFormat(Body):
    """What the answer may be."""

    type: Literal["text", "json_object", "json_schema", "grammar"]
    json_schema: JsonSchema | None = None
    grammar: str | None = None
    """EBNF; our own extension."""


class Function(Body):
    """A function that the model may call."""

    name: Annotated[str, Field(pattern=r"^[a-zA-Z0-9_.-]{1,64}$")]
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: StrictBool | None = None


class Tool(Body):
    """A tool that the model may use, or as ``tool_choice`` the one that it must use."""

    type: Literal["function"]
    function: Function


class ChatRequest(Sampling):
    """POST /v1/chat/completions."""

    messages: Annotated[list[Message], Field(min_length=1)]
    max_completion_tokens: StrictInt | None = None
    logprobs: StrictBool | None = None
    top_logprobs: StrictInt | None = None
    response_format: ResponseFormat | None = None
    tools: list[Tool] | None = None
    tool_choice: Literal["none", "auto", "required"] | Tool | None = None
    parallel_tool_calls: StrictBool | None = None


class CompletionRequest(Sampling):
    """POST /v1/completions."""

    prompt: str | list[str] | list[Token] | list[list[Token]]
    echo: StrictBool | None = None
    logprobs: StrictInt | None = None
    response_format: ResponseFormat | None = None


class TokenizeRequest(Body):
    """POST /tokenize: text, or a conversation as the chat template renders it."""

    model: str | None = None
    prompt: str | None = None
    messages: list[Message] | None = None
    add_special_tokens: StrictBool = True


class DetokenizeRequest(Body):
    """POST /detokenize."""

    model: str | None = None
    tokens: list[Token]


class HeadsRequest(Body):
    """POST /v1/heads: heads to load at run time, by an admin."""

    name: Annotated[str, Field(pattern=r"^[\w.:/-]{1,128}$")]
    path: Annotated[str, Field(min_length=1)]
    """A directory, or "user/heads" on the Hub."""
    revision: str | None = None
