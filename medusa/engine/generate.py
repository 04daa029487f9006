"""The decode loop of ``generate`` and ``stream``: all prompts join one batch, which steps until none is left.

while requests grow:
    compute chunks of the texts that wait                                  (medusa/engine/scheduler.py)
    draft a tree, verify it in one pass, accept a path, commit it          (medusa/engine/step.py)
    hand the new tokens to the requests, which decide when they end        (medusa/engine/output.py)
"""

from collections.abc import Generator, Sequence

from medusa.cache import PoolFullError
from medusa.engine.batch import Batch
from medusa.engine.output import Piece
from medusa.engine.request import Request
from medusa.sampling import SamplingParams, Speculation

Asked = tuple[list[int], SamplingParams, Speculation]
"""Token ids of a prompt, how its completion is chosen, and how it is drafted."""


def start(
    batch: Batch, asked: Sequence[Asked], incremental: bool = False
) -> tuple[list[Request], Generator[list[list[Piece]]]]:
    """Check everything; the requests, and the loop that grows them: it yields the new text of each.

    Args:
        batch: An empty one.
        asked: At least one.
        incremental: Make text token by token, for streaming.

    Raises:
        ValueError: See ``Batch.add``; or, as it runs, the KV cache is shared and others fill it.
    """
    requests = [batch.add(*one, incremental) for one in asked]
    return requests, _decode(batch, requests)


def _decode(batch: Batch, requests: Sequence[Request]) -> Generator[list[list[Piece]]]:
    """The loop; where it is stopped early, the requests leave the batch."""
    try:
        while any(request.active for request in requests):
            grown = batch.step()
            if batch.stuck:
                raise PoolFullError(
                    f"KV cache ({batch.pool.tokens} positions) is full of other texts that still grow; end them first,"
                    " or give this call a cache of its own"
                )
            yield [grown.get(request, []) for request in requests]
    finally:
        for request in requests:
            batch.remove(request)
