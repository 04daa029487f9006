"""An exported repository has a copy of the imported file here."""

from medusa.heads.layer import LayerConfig

__all__ = ["LayerConfig"]
