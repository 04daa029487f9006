"""Head designs side by side: the same base, data and steps, only the design differs; `python -m benchmarks.study`."""
