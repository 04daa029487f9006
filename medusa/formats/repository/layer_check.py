"""In an exported repository the file itself stands here."""

from medusa.layer_check import LayerCheck

__all__ = ["LayerCheck"]
