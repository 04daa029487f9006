"""How many nodes to draft, found out as it runs; the best static tree; what a device holds, how fast a step can be."""
