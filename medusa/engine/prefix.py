"""Prompts that begin like the text before them: a conversation is not computed again turn by turn."""

from collections.abc import Sequence
from itertools import takewhile

from medusa.base.model import BaseModel
from medusa.cache import SlotCache


class Prefix:
    """The cached rows of one text, kept for the next prompt; the caller owns it.

    What both texts begin with stays, the rest is cut: the completion is the one that an empty cache would give.

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

    def take(self, base: BaseModel, prompt: Sequence[int]) -> SlotCache:
        """A cache of one slot that holds the rows of the beginning of ``prompt``; give it back with ``keep``.

        Until then others get an empty one: two completions at the same time never share rows.

        Args:
            base: A base other than the last call's starts from nothing.
            prompt: Token ids; the rows of the last two are never reused (see ``Prefill``).
        """
        cache, self._cache = self._cache, None
        if cache is None or base is not self._base:
            cache, self._tokens = base.new_cache(1), []
        pairs = zip(self._tokens, prompt[:-2], strict=False)
        cache.cut([sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))])
        return cache

    def keep(self, base: BaseModel, cache: SlotCache, tokens: Sequence[int]) -> None:
        """Take back what ``take`` gave, with the text that it holds now, or the beginning of it.

        After an interruption too, since a step counts its rows only when they are complete.
        """
        self._base, self._cache, self._tokens = base, cache, list(tokens[: cache.host_lengths[0]])
