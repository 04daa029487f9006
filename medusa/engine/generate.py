"""The decode loop of ``generate`` and ``stream``: all prompts join one batch, which steps until none is left.

while completions grow:
    prefill a chunk of the prompts that wait                               (medusa/engine/prefill.py)
    draft a tree, verify it in one pass, accept a path, commit it          (medusa/engine/step.py)
    hand the new tokens to the completions, which decide when they end     (medusa/engine/output.py)
"""

from collections.abc import Generator, Sequence
from contextlib import ExitStack, contextmanager

from medusa.base.model import BaseModel
from medusa.cache import SlotCache
from medusa.drafters.choose import Drafters
from medusa.engine.batch import Batch
from medusa.engine.graph import StepGraphs
from medusa.engine.output import Completion, Piece
from medusa.engine.prefix import Prefix
from medusa.engine.prompts import HEADROOM
from medusa.sampling import SamplingParams, Speculation

LARGE_TREE = 64
"""Nodes that a lent cache has room for behind the longest text, four times over."""

Request = tuple[list[int], SamplingParams, Speculation]
"""Token ids of a prompt, how its completion is chosen, and how it is drafted."""


def start(
    base: BaseModel,
    drafters: Drafters,
    graphs: StepGraphs | None,
    requests: Sequence[Request],
    prefix: Prefix | None = None,
    incremental: bool = False,
) -> tuple[list[Completion], Generator[list[list[Piece]]]]:
    """Check everything; the completions, and the loop that grows them: it yields the new text of each.

    Args:
        base: Prepared for decoding.
        drafters: Chooses what drafts.
        graphs: Runs the steps as CUDA graphs; None = eagerly.
        requests: At least one.
        prefix: For one request: where rows of its prompt may stand already, and where they stay.
        incremental: Make text token by token, for streaming.

    Raises:
        ValueError: See ``Batch.add``, or several requests with a prefix.
    """
    if prefix is not None and len(requests) != 1:
        raise ValueError(f"prefix holds one text and there are {len(requests)} prompts; give each its own call")
    completions: list[Completion] = []
    with ExitStack() as stack:
        cache = lent = None
        if prefix is not None:
            cache = stack.enter_context(_taken(prefix, base, requests[0][0], completions))
        elif graphs is not None:
            longest = max(len(ids) for ids, *_ in requests)
            most = max(params.max_new_tokens for _, params, _ in requests)
            limit = longest + min(most, base.context_length) + 4 * LARGE_TREE
            lent = stack.enter_context(graphs.lend(len(requests), min(limit, longest + HEADROOM), limit))
        batch = Batch(base, drafters, graphs, lent)
        completions += [batch.add(*request, incremental, cache) for request in requests]
        return completions, _decode(stack.pop_all(), batch, completions)


@contextmanager
def _taken(
    prefix: Prefix, base: BaseModel, prompt: Sequence[int], completions: Sequence[Completion]
) -> Generator[SlotCache]:
    """The prefix's cache, which it gets back with the text of the completion, or without one that was refused."""
    cache = prefix.take(base, prompt)
    try:
        yield cache
    finally:
        prefix.keep(base, cache, [*prompt, *(token for one in completions for token in one.output.tokens)])


def _decode(held: ExitStack, batch: Batch, completions: Sequence[Completion]) -> Generator[list[list[Piece]]]:
    """The loop; where it is stopped early, the completions leave the batch. Then what was lent goes back."""
    with held:
        try:
            while any(completion.active for completion in completions):
                grown = batch.step()
                yield [grown.get(completion, []) for completion in completions]
        finally:
            for completion in completions:
                batch.remove(completion)
