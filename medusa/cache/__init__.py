"""Keys and values of many sequences.

A ``SlotCache`` knows its sequences and their lengths; where their rows stand is one of two things: side by side in
buffers of its own (``SlotRows``), or in blocks that all caches of a base share (``BlockRows``, ``BlockPool``).
"""

from medusa.cache.layer import SlotLayer
from medusa.cache.pool import BLOCK, BlockPool, PoolFullError
from medusa.cache.slots import SlotCache

__all__ = ["BLOCK", "BlockPool", "PoolFullError", "SlotCache", "SlotLayer"]
