"""Datasets of pairs: their format, their records, and how the commands and training open and blend them.

Modules; each module uses only modules above it:

    split         how a list of datasets is divided into train, validation and test
    formats       the format of pairs; `formats.indexed` writes, reads and checks `.bin` and `.idx`
    contract      the records of plans of pairs: preprocess, adopt, chat
    sampled_hash  a hash of some blocks of a file
    weighted      the records of pairs, and of the datasets of a list with their shares
    training_data the record of all data of a run: lists of datasets, split, tokenizer
    dataset       a finished output of pairs: its files, documents, tokenizer; verify
    blend_file    reads Megatron-LM's files of datasets
    sources       opens what a user names: an output, one pair of it, a pair without a record
"""
