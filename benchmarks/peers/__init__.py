"""Comparison with other engines: same weights, prompts, dtype and threads, alternately, each in its own environment."""
