"""Which requests are computed next: they wait for room, then their prompts are computed in chunks.

Blocks are reserved as they are needed, and not for the longest possible completion. If the pool runs out of blocks, the
newest request gives its blocks back, waits, and later continues with the same text (preemption). Then no request is
admitted until one has ended, because the new request would soon be preempted again.
"""

from collections import Counter, deque
from collections.abc import Iterator, Sequence

from medusa.base.model import BaseModel
from medusa.cache import BlockPool, CachedSequence
from medusa.engine.config import EngineConfig
from medusa.engine.prefill import Chunk
from medusa.engine.request import Request


class Scheduler:
    """The requests of a batch that do not decode.

    Args:
        pool: The KV cache.
        config: Limits.
        base: The base; if it can only decode plainly, a chunk is one token.
    """

    def __init__(self, pool: BlockPool, config: EngineConfig, base: BaseModel) -> None:
        self.pool, self._config = pool, config
        self._chunk = 1 if base.decoding == "plain" else min(config.chunk, config.pass_tokens)
        self._recurrent = base.recurrent
        self._waiting: list[Request] = []
        self._prompts: deque[Request] = deque()
        self._full = False  # the pool ran out of blocks, and no request has ended since

    def __iter__(self) -> Iterator[Request]:
        """All of them."""
        yield from self._waiting
        yield from self._prompts

    @property
    def waiting(self) -> int:
        """Requests that wait for room."""
        return len(self._waiting)

    def add(self, request: Request) -> None:
        """Let a request wait, a new one or one that has lost its room."""
        self._waiting.append(request)

    def drop(self) -> None:
        """Remove requests that have ended."""
        for request in self._prompts:
            if not request.active:
                request.close()
                self.ended()
        self._waiting = [request for request in self._waiting if request.active]
        self._prompts = deque(request for request in self._prompts if request.active)

    def schedule(self, decoding: Sequence[Request]) -> list[Chunk]:
        """The chunks that the next pass computes; long texts take turns.

        Args:
            decoding: The requests that decode in the same pass.
        """
        if not self._waiting and not self._prompts:
            return []
        self._admit(decoding)
        chunks, budget = list[Chunk](), self._config.pass_tokens
        for request in list(self._prompts):
            size = self._size(request)
            if size > budget:
                break
            chunks.append(Chunk(request, size))
            budget -= size
            self._prompts.rotate(-1)
        return chunks

    def _size(self, request: Request) -> int:
        """Tokens of a text's next chunk."""
        size, length = min(request.missing, self._chunk), request.cached.length
        if self._recurrent and size == request.missing:
            # States are saved at the end of a chunk, and found where a block ends, see ``RecurrentStates.save``.
            last = (length + size - 1) // self.pool.size * self.pool.size
            return last - length if last > length else size
        return size

    def finish(self, request: Request) -> None:
        """Remove a request whose whole text is computed; it decodes from now on."""
        self._prompts.remove(request)

    def ended(self) -> None:
        """Note that an admitted request has ended and freed its blocks."""
        self._full = False

    def preempt(self, needed: int, decoding: Sequence[Request]) -> Request | None:
        """The request to preempt if ``needed`` blocks are not available; None if they are.

        A request that is alone in its pool always has room, see ``BlockPool.check``; if another batch uses the pool
        too, it may have to wait.
        """
        if needed <= self.pool.available:
            return None
        last = max([*decoding, *self._prompts], key=lambda request: request.order)
        if last in self._prompts:
            self._prompts.remove(last)
        self._full = True
        return last

    def _admit(self, decoding: Sequence[Request]) -> None:
        """Admit requests while the pool has room for their texts and one more block for each admitted request."""
        under_way = [*decoding, *self._prompts]
        if self._full and under_way:
            return
        clients = Counter(request.client for request in under_way)
        owed = sum(request.cached.missing(request.length) for request in self._prompts) + len(under_way)
        held_up = list[Request]()
        while self._waiting and len(under_way) < (self._config.max_requests or len(under_way) + 1):
            request = min(self._waiting, key=lambda one: (one.priority, clients[one.client], one.number))
            # The prefix cache may supply all but the last token to compute, whose logits or hidden state are needed.
            text = [] if request.unscored else request.text[: -1 - request.resumed]
            known = self.pool.known(text, request.observers)
            if self._computed_by_another(text, known):
                held_up.append(request)
            else:
                needed = self.pool.needed(text[:known], request.length) + 1
                if owed + needed > self.pool.available:
                    break
                owed += needed
                self._begin(request, text)
                clients[request.client] += 1
                under_way.append(request)
            self._waiting.remove(request)
        self._waiting = held_up + self._waiting

    def _begin(self, request: Request, text: list[int]) -> None:
        request.sequence = CachedSequence(self.pool, request.observers)
        found = request.sequence.recall(text)
        if not request.output.tokens:
            request.output.cached_tokens = found
        self._prompts.append(request)

    def _computed_by_another(self, text: list[int], known: int) -> bool:
        """Whether another admitted request is computing the first unknown block of this text, to compute it once."""
        end = known + self.pool.size
        beginning = text[:end]
        return end <= len(text) and any(
            request.length >= end
            and request.text[:end] == beginning
            # Of a block that is computed already there may be no states, and none will come.
            and not (self._recurrent and request.cached.length >= end)
            for request in self._prompts
        )
