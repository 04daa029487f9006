"""Loading a model, and the tests at load."""
