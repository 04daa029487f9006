"""Tree sizes, measured while decoding runs; what a device's memory holds; lower bounds of a step."""
