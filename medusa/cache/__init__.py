"""Keys and values of many sequences, in blocks of a pool that all of them share."""

from medusa.cache.follower import Follower, tell
from medusa.cache.layer import PassCache
from medusa.cache.pool import BLOCK, BlockPool, PoolFullError
from medusa.cache.sequence import CachedSequence, Observer, commit, plan_pass, provisional

__all__ = [
    "BLOCK",
    "BlockPool",
    "CachedSequence",
    "Follower",
    "Observer",
    "PassCache",
    "PoolFullError",
    "commit",
    "plan_pass",
    "provisional",
    "tell",
]
