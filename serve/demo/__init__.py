"""Heads trained on the embedded base, and what they bring there and on a real one."""

AUTO = "auto"
LABELS = {AUTO: "auto (default)", "heads": "heads", "prompt-lookup": "prompt lookup"}
"""Drafters, the default first: the fastest, found out as it runs."""
