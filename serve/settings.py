"""Settings of the server; one home for every default. Imports nothing heavy."""

from dataclasses import dataclass


@dataclass(frozen=True)
class EngineSettings:
    """Limits of the engine."""

    max_batch: int = 64
    """Requests that decode together."""
    max_waiting: int = 256
    """Requests that wait for room in the batch; more are refused."""
    cache_tokens: int | None = None
    """Rows of the KV cache: requests wait until theirs fit, the longest completion that they ask for included. Memory
    is used when they are written. None = as many as fit into 40 % of the memory."""
    prefill_rows: int = 512
    """Prompt tokens that one pass computes between two decode steps."""


@dataclass(frozen=True)
class ApiSettings:
    """Who may ask, for how much, and what is told."""

    name: str = ""
    """Under which the base is served; empty = the last part of its own name."""
    api_keys: frozenset[str] = frozenset()
    """One of them must come as a bearer token; none = everyone may ask."""
    admin_key: str = ""
    """Of /v1/heads; empty = nobody may load heads at run time."""
    origins: tuple[str, ...] = ()
    """Web pages of other hosts that may ask (CORS); "*" = all."""
    max_body: int = 4 << 20
    """Bytes of a request."""
    max_n: int = 16
    """Completions of a request, prompts times n."""
    timeout: float | None = None
    """Seconds that a request may take with waiting, unless it asks for less; None = as long as it takes."""
    spec_metrics: bool = False
    """Answers bring ``metrics.speculative_decoding`` unless they say otherwise."""
