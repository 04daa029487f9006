"""A prefix cache for the caller: the turns of a conversation are not computed again."""

from medusa.base.model import BaseModel
from medusa.cache import BlockPool


class Prefix:
    """The KV cache of earlier texts, kept for the next prompts; the caller owns it.

    Full blocks at the beginning of both a prompt and an earlier text are not computed again. The completion is the one
    that an empty cache would give.

    Args:
        tokens: Most positions that it holds; the least recently used text is dropped first. None = as many as the
            present text needs; earlier texts are kept until their memory is needed.

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
