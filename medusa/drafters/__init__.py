"""Drafters: objects that propose drafts."""

from medusa.drafters.base import Drafter, PlainDrafter
from medusa.drafters.early_exit import EarlyExitDrafter, ExitLayer
from medusa.drafters.heads import HeadsDrafter
from medusa.drafters.hybrid import HybridDrafter
from medusa.drafters.model import ModelDrafter
from medusa.drafters.prompt_lookup import PromptLookupDrafter
from medusa.drafters.sampled import SampledHeadsDrafter
from medusa.drafters.writers import SmallModel

__all__ = [
    "Drafter",
    "EarlyExitDrafter",
    "ExitLayer",
    "HeadsDrafter",
    "HybridDrafter",
    "ModelDrafter",
    "PlainDrafter",
    "PromptLookupDrafter",
    "SampledHeadsDrafter",
    "SmallModel",
]
