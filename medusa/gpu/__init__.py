"""Passes with kernels of our own on a GPU."""
