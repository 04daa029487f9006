"""How reports name drafters and figures."""

AUTO = "auto"
LABELS = {AUTO: "auto (default)", "heads": "heads", "prompt-lookup": "prompt lookup"}
"""Drafters, the default first: whoever is fastest, found out as it runs."""
KIND = "tokens_per_step_"
"""Keys of a drafter's figures by kind of prompt."""
