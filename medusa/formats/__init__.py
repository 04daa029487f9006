"""Formats that heads are stored in."""

from medusa.formats.native import load_heads, save_heads

__all__ = ["load_heads", "save_heads"]
