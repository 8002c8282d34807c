"""Packing: sequences of a dataset -> rows of at most one pack size, in files that fine-tuning frameworks read."""
