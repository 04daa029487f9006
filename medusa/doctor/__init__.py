"""``medusa doctor``: what this machine has, what will run fast on it, and what to do about the rest."""
