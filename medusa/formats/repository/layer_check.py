"""In an exported repository the file itself stands here."""

from medusa.loading.layer_check import LayerCheck

__all__ = ["LayerCheck"]
