"""The frozen language model."""
