"""Benchmarks of the trainer: `python -m benchmarks.training {loss,speed,cache}`."""
