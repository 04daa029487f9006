"""A chat in the terminal, or through pipes."""
