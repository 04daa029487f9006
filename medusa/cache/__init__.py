"""The KV cache: keys and values of many sequences, in blocks of a shared pool."""

from medusa.cache.follower import Cached, Follower, tell, texts_of
from medusa.cache.index import BLOCK
from medusa.cache.pool import BlockPool, PoolFullError
from medusa.cache.sequence import CachedSequence, Observer, commit, plan_pass, provisional
from medusa.cache.texts import FixedTexts, Texts

__all__ = [
    "BLOCK",
    "BlockPool",
    "Cached",
    "CachedSequence",
    "FixedTexts",
    "Follower",
    "Observer",
    "PoolFullError",
    "Texts",
    "commit",
    "plan_pass",
    "provisional",
    "tell",
    "texts_of",
]
