"""Heads for a model of one's own in one command: prompts, answers, training and a comparison, in a given time."""
