"""An exported repository has a copy of the imported file here."""

from medusa.loading.layer_check import LayerCheck

__all__ = ["LayerCheck"]
