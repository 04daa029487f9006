"""The demo: trains heads on the embedded base, and measures their speed there and on a real base."""

AUTO = "auto"
LABELS = {AUTO: "auto (default)", "heads": "heads", "prompt-lookup": "prompt lookup"}
"""Names of drafters for people. The default comes first: the fastest drafter, measured while it runs."""
