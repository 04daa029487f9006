"""``medusa heads``: heads for your own model in one command and a given time."""
