"""Faster passes on a CPU."""
