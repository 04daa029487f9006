"""Scripts, one per engine; each runs with an interpreter of its own and imports ``loop`` from beside it."""
