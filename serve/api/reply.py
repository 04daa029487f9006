"""An answer, whole or as a stream; what both endpoints have in common."""

import time
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from typing import Any, Protocol
from uuid import uuid4

from serve.api.errors import as_api_error
from serve.api.protocol import Sampling, StreamOptions
from serve.api.service import Service, merged
from serve.request import Delta, Ticket

REASONS = {"eos": "stop", "stop": "stop", "length": "length", "abort": "stop"}
"""OpenAI's words for why a completion has ended."""


class Shape(Protocol):
    """How an endpoint tells completions."""

    kind: str
    """What an answer is; as a stream with ``chunk_kind``."""
    chunk_kind: str
    id_prefix: str

    def whole(self, index: int, ticket: Ticket) -> dict[str, Any]:
        """The choice of a completion that has ended."""

    def opening(self, index: int) -> dict[str, Any] | None:
        """The choice that begins a stream, if there is one."""

    def piece(self, index: int, delta: Delta) -> dict[str, Any]:
        """The choice that a completion has grown by."""


class Reply:
    """The answer to a request that is under way.

    Args:
        service: What all requests share.
        body: What was asked for.
        shape: Of the endpoint.
        tickets: The completions, those of a prompt beside each other.
    """

    def __init__(self, service: Service, body: Sampling, shape: Shape, tickets: Sequence[Ticket]) -> None:
        self._body, self._shape, self._tickets = body, shape, tickets
        self._id, self._created = f"{shape.id_prefix}-{uuid4().hex}", int(time.time())
        self._name = service.name_of(body)
        asked = body.speculation.metrics if body.speculation is not None else None
        self._metrics = len(tickets) == 1 and (service.settings.spec_metrics if asked is None else asked)

    async def answer(self) -> dict[str, Any]:
        """The whole answer.

        Raises:
            ApiError: A step has failed, or the time is over.
        """
        try:
            async for _ in merged(self._tickets):
                pass
        except Exception as error:
            raise as_api_error(error) from error
        choices = [self._shape.whole(index, ticket) for index, ticket in enumerate(self._tickets)]
        told = [len(ticket.output.tokens) for ticket in self._tickets]
        body = {**self._head(self._shape.kind), "choices": choices, "usage": self._usage(told)}
        if self._body.return_token_ids:
            body["prompt_token_ids"] = self._tickets[0].request.prompt
            for choice, ticket in zip(choices, self._tickets, strict=True):
                choice |= {"token_ids": ticket.output.tokens, "prompt_token_ids": ticket.request.prompt}
        return body | self._spec_metrics()

    async def chunks(self) -> AsyncGenerator[dict[str, Any]]:
        """The answer piece by piece."""
        options = self._body.stream_options or StreamOptions()
        told = [0] * len(self._tickets)
        head = self._head(self._shape.chunk_kind) | ({"usage": None} if options.include_usage else {})
        for index in range(len(self._tickets)):
            if opening := self._shape.opening(index):
                yield {**head, "choices": [opening]}
        async with aclosing(merged(self._tickets)) as deltas:
            async for index, delta in deltas:
                told[index] += len(delta.tokens)
                choice = self._shape.piece(index, delta)
                if self._body.return_token_ids:
                    choice["token_ids"] = list(delta.tokens)
                if self._body.speculation is not None and self._body.speculation.trace:
                    choice["pieces"] = [[piece, piece.drafted] for piece in delta.pieces]
                chunk = {**head, "choices": [choice]}
                yield chunk | ({"usage": self._usage(told)} if options.continuous_usage_stats else {})
        last = self._spec_metrics() | ({"usage": self._usage(told)} if options.include_usage else {})
        if last:
            yield {**head, "choices": [], **last}

    def _head(self, kind: str) -> dict[str, Any]:
        return {"id": self._id, "object": kind, "created": self._created, "model": self._name}

    def _usage(self, told: Sequence[int]) -> dict[str, Any]:
        """How many tokens were read and written; a prompt counts once, however often it is completed."""
        prompts = [ticket.output for ticket in self._tickets[:: self._body.n or 1]]
        prompt, completion = sum(output.prompt_tokens for output in prompts), sum(told)
        return {
            "prompt_tokens": prompt,
            "completion_tokens": completion,
            "total_tokens": prompt + completion,
            "prompt_tokens_details": {"cached_tokens": sum(output.cached_tokens for output in prompts)},
        }

    def _spec_metrics(self) -> dict[str, Any]:
        """``metrics`` of a single completion, as vLLM gives them."""
        if not self._metrics:
            return {}
        output = self._tickets[0].output
        accepted = sum(count * depth for depth, count in enumerate(output.accepted))
        figures = {
            "mean_acceptance_length": 1 + accepted / max(1, output.steps),
            "draft_acceptance_rate": accepted / max(1, output.draft_tokens),
            "acceptance_histogram": list(output.accepted),
            "num_spec_steps": output.steps,
            "num_accepted_draft_tokens": accepted,
            "num_draft_tokens": output.draft_tokens,
        }
        return {"metrics": {"speculative_decoding": figures}}
