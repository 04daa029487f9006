"""How many nodes to draft, found out as it runs; the best static tree for heads of known accuracy."""
