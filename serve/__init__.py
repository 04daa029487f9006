"""Services on top of the ground floor: the chat in the terminal and the demo."""
