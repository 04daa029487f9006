"""Trees that several tests decode with."""

from medusa import Tree

LOPSIDED = Tree(((0,), (1,), (5,), (0, 0), (0, 3), (1, 2), (1, 2, 0), (1, 2, 4), (0, 3, 1)))
