"""The output has the bytes of Megatron-LM's own preprocessing, for every way of encoding.

`vectors.json` contains for each case the size and the SHA-256 of the `.bin` and `.idx` that Megatron-LM's
`tools/preprocess_data.py` wrote. The fast run encodes each case of the bundled tokenizer in one mode. `make
conformance` encodes every case with every encoder. The input formats and the numbers of processes and workers are
spread over the cases, so that each pair of settings occurs.
"""

import gzip
import hashlib
import io
import json
import os
import struct
from collections.abc import Callable, Iterator
from itertools import combinations, product
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
FORMS = (".jsonl", ".jsonl.zst", ".jsonl.gz", ".parquet")
WORKERS = (1, 3, 7)
"""Numbers of workers. Large tokenizers load slowly, and do not change the division of an input: they have at most 3."""

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


def encoding_modes(number: int) -> list[EncodingMode]:
    """Return the modes of a case; the number shifts the combinations, for which a test below has the rules."""
    vector = list(VECTORS.values())[number]
    counts = WORKERS if vector["tokenizer"] == "tiny" else (1, 1, 3)
    modes = []
    for i, encoder in enumerate(ENCODERS):
        form = FORMS[(number + 3 * i) % 4]
        # A Parquet column of strings cannot contain lists of texts, NaN and lone surrogates.
        if (vector["input"], form) == ("odd", ".parquet"):
            form = FORMS[(number + i) % 3]
        modes.append(EncodingMode(encoder, form, 1 + (number // 2 + i) % 2, counts[(number // 2 + i + 1) % 3]))
    # The encoders never see the id at the end of a document. The fast run has another mode of this case.
    return modes[1:2] if not vector.get("eod", True) else modes


ALL = [(name, mode) for number, name in enumerate(VECTORS) for mode in encoding_modes(number)]


def cases() -> Iterator[Any]:
    """Yield the cases of the fast run, and all; the cases of one tokenizer run on one worker of pytest."""
    for name, mode in FAST.items():
        yield pytest.param(name, mode, id=f"{name}-{'-'.join(map(str, mode))}")
    for number, name in enumerate(VECTORS):
        modes = encoding_modes(number)
        for position, mode in enumerate(modes):
            marks = [pytest.mark.conformance, pytest.mark.xdist_group(f"vectors of {VECTORS[name]['tokenizer']}")]
            if position == number % len(modes):  # each encoder in turn
                marks.append(pytest.mark.every_change)
            yield pytest.param(name, mode, id=f"all-{name}-{'-'.join(map(str, mode))}", marks=marks)


def test_the_cases_have_every_pair_of_settings() -> None:
    columns = list(zip(*(mode for _, mode in ALL), strict=True))
    for first, second in combinations(columns, 2):
        assert set(zip(first, second, strict=True)) == set(product(first, second))
    for form in FORMS:
        for tokenizer in ("tiny", "llama3_1"):
            assert any(VECTORS[name]["tokenizer"] == tokenizer and mode.form == form for name, mode in ALL)
    assert {(name, mode.encoder) for name, mode in ALL} >= {
        (name, encoder) for name in VECTORS for encoder in ENCODERS if name != "mixed-tiny-no-eod"
    }


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
