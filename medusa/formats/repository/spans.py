"""In an exported repository the file itself stands here."""

from medusa.attention.spans import MOST, Span, layer_spans

__all__ = ["MOST", "Span", "layer_spans"]
