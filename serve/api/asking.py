"""Converts the body of a request to requests for the engine."""

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import zip_longest

from medusa import SamplingParams, Speculation, Tree
from medusa.drafters.prediction import PredictionDrafter
from medusa.engine.config import EngineConfig
from medusa.sampling import SAMPLING, SPECULATION
from medusa.serve.api.errors import refused, too_long
from medusa.serve.api.protocol import Sampling, SpeculationBody
from medusa.serve.api.service import Service
from medusa.serve.grammar import Following
from medusa.serve.request import Asked

DRAFTING = SPECULATION & SpeculationBody.model_fields.keys() - {"tree"}
"""Fields of ``speculation`` with the meaning of ``Speculation``'s."""
CHOOSING = SAMPLING & Sampling.model_fields.keys() - {"seed", "logit_bias"}
"""Fields with the meaning of ``SamplingParams``'s."""
MOST_DIGITS = 18
"""Most digits of a token id."""
MOST_NODES = EngineConfig().tree_reserve // 2
"""Most nodes of a tree; the cache has room for two such trees after a text."""


@dataclass(frozen=True)
class Wanted:
    """The values that an endpoint made of a body, in addition to the common fields.

    Attributes:
        prompts: Token ids of each prompt.
        longest: Most tokens of a completion, as requested; None = ``usual``.
        logprobs: Number of alternatives per token; None = no log-probabilities.
        usual: Default for ``longest``, limited by the context; None = all that the context has room for.
        prompt_logprobs: As ``logprobs``, for the prompt's tokens.
        tagged: Whether the text must have special tokens, which it is read by.
        constraint: Makes the constraint of a completion; None = no constraint.
        predicted: Token ids of a predicted part of the completion.
        param: The field that holds the prompt.
        texts: Text of each prompt, which its completion goes on from; None = it was token ids, or a conversation.
    """

    prompts: Sequence[list[int]]
    longest: int | None
    logprobs: int | None
    usual: int | None = None
    prompt_logprobs: int | None = None
    tagged: bool = False
    constraint: Callable[[], Following] | None = None
    predicted: Sequence[int] = ()
    param: str = "messages"
    texts: Sequence[str | None] = ()


def ask(service: Service, body: Sampling, wanted: Wanted, client: str) -> list[Asked]:
    """Requests for the engine: n completions of each prompt.

    Raises:
        ApiError: The body asks for something that cannot be served.
    """
    check_count(service, body, len(wanted.prompts))
    if body.min_tokens and not body.ignore_eos:
        raise refused("min_tokens is not supported; set max_tokens and ignore_eos, or leave it out", "min_tokens")
    if body.stream_options is not None and not body.stream:
        raise refused("stream_options needs stream; set stream, or leave it out", "stream_options")
    try:
        speculation = _speculation(service, body, wanted.predicted)
    except ValueError as error:
        raise refused(str(error), "speculation") from error
    limits = [float(limit) for limit in (body.timeout, service.settings.timeout) if limit is not None]
    timeout, priority = min(limits, default=None), body.priority or 0
    seed = body.seed if body.seed is not None else random.getrandbits(31)
    bias, context = _bias(service, body), service.engine.model.base.context_length
    recorded = body.store is not False and speculation.acceptance != "typical"  # which is not the base's own text
    found = []
    for prompt, text in zip_longest(wanted.prompts, wanted.texts):
        params = _params(body, wanted, _longest(wanted, len(prompt), context), bias)
        for number in range(body.n or 1):
            seeded = replace(params, seed=(seed + number) % 2**63)
            asked = prompt, seeded, speculation, wanted.constraint, client, priority, timeout, text, recorded
            found.append(Asked(*asked))
    return found


def check_count(service: Service, body: Sampling, prompts: int) -> None:
    """Check that completions of this number of prompts are not too many.

    Raises:
        ApiError: They are.
    """
    count, most = (body.n or 1) * prompts, service.settings.max_n
    if count > most:
        raise refused(f"n ({count} completions) exceeds the limit ({most}); ask for fewer", "n")
    room = service.engine.settings.max_batch + service.engine.settings.max_waiting
    if count > room:
        raise refused(f"n ({count} completions) exceeds what the server can hold ({room}); ask for fewer", "n")


def _longest(wanted: Wanted, length: int, context: int) -> int:
    """Most tokens of a completion."""
    room, asked = context - length, wanted.longest
    if room < min(1, 1 if asked is None else asked):
        raise too_long(context, f"the prompt has {length}, which leaves no room for an answer", wanted.param)
    if asked is None:
        return room if wanted.usual is None else min(room, wanted.usual)
    if asked > room:
        raise too_long(context, f"the prompt has {length} and the answer may have {asked}", wanted.param)
    return asked


def _speculation(service: Service, body: Sampling, predicted: Sequence[int]) -> Speculation:
    asked, heads = body.speculation, service.models.heads_of(body.model)
    given = {name: value for name in DRAFTING if (value := getattr(asked, name, None)) is not None}
    drafting = given.keys() & {"drafter", "nodes"} or (asked is not None and asked.tree is not None)
    if asked is not None and not asked.enabled:
        if drafting:
            raise ValueError("speculation (enabled: false) also says how to draft; leave one out")
        given["nodes"] = 1
    elif predicted and not drafting:
        given["drafter"] = PredictionDrafter(predicted, service.engine.model.base.cheap_rows)
    paths = None if asked is None else asked.tree
    nodes = given.get("nodes", 0) if paths is None else len(paths) + 1
    if nodes > MOST_NODES:
        raise ValueError(f"nodes ({nodes}) exceed the limit ({MOST_NODES}); ask for a smaller tree")
    tree = None if paths is None else Tree(tuple(map(tuple, paths)))
    return Speculation(**given, heads=heads, tree=tree)


def _bias(service: Service, body: Sampling) -> dict[int, float] | None:
    try:
        bias = {_index(token): value for token, value in (body.logit_bias or {}).items()}
        service.engine.model.base.check_tokens("logit_bias", bias)
    except ValueError as error:
        raise refused(str(error), "logit_bias") from error
    return bias or None


def _index(token: str) -> int:
    """The token id that a key of ``logit_bias`` names."""
    digits = token.removeprefix("-")
    if not digits.isascii() or not digits.isdigit() or len(digits) > MOST_DIGITS:  # Python would take more for a number
        raise ValueError(f"logit_bias: key ({token[: 2 * MOST_DIGITS]}) is not a number; its keys are token ids")
    return int(token)


def _params(body: Sampling, wanted: Wanted, longest: int, bias: dict[int, float] | None) -> SamplingParams:
    """The sampling parameters; an ApiError names the field that is wrong."""
    given = {"temperature": 1.0} | {name: value for name in CHOOSING if (value := getattr(body, name)) is not None}
    if given.get("top_k") == -1:
        given["top_k"] = 0
    if wanted.tagged:
        given["skip_special_tokens"] = False
    try:
        return SamplingParams(
            **given,
            max_new_tokens=longest,
            logprobs=wanted.logprobs,
            prompt_logprobs=wanted.prompt_logprobs,
            logit_bias=bias,
        )
    except ValueError as error:
        message = str(error).replace("max_new_tokens", "max_tokens")
        if "top_logprobs" in type(body).model_fields and message.startswith("logprobs"):
            message = f"top_{message}"
        field = message.split(maxsplit=1)[0]
        raise refused(message, field if field in type(body).model_fields else None) from error
