"""Acceptance of drafts, measured on texts that the base has generated once."""
