"""The decode loop of ``generate`` and ``stream``: all prompts join one batch, which steps until none is left.

while requests have not ended:
    prefill a chunk of the prompts that wait
    draft a tree, verify it in one pass, accept a path, commit it      (medusa/engine/step.py)
    hand the new tokens to the completions, which decide when they end (medusa/engine/output.py)
"""

from collections.abc import Generator, Sequence

from medusa.engine.batch import Batch
from medusa.engine.output import Completion, Piece


def decode(batch: Batch, completions: Sequence[Completion]) -> Generator[list[list[Piece]]]:
    """Step a batch until these completions have ended; stopped early, they leave it.

    Yields:
        For every completion the pieces of text that the step made final.
    """
    try:
        while any(completion.active for completion in completions):
            grown: dict[Completion, list[Piece]] = {completion: [] for completion in completions}
            for completion, pieces in batch.step():
                grown[completion] += pieces
            yield list(grown.values())
    finally:
        for completion in completions:
            batch.remove(completion)
