"""Check the data of a run before the run: its files, its vocabulary, its tokens, and what each framework reads.

`tokenmill check-data` calls `run.check`. It writes only temporary files, and the cache of the orders of large datasets.

Modules; each module uses only modules above it:

    rows               the rows of the report, and their results
    text_test          statistics that tell text from random tokens
    options            the options of the command
    request            the source of a check, and its parts
    files              checks of the files, the record, the tokenizer and the tokens
    framework_records  what is requested from a framework's process, and what it returns
    framework_readers  reads samples through each framework, in that process
    framework_child    the process
    frameworks         the registry of frameworks; starts the processes and compares their samples
    run                all checks, in order
    report             the report as text and as JSON

docs/check-data.md describes the checks.
"""
