"""Requests that do not decode yet: they wait for room, then their prompts are computed chunk by chunk."""

from collections import deque
from collections.abc import Iterator, Sequence
from itertools import groupby

from medusa.base.model import BaseModel
from medusa.cache import BLOCK, BlockPool, SlotCache
from medusa.engine.prefill import CHUNK, Prefill
from medusa.engine.row import Row

HEADROOM = 256
"""Rows that a new cache has for a completion; a longer one makes it grow."""


class Prompts:
    """Who comes next, in the order in which they came.

    Args:
        base: Prepared for decoding.
        pool: Where rows stand and are found again; requests wait until it has room for all that they may come to. None
            = caches of their own, nobody waits.
        rows: Prompt tokens that one step computes, at most.
    """

    def __init__(self, base: BaseModel, pool: BlockPool | None, rows: int) -> None:
        self._base, self._pool, self._rows = base, pool, rows
        self._waiting: list[Row] = []
        self._prefills: deque[tuple[list[Row], Prefill]] = deque()

    def __iter__(self) -> Iterator[Row]:
        """All requests, those too that have ended beside others in one prefill."""
        yield from self._waiting
        for rows, _ in self._prefills:
            yield from rows

    def add(self, row: Row, cache: SlotCache | None = None) -> None:
        """Let a request wait.

        Args:
            row: The request.
            cache: One slot with the rows of its first tokens; it begins at once.

        Raises:
            PoolFullError: There will never be room for it.
        """
        if cache is not None:
            row.completion.output.cached_tokens = cache.host_lengths[0]
            self._prefills.append(([row], Prefill(self._base, cache, [row.prompt], [row.params.seed])))
            return
        if self._pool is not None:
            self._pool.check(row.most_rows)
        self._waiting.append(row)

    def drop(self) -> None:
        """Let those go that have ended."""
        self._waiting = [row for row in self._waiting if row.completion.active]
        self._prefills = deque(
            (rows, job) for rows, job in self._prefills if any(row.completion.active for row in rows)
        )

    def take(self) -> list[tuple[list[Row], Prefill]]:
        """The oldest prompts in progress, as many as one pass may compute chunks of; ``put_back`` those that go on."""
        if not self._waiting and not self._prefills:
            return []
        # Where passes are shared, each prompt is by itself. Elsewhere prompts of as many chunks are computed together,
        # the short ones first; in a group the longest stands first, see ``Prefill``.
        missing, self._waiting = self._let_in()
        order = sorted(missing, key=lambda row: (_chunks(missing[row]), -missing[row]))
        for _, group in groupby(order, lambda row: _chunks(missing[row])):
            waiting = list(group)
            while waiting:
                together = max(1, self._rows // min(CHUNK, missing[waiting[0]])) if not self._base.joins else 1
                rows, waiting = waiting[:together], waiting[together:]
                self._prefills.append((rows, self._begin(rows)))
        taken, room = list[tuple[list[Row], Prefill]](), self._rows
        while self._prefills and (not taken or self._prefills[0][1].rows <= room):
            taken.append(self._prefills.popleft())
            room -= taken[-1][1].rows
        return taken

    def put_back(self, rows: list[Row], prefill: Prefill) -> None:
        """Behind the others: long prompts take turns."""
        self._prefills.append((rows, prefill))

    def _let_in(self) -> tuple[dict[Row, int], list[Row]]:
        """Which requests begin now, with how many tokens that must be computed; and which go on waiting.

        They do so until the pool has room for them, in the order in which they came, and while another one computes
        what they need too.
        """
        pool, missing = self._pool, dict[Row, int]()
        if pool is None:
            return {row: len(row.prompt) for row in self._waiting}, []
        computing = [row.prompt for rows, _ in self._prefills for row in rows if row.completion.active]
        later = []
        for place, row in enumerate(self._waiting):
            known = pool.known(row.prompt[:-2]) if self._base.mtp is None else 0
            if self._base.mtp is None and _computed(row.prompt, known, computing):
                later.append(row)
            elif pool.claim(row, row.most_rows):
                missing[row] = len(row.prompt) - known
                computing.append(row.prompt)
            else:
                return missing, later + self._waiting[place:]
        return missing, later

    def _begin(self, rows: list[Row]) -> Prefill:
        room = max(len(row.prompt) + min(row.completion.max_new_tokens, HEADROOM) for row in rows)
        cache = self._base.new_cache(len(rows), room, pool=self._pool)
        prompts, seeds = [row.prompt for row in rows], [row.params.seed for row in rows]
        for row, found in zip(rows, cache.recall([prompt[:-2] for prompt in prompts]), strict=True):
            row.completion.output.cached_tokens = found
        return Prefill(self._base, cache, prompts, seeds)


def _chunks(missing: int) -> int:
    return -(-missing // CHUNK)


def _computed(prompt: Sequence[int], known: int, computing: Sequence[Sequence[int]]) -> bool:
    """Whether one of these prompts fills the first block that is not known of this one."""
    end = known + BLOCK
    return end <= len(prompt) - 2 and any(len(other) > end and other[:end] == prompt[:end] for other in computing)
