"""Services on top of the ground floor: a chat in the terminal, a server, and the demo."""
