"""Tree attention: registered with transformers under one name, computed by a backend."""

from medusa.attention.base import BACKENDS, BackendUnavailableError, Scoring, TreeAttention, attend, choose
from medusa.attention.hook import AMBIENT, IMPLEMENTATION, register
from medusa.attention.plan import TreePlan

__all__ = [
    "AMBIENT",
    "BACKENDS",
    "IMPLEMENTATION",
    "BackendUnavailableError",
    "Scoring",
    "TreeAttention",
    "TreePlan",
    "attend",
    "choose",
    "register",
]
