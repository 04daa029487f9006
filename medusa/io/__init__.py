"""Heads on disk and on the Hub."""
