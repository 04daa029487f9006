"""An exported repository has a copy of the imported file here."""

from medusa.attention.spans import MOST, Span, layer_spans

__all__ = ["MOST", "Span", "layer_spans"]
