"""Studies, sweeps, replays and the check of a GPU machine: evidence about the product, which imports nothing of it."""
