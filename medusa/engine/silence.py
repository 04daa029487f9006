"""A warning if a drafter that a request named drafted nothing: the text is right, but decoding was slow."""

import logging
from functools import cache

from medusa.engine.request import Request

logger = logging.getLogger(__name__)

ENOUGH = 8
"""Least number of steps without a draft before a warning."""
REASONS = {
    "heads": "a CPU leaves out guesses below a minimum probability, and these heads made no others; train them"
    " longer, or on answers of this base",
    "hybrid": "the heads made no guess that was likely enough, and nothing in the text repeats",
    "prompt-lookup": "nothing in the text repeats",
    "ngram": "nothing like this text was met before; fill model.ngrams, or complete more texts with it",
}
"""Likely reasons by the name of the drafter."""


def say_if_silent(request: Request) -> None:
    """Warn if a completion has ended without a draft, once for each reason."""
    wanted, output = request.speculation, request.output
    asked = isinstance(wanted.drafter, str) and (wanted.nodes or 1) > 1
    if asked and not output.draft_tokens and output.steps > ENOUGH:
        _say(wanted.drafter, REASONS.get(wanted.drafter, "its guesses were not likely enough"))


@cache
def _say(drafter: str, reason: str) -> None:
    logger.warning("drafter %r drafted nothing, so decoding was plain: %s", drafter, reason)
