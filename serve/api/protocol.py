"""Bodies of requests. Fields are OpenAI's, some of vLLM's, and our own ``speculation``.

Ranges of sampling parameters are checked by ``SamplingParams``, so that they are the same everywhere.
"""

from typing import Annotated, Any, Literal

from pydantic import Field, StrictBool, StrictFloat, StrictInt

from medusa.serve.api.body import Body, ListOf, StrictBody, lacking
from medusa.serve.api.messages import AllowedChoice, Content, Message, ResponseFormat, StructuredOutputs, Tool

Number = StrictInt | StrictFloat
Stop = Annotated[str, Field(max_length=1024)]
Token = Annotated[StrictInt, Field(ge=0, lt=2**31)]
Seed = Annotated[StrictInt, Field(ge=-(2**63), lt=2**63)]


class SpeculationBody(StrictBody):
    """Drafting of this request; greedy and sampled text does not depend on it."""

    enabled: StrictBool = True
    """False = plain decoding."""
    drafter: str | None = None
    """"hybrid", "heads", "prompt-lookup", ...; null = the fastest."""
    nodes: StrictInt | None = None
    """Tree size, the root included; null = the fastest."""
    tree: ListOf[ListOf[StrictInt]] | None = None
    """A static tree of rank paths for heads: [[0], [1], [0, 0]]."""
    acceptance: str | None = None
    """"greedy", "sampling", "speculative", or "typical", which is LOSSY; null = lossless."""
    epsilon: Number | None = None
    """Parameters of typical acceptance, this and the next one."""
    delta: Number | None = None
    metrics: StrictBool | None = None
    """Report ``metrics.speculative_decoding`` with the answer; null = the server's setting."""
    trace: StrictBool = False
    """Mark drafted text in chunks of a stream: ``pieces``, each [text, drafted]."""


class StreamOptions(Body):
    """Additional information in a stream."""

    include_usage: StrictBool = False
    """Send a last chunk with the numbers of tokens."""
    continuous_usage_stats: StrictBool = False
    """Send the numbers of tokens with every chunk too."""
    include_obfuscation: StrictBool = False
    """Ignored here."""


class Shared(Body):
    """Common fields of all requests for text."""

    model: str
    """A name from /v1/models: the base with its own heads, or other heads."""
    stream: StrictBool | None = None
    stream_options: StreamOptions | None = None
    temperature: Number | None = None
    top_p: Number | None = None
    top_k: StrictInt | None = None
    """0 or -1 = all tokens."""
    min_p: Number | None = None
    repetition_penalty: Number | None = None
    presence_penalty: Number | None = None
    frequency_penalty: Number | None = None
    logit_bias: Annotated[dict[str, Number], Field(max_length=1024)] | None = None
    """Bias by token id."""
    seed: Seed | None = None
    """null = a random seed, reported as ``seed`` of the answer; completion i of n has seed + i."""
    stop: Stop | Annotated[ListOf[Stop], Field(max_length=16)] | None = None
    ignore_eos: StrictBool | None = None
    skip_special_tokens: StrictBool | None = None
    """False = special tokens are part of the text."""
    user: str | None = None
    """Requests of different users of an API key are scheduled fairly."""
    priority: StrictInt | None = None
    """Lower numbers come first."""
    timeout: Annotated[Number, Field(gt=0, le=1_000_000)] | None = None
    """Most seconds for the request, waiting included."""
    speculation: SpeculationBody | None = None
    store: StrictBool | None = None
    """false = not to be recorded, where the server records requests."""
    metadata: dict[str, str] | None = None
    """Accepted without effect, as the next ones, because clients send them by default."""
    service_tier: str | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    prompt_cache_retention: str | None = None


class Sampling(Shared):
    """Common fields of both kinds of completions."""

    n: Annotated[StrictInt, Field(ge=1)] | None = None
    max_tokens: StrictInt | None = None
    return_token_ids: StrictBool | None = None
    """Return the token ids of prompt and completions."""
    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None
    """vLLM's way to ask for a format."""
    min_tokens: StrictInt | None = None
    """Only together with ``ignore_eos``, which gives as many as ``max_tokens``."""
    stop_token_ids: Annotated[Any, lacking("give their texts as stop")] = None
    truncate_prompt_tokens: Annotated[Any, lacking("send a shorter prompt")] = None
    prompt_logprobs: Annotated[Any, lacking("give echo and logprobs of /v1/completions", lambda _: False)] = None
    use_beam_search: Annotated[Any, lacking("leave it out")] = None
    include_stop_str_in_output: Annotated[Any, lacking("add the stop text yourself")] = None
    bad_words: Annotated[Any, lacking("give logit_bias")] = None
    allowed_token_ids: Annotated[Any, lacking("give logit_bias, or a format")] = None
    return_tokens_as_token_ids: Annotated[Any, lacking("give return_token_ids")] = None
    cache_salt: Annotated[Any, lacking("all clients share the prefix cache; use a server of your own")] = None
    guided_json: Annotated[Any, lacking("give structured_outputs")] = None
    guided_regex: Annotated[Any, lacking("give structured_outputs")] = None
    guided_choice: Annotated[Any, lacking("give structured_outputs")] = None
    guided_grammar: Annotated[Any, lacking("give structured_outputs")] = None

    def form(self) -> ResponseFormat | None:
        """The format of the answer; None = any text.

        Raises:
            ValueError: It is asked for in two ways, or ``structured_outputs`` cannot be read.
        """
        if self.structured_outputs is None:
            return None if self.response_format is None or self.response_format.type == "text" else self.response_format
        if self.response_format is not None:
            raise ValueError("response_format and structured_outputs mean the same; give one of them")
        return self.structured_outputs.form()


class Rendering(Body):
    """How the chat template renders a conversation."""

    add_generation_prompt: StrictBool = True
    """Add the beginning of an answer after the conversation."""
    continue_final_message: StrictBool = False
    """Continue the last message instead of beginning a new one."""
    chat_template_kwargs: dict[str, Any] | None = None
    """Additional values for the template."""
    reasoning_effort: Literal["none", "minimal", "low", "medium", "high", "xhigh"] | None = None
    """A value for templates that know it; it also sets their ``enable_thinking``, with "none" to false."""


class Prediction(Body):
    """A predicted part of the answer, from which drafts are made."""

    type: Literal["content"]
    content: Content


class ChatRequest(Sampling, Rendering):
    """POST /v1/chat/completions."""

    messages: Annotated[ListOf[Message], Field(min_length=1)]
    max_completion_tokens: StrictInt | None = None
    logprobs: StrictBool | None = None
    top_logprobs: StrictInt | None = None
    tools: ListOf[Tool] | None = None
    tool_choice: Literal["none", "auto", "required"] | Tool | AllowedChoice | None = None
    parallel_tool_calls: StrictBool | None = None
    prediction: Prediction | None = None
    include_reasoning: StrictBool | None = None
    """False = leave the reasoning out of the answer."""
    modalities: Annotated[Any, lacking("this model writes text only", lambda value: value in ([], ["text"]))] = None
    audio: Annotated[Any, lacking("this model writes text only")] = None
    echo: Annotated[Any, lacking("send the last message again yourself")] = None
    chat_template: Annotated[Any, lacking("the base's own is used")] = None
    add_special_tokens: Annotated[Any, lacking("the chat template adds them")] = None
    functions: Annotated[Any, lacking("give tools")] = None
    function_call: Annotated[Any, lacking("give tools and tool_choice", lambda value: value == "none")] = None
    web_search_options: Annotated[Any, lacking("this model has no web search", lambda _: False)] = None


class CompletionRequest(Sampling):
    """POST /v1/completions."""

    prompt: str | ListOf[str] | ListOf[Token] | ListOf[ListOf[Token]]
    echo: StrictBool | None = None
    add_special_tokens: StrictBool | None = None
    """False = no special tokens at the beginning of a text."""
    logprobs: StrictInt | None = None
    best_of: StrictInt | None = None
    """1, or equal to n."""
    suffix: Annotated[Any, lacking("text can only be continued")] = None
    prompt_embeds: Annotated[Any, lacking("send text or token ids")] = None


class TokenizeRequest(Rendering):
    """POST /tokenize: text, or a conversation as the chat template renders it."""

    model: str | None = None
    prompt: str | None = None
    messages: ListOf[Message] | None = None
    tools: ListOf[Tool] | None = None
    add_special_tokens: StrictBool | None = None
    """Add special tokens at the beginning; null = for prompts, but not for templates, which add them."""
    return_token_strs: StrictBool = False
    chat_template: Annotated[Any, lacking("the base's own is used")] = None
    mm_processor_kwargs: Annotated[Any, lacking("this model reads text only")] = None


class DetokenizeRequest(Body):
    """POST /detokenize."""

    model: str | None = None
    tokens: ListOf[Token]


class HeadsRequest(StrictBody):
    """POST /v1/heads: heads to load at run time, by an admin."""

    name: Annotated[str, Field(pattern=r"^[\w.:/-]{1,128}$")]
    path: Annotated[str, Field(min_length=1)]
    """A directory, or "user/heads" on the Hub."""
    revision: str | None = None
