"""Prompts that begin like the text before them: a conversation is not computed again turn by turn."""

from collections.abc import Generator, Sequence
from contextlib import contextmanager
from itertools import takewhile

from medusa.base.model import BaseModel
from medusa.cache import SlotCache
from medusa.engine.output import Answer


class Prefix:
    """The cached rows of one text, kept for the next prompt; the caller owns it.

    What both texts begin with stays, the rest is cut: the answer is the one that an empty cache would give.

    Example:
        >>> prefix = Prefix()
        >>> first = model.generate(prompt, prefix=prefix)
        >>> second = model.generate(prompt + first.tokens + question, prefix=prefix)
    """

    def __init__(self) -> None:
        self._base: BaseModel | None = None
        self._cache: SlotCache | None = None
        self._tokens: list[int] = []

    def clear(self) -> None:
        """Forget the text and free its memory."""
        self._base, self._cache, self._tokens = None, None, []

    @contextmanager
    def lend(self, base: BaseModel, prompt: Sequence[int], answer: Answer) -> Generator[SlotCache]:
        """A cache of one slot that holds the rows of the beginning of ``prompt``; it comes back with the answer's.

        Until then others get an empty one: two answers at the same time never share rows. It comes back after an
        interruption too, since a step counts its rows only when they are complete.

        Args:
            base: A base other than the last call's starts from nothing.
            prompt: Token ids; the rows of the last two are never reused (see ``prefill``).
            answer: Grows while the cache is lent.
        """
        cache, self._cache = self._cache, None
        if cache is None or base is not self._base:
            cache, self._tokens = base.new_cache(1), []
        pairs = zip(self._tokens, prompt[:-2], strict=False)
        answer.output.cached_tokens = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))
        cache.cut([answer.output.cached_tokens])
        try:
            yield cache
        finally:
            tokens = [*prompt, *answer.output.tokens]
            self._base, self._cache, self._tokens = base, cache, tokens[: cache.host_lengths[0]]
