"""Input files: each format under any name, and an error that names content of another format."""

import bz2
import gzip
import json
import lzma
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import zstandard
from hypothesis import given, settings
from hypothesis import strategies as st

from tokenmill.errors import InputError, RequestError
from tokenmill.records.block_kinds import ReadSettings
from tokenmill.records.compression import open_decompressed
from tokenmill.records.json_cutter import JsonCutter
from tokenmill.records.parse import RejectedRecord
from tokenmill.records.readers import OnBad, first_documents, read_documents
from tokenmill.records.suffixes import is_data_file

PLAIN, JSON, FILE = ReadSettings(), ReadSettings("json"), ReadSettings("txt")
LINE = ReadSettings("txt", document_per_line=True)
RECORDS: list[dict[str, Any]] = [
    {"text": 'quoted "a\\" ]}', "n": [1, [2, {"deep": "}"}], []]},
    {"id": 7, "text": "žluť 😀\n\r\n\t", "meta": {"data": [{"text": "no record"}]}},
    {"text": "", "empty": {}},
    {"text": "last" * 300},
]
TEXTS = [record["text"] for record in RECORDS]


def _read(
    path: Path, reading: ReadSettings = PLAIN, on_bad: OnBad = "fail", batch_bytes: int = 4 << 20, key: str = "text"
) -> tuple[list[Any], list[RejectedRecord], int]:
    """Return a file's texts, bad records and number of blank lines; check the compressed size."""
    texts: list[Any] = []
    rejected: list[RejectedRecord] = []
    blank = size = 0
    for batch in read_documents(
        path, [key], display="corpus/file", on_bad=on_bad, batch_bytes=batch_bytes, settings=reading
    ):
        texts += batch.texts[0]
        rejected += batch.rejected
        blank += batch.blank
        size += batch.compressed
    assert size == path.stat().st_size
    return texts, rejected, blank


@pytest.fixture
def file(tmp_path: Path) -> Callable[..., Path]:
    def write(data: bytes | str, name: str = "a.jsonl") -> Path:
        (tmp_path / name).write_bytes(data if isinstance(data, bytes) else data.encode())
        return tmp_path / name

    return write


# -- JSON that is not one record a line

LAYOUTS: dict[str, Callable[[list[Any]], str]] = {
    "array": json.dumps,
    "array over several lines": lambda records: json.dumps(records, indent=2, ensure_ascii=False),
    "array, a record a line": lambda records: "[\n" + ",\n".join(map(json.dumps, records)) + "\n]\n",
    "wrapper": lambda records: json.dumps({"data": records}),
    "wrapper between other keys": lambda r: json.dumps(
        {"version": "data", "info": {"data": [{}]}, "rows": r, "z": [{}, "]"]}
    ),
    "wrapper over several lines": lambda records: json.dumps({"records": records}, indent=1),
    "objects over several lines": lambda records: "\n".join(json.dumps(r, indent=4) for r in records),
    "objects one after the other": lambda records: "".join(map(json.dumps, records)),
    "CR alone": lambda records: "\r".join(map(json.dumps, records)),
    "several arrays": lambda records: json.dumps(records[:1]) + "\n" + json.dumps(records[1:]),
    "a record a line": lambda records: "\ufeff" + "\n".join(map(json.dumps, records)) + "\n\n",
}
PACK: dict[str, Callable[[bytes], bytes]] = {
    "a.json": bytes,
    "a.json.gz": gzip.compress,
    "a.json.zstd": zstandard.ZstdCompressor().compress,
    "a.json.bzip2": bz2.compress,
    "a": lzma.compress,
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_json_is_read_in_every_layout(file: Any, layout: str) -> None:
    data = LAYOUTS[layout](RECORDS * 3).encode()
    for name, pack in PACK.items():
        for batch_bytes in (10, 4 << 20):
            assert _read(file(pack(data), name), JSON, batch_bytes=batch_bytes)[0] == TEXTS * 3


def test_bad_records_of_json_are_counted_in_their_order(file: Any) -> None:
    bad = [3, "text ]}", {"txt": 1}, {"text": None}, [{"text": "nested"}], None, ["a"]]
    mixed = [value for pair in zip(bad, RECORDS * 2, strict=False) for value in pair]
    for layout in ("array", "array over several lines", "wrapper", "array, a record a line"):
        if layout == "wrapper":
            mixed = mixed[1:]  # an array of objects identifies a wrapper
        texts, rejected, _ = _read(file(LAYOUTS[layout](mixed), "a.json"), JSON, "quarantine", batch_bytes=100)
        assert texts == [value["text"] for value in mixed if value in RECORDS]
        assert [item.record for item in rejected] == [i for i, value in enumerate(mixed) if value not in RECORDS]
        assert [json.loads(item.raw) for item in rejected] == [value for value in mixed if value not in RECORDS]
        with pytest.raises(InputError, match=rf"^corpus/file, record {rejected[0].record + 1}: .*--on-bad-record"):
            _read(file(LAYOUTS[layout](mixed), "a.json"), JSON)


def test_invalid_json_stays_invalid(file: Any) -> None:
    """A newline inside a string is not white space, and garbage between two records is a bad record."""
    data = b'{"text": "a"} rubbish "]}{" {"text": "b\nc"}\n{"text": "d\xff"}{"text": NaN}{"text" "e"}{"text": "f"}'
    texts, rejected, _ = _read(file(data), JSON, "quarantine")
    assert texts == ["a", "f"]
    assert [(bad.record, bad.reason.partition(" at")[0]) for bad in rejected] == [
        (1, "invalid JSON"),
        (2, "invalid JSON"),
        (3, "invalid UTF-8"),
        (4, "'text' is a number, not text"),
        (5, "invalid JSON"),
    ]


@pytest.mark.parametrize(
    "data",
    ['[{"text": "a"}, {"text"', '[{"text": "a"},', '{"data": [{"text": "a"}]', '{"text": "a"}{"text": "', "[", "{"],
)
def test_truncated_json_is_refused(file: Any, data: str) -> None:
    with pytest.raises(InputError, match=r"^corpus/file: truncated JSON: .* starts at byte \d+\. Replace the file"):
        _read(file(data, "a.json"), JSON, "quarantine")


@pytest.mark.parametrize("data", ['{"text": "a"}}', "]", '[{"text": "a"}]]', '[{"text": "a"}}'])
def test_unmatched_json_bracket_is_refused(file: Any, data: str) -> None:
    with pytest.raises(InputError, match=r"^corpus/file: damaged JSON: '[]}]' at byte \d+ has no opening bracket"):
        _read(file(data, "a.json"), JSON, "quarantine")


def test_object_is_a_wrapper_only_if_not_a_record(file: Any) -> None:
    own = {"id": 1, "text": "own", "data": [{"text": "inner"}]}
    assert _read(file(json.dumps(own, indent=1), "a.json"), JSON)[0] == ["own"]
    for other in (
        {"data": ["x"], "text": "own"},
        {"data": [], "text": "own"},
        {"items": [{"text": "x"}], "text": "own"},
    ):
        assert _read(file(json.dumps(other), "a.json"), JSON)[0] == ["own"]
    later = json.dumps({"text": "first"}) + json.dumps({"data": [{"text": "inner"}], "text": "second"})
    assert _read(file(later, "a.json"), JSON)[0] == ["first", "second"]
    assert _read(file(json.dumps({"data": [{"m": {"t": "x"}}]}), "a.json"), JSON, key="m.t")[0] == ["x"]


values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(alphabet='\\"[]{},: aé\n\x00', max_size=12),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=8,
)


@pytest.mark.slow
@settings(max_examples=150)
@given(
    records=st.lists(st.dictionaries(st.text(max_size=3), values, min_size=1, max_size=4), max_size=5),
    array=st.booleans(),
    indent=st.sampled_from([None, 0, 2]),
    between=st.sampled_from(["", "\n", "\r", " \t"]),
    size=st.integers(1, 40),
)
def test_values_are_cut_as_json_parses_them(
    records: list[Any], array: bool, indent: int | None, between: str, size: int
) -> None:
    text = json.dumps(records, indent=indent) if array else between.join(json.dumps(r, indent=indent) for r in records)
    if not array and records and any(isinstance(records[0].get(key), list) for key in ("data", "rows")):
        return
    data = text.encode()
    cutter = JsonCutter(["text"], 1 << 20, "")
    cut = [value for start in range(0, len(data), size) for value in cutter.feed(data[start : start + size])]
    assert [json.loads(value.data) for value in [*cut, *cutter.finish()]] == records


def test_a_large_array_comes_in_bounded_batches(file: Any) -> None:
    records = [{"text": f"{number} " * (number % 900)} for number in range(20_000)]
    path = file(gzip.compress(json.dumps(records).encode(), 1), "a.json.gz")
    batches = list(read_documents(path, ["text"], display="", on_bad="fail", batch_bytes=1 << 20, settings=JSON))
    assert [text for batch in batches for text in batch.texts[0]] == [record["text"] for record in records]
    assert max(batch.bytes for batch in batches) < 2 << 20 and len(batches) > 20


# -- content of another format

FOREIGN = {
    "Git LFS pointer": b"version https://git-lfs.github.com/spec/v1\noid sha256:ab\nsize 5\n",
    "git-annex pointer": b"/annex/objects/SHA256E-s5--ab.jsonl\n",
    "Xet pointer": b"# xet version 0\nfilesize = 5\n",
    "HTML": b"\xef\xbb\xbf\n <!DOCTYPE HTML><html><title>Sign in</title>",
    "HTML page": b"<html>\n<head>",
    "XML": b"<?xml version='1.0'?><Error><Code>AccessDenied</Code></Error>",
    "UTF-16LE": '\ufeff{"text": "a"}\n'.encode("utf-16-le"),
    "UTF-16BE": '\ufeff{"text": "a"}\n'.encode("utf-16-be"),
    "iconv -f UTF-16LE": '{"text": "without a mark"}\n'.encode("utf-16-le"),
    "UTF-32LE": '\ufeff{"text": "a"}\n'.encode("utf-32-le"),
    "ZIP archive": b"PK\x03\x04rest of it",
    "tar archive": b"a.jsonl".ljust(257, b"\0") + b"ustar",
    "LZ4": b"\x04\x22\x4d\x18rest of it",
    "--format parquet": b"PAR1 and so on",
    "zero bytes": bytes(5000),
}


@pytest.mark.parametrize("kind", FOREIGN)
def test_foreign_content_is_named(file: Any, kind: str) -> None:
    """The error does not depend on `on_bad`: the content has no records."""
    for name in ("a.jsonl", "a.json.gz", "b.ndjson.zst"):
        path = file(FOREIGN[kind], name)
        if kind != "zero bytes" or name == "a.jsonl":
            with pytest.raises(InputError, match=f"^corpus/file: .*{kind}"):
                _read(path, on_bad="quarantine")
    with pytest.raises(InputError, match=f"^corpus/file: .*{kind}"):
        _read(file(gzip.compress(FOREIGN[kind]), "a.jsonl.gz"), on_bad="quarantine")
    for name in ("a.parquet", "a.arrow"):
        if kind != "--format parquet" or name == "a.arrow":
            with pytest.raises(InputError, match=f"^corpus/file: .*{kind}"):
                _read(file(FOREIGN[kind], name))
    with pytest.raises(InputError, match=f"^corpus/file: .*{kind}"):
        _read(file(FOREIGN[kind], "a"), JSON)


@pytest.mark.parametrize("layout", sorted(set(LAYOUTS) - {"a record a line", "wrapper between other keys"}))
@pytest.mark.parametrize("on_bad", ["fail", "quarantine"])
def test_json_without_a_record_a_line_is_named(file: Any, layout: str, on_bad: OnBad) -> None:
    data = LAYOUTS[layout](RECORDS[:1] if layout == "objects over several lines" else RECORDS)
    with pytest.raises(
        InputError, match=r"^corpus/file: the content is .*, not one record per line: use --format json"
    ):
        _read(file(data, "a.json"), on_bad=on_bad)


def test_array_in_one_long_line_is_named(file: Any) -> None:
    path = file(json.dumps([{"text": "x" * 1000}] * 1000))
    with pytest.raises(InputError, match=r"one JSON array, .*--format json"):
        _read(path, ReadSettings(max_record_bytes=50_000), batch_bytes=10_000)


def test_records_that_resemble_other_formats_are_read(file: Any) -> None:
    texts = ["version https://git-lfs.github.com/spec/v1", "<!DOCTYPE html>", "PAR1", "\0" * 20 + "x", "[{"]
    lines = [json.dumps({"data": [{"text": "inner"}], "messages": [{"role": "user"}], "text": text}) for text in texts]
    assert _read(file("\n".join(lines)))[0] == texts
    assert _read(file("\r\n \r\n" + "\r\n".join(lines)))[0] == texts
    for first in ("[]", '["a"]', "[1, {}]", '{"broken"', '{"data": [{}]}', "text", "\\"):
        taken, rejected, _ = _read(file(f"{first}\n" + "\n".join(lines)), on_bad="quarantine")
        assert (taken, [bad.line for bad in rejected]) == (texts, [1])
    for text in (*texts, "ORC is a format", "<xml", "BZh9 is how bzip2 begins", "{}"):
        assert _read(file(text, "a.txt"), FILE)[0] == [text]


def test_chat_data_is_named(file: Any) -> None:
    for record in (
        {"messages": [{"role": "user", "content": "hi"}]},
        {"conversations": [{"from": "human", "value": "hi"}], "id": 1},
    ):
        for reading in (ReadSettings(), JSON):
            with pytest.raises(InputError, match=r"'(messages|conversations)' contains chat data, .*chat template"):
                _read(file(json.dumps(record)), reading)
        with pytest.raises(InputError, match="contains chat data"):
            _read(file(json.dumps(record)), key=next(iter(record)))
        path = file(b"", "a.parquet")
        pq.write_table(pa.Table.from_pylist([record]), path)
        for key in ("text", next(iter(record))):
            with pytest.raises(RequestError, match=r"^corpus/file: .*contains chat data"):
                _read(path, key=key)


# -- names, and compression that the name does not show


def test_names_of_data_files() -> None:
    for name in ("a.jsonlines", "a.ndjson.gzip", "A.JSONL.ZSTD", "a.json.bzip2", "x/data-0.arrow"):
        assert is_data_file(name)
    for name in ("RC_2020-01.zst", "AA/wiki_00", "a.txt", "a.json", "a.jsonl.gz", "part-0", "old-readme"):
        assert is_data_file(name, "jsonl") and is_data_file(name, "json")
    for name in ("README.md", "x/LICENSE", "a.parquet", "a.png", "_SUCCESS", "a.py"):
        assert not is_data_file(name, "jsonl")
    assert [
        name for name in ("a.txt", "b.md", "c", "d.jsonl.gz", "e.txt.gz", "README.md") if is_data_file(name, "txt")
    ] == [
        "a.txt",
        "b.md",
        "c",
        "e.txt.gz",
    ]
    assert is_data_file("blobs/0f3a", "parquet") and not is_data_file("a.jsonl", "parquet")
    assert is_data_file("cache", "arrow") and not is_data_file("state.json", "arrow")


@pytest.mark.parametrize("name", ["a.jsonl", "a", "a.b"])
def test_compression_is_detected_by_content(file: Any, name: str) -> None:
    data = b'{"text": "a"}\n'
    skippable = b"\x50\x2a\x4d\x18\x04\x00\x00\x00text"
    for packed in (
        gzip.compress(data),
        bz2.compress(data),
        lzma.compress(data),
        zstandard.ZstdCompressor().compress(data),
        skippable + zstandard.ZstdCompressor().compress(data),
    ):
        path = file(packed, name)
        assert b"".join(open_decompressed(path)) == data
        assert _read(path)[0] == ["a"]


def test_format_is_detected_by_content(file: Any) -> None:
    table = pa.table({"text": ["a", "b"]})
    path = file(b"", "blob")
    pq.write_table(table, path)
    assert _read(path)[0] == ["a", "b"]
    for new in (pa.ipc.new_file, pa.ipc.new_stream):
        with new(str(path), table.schema) as writer:
            writer.write_table(table)
        assert _read(path)[0] == ["a", "b"]
    assert _read(file('{"text": "a"}', "wiki_00"))[0] == ["a"]


# -- txt


def test_text_is_one_document_or_one_per_line(file: Any) -> None:
    path = file("\ufeffOnce upon\r\n\r\n a time\n\n", "a.txt")
    assert _read(path, FILE)[0] == ["Once upon\r\n\r\n a time\n\n"]
    assert _read(path, LINE) == (["Once upon", " a time"], [], 2)
    assert _read(file(gzip.compress(path.read_bytes()), "a.txt.gz"), FILE)[0] == ["Once upon\r\n\r\n a time\n\n"]
    assert _read(file(b"", "a.txt"), FILE) == _read(file(b"", "a.txt"), LINE) == ([], [], 0)
    assert _read(file(b" \n\n", "a.txt"), FILE) == ([], [], 1)
    bad = file(b"fine\n\nno \xff UTF-8\nlast", "a.txt")
    with pytest.raises(InputError, match=r"^corpus/file, record 1: invalid UTF-8 at byte 10 of the text"):
        _read(bad, FILE)
    texts, rejected, _ = _read(bad, LINE, "quarantine", batch_bytes=8)
    assert texts == ["fine", "last"]
    assert [(item.record, item.line, item.raw) for item in rejected] == [(1, 3, b"no \xff UTF-8")]
    assert first_documents(path, "text", 5, 4, settings=LINE) == ["fine"]


# -- Arrow, and columns of all kinds


def _arrow(path: Path, table: pa.Table, *, stream: bool = True, **options: Any) -> Path:
    with (pa.ipc.new_stream if stream else pa.ipc.new_file)(str(path), table.schema, **options) as writer:
        writer.write_table(table, max_chunksize=2)
    return path


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize(
    "kind",
    [
        pa.string(),
        pa.large_string(),
        pa.string_view(),
        pa.binary(),
        pa.large_binary(),
        pa.binary_view(),
        pa.dictionary(pa.int32(), pa.string()),
        pa.list_(pa.string()),
        pa.large_list(pa.large_string()),
        pa.list_view(pa.string()),
        pa.large_list_view(pa.binary()),
    ],
    ids=str,
)
def test_columns_of_every_kind(tmp_path: Path, stream: bool, kind: pa.DataType) -> None:
    lists = "list" in str(kind)
    rows = [["a", "é"], [], ["😀" * 20]] if lists else ["a", "é", "😀" * 20]
    other = pa.array([[1], [2, 3], []], pa.list_view(pa.int32()))
    table = pa.table({"other": other, "text": pa.array(rows, kind), "meta": [{"text": text} for text in "xyz"]})
    options = {"options": pa.ipc.IpcWriteOptions(compression="lz4")} if lists else {}
    path = _arrow(tmp_path / "a.arrow", table, stream=stream, **options)
    assert _read(path)[0] == rows
    assert _read(path, batch_bytes=1)[0] == rows
    assert _read(path, key="meta.text")[0] == ["x", "y", "z"]
    with pytest.raises(RequestError, match=r"no column 'body'; set --keys to one of 'other', 'text', 'meta'"):
        _read(path, key="body")
    if "dictionary" not in str(kind):
        pq.write_table(table, tmp_path / "a.parquet")
        assert _read(tmp_path / "a.parquet")[0] == rows


@pytest.mark.parametrize("kind", [pa.binary(), pa.large_binary(), pa.binary_view()], ids=str)
def test_bytes_that_are_not_utf8_are_a_bad_record(tmp_path: Path, kind: pa.DataType) -> None:
    table = pa.table({"text": pa.array([b"a", b"\xff\xfe", None, b"d"], kind)})
    pq.write_table(table, tmp_path / "a.parquet")
    for path in (tmp_path / "a.parquet", _arrow(tmp_path / "a.arrow", table)):
        with pytest.raises(InputError, match=r"^corpus/file, row 2: 'text' is invalid UTF-8"):
            _read(path)
        texts, rejected, _ = _read(path, on_bad="quarantine")
        assert (texts, [bad.record for bad in rejected]) == (["a", "d"], [1, 2])


def test_a_damaged_arrow_file_is_refused(tmp_path: Path) -> None:
    table = pa.table({"text": [f"text {number}" for number in range(50)]})
    for stream in (True, False):
        path = _arrow(tmp_path / "a.arrow", table, stream=stream)
        whole = path.read_bytes()
        with pa.ipc.open_stream(whole) if stream else pa.ipc.open_file(whole):
            pass
        cuts = [len(whole) - 8, len(whole) - 1, len(whole) // 2, len(whole) - 8 - 200, 20, 0]
        for damaged in [*(whole[:cut] for cut in cuts), whole + b"more"]:
            path.write_bytes(damaged)
            with pytest.raises(InputError, match=r"^corpus/file: damaged Arrow after row \d+: .*tokenmill download"):
                _read(path, on_bad="quarantine")
    assert _read(_arrow(path, table.slice(0, 0))) == ([], [], 0)
    # Offsets beyond the data: the process that follows them would read other memory, or crash.
    offsets = pa.py_buffer(b"".join(n.to_bytes(4, "little") for n in (0, 1 << 30, 2)))
    column = pa.Array.from_buffers(pa.string(), 2, [None, offsets, pa.py_buffer(b"ab")])
    with pytest.raises(InputError, match="damaged Arrow"):
        _read(_arrow(path, pa.table({"text": column})))


def test_compressed_column_file_has_a_remedy(file: Any) -> None:
    for name in ("a.parquet.gz", "b.arrow.zst"):
        with pytest.raises(InputError, match=r"^corpus/file: .* is compressed as (gz|zst), .*; decompress the file"):
            _read(file(b"x", name))


# -- records that are too long


@pytest.mark.parametrize("form", ["jsonl", "json", "txt", "parquet", "arrow", "jsonl.zst"])
def test_too_long_record_is_skipped(tmp_path: Path, form: str) -> None:
    texts = ["first", "x" * 300_000, "between", "y" * 2_000_000, "last"]
    path, reading = tmp_path / f"a.{form}", ReadSettings(max_record_bytes=100_000)
    lines = "".join(json.dumps({"text": text}) + "\n" for text in texts).encode()
    if form == "jsonl":
        path.write_bytes(lines)
    elif form == "jsonl.zst":
        path.write_bytes(zstandard.ZstdCompressor().compress(lines))
    elif form == "json":
        path.write_text(json.dumps([{"text": text} for text in texts], indent=1))
        reading = reading._replace(format="json")
    elif form == "txt":
        path.write_text("\n".join(texts))
        reading = reading._replace(format="txt", document_per_line=True)
    elif form == "parquet":
        pq.write_table(pa.table({"text": texts}), path)
    else:
        _arrow(path, pa.table({"text": texts}))
    taken, rejected, _ = _read(path, reading, "quarantine", batch_bytes=20_000)
    assert taken == ["first", "between", "last"]
    assert [bad.record for bad in rejected] == [1, 3]
    assert all(len(bad.raw) <= 1 << 16 for bad in rejected)
    with pytest.raises(
        InputError,
        match=r"^corpus/file, (line|record|row) 2: record of 300,0\d\d bytes: .*100,000 .*--max-record-size",
    ):
        _read(path, reading, batch_bytes=20_000)
    assert _read(path, reading._replace(max_record_bytes=3_000_000), batch_bytes=20_000)[0] == texts


def test_too_long_text_is_skipped(file: Any) -> None:
    path = file(gzip.compress(b"word " * 50_000), "a.txt.gz")
    assert [bad.record for bad in _read(path, FILE._replace(max_record_bytes=100_000), "quarantine")[1]] == [0]
    assert len(_read(path, FILE)[0][0]) == 250_000


def test_too_long_record_at_either_end_of_a_file(file: Any) -> None:
    """The record has no newline after it, or blank lines follow."""
    long = json.dumps({"text": "x" * 300_000})
    for data, taken, bad in (
        (long, [], [1]),
        (f"{long}\n", [], [1]),
        (f'\n\n{long}\n \n{{"text": "a"}}', ["a"], [3]),
        (f'{{"text": "a"}}\n{long}', ["a"], [2]),
    ):
        texts, rejected, _ = _read(file(data), ReadSettings(max_record_bytes=100_000), "quarantine", batch_bytes=10_000)
        assert (texts, [item.line for item in rejected]) == (taken, bad)
    escaped = json.dumps([{"text": "\\" * 300_001}, {"text": "b"}])
    assert _read(file(escaped), JSON._replace(max_record_bytes=100_000), "quarantine")[0] == ["b"]
