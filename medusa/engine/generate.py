"""The decode loop of ``generate`` and ``stream``: all prompts join one batch, which steps until none is left.

while requests grow:
    compute chunks of waiting prompts                                      (medusa/engine/scheduler.py)
    draft a tree, verify it in one pass, accept a path, commit it          (medusa/engine/step.py)
    hand the new tokens to the requests, which decide when they end        (medusa/engine/output.py)
"""

from collections.abc import Generator, Sequence

from medusa.cache import PoolFullError
from medusa.engine.batch import Batch
from medusa.engine.output import Piece
from medusa.engine.request import Request
from medusa.sampling import SamplingParams, Speculation

Asked = tuple[list[int], SamplingParams, Speculation, bool]
"""Token ids of a prompt, how its completion is sampled and drafted, and whether its text goes on from the prompt's."""


def start(
    batch: Batch, asked: Sequence[Asked], incremental: bool = False
) -> tuple[list[Request], Generator[list[list[Piece]]]]:
    """Check and add requests; returns them and the loop, which yields the new text of each request per step.

    Args:
        batch: An empty batch.
        asked: At least one prompt with its parameters.
        incremental: Decode text token by token, for streaming.

    Raises:
        ValueError: See ``Batch.add``. In the loop: users outside this batch fill a shared KV cache.
    """
    requests = [
        batch.add(prompt, sampling, speculation, incremental, continues=text)
        for prompt, sampling, speculation, text in asked
    ]
    return requests, _decode(batch, requests)


def _decode(batch: Batch, requests: Sequence[Request]) -> Generator[list[list[Piece]]]:
    """The loop; if it is stopped early, the requests leave the batch."""
    try:
        while any(request.active for request in requests):
            grown = batch.step()
            if batch.stuck and not grown:  # where a request has ended, the next step has its room
                raise PoolFullError(
                    f"KV cache ({batch.pool.tokens} positions) is full of other texts that still grow; end them first,"
                    " or give this call a cache of its own"
                )
            yield [grown.get(request, []) for request in requests]
    finally:
        for request in requests:
            batch.remove(request)
