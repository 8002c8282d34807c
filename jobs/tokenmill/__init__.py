"""tokenmill: from a text corpus to Megatron-LM training data.

The flow of data, and where each step lives: `corpus` lists and reads what comes from outside,
`stages` says what a unit of work is and does it, `flow` plans, commits, resumes and accounts for
units, `tokens` turns text into Megatron's indexed datasets, `cli` is the command line.
"""

__version__ = "0.1.0"
