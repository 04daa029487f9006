"""Drafters of users: what they propose is checked, since a wrong tree would change the text."""

from collections.abc import Mapping, Sequence

import torch

from medusa.cache import Cached
from medusa.drafters.base import Drafter
from medusa.state import DecodeState
from medusa.tree import Draft


class OwnDrafter(Drafter):
    """A drafter whose drafts are checked before a pass computes them.

    Args:
        drafter: A user's.
    """

    def __init__(self, drafter: Drafter) -> None:
        self._drafter, self.nodes, self.places = drafter, drafter.nodes, drafter.places
        self.recordable, self.observers, self.sees_base = drafter.recordable, drafter.observers, drafter.sees_base

    def propose(self, state: DecodeState, cached: Cached = (), /) -> Draft:
        """Its draft.

        Raises:
            ValueError: It is no draft below ``state.roots``.
        """
        draft = self._drafter.propose(state, cached)
        if not isinstance(cached, Mapping):  # a recorded step reads nothing
            self._check(draft, state)
        return draft

    def _check(self, draft: Draft, state: DecodeState) -> None:
        name, batch = type(self._drafter).__name__, len(state.roots)
        if not isinstance(draft, Draft):
            raise ValueError(f"drafter ({name}) proposes {draft!r}, which is no Draft; return one")
        shapes = tuple(draft.tokens.shape), tuple(draft.parents.shape)
        if draft.tokens.dim() != 2 or len(draft.tokens) != batch or shapes[0] != shapes[1]:
            raise ValueError(
                f"drafter ({name}) proposes tokens {shapes[0]} and parents {shapes[1]}; both must be [{batch}, N]"
            )
        if (size := shapes[0][1]) > self.nodes:
            raise ValueError(
                f"drafter ({name}) proposes {size} nodes, and its `nodes` says {self.nodes}; correct one of them"
            )
        if not draft.tokens.dtype == draft.parents.dtype == torch.int64:
            kinds = f"tokens of {draft.tokens.dtype} and parents of {draft.parents.dtype}"
            raise ValueError(f"drafter ({name}) proposes {kinds}; both must be torch.int64")
        if not torch.equal(draft.tokens[:, 0], state.roots):
            raise ValueError(f"drafter ({name}) proposes trees below other roots; column 0 must hold state.roots")
        places_N = torch.arange(draft.parents.shape[1], device=draft.parents.device).clamp(min=1)
        if ((draft.parents < 0) | (draft.parents >= places_N)).any():
            raise ValueError(f"drafter ({name}) proposes parents behind their children; each must stand before them")

    def beside_prompts(self) -> Drafter:
        """See ``Drafter``."""
        beside = self._drafter.beside_prompts()
        return self if beside is self._drafter else OwnDrafter(beside)

    def observe(self, counts: Sequence[int], seconds: float) -> None:
        """See ``Drafter``."""
        self._drafter.observe(counts, seconds)
