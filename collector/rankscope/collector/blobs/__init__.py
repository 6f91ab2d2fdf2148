"""Whole tensors: stored once by their digest, given out as .pt files."""
