"""Keys and values of many sequences, in blocks of a pool that all of them share."""

from medusa.cache.layer import PassCache
from medusa.cache.pool import BLOCK, BlockPool, PoolFullError
from medusa.cache.sequence import CachedSequence, commit, plan_pass, provisional

__all__ = ["BLOCK", "BlockPool", "CachedSequence", "PassCache", "PoolFullError", "commit", "plan_pass", "provisional"]
