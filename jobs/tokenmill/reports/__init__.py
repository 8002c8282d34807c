"""Reports about an output of a stage, or about a training run: `tokenmill report`.

Modules, in the order of the flow of data:

    contract      the records of a report, which are the form of --json, too
    lengths       lengths of documents and tokens of each source, exact, from the .idx files
    usage         frequencies of ids and equal documents, from the .bin files, of all documents or of a sample
    scripts       scripts of Unicode, by ranges of code points
    texts         the decoded sample: tokens per character by script; two tokenizers; examples
    rejected      the reasons in the quarantine
    stages        time and rates of the stages from their receipts, and the lineage
    dataset       the report about an output
    run           the report about a training run
    sections      headings, sentences and tables of a report
    text          a report as text
    page          a report as one HTML file

A report contains no text of the data, unless the caller requests examples.
"""
