"""A chat in the terminal, a server, and the demo."""
