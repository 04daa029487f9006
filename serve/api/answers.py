"""The bodies of answers, for the API's documentation: fields that are always present have no default."""

from typing import Any, Literal

from pydantic import BaseModel


class Problem(BaseModel):
    """An error: what is wrong, the rule, and the remedy."""

    message: str
    type: str
    param: str | None
    """The field of the request that is wrong."""
    code: str | None
    """A code for programs."""


class Failure(BaseModel):
    """The body of an error."""

    error: Problem


class PromptDetails(BaseModel):
    """Details of prompt tokens."""

    cached_tokens: int


class PredictionDetails(BaseModel):
    """Details of completion tokens."""

    accepted_prediction_tokens: int
    rejected_prediction_tokens: int


class Usage(BaseModel):
    """Numbers of tokens."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptDetails
    completion_tokens_details: PredictionDetails | None = None
    """Only if the request had a prediction."""


class Likely(BaseModel):
    """A token and its log-probability in nats."""

    token: str
    logprob: float
    bytes: list[int]


class ToldToken(Likely):
    """A written token, with the most likely tokens at its place."""

    top_logprobs: list[Likely]


class ChatLogprobs(BaseModel):
    """Log-probabilities of a chat completion."""

    content: list[ToldToken]
    refusal: None


class Logprobs(BaseModel):
    """Log-probabilities of a text completion, and of its prompt if it is echoed."""

    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]


class CalledFunction(BaseModel):
    """A function with its arguments as JSON."""

    name: str
    arguments: str


class AnsweredCall(BaseModel):
    """A call of a tool."""

    id: str
    type: Literal["function"]
    function: CalledFunction


class Answered(BaseModel):
    """The message of the model."""

    role: Literal["assistant"]
    content: str | None
    refusal: None
    reasoning_content: str | None = None
    """The model's reasoning before the answer, if there is any."""
    tool_calls: list[AnsweredCall] | None = None


class Choice(BaseModel):
    """One completion."""

    index: int
    finish_reason: Literal["stop", "length", "tool_calls"]
    token_ids: list[int] | None = None
    prompt_token_ids: list[int] | None = None


class ChatChoice(Choice):
    """One answer."""

    message: Answered
    logprobs: ChatLogprobs | None


class TextChoice(Choice):
    """One text."""

    text: str
    logprobs: Logprobs | None


class Answer(BaseModel):
    """Common fields of both kinds of completions."""

    id: str
    created: int
    model: str
    seed: int | None = None
    """Seed of the first completion, if tokens were sampled."""
    usage: Usage
    prompt_token_ids: list[int] | None = None
    metrics: dict[str, Any] | None = None


class ChatCompletion(Answer):
    """POST /v1/chat/completions."""

    object: Literal["chat.completion"]
    choices: list[ChatChoice]


class TextCompletion(Answer):
    """POST /v1/completions."""

    object: Literal["text_completion"]
    choices: list[TextChoice]


class OutputText(BaseModel):
    """Text of a message."""

    type: Literal["output_text"]
    text: str
    annotations: list[Any]
    logprobs: list[ToldToken]


class OutputMessage(BaseModel):
    """What the model said."""

    type: Literal["message"]
    id: str
    status: str
    role: Literal["assistant"]
    content: list[OutputText]


class ReasoningText(BaseModel):
    """Text of the model's reasoning."""

    type: Literal["reasoning_text"]
    text: str


class OutputReasoning(BaseModel):
    """The model's reasoning before the answer."""

    type: Literal["reasoning"]
    id: str
    status: str
    summary: list[Any]
    content: list[ReasoningText]


class OutputCall(BaseModel):
    """A function call of the model."""

    type: Literal["function_call"]
    id: str
    status: str
    call_id: str
    name: str
    arguments: str


class ResponseUsage(BaseModel):
    """Numbers of tokens."""

    input_tokens: int
    input_tokens_details: dict[str, int]
    output_tokens: int
    output_tokens_details: dict[str, int]
    total_tokens: int


class ResponseObject(BaseModel):
    """POST /v1/responses; the request's fields are repeated in it."""

    id: str
    object: Literal["response"]
    created_at: int
    completed_at: int | None
    model: str
    status: Literal["completed", "incomplete"]
    incomplete_details: dict[str, str] | None
    error: None
    output: list[OutputReasoning | OutputMessage | OutputCall]
    usage: ResponseUsage


class ServedModel(BaseModel):
    """A model name for requests."""

    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    root: str
    """The base."""
    parent: str | None
    """The base of these heads; null = this is a base."""
    max_model_len: int
    """Context length in tokens."""
    drafters: list[str]
    heads: dict[str, Any] | None


class ModelList(BaseModel):
    """GET /v1/models."""

    object: Literal["list"]
    data: list[ServedModel]


class Tokens(BaseModel):
    """POST /tokenize."""

    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None


class Detokenized(BaseModel):
    """POST /detokenize."""

    prompt: str
