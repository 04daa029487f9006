"""Loading a model, and what is checked when it is loaded."""
