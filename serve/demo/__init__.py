"""Heads trained on the embedded base, and what they bring there and on a real one."""
