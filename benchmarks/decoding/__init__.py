"""``medusa-bench``: what a decode step costs, and what it could cost at best."""
