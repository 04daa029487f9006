"""Acceptance traces of trained heads, and replays of them through the steps of any shape."""
