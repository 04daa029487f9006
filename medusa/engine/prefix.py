"""Prompts that begin like texts before them: a conversation is not computed again turn by turn."""

from medusa.base.model import BaseModel
from medusa.cache import BlockPool


class Prefix:
    """The KV cache of earlier texts, kept for the next prompts; the caller owns it.

    Whole blocks that a prompt and an earlier text begin with are not computed again: the completion is the one that an
    empty cache would give.

    Args:
        tokens: Positions that it may hold; the text that was unused for longest goes first. None = as many as one text
            needs at a time, and earlier texts as long as their memory is not needed.

    Example:
        >>> prefix = Prefix()
        >>> first = model.generate(prompt, prefix=prefix)
        >>> second = model.generate(prompt + first.tokens + question, prefix=prefix)
    """

    def __init__(self, tokens: int | None = None) -> None:
        self._tokens = tokens
        self._pool: BlockPool | None = None

    def clear(self) -> None:
        """Forget all texts and free their memory."""
        self._pool = None

    def pool(self, base: BaseModel) -> BlockPool:
        """The pool that keeps the texts of this base; texts of another base are forgotten."""
        if self._pool is None or self._pool.owner is not base.model:
            self._pool = base.new_pool(self._tokens)
        return self._pool
