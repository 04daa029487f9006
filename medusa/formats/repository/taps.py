"""An exported repository has a copy of the imported file here."""

from medusa.base.taps import DecoderPass

__all__ = ["DecoderPass"]
