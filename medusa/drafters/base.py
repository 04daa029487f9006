"""The interface of drafters, and the drafter for plain decoding."""

from collections.abc import Sequence
from typing import Protocol

from medusa.cache import Cached, Observer
from medusa.state import DecodeState
from medusa.tree import Draft


class Drafter(Protocol):
    """Proposes trees. Under ``greedy`` and ``sampling`` acceptance a draft can change the speed, never the text.

    Under ``speculative`` the text keeps its distribution if ``Draft.probs`` has the distributions of drawn tokens.
    """

    nodes: int
    """N, nodes of a draft, the root included; on a CPU, where shapes are free, a draft may have fewer."""
    recordable: bool = False
    """Whether a step can be recorded as a CUDA graph: shapes are fixed, and drafts depend only on tensors of the state.
    Subclasses inherit this default and those below."""
    observers: Sequence[Observer] = ()
    """Its layers that read the hidden states of committed tokens."""
    places: int = 0
    """Number of positions after a text that a draft uses in their caches."""
    sees_base: bool = False
    """Whether drafts read the base's cached keys and values."""

    def propose(self, state: DecodeState, cached: Cached = (), /) -> Draft:
        """A draft whose column 0 holds ``state.roots``.

        Args:
            state: The state of the requests.
            cached: Their cached texts, for drafters with models that follow the base (``CachedSequence.follower``); in
                recorded steps a mapping by observer.
        """

    def beside_prompts(self) -> "Drafter":
        """The drafter for steps that also compute chunks of prompts, whose first tokens wait for the step."""
        return self

    def observe(self, counts: Sequence[int], seconds: float) -> None:
        """Take the result of a step with the latest draft; for drafters that learn.

        Args:
            counts: Emitted tokens of each row, 0 if it was not active.
            seconds: Time of the whole step.
        """
        return


class PlainDrafter(Drafter):
    """Drafts nothing: every step is one plain decode step."""

    nodes = 1
    recordable = True

    def propose(self, state: DecodeState, _: Cached = (), /) -> Draft:
        """The roots only."""
        return Draft.chain(state.roots[:, None])
