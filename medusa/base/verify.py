"""One pass of a model over the rows of trees."""

from torch import Tensor

from medusa.base.model import BaseModel
from medusa.cache import SlotCache
from medusa.tree import Draft


def verify(base: BaseModel, cache: SlotCache, draft: Draft) -> Tensor:
    """Run the base once over all tree rows; their keys and values go behind the committed rows of the cache.

    Returns:
        Hidden states [B, N, F].
    """
    cache.begin(draft.tokens.shape[1])
    plan = base.new_plan(draft, cache)
    positions_BN = cache.lengths[:, None] + draft.depths
    return base.tree_hidden_states(draft.tokens, positions_BN, cache, plan)
