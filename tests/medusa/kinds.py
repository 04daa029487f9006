"""Head architectures by what they need."""

from medusa.heads import ARCHITECTURES

REMEMBER = ("attention", "block")
"""They draft behind what is cached of a text, and have tests of their own."""
MEMORYLESS = [name for name in ARCHITECTURES if name not in REMEMBER]
"""A hidden state is all that they need."""
