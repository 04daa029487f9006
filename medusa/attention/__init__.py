"""Tree attention: registered with transformers under one name, computed by a backend."""

from medusa.attention.backends import BACKENDS, attend, choose
from medusa.attention.contract import BackendUnavailableError, Scoring, TreeAttention, TreePlan
from medusa.attention.hook import IMPLEMENTATION, attend_rows, register
from medusa.attention.spans import Span, UnknownSpanError, layer_spans

__all__ = [
    "BACKENDS",
    "IMPLEMENTATION",
    "BackendUnavailableError",
    "Scoring",
    "Span",
    "TreeAttention",
    "TreePlan",
    "UnknownSpanError",
    "attend",
    "attend_rows",
    "choose",
    "layer_spans",
    "register",
]
