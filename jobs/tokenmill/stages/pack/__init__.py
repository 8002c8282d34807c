"""Packing: sequences of a dataset -> rows of at most one pack size, in files that fine-tuning frameworks read.

options     the options of the stage
algorithms  which sequences share a row
blend       weights and epochs of several datasets
sources     the sequences of a dataset
assignment  all rows of a pack, stored before any is written
rows        reads the sequences of rows and puts them together
metadata    the files that describe all shards
stage       the stage; `tokenmill.packs` has the files that it writes
"""
