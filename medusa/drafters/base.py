"""The drafter's contract, and the drafter that drafts nothing."""

from collections.abc import Sequence
from typing import Protocol

from medusa.cache import Cached, Observer
from medusa.state import DecodeState
from medusa.tree import Draft


class Drafter(Protocol):
    """Proposes trees; what it proposes can change speed, never the text of ``greedy`` and ``sampling`` acceptance.

    The ``speculative`` rule keeps the distribution of the text as long as ``Draft.probs`` says how tokens were drawn.
    """

    nodes: int
    """N, nodes of a draft with the root; on a CPU, where shapes cost nothing, a draft may have fewer."""
    recordable: bool = False
    """Shapes are fixed and drafts follow from the state's tensors alone, on the device: a step may become a CUDA graph.
    A drafter that inherits from this class may leave it out."""
    observers: Sequence[Observer] = ()
    """Layers of its own that must see what the base commits; likewise."""
    places: int = 0
    """Places behind a text that a draft takes in their caches; likewise."""

    def propose(self, state: DecodeState, cached: Cached = (), /) -> Draft:
        """A draft whose column 0 holds ``state.roots``.

        Args:
            state: Of the requests that it drafts for.
            cached: What is cached of each, for drafters whose models follow the base (``CachedSequence.follower``); in
                recorded steps by observer.
        """

    def beside_prompts(self) -> "Drafter":
        """Who drafts in a step that computes chunks of prompts too, whose first tokens wait for its end."""
        return self

    def observe(self, counts: Sequence[int], seconds: float) -> None:
        """See what a step with the latest draft has brought; for drafters that learn.

        Args:
            counts: Tokens of each row, 0 where it was not active.
            seconds: That the whole step took.
        """
        return


class PlainDrafter(Drafter):
    """Drafts nothing: every step is one plain decode step."""

    nodes = 1
    recordable = True

    def propose(self, state: DecodeState, _: Cached = (), /) -> Draft:
        """The roots alone."""
        return Draft.chain(state.roots[:, None])
