"""Scripts, one per engine; each runs with its own interpreter and imports ``loop`` from the same directory."""
