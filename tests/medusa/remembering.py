"""Heads that remember a text: their drafts with the texts that these are for, and what the layers say, written out."""

import torch

from medusa.drafters import HeadsDrafter
from tests.medusa import block_by_hand, layer_by_hand

TEXTS = [[5, 6, 7, 9, 4, 4, 8], [9, 8], [11, 3] * 40]
BY_HAND = {"attention": layer_by_hand.recomputed, "block": block_by_hand.recomputed}


class Watched(HeadsDrafter):
    """Keeps its drafts with the texts that they are for."""

    def __init__(self, *arguments, **options):
        super().__init__(*arguments, **options)
        self.seen = []

    def propose(self, state, sequences=(), /):
        draft = super().propose(state, sequences)
        for row, place in enumerate(state.positions.tolist()):
            if state.active[row]:
                self.seen.append((state.history[row, : place + 1].tolist(), draft, row))
        return draft


def recomputed(heads, base, text, path):
    """Logits of the token behind a path below the last token of a text."""
    return BY_HAND[heads.config.architecture](heads, base, text, path)


@torch.no_grad()
def scores(heads, base, text, paths):
    """For each path the sum of log-probabilities along it, each computed anew, less what each depth costs."""
    logprobs, found = {}, {}
    for path in paths:
        found[path] = 0.0
        for depth, column in enumerate(heads.columns(torch.tensor(path, dtype=torch.int64)).tolist()):
            if path[:depth] not in logprobs:
                logits = recomputed(heads, base, text, path[:depth])
                drafted = logits if len(logits) == heads.config.output_size else logits[heads.draft_ids]
                logprobs[path[:depth]] = drafted.log_softmax(-1)
            found[path] += float(logprobs[path[:depth]][column]) - 1e-4
    return found
