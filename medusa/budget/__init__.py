"""How many nodes to draft, found out as it runs; what a device holds, how fast a step can be."""
