"""check_pair detects each kind of damage, names its location, and accepts a valid pair."""

import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tokenmill.core.files.hashing import hash_file
from tokenmill.datasets.formats.indexed import check
from tokenmill.datasets.formats.indexed.check import check_pair
from tokenmill.datasets.formats.indexed.writer import IndexedWriter
from tokenmill.engine.contract import FileEntry
from tokenmill.tokenize.assemble import assemble

EOD = 0
VOCABULARY = 1000
LENGTHS = [3, 0, 5, 1, 4, 0, 2]  # tokens of each document before EOD
SEQUENCES = 5
POINTERS = 34 + 4 * SEQUENCES
DOCUMENTS = POINTERS + 8 * SEQUENCES


def write_pair(prefix: Path, lengths: list[int], eod: int | None = EOD, seed: int = 1, dtype: str = "uint16") -> None:
    ids = np.random.default_rng(seed).integers(1, VOCABULARY, sum(lengths)).astype(np.uint32)
    with Path(f"{prefix}.bin").open("wb") as file:
        writer = IndexedWriter(file, Path(f"{prefix}.idx"), dtype)
        writer.add(*assemble(ids, np.cumsum([0, *lengths]), None, eod, dtype))
    with Path(f"{prefix}.idx").open("wb") as index:
        writer.write_index(index)
    writer.discard()


def receipt(prefix: Path) -> dict[str, FileEntry]:
    paths = {suffix: Path(f"{prefix}.{suffix}") for suffix in ("bin", "idx")}
    return {
        suffix: FileEntry(path.name, path.stat().st_size, hash_file(path), parts=[]) for suffix, path in paths.items()
    }


def put(path: Path, offset: int, layout: str, *values: int) -> None:
    """Overwrite part of a file in place."""
    data = bytearray(path.read_bytes())
    struct.pack_into(layout, data, offset, *values)
    path.write_bytes(data)


def find_problems(prefix: Path, **options: Any) -> str:
    options = {"vocab_size": VOCABULARY, "eod": EOD} | options
    return "\n".join(str(problem) for problem in check_pair(prefix, **options))


@pytest.fixture
def pair(tmp_path: Path) -> Path:
    write_pair(tmp_path / "p", LENGTHS)
    return tmp_path / "p"


@pytest.fixture(params=["one block", "many blocks"])
def _blocks(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Test files that are smaller and larger than one block in memory."""
    if request.param == "many blocks":
        monkeypatch.setattr(check, "BLOCK", 8)
        monkeypatch.setattr(check, "CHUNK", 2)


@pytest.mark.usefixtures("_blocks")
@pytest.mark.parametrize("lengths", [LENGTHS, [1], [0, 0], []])
@pytest.mark.parametrize("eod", [EOD, None])
def test_valid_pair_has_no_problems(tmp_path: Path, lengths: list[int], eod: int | None) -> None:
    write_pair(tmp_path / "p", lengths, eod)
    files = receipt(tmp_path / "p")
    assert check_pair(tmp_path / "p", vocab_size=VOCABULARY, eod=eod, files=files) == []
    assert check_pair(tmp_path / "p") == []


@pytest.mark.usefixtures("_blocks")
def test_megatron_pair_has_no_problems() -> None:
    prefix = Path(__file__).parents[1] / "conformance/small-tiny_text_document"
    assert check_pair(prefix, vocab_size=4096, eod=0) == []


@pytest.mark.usefixtures("_blocks")
@pytest.mark.parametrize(
    ("offset", "layout", "value", "messages"),
    [
        (0, "<B", 0x4E, ["begins with"]),
        (9, "<Q", 2, ["version 2"]),
        (17, "<B", 77, ["dtype code 77"]),
        (17, "<B", 4, ["int32 (code 4), but 1,000 vocabulary entries need uint16 (code 8)", "pointer"]),
        (18, "<Q", 6, ["6 sequences and 8 document indices need"]),
        (26, "<Q", 2**60, ["bytes, but 5 sequences"]),
        (34 + 4, "<i", 0, ["sequence 1 has the length 0", "pointer of sequence 2"]),
        (34 + 4, "<i", -6, ["sequence 1 has the length -6"]),
        (34 + 16, "<i", 4, ["40 bytes, but p.idx requires 42"]),
        (POINTERS, "<q", 2, ["pointer of sequence 0 is 2, but the lengths before it add up to 0"]),
        (POINTERS + 16, "<q", 6, ["pointers decrease at sequence 2", "pointer of sequence 2 is 6"]),
        (POINTERS + 24, "<q", 26, ["pointer of sequence 3 is 26, but the lengths before it add up to 24"]),
        (DOCUMENTS, "<q", 1, ["start at 1 instead of 0"]),
        (DOCUMENTS + 24, "<q", 0, ["document indices decrease at document 2"]),
        (DOCUMENTS + 56, "<q", 6, ["end at 6, not at the number of sequences, 5"]),
    ],
)
def test_wrong_field_of_the_index(pair: Path, offset: int, layout: str, value: int, messages: list[str]) -> None:
    put(Path(f"{pair}.idx"), offset, layout, value)
    for full in (True, False):
        for message in messages:
            assert message in find_problems(pair, full=full)


def test_flipped_byte_changes_the_hash(pair: Path) -> None:
    files = receipt(pair)
    data = Path(f"{pair}.bin").read_bytes()
    put(Path(f"{pair}.bin"), 2, "<B", data[2] ^ 1)
    assert find_problems(pair) == ""
    assert find_problems(pair, files=files, full=False) == ""
    assert "p.bin: its content changed after it was written" in find_problems(pair, files=files)


def test_truncated_bin(pair: Path) -> None:
    files = receipt(pair)
    for size in (39, 38, 0):
        with Path(f"{pair}.bin").open("r+b") as file:
            file.truncate(size)
        assert f"p.bin: it has {size} bytes, but p.idx requires 40" in find_problems(pair)
        assert f"p.bin: it has {size} bytes, but its receipt has 40" in find_problems(pair, files=files, full=False)


def test_truncated_index(pair: Path) -> None:
    files = receipt(pair)
    Path(f"{pair}.idx").write_bytes(Path(f"{pair}.idx").read_bytes()[:-8])
    assert "bytes, but 5 sequences and 8 document indices need" in find_problems(pair)
    assert "its receipt has" in find_problems(pair, files=files)


@pytest.mark.parametrize("suffix", [".bin", ".idx"])
def test_missing_file(pair: Path, suffix: str) -> None:
    Path(f"{pair}{suffix}").unlink()
    assert f"p{suffix}: missing" in find_problems(pair)


@pytest.mark.usefixtures("_blocks")
@pytest.mark.parametrize(
    ("dtype", "layout", "value", "vocabulary"), [("uint16", "<H", 1000, 1000), ("int32", "<i", -2, 70_000)]
)
def test_ids_outside_the_vocabulary(tmp_path: Path, dtype: Any, layout: str, value: int, vocabulary: int) -> None:
    write_pair(tmp_path / "p", LENGTHS, dtype=dtype)
    # Documents 0 and 2 have 4 and 6 tokens with EOD: tokens 6 and 12 of the file are 2/2 and 4/0.
    for token in (6, 12):
        put(tmp_path / "p.bin", token * np.dtype(dtype).itemsize, layout, value)
    message = find_problems(tmp_path / "p", vocab_size=vocabulary)
    assert f"token 2 of document 2 has the id {value}, outside 0..{vocabulary - 1}; 2 ids in all" in message
    assert find_problems(tmp_path / "p", vocab_size=vocabulary, full=False) == ""


def test_negative_ids_without_a_vocabulary(tmp_path: Path) -> None:
    write_pair(tmp_path / "p", LENGTHS, dtype="int32")
    put(tmp_path / "p.bin", 0, "<i", -1)
    assert "token 0 of document 0 has the id -1" in find_problems(tmp_path / "p", vocab_size=None)


@pytest.mark.usefixtures("_blocks")
def test_documents_without_eod(pair: Path) -> None:
    for token in (11, 16):  # the last tokens of documents 3 and 4
        put(Path(f"{pair}.bin"), token * 2, "<H", 7)
    assert "document 3 ends with token id 7 instead of EOD 0, as do 2 documents in all" in find_problems(pair)
    assert find_problems(pair, eod=None) == ""


@pytest.mark.parametrize("other", [[4, 0, 4, 1, 4, 0, 2], [1, 0, 2]])
def test_index_of_another_bin(tmp_path: Path, pair: Path, other: list[int]) -> None:
    """The first index has the same sizes: only its content differs."""
    files = receipt(pair)
    write_pair(tmp_path / "q", other, seed=2)
    (tmp_path / "q.idx").rename(f"{pair}.idx")
    assert find_problems(pair) != ""
    assert "p.idx" in find_problems(pair, eod=None, files=files)


@pytest.mark.parametrize("name", ["p.q.0", "p_text_document"])
def test_prefix_may_have_dots(tmp_path: Path, name: str, pair: Path) -> None:
    for suffix in (".bin", ".idx"):
        Path(f"{pair}{suffix}").rename(f"{tmp_path / name}{suffix}")
    assert find_problems(tmp_path / name) == ""
