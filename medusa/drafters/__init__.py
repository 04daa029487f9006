"""Whatever proposes a draft."""

from medusa.drafters.base import Drafter, PlainDrafter
from medusa.drafters.heads import HeadsDrafter
from medusa.drafters.hybrid import HybridDrafter
from medusa.drafters.prompt_lookup import LOOKUP_GUESSES, PromptLookupDrafter
from medusa.drafters.sampled import SampledHeadsDrafter

__all__ = [
    "LOOKUP_GUESSES",
    "Drafter",
    "HeadsDrafter",
    "HybridDrafter",
    "PlainDrafter",
    "PromptLookupDrafter",
    "SampledHeadsDrafter",
]
