"""Rows without files: sequences in memory as rows, and the rows of a packed shard."""

import io
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq

from support import stages
from support.chat import make_tokenizer
from support.corpus import text
from tokenmill.engine.progress import Reporter
from tokenmill.engine.stage import StageRun
from tokenmill.packs.rows import Rows
from tokenmill.stages.pack.algorithms import Bins
from tokenmill.stages.pack.assignment import SLOT
from tokenmill.stages.pack.rows import assemble

Sequences = Sequence[tuple[Sequence[int], Sequence[int]]]
"""The ids and the unshifted mask of each sequence."""


class Buffer:
    """An output in memory, with the methods that writers use."""

    def __init__(self) -> None:
        self.data = b""

    @property
    def bytes(self) -> int:
        return len(self.data)

    def write(self, data: Any) -> None:
        self.data += bytes(data)


def rows_of(sequences: Sequences, bins: Bins, *, multiple: int = 1, pad: int = 0) -> Rows:
    """Return the rows of sequences."""
    ids = np.array([token for tokens, _ in sequences for token in tokens], "i4")
    mask = np.array([value for _, values in sequences for value in values], "u1")
    lengths = np.array([len(tokens) for tokens, _ in sequences])
    slots = np.zeros(len(bins.order), SLOT)
    slots["start"] = (np.cumsum(lengths) - lengths)[bins.order]
    slots["length"], slots["record"] = lengths[bins.order], bins.order
    return assemble(slots, bins.ends, lambda _: (ids, mask), multiple=multiple, pad=pad)


def pack_documents(directory: Path, pack_size: int, **options: Any) -> Path:
    """Preprocess two files in a directory, and return their documents packed in pairs; `options` are of PackOptions."""
    run = StageRun(Reporter(), processes=1)
    (directory / "in").mkdir()
    for number in range(2):
        (directory / "in" / f"{number}.jsonl").write_bytes(text(number, 120))
    stages.preprocess(
        directory / "in", directory / "pairs", run, tokenizer=str(make_tokenizer(directory / "tokenizer"))
    )
    stages.pack(directory / "pairs", directory / "packed", run, format="megatron", pack_size=pack_size, **options)
    return directory / "packed"


def split_rows(rows: Rows) -> list[list[list[int]]]:
    """Return the ids, the mask and the starts of each row as lists."""
    starts = rows.starts_in_rows
    return [
        [
            rows.ids[rows.bounds[i] : rows.bounds[i + 1]].tolist(),
            rows.mask[rows.bounds[i] : rows.bounds[i + 1]].tolist(),
            starts[rows.row_sequences[i] : rows.row_sequences[i + 1]].tolist(),
        ]
        for i in range(rows.row_count)
    ]


def read_rows(name: str, data: bytes) -> list[list[list[int]]]:
    """Return the rows of a shard; `name` is its format."""
    if name == "parquet":
        records = pq.read_table(io.BytesIO(data)).to_pylist()
    elif name == "jsonl":
        records = [json.loads(line) for line in data.splitlines()]
    else:
        records = np.load(io.BytesIO(data), allow_pickle=True).tolist()
    return [[record[key] for key in ("input_ids", "loss_mask", "seq_start_id")] for record in records]


def read_output(output: Path, split: str = "") -> list[list[list[int]]]:
    """Return the rows of all shards of an output, or of one split."""
    paths = sorted(path for path in (output / split).glob("shard_*"))
    return [row for path in paths for row in read_rows(path.suffix[1:], path.read_bytes())]
