"""Figures of a level of load."""

from collections import Counter
from collections.abc import Iterable
from typing import Any

import numpy

from medusa.benchmarks.serving.load import Level


def summarize(level: Level) -> dict[str, Any]:
    """Tokens per second and the distributions of times, in seconds, within the window.

    Errors are those of the whole level. ``inter_token`` has an entry per token (gap / tokens) if the server reports the
    tokens of each chunk, otherwise one per chunk; ``inter_token_of`` tells which.
    """
    whole = [answer for answer in level.answers if answer.error is None]
    errors = Counter(answer.error for answer in level.answers if answer.error is not None)
    counted = bool(whole) and all(answer.counted for answer in whole)
    tokens, first, between, ends = 0.0, [], [], []
    for answer in whole:
        shares = answer.shares()
        for place, (when, share) in enumerate(zip(answer.times, shares, strict=True)):
            if not level.opened <= when <= level.closed:
                continue
            tokens += share
            if place == 0:
                first.append(when - answer.asked)
                continue
            gap = when - answer.times[place - 1]
            number = max(1, round(share)) if counted else 1
            between += [gap / number] * number
        if level.opened <= answer.ended <= level.closed:
            ends.append(answer)
    seconds = level.closed - level.opened
    chunks = sum(len(answer.times) for answer in whole)
    return {
        "clients": level.clients,
        "seconds": seconds,
        "tokens_per_second": tokens / seconds,
        "requests": len(ends),
        "errors": errors.total(),
        "error_messages": dict(errors.most_common(5)),
        "first_token": _distribution(first),
        "inter_token": _distribution(between),
        "inter_token_of": "token" if counted else "chunk",
        "end_to_end": _distribution(answer.ended - answer.asked for answer in ends),
        "tokens": tokens,
        "tokens_from": "usage" if whole and all(answer.tokens is not None for answer in whole) else "chunks",
        "tokens_per_chunk": sum(answer.count for answer in whole) / chunks if chunks else None,
        "tokens_per_request": sum(answer.count for answer in ends) / len(ends) if ends else None,
    }


def _distribution(values: Iterable[float]) -> dict[str, float | int | None]:
    known = list(values)
    points = numpy.percentile(known, [50, 90, 99]).tolist() if known else [None] * 3
    return {"count": len(known), **dict(zip(("p50", "p90", "p99"), points, strict=True))}
