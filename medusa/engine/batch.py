"""Sequences that decode together: they join and leave between steps, each with parameters of its own.

batch.add(prompt, ...)       a request waits; its prompt is computed in chunks, one in each step
batch.step()                 one decode step of all sequences that are ready, and a chunk of prompts beside it
                                                                                      (medusa/engine/step.py)
batch.remove(completion)     a request leaves, and frees its rows of the KV cache
"""

from collections.abc import Sequence

from medusa.acceptance import BuiltRule, build_rule
from medusa.base.model import BaseModel
from medusa.cache import BlockPool, SlotCache
from medusa.drafters import Drafter, PlainDrafter
from medusa.drafters.choose import Drafters
from medusa.engine.constraint import Constraint
from medusa.engine.graph import StepGraphs
from medusa.engine.logprobs import LogprobReader
from medusa.engine.output import Completion, Piece
from medusa.engine.prefill import Prefill, advance
from medusa.engine.prompts import Prompts
from medusa.engine.row import Row, compose
from medusa.engine.step import first_step
from medusa.engine.steps import EagerSteps, StartSteps, Steps
from medusa.sampling import SamplingParams, Speculation
from medusa.state import DecodeState

PREFILL_ROWS = 16_384
"""Prompt tokens of a pass, at most: as many as keep any device busy."""
LEAVE_AT = 1 / 4
"""Where steps run as graphs, sequences that have ended leave when at most this share of the batch still grows: a graph
belongs to a number of sequences."""

PLAIN = PlainDrafter()


class Batch:
    """Requests that share every pass of the base; for one thread.

    Greedy and sampled completions have the tokens that they would have alone, whatever stands beside them.

    Args:
        base: Prepared for decoding.
        drafters: Chooses what drafts for a row.
        graphs: Runs the steps as CUDA graphs; None = eagerly.
        cache: An empty cache that was lent for the batch (``StepGraphs.lend``); None = its own.
        prefill_rows: Prompt tokens that one step computes, at most.
        pool: Where rows of the KV cache stand and are found again, by this batch and others (``BaseModel.new_pool``);
            None = a pool of its own. Requests wait until it has room for all that they may come to.
    """

    def __init__(
        self,
        base: BaseModel,
        drafters: Drafters,
        graphs: StepGraphs | None = None,
        cache: SlotCache | None = None,
        prefill_rows: int = PREFILL_ROWS,
        pool: BlockPool | None = None,
    ) -> None:
        self._base, self._drafters, self._graphs, self._lent = base, drafters, graphs, cache
        self._pool = pool or (base.new_pool() if cache is None else cache.pool)
        self._prompts = Prompts(base, self._pool, prefill_rows)
        self._rows: list[Row] = []  # those that decode, in the order of the cache's slots
        self._cache: SlotCache | None = None
        self._state: DecodeState | None = None
        self._steps: Steps | None = None
        self._chosen: dict[Row, Drafter] = {}
        self._reader: LogprobReader | None = None
        self._grown: dict[Completion, list[Piece]] = {}

    def __len__(self) -> int:
        """Requests that have not ended, or whose last tokens the next ``step`` hands over."""
        active = sum(row.completion.active for rows in (self._prompts, self._rows) for row in rows)
        return active + sum(not completion.active for completion in self._grown)

    def add(
        self,
        prompt: Sequence[int],
        params: SamplingParams | None = None,
        speculation: Speculation | None = None,
        incremental: bool = False,
        cache: SlotCache | None = None,
        constraint: Constraint | None = None,
    ) -> Completion:
        """Let a request join; its completion grows with every ``step``.

        Args:
            prompt: Token ids, at least one.
            params: How its tokens are chosen; None = the defaults.
            speculation: How they are drafted; None = the defaults.
            incremental: Make text token by token, for streaming.
            cache: One slot with the rows of the prompt's first tokens (``Prefix``), for a request that stays alone.
            constraint: What the completion may say; None = anything.

        Raises:
            ValueError: An empty prompt, one that fills the context or holds what is no token id, parameters that this
                model cannot serve, or more tokens than the KV cache may hold.
        """
        base, prompt = self._base, list(prompt)
        params, speculation = params or SamplingParams(), speculation or Speculation()
        rule = self.check(prompt, params, speculation)
        room = base.context_length - len(prompt)
        completion = Completion(base.tokenizer, len(prompt), params, room, base.eos_ids, incremental)
        row = Row(prompt, params, speculation, rule, completion, constraint)
        self._prompts.add(row, cache)
        return completion

    def check(self, prompt: Sequence[int], params: SamplingParams, speculation: Speculation) -> BuiltRule:
        """The rule of a request that can join; see ``add``.

        Raises:
            ValueError: It cannot.
        """
        base = self._base
        base.check_tokens("prompt", prompt)
        base.check_tokens("logit_bias", params.logit_bias or ())
        rule = build_rule(params, speculation, base.device)
        self._drafters.check(speculation, rule)
        if not prompt:
            raise ValueError("prompt (0 tokens) is empty; give at least one token")
        if len(prompt) >= base.context_length:
            raise ValueError(
                f"prompt ({len(prompt)} tokens) leaves no room in the base's context ({base.context_length} tokens);"
                " shorten the prompt"
            )
        return rule

    def remove(self, completion: Completion) -> None:
        """End a request that waits or grows and free its rows; one that has ended is left alone."""
        if not completion.active:
            return
        completion.abort()
        self._prompts.drop()
        self._leave()

    def step(self) -> dict[Completion, list[Piece]]:
        """One decode step of the sequences that are ready, and a chunk of the prompts that wait.

        Prompts whose last chunk it was have their first token then, and decode from the next step on.

        Returns:
            The completions that grew, with the text that became final.
        """
        due = self._prompts.take()
        prompts = [prefill for _, prefill in due]
        if self._rows:
            steps = self._steps or self._begin()
            self._extend(self._rows, steps.next(prompts), steps.sizes, self._reader)
        elif prompts:
            advance(self._base, prompts)
        for rows, prefill in due:
            self._arrive(rows, prefill)
        self._leave()
        grown, self._grown = self._grown, {}
        return grown

    def _arrive(self, rows: list[Row], prefill: Prefill) -> None:
        """See what a chunk has brought: rows that others may find, or the first tokens."""
        for slot, row in enumerate(rows):
            prefill.cache.remember(slot, row.prompt)
        if not prefill.done:
            self._prompts.put_back(rows, prefill)
            return
        drafter, rule, reader, _ = compose(rows, lambda _: PLAIN, self._base.device)
        first = first_step(prefill, drafter, rule, reader)
        for row in rows:
            row.completion.start_clock()
        self._extend(rows, first.tokens, first.sizes, reader)
        self._stop()
        self._join(rows, prefill.cache, first.state)

    def _join(self, rows: list[Row], cache: SlotCache, state: DecodeState) -> None:
        """Let rows whose prompts are computed decode with the others."""
        if self._cache is None and self._lent is None:
            self._cache = cache
        else:
            self._cache = self._lent if self._cache is None else self._cache
            assert self._cache is not None, "its own or lent"
            self._cache.join(cache)
        self._state = state if self._state is None else self._state.join(state)
        self._rows = self._rows + rows

    def _begin(self) -> Steps:
        """Start steps for the rows as they are now: choose drafters, and group rows that share a drafter and a rule."""
        assert self._cache is not None and self._state is not None, "rows have both"
        count = len(self._rows)
        drafter, rule, self._reader, self._chosen = compose(
            self._rows, lambda row: self._drafters.choose(row.speculation, count, row.rule), self._base.device
        )
        longest = max(len(row.prompt) + row.completion.max_new_tokens for row in self._rows)
        # The last tree stands behind the longest text; beside others, a text that has ended may be longer by a step,
        # and by one more where steps run ahead.
        needed = longest + 4 * drafter.nodes
        self._cache.limit = needed if self._lent is None else max(needed, self._lent.limit)
        if self._reader is not None or any(row.constraint for row in self._rows):  # the host has a say in each step
            self._steps = EagerSteps(self._base, self._cache, drafter, rule, self._state, self._reader)
        else:
            start: StartSteps = EagerSteps if self._graphs is None else self._graphs.steps
            self._steps = start(self._base, self._cache, drafter, rule, self._state)
        return self._steps

    def _extend(
        self, rows: Sequence[Row], tokens: list[list[int]], sizes: Sequence[int], reader: LogprobReader | None
    ) -> None:
        """Hand every row its new tokens."""
        logprobs = reader.take() if reader is not None else {}
        for index, (row, new, size) in enumerate(zip(rows, tokens, sizes, strict=True)):
            if new and row.completion.active:
                pieces = row.completion.extend(new, logprobs.get(index, []), size - 1)
                self._grown.setdefault(row.completion, []).extend(pieces)
                if row.constraint is not None and row.completion.active:
                    row.constraint.advance(new)

    def _stop(self) -> None:
        """No more steps of the rows as they are; a step that is still under way counts."""
        if self._steps is not None:
            late, self._state = self._steps.stop()
            if late is not None:
                self._extend(self._rows, late, self._steps.sizes, self._reader)
            self._steps = None

    def _leave(self) -> None:
        """Let rows that have ended go; the last ones take their places in the cache."""
        growing = [row.completion.active for row in self._rows]
        if all(growing):
            return
        if self._graphs is not None and self._steps is not None:
            self._steps.keep(growing)
            if sum(growing) > LEAVE_AT * len(growing):
                return
        self._stop()
        for slot, row in enumerate(self._rows):
            if row.completion.active:
                continue
            if self._cache is not None:
                self._cache.remember(slot, [*row.prompt, *row.completion.output.tokens])
            if self._pool is not None:
                self._pool.drop(row)
            if row in self._chosen:
                wanted, output = row.speculation, row.completion.output
                self._drafters.observe(self._chosen[row], wanted, row.rule, len(self._rows), row.prompt, output)
        kept = [index for index, row in enumerate(self._rows) if row.completion.active]
        if not kept:
            self._rows, self._cache, self._state = [], None, None
            if self._lent is not None:
                self._lent.cut([])
            return
        tail = [index for index in kept if index >= len(kept)]
        order = [index if self._rows[index].completion.active else tail.pop() for index in range(len(kept))]
        assert self._cache is not None and self._state is not None, "rows have both"
        self._cache.select(order)
        self._state = self._state.select(order)
        self._rows = [self._rows[index] for index in order]
