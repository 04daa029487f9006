"""How reports name drafters and figures."""

LABELS = {"hybrid": "heads + lookup (default)", "heads": "heads", "prompt-lookup": "prompt lookup"}
"""Drafters, the default first; ``heads-sampled`` is for temperatures above 0."""
KIND = "tokens_per_step_"
"""Keys of a drafter's figures by kind of prompt."""
