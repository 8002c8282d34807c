"""Readers of documents: the values and the order of json.loads, and the place of every bad record."""

import gzip
import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import zstandard
from hypothesis import given, settings
from hypothesis import strategies as st

from tokenmill.errors import InputError, RequestError
from tokenmill.records.readers import OnBad, TextBatch, first_documents, read_documents
from tokenmill.records.records import RecordCounter


def _read(path: Path, keys: Sequence[str] = ("text",), on_bad: OnBad = "fail", batch_bytes: int = 4 << 20) -> TextBatch:
    """Read a file as one batch, and check the invariants of each batch."""
    total = TextBatch([[] for _ in keys])
    for batch in read_documents(path, keys, display="corpus/file", on_bad=on_bad, batch_bytes=batch_bytes):
        assert batch.records == batch.documents + len(batch.rejected)
        assert all(len(texts) == batch.documents for texts in batch.texts)
        for collected, texts in zip(total.texts, batch.texts, strict=True):
            collected.extend(texts)
        total.rejected += batch.rejected
        for name in ("documents", "records", "blank", "bytes", "compressed"):
            setattr(total, name, getattr(total, name) + getattr(batch, name))
    assert total.compressed == path.stat().st_size
    return total


@pytest.fixture
def lines(tmp_path: Path) -> Any:
    def write(data: bytes | str, name: str = "a.jsonl") -> Path:
        path = tmp_path / name
        path.write_bytes(data if isinstance(data, bytes) else data.encode())
        return path

    return write


@pytest.mark.parametrize(
    ("line", "text"),
    [
        (rb'{"text": "a"}', "a"),
        (rb'{"text": ""}', ""),
        ('{"text": "žluťoučký 😀"}'.encode(), "žluťoučký 😀"),
        (rb'  {"text": "a"}  ', "a"),
        (b'{"text": "a"}\r', "a"),
        (rb'{"text": "a\u0000b"}', "a\0b"),
        (rb'{"text": "\ud83d\ude00"}', "😀"),
        (rb'{"text": "a", "n": NaN}', "a"),
        (rb'{"text": "a", "n": [Infinity, -Infinity, 1e400]}', "a"),
        (rb'{"text": "a", "other": "\ud800"}', "a"),
        (rb'{"text": "a", "text": "b"}', "b"),
        (rb'{"text": ["a", "b"]}', ["a", "b"]),
        (rb'{"text": []}', []),
        (rb'{"text": ["a"], "n": NaN}', ["a"]),
        (b'{"text": "a", "n": ' + b"9" * 300 + b"}", "a"),
        (b'{"text": "a", "n": ' + b"[" * 900 + b"]" * 900 + b"}", "a"),
    ],
)
def test_accepted_like_json_loads(lines: Any, line: bytes, text: object) -> None:
    assert json.loads(line.decode())["text"] == text
    batch = _read(lines(line + b"\n" + line))
    assert batch.texts == [[text, text]]
    assert (batch.documents, batch.records, batch.blank) == (2, 2, 0)


BAD = [
    (rb'{"text": "a"', "invalid JSON at column 13"),
    (rb'{"text": "a"} {"text": "b"}', "invalid JSON at column 15"),
    (rb"text", "invalid JSON at column 1"),
    (b'{"text": "a\0b"}', "invalid JSON at column 12 .*control character"),
    (b'{"text": "a\tb"}', "control character"),
    (b'{"text": "a\xff"}', "invalid UTF-8 at byte 12"),
    (b'{"text": "a", "other": "\xed\xa0\x80"}', "invalid UTF-8 at byte 25"),
    (rb'{"text": "a\ud800"}', "'text' contains a lone surrogate"),
    (rb'{"text": ["a", "\udc00"]}', "'text' contains a lone surrogate"),
    (b'\xef\xbb\xbf{"text": "a"}', "invalid JSON at column 1"),  # a byte-order mark on a later line
    (b'{"text": "a", "n": ' + b"[" * 100_000 + b"]" * 100_000 + b"}", "nested too deeply"),
    (rb'["a"]', "a list, not an object"),
    (rb'"text"', "text, not an object"),
    (rb"3", "a number, not an object"),
    (rb"null", "null, not an object"),
    (rb'{"Text": "a", "meta": {}}', "no key 'text' .*'Text', 'meta'"),
    (rb"{}", "no key 'text'"),
    (rb'{"text": null}', "'text' is null, not text"),
    (rb'{"text": 3.5}', "'text' is a number, not text"),
    (rb'{"text": NaN}', "'text' is a number, not text"),
    (rb'{"text": true}', "'text' is true or false, not text"),
    (rb'{"text": {"text": "a"}}', "'text' is an object, not text"),
    (rb'{"text": ["a", null]}', "'text' is a list that contains null"),
    (rb'{"text": [["a"]]}', "'text' is a list that contains a list"),
]


@pytest.mark.parametrize(("line", "reason"), BAD)
def test_a_bad_record_has_place_and_remedy(lines: Any, line: bytes, reason: str) -> None:
    path = lines(b'{"text": "first"}\n\n' + line + b'\n{"text": "last"}\n')
    with pytest.raises(InputError, match=rf"^corpus/file, line 3: .*{reason}.*--on-bad-record=quarantine"):
        _read(path)


def test_bad_records_are_quarantined(lines: Any) -> None:
    good = b'{"text": "good"}'
    path = lines(b"\n".join(part for line, _ in BAD for part in (good, b" \t", line)))
    batch = _read(path, on_bad="quarantine")
    assert batch.texts == [["good"] * len(BAD)]
    assert (batch.documents, batch.records, batch.blank) == (len(BAD), 2 * len(BAD), len(BAD))
    assert [bad.raw for bad in batch.rejected] == [line for line, _ in BAD]
    assert [bad.record for bad in batch.rejected] == list(range(1, 2 * len(BAD), 2))
    assert [bad.line for bad in batch.rejected] == list(range(3, 3 * len(BAD) + 1, 3))


@pytest.mark.parametrize("end", [b"\n", b"\r\n"])
@pytest.mark.parametrize("last", [True, False])
@pytest.mark.parametrize("mark", [b"", b"\xef\xbb\xbf"])
def test_line_ends_and_byte_order_mark(lines: Any, end: bytes, last: bool, mark: bytes) -> None:
    rows = [b'{"text": "a"}', b"", b'{"text": "b"}', b" \t\x0b\x0c", b'{"text": "c"}']
    batch = _read(lines(mark + end.join(rows) + end * last))
    assert batch.texts == [["a", "b", "c"]]
    assert batch.blank == 2


@pytest.mark.parametrize("data", [b"", b"\n", b"\r\n\r\n", b"\xef\xbb\xbf", b"\xef\xbb\xbf\n", b"  "])
def test_files_without_records(lines: Any, data: bytes) -> None:
    batch = _read(lines(data))
    assert (batch.documents, batch.records, batch.bytes) == (0, 0, len(data))


@pytest.mark.parametrize("name", ["a.jsonl.zst", "a.jsonl.gz"])
def test_batches_are_bounded_and_complete(lines: Any, name: str) -> None:
    """Lines of many lengths cross the blocks; one line is longer than several blocks."""
    sizes = [*range(0, 3000, 7), 2_500_000, *range(0, 30_000, 11)]
    data = b"\r\n".join(json.dumps({"text": f"{size}" * (size // 4 + 1)}).encode() for size in sizes)
    pack = zstandard.ZstdCompressor().compress if name.endswith("zst") else gzip.compress
    path = lines(pack(data), name)
    total = _read(path, batch_bytes=1 << 20)
    assert total.texts == [[json.loads(line)["text"] for line in data.split(b"\n")]]
    assert total.bytes == len(data)
    batches = list(read_documents(path, ["text"], display="", on_bad="fail", batch_bytes=1 << 20))
    assert len(batches) > 10
    assert max(batch.bytes for batch in batches) < 6 << 20


def test_several_keys_are_aligned(lines: Any) -> None:
    path = lines(b'{"text": "a", "title": "A"}\n{"text": "b"}\n{"title": ["C", "c"], "text": "c", "n": NaN}\n')
    batch = _read(path, ["text", "title"], "quarantine")
    assert batch.texts == [["a", "c"], ["A", ["C", "c"]]]
    assert [(bad.record, bad.line) for bad in batch.rejected] == [(1, 2)]


def test_nested_keys(lines: Any) -> None:
    """A field with the literal name has priority over the path."""
    path = lines(
        b'{"meta": {"text": "nested"}}\n{"meta.text": "literal", "meta": {"text": "x"}}\n'
        b'{"meta": {"text": "n", "x": "\\ud800"}}\n{"meta": "text"}\n{"meta": {}}\n{"meta.text": null}\n'
    )
    batch = _read(path, ["meta.text"], "quarantine")
    assert batch.texts == [["nested", "literal", "n"]]
    assert [bad.line for bad in batch.rejected] == [4, 5, 6]


def test_an_absent_path(lines: Any) -> None:
    with pytest.raises(InputError, match=r"line 1: there is no key 'meta\.body' \(the keys are 'meta'\)"):
        _read(lines(b'{"meta": {"text": "a"}}'), ["meta.body"])


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=6,
)
records = st.builds(
    lambda text, rest, ascii_only: json.dumps({**rest, **text}, ensure_ascii=ascii_only),
    st.fixed_dictionaries({}, optional={"text": st.text() | st.lists(st.text(), max_size=3) | json_values}),
    st.dictionaries(st.text(max_size=4), json_values, max_size=3),
    st.booleans(),
)
mangled = st.builds(
    lambda line, position, insertion: (
        line[: position % (len(line) + 1)] + insertion + line[position % (len(line) + 1) :]
    ),
    records | json_values.map(json.dumps),
    st.integers(0, 200),
    st.sampled_from(["", "", '"', "\\", "\\ud800", "\\ud83d\\ude00", "\0", "\r", "\ufeff", "}", "1e999", "é", " "]),
)


def _expected(line: str) -> object:
    """Return the text that Megatron-LM would encode from a line, or None if it would fail."""
    try:
        text = json.loads(line)["text"]
        for part in [text] if isinstance(text, str) else text:
            if not isinstance(part, str):
                return None
            part.encode()
    except (ValueError, KeyError, TypeError):
        return None
    return text if isinstance(text, str | list) else None


@settings(max_examples=120)
@given(rows=st.lists(mangled | st.text(alphabet='{}[]":,\\u0d8etx1.-+N aI', max_size=30), max_size=8))
def test_texts_equal_those_of_json_loads(tmp_path_factory: pytest.TempPathFactory, rows: list[str]) -> None:
    raw = [row.encode(errors="surrogatepass").replace(b"\n", b"") for row in rows]
    path = tmp_path_factory.mktemp("any") / "a.jsonl"
    path.write_bytes(b'{"text": "first"}\n' + b"\n".join(raw))
    expected = [_expected(line.decode(errors="replace")) if _valid(line) else None for line in raw]
    batch = _read(path, on_bad="quarantine")
    assert batch.texts[0] == ["first", *(text for text in expected if text is not None)]
    counter = RecordCounter()
    counter.update(path.read_bytes())
    assert (counter.finish(), counter.blank) == (batch.records, batch.blank)


def _valid(line: bytes) -> bool:
    try:
        line.decode()
    except UnicodeDecodeError:
        return False
    return True


def _parquet(tmp_path: Path, columns: dict[str, Any], **options: Any) -> Path:
    path = tmp_path / "a.parquet"
    pq.write_table(pa.table(columns), path, **options)
    return path


@pytest.mark.parametrize(
    "column",
    [
        pa.array(["a", "é", ""]),
        pa.array(["a", "é", ""], pa.large_string()),
        pa.array(["a", "é", ""]).dictionary_encode(),
    ],
    ids=["string", "large_string", "dictionary"],
)
def test_parquet_text_columns(tmp_path: Path, column: pa.Array) -> None:
    path = _parquet(tmp_path, {"id": [1, 2, 3], "text": column})
    assert _read(path).texts == [["a", "é", ""]]


def test_parquet_lists_structs_and_dotted_names(tmp_path: Path) -> None:
    columns = {"meta": [{"text": "x", "n": 1}, {"text": "y", "n": 2}], "list": [["a", "b"], []], "a.b": ["p", "q"]}
    batch = _read(_parquet(tmp_path, columns), ["meta.text", "list", "a.b"])
    assert batch.texts == [["x", "y"], [["a", "b"], []], ["p", "q"]]


def test_parquet_nulls_are_bad_records(tmp_path: Path) -> None:
    path = _parquet(tmp_path, {"text": ["a", None, "c"], "meta": [{"t": ["x", None]}, None, {"t": ["y"]}]})
    with pytest.raises(InputError, match=r"^corpus/file, row 2: 'text' is null.*--on-bad-record=quarantine"):
        _read(path)
    batch = _read(path, ["text", "meta.t"], "quarantine")
    assert batch.texts == [["c"], [["y"]]]
    assert [(bad.record, bad.line) for bad in batch.rejected] == [(0, 1), (1, 2)]
    assert json.loads(batch.rejected[1].raw) == {"text": None, "meta.t": None}


def test_parquet_invalid_utf8_is_a_bad_record(tmp_path: Path) -> None:
    offsets, data = pa.py_buffer(bytes([0, 0, 0, 0, 1, 0, 0, 0, 3, 0, 0, 0])), pa.py_buffer(b"a\xff\xfe")
    column = pa.Array.from_buffers(pa.string(), 2, [None, offsets, data])
    with pytest.raises(InputError, match="row 2: 'text' is invalid UTF-8"):
        _read(_parquet(tmp_path, {"text": column}))


@pytest.mark.parametrize("key", ["body", "meta.body", "text.body", "meta.text.body"])
def test_parquet_without_the_column(tmp_path: Path, key: str) -> None:
    path = _parquet(tmp_path, {"text": ["a"], "meta": [{"text": "x"}]})
    with pytest.raises(
        RequestError, match=f"^corpus/file: there is no column '{key}'; set --keys to one of 'text', 'meta'"
    ):
        _read(path, [key])


@pytest.mark.parametrize("key", ["n", "meta", "raw"])
def test_parquet_column_without_text(tmp_path: Path, key: str) -> None:
    path = _parquet(tmp_path, {"n": [1], "meta": [{"text": "x"}], "raw": [[1.5]]})
    with pytest.raises(RequestError, match=f"column '{key}' has the type .*neither text nor a list"):
        _read(path, [key])


def test_parquet_in_batches(tmp_path: Path) -> None:
    texts = [f"{n} " * (n % 700) for n in range(4000)]
    path = _parquet(tmp_path, {"text": texts, "noise": ["x" * 50] * 4000}, row_group_size=1500)
    batches = list(read_documents(path, ["text"], display="", on_bad="fail", batch_bytes=256 << 10))
    assert [text for batch in batches for text in batch.texts[0]] == texts
    assert len(batches) > 8
    assert all(batch.bytes < 1 << 20 for batch in batches)


@pytest.mark.slow
def test_parquet_dictionary_that_expands(tmp_path: Path) -> None:
    path = _parquet(tmp_path, {"text": ["x" * 100_000] * 3000})
    assert path.stat().st_size < 1 << 20
    sizes = [batch.bytes for batch in read_documents(path, ["text"], display="", on_bad="fail")]
    assert sum(sizes) >= 300_000_000
    assert max(sizes) < 8 << 20


def test_parquet_empty_and_damaged(tmp_path: Path) -> None:
    path = _parquet(tmp_path, {"text": [f"text {n}" for n in range(5000)]}, write_page_checksum=True)
    intact = path.read_bytes()
    assert _read(_parquet(tmp_path, {"text": pa.array([], pa.string())}), batch_bytes=10).records == 0
    flipped = bytearray(intact)
    flipped[len(intact) // 3] ^= 4
    for damaged in (intact[: len(intact) // 2], intact[:-3], b"PAR1", b"", bytes(flipped)):
        path.write_bytes(damaged)
        with pytest.raises(InputError, match=r"^corpus/file: damaged Parquet .*tokenmill download"):
            _read(path)


def test_first_documents_skips_bad_records(lines: Any) -> None:
    path = lines(b'{"text": "a"}\nbroken\n{"text": ["b", "c"]}\n{"text": null}\n{"text": "d"}\n')
    assert first_documents(path, "text", 10, 1000) == ["a", "b", "c", "d"]
    assert first_documents(path, "text", 2, 1000) == ["a", "b"]
    assert first_documents(path, "text", 10, 3) == ["a", "b", "c"]
    assert first_documents(lines(b'{"text": "abcdef"}\n{"text": "g"}'), "text", 10, 4) == ["abcd"]


def test_damaged_compression_names_the_file(lines: Any) -> None:
    data = zstandard.ZstdCompressor().compress(b'{"text": "a"}\n' * 1000)
    with pytest.raises(InputError, match=r"^corpus/file: truncated zst data"):
        _read(lines(data[:-2], "a.jsonl.zst"))


def test_nan_is_not_text(lines: Any) -> None:
    assert math.isnan(json.loads('{"text": NaN}')["text"])
    batch = _read(lines(b'{"text": NaN}\n'), on_bad="quarantine")
    assert (batch.documents, len(batch.rejected)) == (0, 1)
