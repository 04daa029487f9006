"""Limits of the engine; one home for each. Imports nothing heavy."""

from dataclasses import dataclass


@dataclass(frozen=True)
class EngineConfig:
    """How much a ``Batch`` does at a time.

    Raises:
        ValueError: A value out of its range.
    """

    max_requests: int | None = None
    """Requests that are computed together, in prefill or decoding; others wait. None = no limit."""
    pass_tokens: int = 16_384
    """Prompt tokens that one pass computes, at most: as many as keep any device busy."""
    chunk: int = 512
    """Tokens of one prompt that one pass computes, at most: bounds the memory of long prompts."""
    tree_reserve: int = 128
    """Positions behind a text that are kept free for trees where a request's room is checked."""

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if value is not None and value < 1:
                raise ValueError(f"{name} ({value}) must be at least 1; raise it")
