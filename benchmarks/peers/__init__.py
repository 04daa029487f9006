"""Other engines beside this one: the same weights, prompts, dtype and threads, in turn, each in its own environment."""
