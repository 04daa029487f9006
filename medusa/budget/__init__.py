"""How many nodes to draft, found out as it runs."""
