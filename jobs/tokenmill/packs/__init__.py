"""Files of packed rows, for the stage that writes them and for everything that reads them.

contract        the records of packed rows in plans
rows            rows of sequences, as writers receive them
parquet_layout  checks of a Parquet file before pyarrow decodes it
writers         the formats of shards; `writers.parquet` also reads them
check           checks of a shard
kind            the kind of the stage pack
view            the text and the mask of a row
"""
