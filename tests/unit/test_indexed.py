"""The indexed dataset, compared with Megatron-LM's files, and its limits."""

import hashlib
import io
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tokenmill.datasets.formats.indexed import writer as writing
from tokenmill.datasets.formats.indexed.reader import IndexedReader, dtype_for
from tokenmill.datasets.formats.indexed.writer import IndexedWriter, WriterState
from tokenmill.errors import InputError, RequestError, TransientError
from tokenmill.tokenize.assemble import assemble

CONFORMANCE = Path(__file__).parents[1] / "conformance"
PAIR = CONFORMANCE / "small-tiny_text_document"
TINY = [
    vector
    for vector in json.loads((CONFORMANCE / "vectors.json").read_text())["vectors"]
    if vector["tokenizer"] == "tiny"
]


def write_pair(prefix: Path, documents: list[list[list[int]]], dtype: str = "int32", eod: int | None = 0) -> None:
    """Write documents, each a list of sentences, through assemble and the writer, in one batch."""
    sentences = [sentence for document in documents for sentence in document]
    ids = np.array([token for sentence in sentences for token in sentence], dtype=np.uint32)
    offsets = np.cumsum([0, *map(len, sentences)])
    counts = np.array([len(document) for document in documents], dtype=np.int64)
    with Path(f"{prefix}.bin").open("wb") as bin_file:
        writer = IndexedWriter(bin_file, prefix.with_name("index"), dtype)
        writer.add(*assemble(ids, offsets, counts, eod, dtype))
    Path(f"{prefix}.idx").write_bytes(index_of(writer))
    writer.discard()


def index_of(writer: IndexedWriter) -> bytes:
    """Return the bytes of the .idx."""
    index = io.BytesIO()
    writer.write_index(index)
    return index.getvalue()


@pytest.fixture(scope="module")
def encode() -> Callable[[list[str]], list[list[int]]]:
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(CONFORMANCE / "tokenizers/tiny/tokenizer.json"))
    return lambda texts: [encoding.ids for encoding in tokenizer.encode_batch(texts)]


@pytest.mark.slow
@pytest.mark.parametrize("vector", TINY, ids=lambda vector: vector["name"])
def test_bytes_equal_megatron(
    tmp_path: Path, vector: dict[str, Any], encode: Callable[[list[str]], list[list[int]]]
) -> None:
    eod = encode(["<|endoftext|>"])[0][0] if vector.get("eod", True) else None
    lines = (CONFORMANCE / "inputs" / f"{vector['input']}.jsonl").read_bytes().split(b"\n")
    records = [json.loads(line) for line in lines if line.strip()]
    for key, output in vector["outputs"].items():
        bin_file = io.BytesIO()
        writer = IndexedWriter(bin_file, tmp_path / key, dtype_for(4096).name)
        for start in range(0, len(records), 97):
            texts = [record[key] for record in records[start : start + 97]]
            lists = [text if isinstance(text, list) else [text] for text in texts]
            counts = None if all(len(item) == 1 for item in lists) else np.array([*map(len, lists)])
            encoded = encode([sentence for item in lists for sentence in item])
            ids = np.array([token for sentence in encoded for token in sentence], dtype=np.uint32)
            offsets = np.cumsum([0, *map(len, encoded)]).astype(np.uint64)
            writer.add(*assemble(ids, offsets, counts, eod, writer.dtype))
        index = index_of(writer)
        writer.discard()
        assert hashlib.sha256(bin_file.getvalue()).hexdigest() == output["bin_sha256"]
        assert hashlib.sha256(index).hexdigest() == output["idx_sha256"]
        assert (writer.sequences, writer.documents) == (output["sequences"], output["documents"])
    assert not list(tmp_path.iterdir())


def test_megatrons_pair_is_read_and_written_again(tmp_path: Path) -> None:
    reader = IndexedReader(PAIR)
    assert (reader.dtype.name, reader.sequences, reader.documents) == ("uint16", 12, 12)
    assert sum(len(reader.document(i)) for i in range(12)) == 12530 // 2
    assert all(reader.sequence(i)[-1] == 0 for i in range(12))
    write_pair(tmp_path / "copy", [[reader.document(i).tolist()] for i in range(12)], "uint16", eod=None)
    for suffix in (".bin", ".idx"):
        assert Path(f"{tmp_path / 'copy'}{suffix}").read_bytes() == Path(f"{PAIR}{suffix}").read_bytes()


@pytest.mark.parametrize(
    ("eod", "documents", "expected"),
    [
        (9, [[[1, 2]], [[3]]], [[1, 2, 9], [3, 9]]),
        (None, [[[1, 2]], [[]], [[3]]], [[1, 2], [], [3]]),
        (9, [[[]], [[1]], [[]]], [[], [1, 9], []]),
        (9, [[[1], [], [2, 3]], [], [[], []], [[4], []]], [[1, 2, 3, 9], [], [], [4, 9]]),
        (0, [], []),
        (0, [[[]]], [[]]),
    ],
)
def test_empty_text_and_eod(
    tmp_path: Path, eod: int | None, documents: list[list[list[int]]], expected: list[list[int]]
) -> None:
    write_pair(tmp_path / "p", documents, eod=eod)
    reader = IndexedReader(tmp_path / "p")
    assert [reader.document(i).tolist() for i in range(reader.documents)] == expected
    assert (reader.lengths > 0).all()


def sentences_of(document: list[list[int]], eod: int | None) -> list[list[int]]:
    """Apply Megatron-LM's rule to one document in plain Python."""
    kept = [sentence for sentence in document if sentence]
    return kept if eod is None or not kept else [*kept[:-1], [*kept[-1], eod]]


@given(
    documents=st.lists(st.lists(st.lists(st.integers(0, 65535), max_size=5), max_size=4), max_size=20),
    eod=st.none() | st.integers(0, 65535),
    dtype=st.sampled_from([np.uint16, np.int32]),
)
def test_assemble_is_the_rule_applied_to_each_document(
    documents: list[list[list[int]]], eod: int | None, dtype: Any
) -> None:
    sentences = [sentence for document in documents for sentence in document]
    # Batches are slices of larger buffers: the values around them do not matter.
    ids = np.array([7, *(token for sentence in sentences for token in sentence), 7], dtype=np.uint32)
    offsets = np.cumsum([1, *map(len, sentences)]).astype(np.uint64)
    tokens, lengths, counts = assemble(ids, offsets, np.array([*map(len, documents)], dtype=int), eod, dtype)
    expected = [sentences_of(document, eod) for document in documents]
    assert tokens.tolist() == [token for document in expected for sentence in document for token in sentence]
    assert lengths.tolist() == [len(sentence) for document in expected for sentence in document]
    assert counts.tolist() == [len(document) for document in expected]
    assert (tokens.dtype.name, lengths.dtype.name) == (np.dtype(dtype).name, "int32")


@given(documents=st.lists(st.lists(st.integers(0, 9), max_size=3), max_size=9), several=st.booleans())
def test_assemble_of_texts_that_the_encoder_ended(documents: list[list[int]], several: bool) -> None:
    def flat(texts: list[list[int]]) -> tuple[Any, Any]:
        return np.array([token for text in texts for token in text], np.uint32), np.cumsum([0, *map(len, texts)])

    counts = np.array([2] * (len(documents) // 2) + [1] * (len(documents) % 2), int) if several else None
    ended = assemble(*flat([[*text, 5] for text in documents]), counts, 5, np.int32, ended=True)
    for actual, expected in zip(ended, assemble(*flat(documents), counts, 5, np.int32), strict=True):
        assert actual.tolist() == expected.tolist()
        assert actual.dtype == expected.dtype


@pytest.mark.parametrize(
    ("token", "eod", "dtype"), [(65536, 0, np.uint16), (2**31, 0, np.int32), (1, 65536, np.uint16)]
)
def test_an_id_past_the_dtype_is_refused(token: int, eod: int, dtype: Any) -> None:
    ids = np.array([1, token], dtype=np.uint32)
    with pytest.raises(RequestError, match=f"token id {max(token, eod)} does not fit {np.dtype(dtype).name}"):
        assemble(ids, np.array([0, 2]), None, eod, dtype)


def test_dtype_changes_at_65500() -> None:
    assert [dtype_for(size) for size in (4096, 65499, 65500, 128256)] == [np.uint16] * 2 + [np.int32] * 2


def test_a_resumed_writer_gives_the_same_bytes(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)

    def batch() -> tuple[Any, ...]:
        lengths = rng.integers(0, 9, 50)
        ids = rng.integers(0, 100_000, lengths.sum()).astype(np.uint32)
        return assemble(ids, np.concatenate(([0], np.cumsum(lengths))), None, 5, np.int32)

    first, lost, second = batch(), batch(), batch()
    whole = io.BytesIO()
    straight = IndexedWriter(whole, tmp_path / "straight", "int32")
    straight.add(*EVEN)
    straight.add(*first)
    straight.add(*second)

    for saved_after in (1, 2):
        parts = io.BytesIO()
        killed = IndexedWriter(parts, tmp_path / "killed", "int32")
        killed.add(*EVEN)
        if saved_after == 2:
            killed.add(*first)
        state = WriterState.from_json(json.loads(json.dumps(killed.save_state("0" * 32).to_json())))
        killed.add(*lost)
        killed.close()
        parts.truncate(state.bin_bytes)
        parts.seek(state.bin_bytes)
        resumed = IndexedWriter.resume(state, parts, tmp_path / "killed")
        if saved_after == 1:
            resumed.add(*first)
        resumed.add(*second)
        assert parts.getvalue() == whole.getvalue()
        assert index_of(resumed) == index_of(straight)
        resumed.close()

    for name, size in (("killed.lengths", 8), ("killed.documents", 8)):
        data = (tmp_path / name).read_bytes()
        (tmp_path / name).write_bytes(b"\0" * size)
        with pytest.raises(InputError, match=rf"{name}: 8 bytes.*start the unit again"):
            IndexedWriter.resume(state, parts, tmp_path / "killed")
        (tmp_path / name).unlink()
        with pytest.raises(InputError, match=rf"{name}: missing.*start the unit again"):
            IndexedWriter.resume(state, parts, tmp_path / "killed")
        (tmp_path / name).write_bytes(data)


def test_lengths_that_the_file_system_lost_are_no_index(tmp_path: Path) -> None:
    writer = IndexedWriter(io.BytesIO(), tmp_path / "p", "uint16")
    writer.add(np.arange(6, dtype="uint16"), np.array([2, 4], "<i4"), np.array([2]))
    whole = index_of(writer)
    for name in ("p.lengths", "p.documents"):
        data = (tmp_path / name).read_bytes()
        (tmp_path / name).write_bytes(bytes(len(data)))
        with pytest.raises(TransientError, match=rf"{name} does not have the bytes"):
            writer.write_index(io.BytesIO())
        (tmp_path / name).write_bytes(data)
    assert index_of(writer) == whole


EVEN = (np.arange(30, dtype=np.int32), np.full(10, 3, np.int32), None)
"""A batch of documents of one sequence each: the writer keeps only their number."""


def test_an_index_larger_than_a_chunk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    documents = [[[1] * (1 + i % 7)] for i in range(30)] + [[[1] * (i % 7)] for i in range(100)]
    write_pair(tmp_path / "one", documents)
    monkeypatch.setattr(writing, "CHUNK", 8)
    write_pair(tmp_path / "many", documents)
    reader = IndexedReader(tmp_path / "many")
    assert [reader.document(i).tolist()[:-1] for i in range(130)] == [document[0] for document in documents]
    assert (tmp_path / "one.idx").read_bytes() == (tmp_path / "many.idx").read_bytes()


def test_inconsistent_batch_is_a_bug(tmp_path: Path) -> None:
    writer = IndexedWriter(io.BytesIO(), tmp_path / "p", "int32")
    with pytest.raises(ValueError, match="must sum"):
        writer.add(np.zeros(3, np.int32), np.array([2], np.int32), np.array([1]))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda data: b"MMIDIDY" + data[7:], "not an indexed dataset"),
        (lambda data: b"", "not an indexed dataset"),
        (lambda data: data[:20], "inside its 34-byte header"),
        (lambda data: data[:9] + b"\x02" + data[10:], "version 2"),
        (lambda data: data[:17] + b"\x09" + data[18:], "dtype code 9"),
        (lambda data: data[:-1], "281 bytes, but 12 sequences and 13 document indices need 282"),
        (lambda data: data[:17] + b"\x04" + data[18:], "12,530 bytes, but"),
    ],
)
def test_damaged_index_is_described(tmp_path: Path, change: Callable[[bytes], bytes], message: str) -> None:
    (tmp_path / "p.bin").write_bytes(Path(f"{PAIR}.bin").read_bytes())
    (tmp_path / "p.idx").write_bytes(change(Path(f"{PAIR}.idx").read_bytes()))
    with pytest.raises(InputError, match=message):
        IndexedReader(tmp_path / "p")


def test_positions_past_the_end_are_index_errors() -> None:
    reader = IndexedReader(PAIR)
    for read in (reader.document, reader.sequence):
        for number in (-1, 12):
            with pytest.raises(IndexError, match=f"{number} of 12"):
                read(number)
    with pytest.raises(InputError, match="missing"):
        IndexedReader(CONFORMANCE / "no-such-pair")
