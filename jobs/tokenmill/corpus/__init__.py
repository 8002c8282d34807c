"""Input of the pipeline: list and fetch sources, decompress files, and read records."""
