"""Limits of the engine; one home for each. Imports nothing heavy."""

from dataclasses import dataclass

from medusa.sampling import check_whole


@dataclass(frozen=True)
class EngineConfig:
    """Limits of what a ``Batch`` computes at a time.

    Raises:
        ValueError: A value out of its range.
    """

    max_requests: int | None = None
    """Most requests that are computed together, in prefill or decoding; others wait. None = no limit."""
    pass_tokens: int = 16_384
    """Most prompt tokens of one pass; enough to keep any device busy."""
    chunk: int = 512
    """Most tokens of one prompt in one pass; bounds the memory of long prompts."""
    tree_reserve: int = 128
    """Positions after a text that are kept free for trees when the room for a request is checked."""

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if value is None and name == "max_requests":
                continue
            check_whole(name, value)
            if value < 1:
                raise ValueError(f"{name} ({value}) must be at least 1; raise it")
