"""The benchmark: ways to decode the same weights, in turn, on the same prompts."""
