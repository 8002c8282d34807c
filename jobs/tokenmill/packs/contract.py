"""The records of packed rows in plans."""

from msgspec import field

from tokenmill.datasets.contract import ResolvedTokenizer
from tokenmill.engine.contract import Count, Hash, Name, Record

SHARD, METADATA, BLEND = "shard", "metadata", "blend"
"""The roles of the outputs."""

STORED, TRAINED = "stored", "trained"
"""How the tokens of a sequence are counted: all ids, or the positions that the trainer reads, which are one less."""


class ShardFile(Record, frozen=True, gc=False):
    """A shard in the list of all shards: its path in the output, and its number of rows."""

    path: Name
    rows: Count


class PackSpec(Record, frozen=True):
    """The work of a unit: consecutive rows of the stored assignment, or the files that describe all shards.

    `content` is the xxh3-128 of the rows' part of the assignment. `sequences`, `tokens` (with padding), `padding` and
    `trained` are the totals of the rows. The unit without rows has `metadata`, the shards of each split, and the number
    of sequences that were left out.
    """

    split: str = ""
    epoch: Count = 0
    first: Count = 0
    rows: Count = 0
    content: str = ""
    sequences: Count = 0
    tokens: Count = 0
    padding: Count = 0
    trained: Count = 0
    metadata: list[dict[str, object]] = field(default_factory=list)
    shards: dict[str, list[ShardFile]] = field(default_factory=dict)
    dropped: Count = 0


class PackBasis(Record, frozen=True, kw_only=True):
    """The parameters that determine the bytes of every shard in addition to its rows.

    `inputs` is a hash of the pairs and of the names of their sources. `multiple` is the multiple to which each
    sequence is padded with `pad`. `fill` is "stored" or "trained". `vocabulary` is the number of valid token ids.
    """

    inputs: Hash
    format: Name
    pack_size: Count
    fill: Name
    multiple: Count
    pad: Count
    vocabulary: Count


class PackDetails(Record, frozen=True):
    """The tokenizer of the packed ids, and the xxh3-128 of the stored assignment."""

    tokenizer: ResolvedTokenizer
    assignment: Hash
