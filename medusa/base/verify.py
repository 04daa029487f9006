"""One pass of a model over the rows of trees."""

from collections.abc import Sequence
from contextlib import ExitStack

from torch import Tensor

from medusa.attention import TreePlan
from medusa.base.model import BaseModel
from medusa.cache import SlotCache
from medusa.tree import Draft


def verify(base: BaseModel, cache: SlotCache, draft: Draft) -> Tensor:
    """Run the base once over all tree rows; their keys and values go behind the committed rows of the cache.

    Returns:
        Hidden states [B, N, F].
    """
    return base.tree_hidden_states([(cache, _plan(base, cache, draft))])[0]


def verify_together(base: BaseModel, drafts: Sequence[tuple[SlotCache, Draft]]) -> list[Tensor]:
    """The same for several caches, in one pass where the base can; a draft may be of a cache's first slots alone."""
    with ExitStack() as stack:
        for cache, draft in drafts:
            if len(draft.tokens) < cache.slots:
                stack.enter_context(cache.leading(len(draft.tokens)))
        return base.tree_hidden_states([(cache, _plan(base, cache, draft)) for cache, draft in drafts])


def _plan(base: BaseModel, cache: SlotCache, draft: Draft) -> TreePlan:
    cache.begin(draft.tokens.shape[1])
    return base.new_plan(draft, cache)
