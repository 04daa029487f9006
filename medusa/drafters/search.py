"""Trees of what followed a text's last tokens, in it or in earlier texts, chosen by the host."""

import weakref

import torch
from torch import Tensor

from medusa.cpu import native
from medusa.cpu.lookup import Search, look_up
from medusa.drafters.continuations import Confidence, Texts, grow, judge
from medusa.drafters.merge import build
from medusa.state import DecodeState
from medusa.tree import Draft


class TreeSearch:
    """Searches at each step, after it has judged what it found at the step before.

    Args:
        search: The parameters.
        confidence: Shares of right guesses.
        texts: Where to search.
    """

    def __init__(self, search: Search, confidence: Confidence, texts: Texts) -> None:
        self._search, self._confidence, self._texts = search, confidence, texts
        self._last: tuple[weakref.ref[Tensor], Tensor] | None = None  # the text itself goes with its request

    def __call__(self, state: DecodeState) -> Draft:
        """A tree below ``state.roots``; only the root if there is no guess."""
        last, self._last = self._last, (weakref.ref(state.history), state.positions)
        # If rows have joined or left, the last draft is not judged.
        before = last[1] if last is not None and last[0]() is state.history else None
        device, positions, active = state.roots.device, state.positions.cpu(), state.active.cpu()
        history = state.history if device.type == "cpu" else state.history[:, : int(positions.max()) + 1].cpu()
        before = None if before is None else before.cpu()
        if native.reads_indices(history):
            seen = self._confidence.right, self._confidence.tried
            draft = look_up(history, positions, before, active, *seen, self._search, self._texts.tables)
        else:
            draft = self._draft(history, positions, before, active)
        if device.type == "cpu":
            return draft
        return Draft(draft.tokens.to(device), draft.parents.to(device), draft.depth)

    def _draft(self, history: Tensor, positions: Tensor, before: Tensor | None, active: Tensor) -> Draft:
        """The same in Python."""
        rows = zip(history.numpy(), positions.tolist(), active.tolist(), strict=True)
        texts = [(text[: root + 1], on) for text, root, on in rows]
        for (text, on), root in zip(texts, [] if before is None else before.tolist(), strict=False):
            if on:
                judge(text, root, self._confidence, self._search, self._texts)
        # With a single token there is no earlier place.
        trees = [grow(text if on else text[-1:], self._confidence, self._search, self._texts) for text, on in texts]
        roots = torch.tensor([tree[0].token for tree in trees])
        return build(trees) if max(map(len, trees)) > 1 else Draft.chain(roots[:, None])
