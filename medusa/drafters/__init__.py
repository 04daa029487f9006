"""Whatever proposes a draft."""

from medusa.drafters.base import DecodeState, Drafter, PlainDrafter
from medusa.drafters.heads import HeadsDrafter

__all__ = ["DecodeState", "Drafter", "HeadsDrafter", "PlainDrafter"]
