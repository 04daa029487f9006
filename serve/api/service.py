"""What the endpoints share, and the way of a request through them."""

import asyncio
import json
import random
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import aclosing, suppress
from copy import deepcopy
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, TypeVar

from fastapi import Request as HttpRequest

from medusa import SamplingParams, Speculation, Tree
from medusa.engine.config import EngineConfig
from medusa.sampling import SAMPLING, SPECULATION
from serve.api.errors import ApiError, as_api_error, refused
from serve.api.protocol import Message, Sampling, SpeculationBody
from serve.engine import Engine
from serve.models import Models
from serve.request import Asked, Delta, Ticket
from serve.settings import ApiSettings

if TYPE_CHECKING:
    from serve.grammar import Grammars

Result = TypeVar("Result")
DRAFTING = SPECULATION & SpeculationBody.model_fields.keys() - {"tree"}
"""Fields of ``speculation`` that mean what they mean in ``Speculation``."""
CHOOSING = SAMPLING & Sampling.model_fields.keys() - {"seed", "logit_bias"}
"""Fields that mean what they mean in ``SamplingParams``."""
MOST_NODES = EngineConfig().tree_reserve // 2
"""Of a request's trees: two of them have room behind its text."""
LONGEST_TOKEN = 64
"""Characters; a text with more than so many for each token of the context is not encoded."""
DISCONNECTED = 0.2
"""Seconds between two looks whether a client is still there."""
CLIENT_GONE = 499
"""Nginx's status; nobody reads it."""


@dataclass
class Service:
    """The engine behind the API.

    Attributes:
        tokenizer: A copy of the base's: tokenizers are not made for several threads.
    """

    engine: Engine
    models: Models
    grammars: "Grammars"
    settings: ApiSettings
    tokenizer: Any = field(init=False)

    def __post_init__(self) -> None:
        self.tokenizer = deepcopy(self.engine.model.base.tokenizer)
        self._texts = ThreadPoolExecutor(1, thread_name_prefix="texts")

    async def aside(self, function: Callable[..., Result], *arguments: Any) -> Result:
        """Compute with texts while the event loop goes on."""
        return await asyncio.get_running_loop().run_in_executor(self._texts, function, *arguments)

    @property
    def context_length(self) -> int:
        """Of the base, in tokens."""
        return self.engine.model.base.context_length

    def encode(self, text: str, special: bool = True) -> list[int]:
        """Token ids of a text."""
        self._check_length(len(text))
        ids: list[int] = self.tokenizer(text, add_special_tokens=special).input_ids
        return ids

    def render(self, messages: Sequence[Message], tools: Sequence[dict[str, Any]] | None = None) -> list[int]:
        """Token ids of a conversation up to where the answer begins.

        Raises:
            ApiError: There is no template, or it refuses.
        """
        from medusa.prompts import render_messages

        said = [_plain(message) for message in messages]
        self._check_length(sum(len(message["content"]) for message in said))
        try:
            return render_messages(self.tokenizer, said, self.models.name, tools)
        except ValueError as error:
            raise refused(str(error), "messages") from error

    def _check_length(self, characters: int) -> None:
        """Refuse text that cannot fit before it is encoded."""
        if characters > LONGEST_TOKEN * self.context_length:
            raise refused(f"text ({characters} characters) exceeds the context ({self.context_length} tokens); cut it")

    def requests(
        self,
        body: Sampling,
        prompts: Sequence[list[int]],
        max_tokens: int | None,
        logprobs: int | None,
        constraint: Callable[[], Any] | None,
        client: str,
    ) -> list[Asked]:
        """What the engine is asked for: n completions of each prompt.

        Raises:
            ApiError: Something in the body cannot be served.
        """
        count = (body.n or 1) * len(prompts)
        if count > self.settings.max_n:
            raise refused(f"n ({count} completions) exceeds the limit ({self.settings.max_n}); ask for fewer", "n")
        if body.stream_options is not None and not body.stream:
            raise refused("stream_options needs stream; set stream, or leave it out", "stream_options")
        try:
            speculation = self._speculation(body)
        except ValueError as error:
            raise refused(str(error), "speculation") from error
        limits = [float(limit) for limit in (body.timeout, self.settings.timeout) if limit is not None]
        timeout, priority = min(limits, default=None), body.priority or 0
        seed = body.seed if body.seed is not None else random.getrandbits(31)
        found = []
        for prompt in prompts:
            room = max(1, self.context_length - len(prompt))
            params = _params(body, room if max_tokens is None else max_tokens, logprobs)
            for number in range(body.n or 1):
                seeded = replace(params, seed=(seed + number) % 2**63)
                found.append(Asked(prompt, seeded, speculation, constraint, client, priority, timeout))
        return found

    def _speculation(self, body: Sampling) -> Speculation:
        asked, heads = body.speculation, self.models.heads_of(body.model)
        if asked is None:
            return Speculation(heads=heads)
        given = {name: value for name in DRAFTING if (value := getattr(asked, name)) is not None}
        if not asked.enabled:
            if given.keys() & {"drafter", "nodes"} or asked.tree is not None:
                raise ValueError("speculation is not enabled and says how to draft; leave one out")
            given["nodes"] = 1
        nodes = max(asked.nodes or 0, len(asked.tree or ()) + 1)
        if nodes > MOST_NODES:
            raise ValueError(f"nodes ({nodes}) exceed the limit ({MOST_NODES}); ask for a smaller tree")
        tree = None if asked.tree is None else Tree(tuple(tuple(path) for path in asked.tree))
        return Speculation(**given, heads=heads, tree=tree)

    async def start(self, requests: Sequence[Asked]) -> list[Ticket]:
        """Send requests on their way; all of them are taken, or none.

        Raises:
            ApiError: One is refused.
        """
        tickets = [self.engine.submit(request) for request in requests]
        try:
            for ticket in tickets:
                await ticket.taken()
        except BaseException as error:
            for ticket in tickets:
                ticket.cancel()
            if isinstance(error, Exception):
                raise as_api_error(error) from error
            raise
        return tickets


async def merged(tickets: Sequence[Ticket]) -> AsyncGenerator[tuple[int, Delta]]:
    """What the completions grow by, with their numbers, in the order in which it comes."""
    if len(tickets) == 1:
        async with aclosing(tickets[0].deltas()) as deltas:
            async for delta in deltas:
                yield 0, delta
        return
    arrived: asyncio.Queue[tuple[int, Delta | Exception | None]] = asyncio.Queue()

    async def pump(number: int, ticket: Ticket) -> None:
        try:
            async with aclosing(ticket.deltas()) as deltas:
                async for delta in deltas:
                    arrived.put_nowait((number, delta))
        except Exception as error:  # noqa: BLE001 - it is raised where deltas are read
            arrived.put_nowait((number, error))
        arrived.put_nowait((number, None))

    pumps = [asyncio.create_task(pump(number, ticket)) for number, ticket in enumerate(tickets)]
    try:
        left = len(pumps)
        while left:
            number, event = await arrived.get()
            if isinstance(event, Exception):
                raise event
            if event is None:
                left -= 1
            else:
                yield number, event
    finally:
        for task in pumps:
            task.cancel()
        for ticket in tickets:
            ticket.cancel()


async def while_connected(request: HttpRequest, work: Awaitable[Result]) -> Result:
    """The result of the work, which ends when the client goes away.

    Raises:
        ApiError: It has gone.
    """
    task = asyncio.ensure_future(work)
    try:
        while not (await asyncio.wait({task}, timeout=DISCONNECTED))[0]:
            if await request.is_disconnected():
                raise ApiError(CLIENT_GONE, "the client has gone")
        return task.result()
    finally:
        task.cancel()


def _params(body: Sampling, longest: int, logprobs: int | None) -> SamplingParams:
    """How tokens are chosen; an ApiError names the field that is wrong."""
    given = {"temperature": 1.0} | {name: value for name in CHOOSING if (value := getattr(body, name)) is not None}
    if given.get("top_k") == -1:
        given["top_k"] = 0
    try:
        bias = {int(token): value for token, value in (body.logit_bias or {}).items()} or None
    except ValueError as error:
        raise refused(f"logit_bias: {error}; its keys are token ids", "logit_bias") from error
    try:
        return SamplingParams(**given, max_new_tokens=longest, logprobs=logprobs, logit_bias=bias)
    except ValueError as error:
        message = str(error).replace("max_new_tokens", "max_tokens")
        field = message.split(maxsplit=1)[0]
        raise refused(message, field if field in type(body).model_fields else None) from error


def _plain(message: Message) -> dict[str, Any]:
    """A message as chat templates know it."""
    said = message.model_dump(exclude_none=True, exclude={"refusal"})
    for call in said.get("tool_calls", ()):
        call.pop("index", None)
        with suppress(ValueError):  # templates write arguments as JSON themselves
            call["function"]["arguments"] = json.loads(call["function"]["arguments"])
    if isinstance(message.content, list):
        said["content"] = "".join(part.text for part in message.content)
    said.setdefault("content", "")
    if said["role"] == "developer":
        said["role"] = "system"
    return said
