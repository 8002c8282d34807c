"""Names, paths, hashed JSON and atomic files, with hostile input and after a crash."""

import errno
import json
import os
import re
import resource
import subprocess
import sys
import threading
import tracemalloc
from pathlib import Path
from typing import Any

import pytest
import xxhash
from hypothesis import example, given
from hypothesis import strategies as st

from tokenmill.core.files.codec import (
    BATCH_BYTES,
    PackedList,
    canonical_json,
    content_id,
    read_json,
    readable_json,
    readable_pieces,
)
from tokenmill.core.files.explain import explain_os_errors
from tokenmill.core.files.hashing import hash_file
from tokenmill.core.files.paths import MAX_NAME_BYTES, join_inside, safe_name
from tokenmill.core.files.publish import publish_once, write_atomic
from tokenmill.errors import MachineError, RequestError, TransientError

ANY_TEXT = st.text(st.characters(exclude_categories=()), max_size=400)
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | ANY_TEXT,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
    max_leaves=12,
)


@given(ANY_TEXT)
@example("")
@example(".")
@example("..")
@example("../../x")
@example("/etc/passwd")
@example("a\0b")
@example(".tokenmill")
@example("x" * 300)
@example("\u00e9" * 300)
@example("." * 300)
@example("con\n\r\x1b[2J")
def test_a_safe_name_is_one_portable_visible_file_name(name: str) -> None:
    safe = safe_name(name)
    assert re.fullmatch(r"[A-Za-z0-9_=+@,~%-][A-Za-z0-9._=+@,~%-]*", safe)
    assert len(safe) <= MAX_NAME_BYTES
    assert safe_name(name) == safe


@given(st.lists(ANY_TEXT, unique=True, max_size=30))
@example(["a b", "a%20b", "a%2520b", "A b"])
@example([".a", "a", "..a"])
def test_two_names_never_become_one(names: list[str]) -> None:
    assert len({safe_name(name) for name in names}) == len(names)


def test_no_name_can_forge_a_marked_one() -> None:
    for hidden in (f".hidden{number}" for number in range(50)):
        marked = safe_name(hidden)
        forged = re.sub("%([0-9A-F]{2})", lambda match: chr(int(match[1], 16)), marked)
        assert safe_name(forged) != marked


def test_portable_names_stay_as_they_are() -> None:
    for name in ("a.jsonl.zst", "train-00000-of-00072.parquet", "x_y=1+2@3,4~5"):
        assert safe_name(name) == name


@given(ANY_TEXT)
def test_a_recorded_path_stays_inside_or_is_refused(relative: str) -> None:
    root = Path("/data/output")
    try:
        path = join_inside(root, relative)
    except RequestError:
        return
    assert os.path.normpath(path) == str(path) != str(root)
    assert str(path).startswith("/data/output/")


@pytest.mark.parametrize("relative", ["", ".", "..", "../x", "a/../../x", "/etc/passwd", "a//b", "a/", "a\0b"])
def test_a_path_that_leaves_is_refused(relative: str) -> None:
    with pytest.raises(RequestError, match="would leave"):
        join_inside(Path("/data"), relative)


@given(JSON)
def test_the_hashed_form_of_a_value_is_unique_to_it(value: Any) -> None:
    data = canonical_json(value)
    assert json.loads(data) == value
    assert data.isascii()
    assert canonical_json(json.loads(readable_json(value))) == data


@given(st.dictionaries(st.text(max_size=8), JSON, max_size=6), st.randoms())
def test_an_id_does_not_depend_on_the_order_of_keys(value: dict[str, Any], random: Any) -> None:
    keys = list(value)
    random.shuffle(keys)
    assert content_id({key: value[key] for key in keys}) == content_id(value)
    assert content_id({"wrapped": value}) != content_id(value)


def test_nan_has_no_hashed_form() -> None:
    with pytest.raises(ValueError, match="not JSON compliant"):
        canonical_json({"x": float("nan")})


@pytest.mark.parametrize("content", [b"", b'{"a": 1', b"\xff\xfe", b"null\0", b"[" * 100_000])
def test_damaged_json_reads_as_none(content: bytes, tmp_path: Path) -> None:
    path = tmp_path / "record.json"
    path.write_bytes(content)
    assert read_json(path) is None
    assert read_json(tmp_path / "missing.json") is None
    assert read_json(path / "below-a-file.json") is None


def test_one_of_many_writers_publishes(tmp_path: Path) -> None:
    path, won = tmp_path / "deep" / "plan.json", []
    ready = threading.Barrier(8)

    def publish(number: int) -> None:
        ready.wait()
        if publish_once(path, b"%d" % number * 1000):
            won.append(number)

    threads = [threading.Thread(target=publish, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(won) == 1
    assert path.read_bytes() == b"%d" % won[0] * 1000
    assert list(path.parent.iterdir()) == [path]


def test_replaced_file_leaves_no_temporary_file(tmp_path: Path) -> None:
    path = tmp_path / ("n" * 200 + ".json")
    write_atomic(path, b"old")
    write_atomic(path, b"new")
    assert path.read_bytes() == b"new"
    (tmp_path / "directory").mkdir()
    with pytest.raises(OSError, match="directory"):
        write_atomic(tmp_path / "directory", b"x")
    assert {child.name for child in tmp_path.iterdir()} == {path.name, "directory"}


@given(st.binary(max_size=5000), st.integers(0, 6000))
def test_file_hash_is_that_of_its_bytes(tmp_path_factory: pytest.TempPathFactory, data: bytes, length: int) -> None:
    path = tmp_path_factory.getbasetemp() / "hashed"
    path.write_bytes(data)
    assert hash_file(path) == xxhash.xxh3_128(data).hexdigest()
    assert hash_file(path, length) == xxhash.xxh3_128(data[:length]).hexdigest()


@pytest.mark.parametrize(
    ("number", "kind", "remedy"),
    [
        (errno.ENOSPC, MachineError, "free space"),
        (errno.EDQUOT, MachineError, "quota"),
        (errno.EROFS, MachineError, "read-write"),
        (errno.EACCES, RequestError, "may write"),
        (errno.ENAMETOOLONG, RequestError, "another path"),
        (errno.ENOTDIR, RequestError, "another path"),
        (errno.EIO, TransientError, "again"),
        (errno.ESTALE, TransientError, "again"),
    ],
)
def test_os_errors_have_a_remedy(number: int, kind: type[Exception], remedy: str) -> None:
    with pytest.raises(kind, match=remedy) as caught, explain_os_errors(Path("/data/out")):
        raise OSError(number, os.strerror(number), "/data/out/file")
    assert type(caught.value) is kind
    assert "/data/out/file" in str(caught.value)
    assert isinstance(caught.value.__cause__, OSError)


def test_other_errors_keep_their_traceback() -> None:
    with pytest.raises(OSError, match="Exec format"), explain_os_errors(Path("/data")):
        raise OSError(errno.ENOEXEC, "Exec format error")


def test_output_on_two_file_systems_is_refused(tmp_path: Path) -> None:
    with pytest.raises(RequestError, match="on different file systems"), explain_os_errors(tmp_path):
        raise OSError(errno.EXDEV, os.strerror(errno.EXDEV), "a", None, "b")


ITEMS = st.lists(
    st.dictionaries(st.text(max_size=8), st.none() | st.integers(-(2**53), 2**53) | ANY_TEXT, min_size=1, max_size=3),
    max_size=5,
)


@given(ITEMS, ANY_TEXT)
@example([{"long": "x" * BATCH_BYTES}, {"last": 1}], "")
def test_packed_values_are_hashed_and_written_like_plain_ones(items: list[Any], other: Any) -> None:
    plain, packed = ({"b": other, "files": files, "a": 1} for files in (items, PackedList.of(items)))
    assert content_id(packed) == content_id(plain)
    assert b"".join(readable_pieces(packed)) == readable_json(plain)
    assert (list(packed["files"]), len(packed["files"])) == (json.loads(json.dumps(items)), len(items))


@given(ITEMS, ANY_TEXT)
def test_list_is_read_packed_in_every_json_layout(
    tmp_path_factory: pytest.TempPathFactory, items: list[Any], other: Any
) -> None:
    path = tmp_path_factory.getbasetemp() / "packed.json"
    value = json.loads(json.dumps({"b": other, "files": items, "a": 1}))
    lines = ",\n".join(json.dumps(item) for item in items)
    one_item_per_line = readable_json({"b": other, "files": [], "a": 1}).replace(
        b'\n "files": []', f'\n "files": [\n{lines}\n ]'.encode()
    )
    for data in (
        readable_json(value),
        json.dumps(value).encode(),
        json.dumps(value, indent=4).encode(),
        one_item_per_line,
    ):
        path.write_bytes(data)
        packed_value = read_json(path, packed="files")
        assert {**packed_value, "files": list(packed_value["files"])} == value
        for size in (1, len(data) // 2, len(data) - 3):
            path.write_bytes(data[:size])
            assert read_json(path, packed="files") is None


READ_PACKED = """
import sys
from pathlib import Path
from tokenmill.core.files.codec import read_json
(item,) = read_json(Path(sys.argv[1]), packed="files")["files"]
print(len(item["parts"]))
"""


def test_an_item_of_many_lines_is_read_in_linear_time(tmp_path: Path) -> None:
    """A file of which many records were rejected has a range of lines for each: copies of the text end at the limit."""
    count, path = 150_000, tmp_path / "manifest.json"
    part = b'    {\n     "source": "shard-00000.jsonl",\n     "first": 123456789,\n     "count": 9\n    }'
    parts = b",\n".join([part] * count)
    path.write_bytes(b'{\n "files": [\n  {\n   "path": "a",\n   "parts": [\n' + parts + b"\n   ]\n  }\n ]\n}\n")
    process = subprocess.Popen([sys.executable, "-c", READ_PACKED, path], stdout=subprocess.PIPE, text=True)
    resource.prlimit(process.pid, resource.RLIMIT_CPU, (60, 60))
    output, _ = process.communicate()
    assert (process.returncode, output) == (0, f"{count}\n")


def test_a_record_is_encoded_in_little_more_memory_than_its_text() -> None:
    value = {"parts": [{"source": "shard-00000.jsonl", "first": 10 * number, "count": 9} for number in range(2000)]}
    expected = json.dumps(value, indent=1) + "\n"
    tracemalloc.start()
    try:
        text = readable_json(value)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert text.decode() == expected
    assert peak < 4 * len(text)
