"""How many nodes to draft, from measured costs."""
