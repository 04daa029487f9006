"""The benchmark: methods of decoding with the same weights and prompts, measured alternately."""
