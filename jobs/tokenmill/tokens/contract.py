"""What plans and journals of preprocess hold: from what a pair is made, and how far an attempt at it is."""

from tokenmill.flow.contract import Count, InputFile, InputRange, Name, Part, Record

PREPROCESS = "preprocess"
"""The stage whose outputs are pairs."""


class PairSpec(Record, frozen=True):
    """From what pairs of .bin and .idx are made: `name` begins their names; `adopted` is how another tool's were."""

    name: Name
    inputs: list[InputFile]
    adopted: str | None = None


class WriterState(Record, frozen=True, gc=False):
    """How far a pair is: what IndexedWriter.mark made durable, and IndexedWriter.resume goes on from."""

    dtype_code: Count
    sequences: Count
    documents: Count
    even: Count
    tokens: Count
    bin_bytes: Count


class Journal(Record, frozen=True):
    """How far an attempt at a unit of preprocess is (`tokens.unit_tokenizer`)."""

    done: Count
    columns: list[WriterState]
    rejected_bytes: Count
    counts: dict[str, Count]
    parts: list[Part]
    inputs: list[InputRange]
