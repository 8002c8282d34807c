"""Tokenizers, encoders and the conversion of documents into pairs.

    module               responsibility
    options              the command-line options of tokenization
    tokenizer_files      fetch the files of a tokenizer from a directory or the Hub
    tokenizer            resolve a tokenizer: run the two subprocesses, write the result
    resolve              subprocess: load the tokenizer with transformers, write the input of the parity gate
    sentencepiece_model  the reference for a tokenizer whose only vocabulary is a SentencePiece model
    gate                 subprocess: compare each candidate encoder with Hugging Face; return a verdict
    cache                resolutions of this machine, for the next output with the same tokenizer
    encoder_store        the tokenizer, the backend files and the verdicts next to the data
    merges               backend files without unreachable merges
    encoders             load the encoder of an engine, with a guard
    engines              the registry of engines: fastokens, gigatoken, hf
    special_tokens       count special tokens in texts
    stream               fetch shards of a remote source while the stage runs
    unit_tokenizer       tokenize one unit: read its files, write its pairs
    workers              encoder processes, and the shared memory for their blocks
    assemble             Megatron-LM's rules for empty text and EOD

Planning: options -> tokenizer_files -> tokenizer -> resolve -> gate -> encoder_store (cache skips resolve and gate).
Work: unit_tokenizer -> workers (encoders, special_tokens) -> assemble -> `datasets.formats`.
"""
