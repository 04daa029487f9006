"""Requests that are computed together: they join and leave between steps, each with parameters of its own.

batch.add(prompt, ...)    a request waits for room
batch.step()              schedule: chunks of the texts that wait                 (medusa/engine/scheduler.py)
                          run:      one pass, a decode step of all that are ready (medusa/engine/step.py)
                          finish:   hand out new text; requests that have ended leave
batch.remove(request)     a request leaves, and frees its blocks of the KV cache
"""

from collections.abc import Sequence
from itertools import islice

import torch

from medusa.acceptance import BuiltRule, build_rule
from medusa.base.context import context_note
from medusa.base.model import BaseModel
from medusa.cache import BlockPool
from medusa.drafters import Drafter, PlainDrafter
from medusa.drafters.choose import Drafters
from medusa.engine.config import EngineConfig
from medusa.engine.constraint import Constraint
from medusa.engine.graph import StepGraphs
from medusa.engine.logprobs import LogprobReader
from medusa.engine.mixed import compose
from medusa.engine.output import CONTEXT, Completion, Piece
from medusa.engine.prefill import Chunk, advance, first_state
from medusa.engine.request import Request
from medusa.engine.scheduler import Scheduler
from medusa.engine.silence import say_if_silent
from medusa.engine.step import first_step
from medusa.engine.steps import EagerSteps, Steps
from medusa.sampling import SamplingParams, Speculation, check_whole
from medusa.state import DecodeState
from medusa.torch_defaults import torch_defaults

PLAIN = PlainDrafter()


class Batch:
    """Requests that share every pass of the base; for one thread.

    Greedy and sampled completions have the tokens that they would have alone, whatever else the batch computes.

    Args:
        base: Prepared for decoding.
        drafters: Chooses the drafter of a request.
        graphs: Runs decode steps as CUDA graphs; None = eagerly.
        pool: The KV cache, which batches of one base and one thread may share (``BaseModel.new_pool``); None = its own.
        config: Limits of a pass; None = the defaults.

    Attributes:
        pool: The KV cache.
        preemptions: How often a request has lost its room and waited again.
    """

    @torch_defaults()
    def __init__(
        self,
        base: BaseModel,
        drafters: Drafters,
        graphs: StepGraphs | None = None,
        pool: BlockPool | None = None,
        config: EngineConfig | None = None,
    ) -> None:
        self._base, self._drafters, self._graphs = base, drafters, graphs
        self._config = config or EngineConfig()
        self.pool = pool or base.new_pool()
        self._scheduler = Scheduler(self.pool, self._config, base)
        self._decoding: list[Request] = []  # in the order of the state
        self._state: DecodeState | None = None
        self._steps: Steps | None = None
        self._chosen: dict[Request, Drafter] = {}
        self._reader: LogprobReader | None = None
        self._grown: dict[Request, list[Piece]] = {}
        self._added = self.preemptions = 0

    def __len__(self) -> int:
        """Number of requests that have not ended, or whose last tokens the next ``step`` returns."""
        active = [request for request in (*self._scheduler, *self._decoding) if request.active]
        return len(active) + sum(not request.active for request in self._grown)

    @property
    def waiting(self) -> int:
        """Number of requests that wait for room in the cache."""
        return self._scheduler.waiting

    @property
    def stuck(self) -> bool:
        """Whether, after a step in which nothing grew, users of the pool outside this batch hold the room it needs."""
        return self.waiting > 0 and len(self) == self.waiting

    @torch_defaults()
    def add(
        self,
        prompt: Sequence[int],
        params: SamplingParams | None = None,
        speculation: Speculation | None = None,
        incremental: bool = False,
        constraint: Constraint | None = None,
        client: str = "",
        priority: int = 0,
        continues: bool = False,
    ) -> Request:
        """Let a request join; it grows with every ``step``.

        Args:
            prompt: Token ids, at least one.
            params: How its tokens are chosen; None = the defaults.
            speculation: How its tokens are drafted; None = the defaults.
            incremental: Decode text token by token, for streaming.
            constraint: A grammar that the completion must follow; None = anything.
            client: Name of the client; the client with the fewest running requests comes first.
            priority: Lower numbers come first, whatever the client.
            continues: The completion's text goes on from the prompt's: some tokenizers write the space in front of a
                word only then. False = it is a text of its own, as the answer of a chat.

        Raises:
            ValueError: The prompt is empty, fills the context or holds a number that is not a token id; this model
                cannot serve the parameters; the tokens exceed the KV cache; or the base is in training mode.
        """
        check_whole("priority", priority)
        base, prompt = self._base, list(prompt)
        params, speculation = (params or SamplingParams()).seeded(), speculation or Speculation()
        rule = self.check(prompt, params, speculation)
        room = base.context_length - len(prompt)
        said = (token for token in reversed(prompt) if token not in base.special_ids)
        before = list(islice(said, CONTEXT))[::-1] if continues else []
        completion = Completion(base.tokenizer, len(prompt), params, room, base.eos_ids, incremental, before)
        self._added += 1
        observers = self._drafters.observers(speculation)
        request = Request(
            prompt, params, speculation, rule, completion, observers, constraint, client, priority, number=self._added
        )
        self._scheduler.add(request)
        return request

    def check(self, prompt: Sequence[int], params: SamplingParams, speculation: Speculation) -> BuiltRule:
        """The acceptance rule of a request that can join; see ``add``.

        Raises:
            ValueError: The request cannot join.
        """
        base = self._base
        if base.model.training:
            raise ValueError(
                f"base ({base.name}) is in training mode: dropout changes its text; call base.model.eval()"
            )
        base.check_tokens("prompt", prompt)
        base.check_tokens("logit_bias", params.logit_bias or ())
        rule = build_rule(params, speculation, base.device)
        self._drafters.check(speculation, rule)
        if not prompt:
            raise ValueError("prompt (0 tokens) is empty; give at least one token")
        room = base.context_length - len(prompt)
        if room < min(1, params.max_new_tokens):
            note = context_note(base.config)
            raise ValueError(
                f"prompt ({len(prompt)} tokens) leaves no room in the base's context ({base.context_length} tokens"
                f"{note and f': {note}'}); shorten the prompt"
            )
        sizes = (getattr(given, "nodes", 0) for given in (speculation, speculation.tree, speculation.drafter))
        trees = max(self._config.tree_reserve, *(2 * (size or 0) for size in sizes))
        self.pool.check(len(prompt) + min(params.max_new_tokens, room) + trees)
        return rule

    @torch_defaults()
    def remove(self, request: Request) -> None:
        """End a request that waits or grows, and free its blocks; nothing happens to one that has ended."""
        if not request.active:
            return
        request.completion.abort()
        self._scheduler.drop()
        self._leave()
        self._grown.pop(request, None)

    def close(self) -> None:
        """Free all blocks after a failed step; the batch must not be used afterwards."""
        for request in (*self._scheduler, *self._decoding):
            request.close()

    @torch_defaults()
    def step(self) -> dict[Request, list[Piece]]:
        """One decode step of the requests that are ready, with chunks of prompts in the same pass.

        A request whose last chunk was computed gets its first token, and decodes from the next step on.

        Returns:
            The requests that grew, each with its new final text.
        """
        chunks = self._schedule()
        if self._decoding:
            steps = self._steps or self._begin()
            self._extend(self._decoding, steps.next(chunks), steps.sizes, self._reader)
        elif chunks:
            advance(self._base, chunks)
        self._arrive(chunks)
        self._leave()
        grown, self._grown = self._grown, {}
        return grown

    def _schedule(self) -> list[Chunk]:
        """The chunks of the next pass; requests for which there is no room any more wait again."""
        chunks = self._scheduler.schedule(self._decoding)
        if self.pool.limit is None:
            return chunks
        while True:
            steps = self._steps or (self._begin() if self._decoding else None)  # after a preemption new ones
            places = steps.places if steps is not None else 0
            needed = sum(request.cached.missing(request.cached.length + places) for request in self._decoding)
            needed += sum(chunk.request.cached.missing(chunk.request.cached.length + chunk.size) for chunk in chunks)
            last = self._scheduler.preempt(needed, self._decoding)
            if last is None:
                return chunks
            chunks = [chunk for chunk in chunks if chunk.request is not last]
            if last in self._decoding:
                self._stop()
                self._keep([index for index, request in enumerate(self._decoding) if request is not last])
            last.close()
            if last.active:  # the step under way may have ended it
                self._scheduler.add(last)
                self.preemptions += 1

    def _begin(self) -> Steps:
        """Start steps for the present requests: choose drafters, and group requests with the same drafter and rule."""
        assert self._state is not None, "a decoding request has a state"
        count = len(self._decoding)
        drafter, rule, self._reader, self._chosen, watched = compose(
            self._decoding, lambda one: self._drafters.choose(one.speculation, count, one.rule), self._base.device
        )
        sequences = [request.cached for request in self._decoding]
        if self._graphs is None or watched:
            self._steps = EagerSteps(self._base, sequences, drafter, rule, self._state, self._reader)
        else:
            self._steps = self._graphs.steps(self._base, sequences, drafter, rule, self._state)
        return self._steps

    def _arrive(self, chunks: Sequence[Chunk]) -> None:
        """Use computed chunks: index their blocks for other requests, and emit first tokens after last chunks."""
        for chunk in chunks:
            chunk.request.cached.remember(chunk.request.text)
            if chunk.ends and not chunk.request.completion.max_new_tokens:  # only the prompt was to be scored
                self._scheduler.finish(chunk.request)
                self._grown[chunk.request] = chunk.request.completion.end("length")
                chunk.request.close()
                self._scheduler.ended()
        ending = [chunk for chunk in chunks if chunk.ends and chunk.request.active]
        if not ending:
            return
        requests, states = list[Request](), list[DecodeState]()
        if beginning := [chunk for chunk in ending if chunk.begins]:
            new = [chunk.request for chunk in beginning]
            drafter, rule, reader, *_ = compose(new, lambda _: PLAIN, self._base.device)
            first = first_step(beginning, drafter, rule, reader)
            for request in new:
                request.completion.start_clock()
            self._extend(new, first.tokens, first.sizes, reader)
            requests, states = new, [first.state]
        if resumed := [chunk for chunk in ending if not chunk.begins]:  # their next steps draft, as they would have
            again = [chunk.request for chunk in resumed]
            requests += again
            states.append(first_state(again, torch.stack([chunk.hidden for chunk in resumed])))
        self._stop()
        for state in states:
            self._state = state if self._state is None else self._state.join(state)
        self._decoding = self._decoding + requests
        for request in requests:  # not before: if a step fails, all requests are in one of both places
            self._scheduler.finish(request)

    def _extend(
        self, requests: Sequence[Request], tokens: list[list[int]], sizes: Sequence[int], reader: LogprobReader | None
    ) -> None:
        """Hand every request its new tokens."""
        logprobs = reader.take() if reader is not None else {}
        for index, (request, new, size) in enumerate(zip(requests, tokens, sizes, strict=True)):
            if new and request.active:
                pieces = request.completion.extend(new, logprobs.get(index, []), size - 1)
                self._grown.setdefault(request, []).extend(pieces)
                if request.constraint is not None and request.active:
                    request.constraint.advance(new)

    def _stop(self) -> None:
        """End the steps of the present requests; the tokens of a step under way are kept."""
        if self._steps is not None:
            late, self._state = self._steps.stop()
            if late is not None:
                self._extend(self._decoding, late, self._steps.sizes, self._reader)
            self._steps = None

    def _leave(self) -> None:
        """Remove requests that have ended."""
        if all(request.active for request in self._decoding):
            return
        self._stop()
        count = len(self._decoding)
        for request in self._decoding:
            if not request.active:
                request.close()
                say_if_silent(request)
                self._scheduler.ended()
                if request in self._chosen:
                    wanted, rule = request.speculation, request.rule
                    chosen = self._chosen[request]
                    self._drafters.observe(chosen, wanted, rule, count, request.prompt, request.output)
        self._keep([index for index, request in enumerate(self._decoding) if request.active])

    def _keep(self, places: Sequence[int]) -> None:
        """Keep only these requests, by their places, for further decoding."""
        assert self._state is not None, "a decoding request has a state"
        self._decoding = [self._decoding[place] for place in places]
        self._state = self._state.select(places) if places else None
