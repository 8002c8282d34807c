"""Bytes equal to what Megatron-LM's own preprocessing writes, whatever way the corpus takes.

`vectors.json` holds, for each case, size and SHA-256 of the `.bin` and `.idx` that Megatron-LM's
`tools/preprocess_data.py` wrote. The fast run takes each bundled-tokenizer case one way; `make conformance`
takes every case through every encoder, form of input, and number of processes and workers.
"""

import gzip
import hashlib
import io
import json
import os
import struct
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import zstandard

HERE = Path(__file__).parent
VECTORS = {vector["name"]: vector for vector in json.loads((HERE / "vectors.json").read_text())["vectors"]}
ENCODERS = ("hf", "gigatoken", "fastokens")
WORKERS = (1, 3, 7)
PARTS = 9
"""Files an input is split into where workers share it: more than workers."""


class EncodingMode(NamedTuple):
    """How a corpus reaches the `.bin`."""

    encoder: str
    form: str
    processes: int = 1
    workers: int = 1


FAST = {
    "small-tiny": EncodingMode("gigatoken", ".jsonl.gz", 2),
    "mixed-tiny": EncodingMode("fastokens", ".jsonl.zst", 1),
    "mixed-tiny-no-eod": EncodingMode("hf", ".parquet", 2),
    "mixed-tiny-two-keys": EncodingMode("gigatoken", ".parquet", 1),
    "escaped-tiny": EncodingMode("hf", ".jsonl", 1),
    "odd-tiny": EncodingMode("fastokens", ".jsonl", 2, 3),
}


def every_way(number: int) -> Iterator[EncodingMode]:
    """Pair the axes so that a case meets each value of each; the number turns the pairs from case to case."""
    for i, form in enumerate((".jsonl", ".jsonl.zst", ".jsonl.gz", ".parquet")):
        yield EncodingMode(ENCODERS[(number + i) % 3], form, 1 + i % 2, WORKERS[(number // 3 + i) % 3])


def cases() -> Iterator[Any]:
    for name, way in FAST.items():
        yield pytest.param(name, way, id=f"{name}-{'-'.join(map(str, way))}")
    for number, (name, vector) in enumerate(VECTORS.items()):
        for way in every_way(number):
            # Text given as a list, NaN and lone surrogates have no place in a Parquet column of strings.
            if (vector["input"], way.form) != ("odd", ".parquet"):
                parameters = f"all-{name}-{'-'.join(map(str, way))}"
                yield pytest.param(name, way, id=parameters, marks=pytest.mark.conformance)


def tokenizer_directory(name: str) -> Path:
    """Find a vector's tokenizer; a missing download is a failure, so that it cannot go unnoticed."""
    if name == "tiny":
        return HERE / "tokenizers/tiny"
    root = os.environ.get("TOKENMILL_NPM_TOKENIZERS")
    directory = Path(root or "unset") / name
    if not (directory / "tokenizer.json").is_file():
        pytest.fail(f"no tokenizer.json in {directory} (TOKENMILL_NPM_TOKENIZERS={root}): run make conformance")
    return directory


def write_form(lines: bytes, path: Path, form: str) -> None:
    """Write JSON lines as a form of input; compressed ones get two frames, which is legal and common."""
    half = len(lines) // 2
    if form == ".parquet":
        records = [json.loads(line) for line in lines.split(b"\n") if line.strip()]
        columns = {key: [record[key] for record in records] for key in ("text", "title") if key in records[0]}
        pq.write_table(pa.table(columns), f"{path}{form}", row_group_size=max(1, len(records) // 3))
        return
    if form == ".jsonl.zst":
        lines = b"".join(zstandard.ZstdCompressor().compress(part) for part in (lines[:half], lines[half:]))
    elif form == ".jsonl.gz":
        lines = b"".join(gzip.compress(part, mtime=0) for part in (lines[:half], lines[half:]))
    Path(f"{path}{form}").write_bytes(lines)


def write_input(name: str, form: str, directory: Path, parts: int) -> None:
    """Write an input as one file of its name, or as several that begin with it, in order."""
    directory.mkdir()
    lines = (HERE / "inputs" / f"{name}.jsonl").read_bytes()
    if parts == 1:
        write_form(lines, directory / name, form)
        return
    kept = io.BytesIO(lines).readlines()
    for part in range(parts):
        share = kept[part * len(kept) // parts : (part + 1) * len(kept) // parts]
        write_form(b"".join(share), directory / f"{name}-{part}", form)


def join(pairs: list[Path]) -> tuple[bytes, bytes]:
    """Join pairs, in order, to the one that a single input would have become."""
    ids, lengths, documents = [], [], [np.zeros(1, dtype="<i8")]
    header = b""
    for prefix in pairs:
        data = Path(f"{prefix}.idx").read_bytes()
        header = data[:18]
        sequences, entries = struct.unpack_from("<QQ", data, 18)
        ids.append(Path(f"{prefix}.bin").read_bytes())
        documents.append(np.frombuffer(data, "<i8", entries, 34 + 12 * sequences)[1:] + sum(map(len, lengths)))
        lengths.append(np.frombuffer(data, "<i4", sequences, 34))
    sizes = np.concatenate(lengths)
    pointers = (np.cumsum(sizes, dtype="<i8") - sizes) * {4: 4, 8: 2}[header[17]]
    index = np.concatenate(documents)
    counts = struct.pack("<QQ", len(sizes), len(index))
    return b"".join(ids), header + counts + sizes.tobytes() + pointers.tobytes() + index.tobytes()


@pytest.mark.parametrize(("name", "way"), list(cases()))
def test_bytes_equal_megatron(tmp_path: Path, preprocess: Callable[..., None], name: str, way: EncodingMode) -> None:
    vector = VECTORS[name]
    tokenizer = tokenizer_directory(vector["tokenizer"])
    parts = 1 if way.workers == 1 else PARTS
    write_input(vector["input"], way.form, tmp_path / "in", parts)
    keys = vector.get("keys", ["text"])
    options = ["--keys", ",".join(keys), "--encoder", way.encoder, "--processes", str(way.processes)]
    if not vector.get("eod", True):
        options.append("--no-append-eod")
    if "--tokenizer-hf-no-include-special-tokens" in vector.get("extra", []):
        options.append("--no-special-tokens")
    if vector["tokenizer"] != "tiny":  # gpt4o and llama2 are other tokenizers by their own files
        options += ["--tokenizer-source", "class"]
    for worker in range(way.workers):
        share = ["--worker-index", str(worker), "--workers", str(way.workers)]
        preprocess(tmp_path / "in", tmp_path / "out", tokenizer, *options, *share)

    names = [vector["input"]] if parts == 1 else [f"{vector['input']}-{part}" for part in range(parts)]
    for key, expected in vector["outputs"].items():
        pairs = [tmp_path / "out" / f"{part}_{key}_document" for part in names]
        joined = join(pairs)
        if parts == 1:
            assert joined == tuple(Path(f"{pairs[0]}.{suffix}").read_bytes() for suffix in ("bin", "idx"))
        for data, suffix in zip(joined, ("bin", "idx"), strict=True):
            found = (len(data), hashlib.sha256(data).hexdigest())
            assert found == (expected[f"{suffix}_bytes"], expected[f"{suffix}_sha256"]), f"{key} .{suffix}"
    assert len(list((tmp_path / "out").glob("*.bin"))) == len(names) * len(keys)
