"""The output has the bytes of Megatron-LM's own preprocessing, for every way of encoding.

`vectors.json` contains for each case the size and the SHA-256 of the `.bin` and `.idx` that Megatron-LM's
`tools/preprocess_data.py` wrote. The fast run encodes each case of the bundled tokenizer in one mode. `make
conformance` encodes every case with every encoder, input format, and number of processes and workers.
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
"""Number of files of an input that several workers share: more files than workers."""


class EncodingMode(NamedTuple):
    """A way to encode a corpus."""

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


def encoding_modes(number: int) -> Iterator[EncodingMode]:
    """Yield modes for a case so that it has each encoder, format and count; the number shifts the combinations."""
    for i, form in enumerate((".jsonl", ".jsonl.zst", ".jsonl.gz", ".parquet")):
        yield EncodingMode(ENCODERS[(number + i) % 3], form, 1 + i % 2, WORKERS[(number // 3 + i) % 3])


def cases() -> Iterator[Any]:
    for name, mode in FAST.items():
        yield pytest.param(name, mode, id=f"{name}-{'-'.join(map(str, mode))}")
    for number, (name, vector) in enumerate(VECTORS.items()):
        for mode in encoding_modes(number):
            # A Parquet column of strings cannot contain lists of texts, NaN and lone surrogates.
            if (vector["input"], mode.form) != ("odd", ".parquet"):
                parameters = f"all-{name}-{'-'.join(map(str, mode))}"
                yield pytest.param(name, mode, id=parameters, marks=pytest.mark.conformance)


def tokenizer_directory(name: str) -> Path:
    """Return a vector's tokenizer; a missing download is a failure, so that the test is never skipped."""
    if name == "tiny":
        return HERE / "tokenizers/tiny"
    root = os.environ.get("TOKENMILL_NPM_TOKENIZERS")
    directory = Path(root or "unset") / name
    if not (directory / "tokenizer.json").is_file():
        pytest.fail(f"no tokenizer.json in {directory} (TOKENMILL_NPM_TOKENIZERS={root}): run make conformance")
    return directory


def write_form(lines: bytes, path: Path, form: str) -> None:
    """Write JSON lines in an input format; compressed files get two frames, which is valid and common."""
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
    """Write an input as one file with its name, or as several files with this prefix, in order."""
    directory.mkdir()
    lines = (HERE / "inputs" / f"{name}.jsonl").read_bytes()
    if parts == 1:
        write_form(lines, directory / name, form)
        return
    all_lines = io.BytesIO(lines).readlines()
    for part in range(parts):
        share = all_lines[part * len(all_lines) // parts : (part + 1) * len(all_lines) // parts]
        write_form(b"".join(share), directory / f"{name}-{part}", form)


def join(pairs: list[Path]) -> tuple[bytes, bytes]:
    """Join pairs, in order, to the pair of a single input."""
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


@pytest.mark.parametrize(("name", "mode"), list(cases()))
def test_bytes_equal_megatron(tmp_path: Path, preprocess: Callable[..., None], name: str, mode: EncodingMode) -> None:
    vector = VECTORS[name]
    tokenizer = tokenizer_directory(vector["tokenizer"])
    parts = 1 if mode.workers == 1 else PARTS
    write_input(vector["input"], mode.form, tmp_path / "in", parts)
    keys = vector.get("keys", ["text"])
    options = ["--keys", ",".join(keys), "--encoder", mode.encoder, "--processes", str(mode.processes)]
    if not vector.get("eod", True):
        options.append("--no-append-eod")
    if "--tokenizer-hf-no-include-special-tokens" in vector.get("extra", []):
        options.append("--no-special-tokens")
    if vector["tokenizer"] != "tiny":  # gpt4o and llama2 differ without this option
        options += ["--tokenizer-source", "class"]
    for worker in range(mode.workers):
        share = ["--worker-index", str(worker), "--workers", str(mode.workers)]
        preprocess(tmp_path / "in", tmp_path / "out", tokenizer, *options, *share)

    names = [vector["input"]] if parts == 1 else [f"{vector['input']}-{part}" for part in range(parts)]
    for key, expected in vector["outputs"].items():
        pairs = [tmp_path / "out" / f"{part}_{key}_document" for part in names]
        joined = join(pairs)
        if parts == 1:
            assert joined == tuple(Path(f"{pairs[0]}.{suffix}").read_bytes() for suffix in ("bin", "idx"))
        for data, suffix in zip(joined, ("bin", "idx"), strict=True):
            actual = (len(data), hashlib.sha256(data).hexdigest())
            assert actual == (expected[f"{suffix}_bytes"], expected[f"{suffix}_sha256"]), f"{key} .{suffix}"
    assert len(list((tmp_path / "out").glob("*.bin"))) == len(names) * len(keys)
