"""Benchmarks of the trainer: `python -m train.bench {loss,speed,cache}`."""
