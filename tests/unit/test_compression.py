"""Decompression: every frame of a file, bounded memory, and no damage that looks like a short file."""

import bz2
import ctypes
import gc
import gzip
import lzma
import mmap
import os
import random
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

import pytest
import zstandard
from hypothesis import given, settings
from hypothesis import strategies as st

from support.commandline import run_in_process
from tokenmill.errors import InputError
from tokenmill.records.compression import open_decompressed
from tokenmill.records.records import RecordCounter
from tokenmill.records.suffixes import is_data_file, strip_compression


def _zst(data: bytes) -> bytes:
    return zstandard.ZstdCompressor(write_checksum=True).compress(data)


CODECS: dict[str, Callable[[bytes], bytes]] = {
    "zst": _zst,
    "gz": lambda data: gzip.compress(data, mtime=0),
    "bz2": bz2.compress,
    "xz": lambda data: lzma.compress(data, preset=0),
}
every_codec = pytest.mark.parametrize("codec", CODECS)
SKIPPABLE = b"\x5a\x2a\x4d\x18\x05\0\0\0hello"


def _text(size: int, seed: int = 0) -> bytes:
    words = [f"word{i:x}" for i in range(3000)]
    pick = random.Random(seed)
    return (" ".join(pick.choices(words, k=size // 8 + 8)).encode() + b"\n")[:size]


def _write(tmp_path: Path, name: str, data: bytes) -> Path:
    path = tmp_path / name
    path.write_bytes(data)
    return path


def _read(path: Path) -> bytes:
    """Read a file in both ways, which must give the same bytes or the same error."""
    try:
        into: bytes | InputError = _read_into(path, 1 << 20)
    except InputError as error:
        into = error
    if isinstance(into, InputError):
        with pytest.raises(InputError) as caught:
            list(open_decompressed(path))
        assert str(caught.value) == str(into)
        raise into
    assert b"".join(open_decompressed(path)) == into
    return into


def _read_into(path: Path, size: int) -> bytes:
    """Read a file through buffers of one size; only the last buffer is not full."""
    data = bytearray()
    buffer = memoryview(bytearray(size))
    with open_decompressed(path) as reader:
        count = size
        while count == size:
            count = reader.readinto(buffer)
            data += buffer[:count]
        assert reader.readinto(buffer) == 0
        assert reader.compressed_read == path.stat().st_size
    return bytes(data)


@every_codec
def test_whole_file_and_progress(tmp_path: Path, codec: str) -> None:
    data = _text(1_500_000)
    path = _write(tmp_path, f"a.jsonl.{codec}", CODECS[codec](data))
    reader = open_decompressed(path)
    blocks = list(reader)
    assert b"".join(blocks) == data
    assert all(0 < len(block) <= 4 << 20 for block in blocks)
    assert reader.compressed_read == path.stat().st_size


def test_plain(tmp_path: Path) -> None:
    data = _text(2_100_000)
    assert _read(_write(tmp_path, "a.jsonl", data)) == data


def test_empty_plain_file_has_no_data(tmp_path: Path) -> None:
    assert list(open_decompressed(_write(tmp_path, "a.jsonl", b""))) == []


@pytest.mark.parametrize("suffix", ["gz", "gzip", "zst", "zstd", "bz2", "bzip2", "xz", "XZ"])
def test_a_compressed_file_of_no_bytes_is_truncated(tmp_path: Path, suffix: str) -> None:
    with pytest.raises(InputError, match=r"truncated \w+ data: the file has 0 bytes"):
        _read(_write(tmp_path, f"a.jsonl.{suffix}", b""))


@every_codec
def test_compressed_data_of_no_bytes_has_no_data(tmp_path: Path, codec: str) -> None:
    assert _read(_write(tmp_path, f"a.{codec}", CODECS[codec](b""))) == b""
    assert _read(_write(tmp_path, f"b.{codec}", CODECS[codec](b"") * 3)) == b""


def test_a_skippable_zstd_frame_alone_has_no_data(tmp_path: Path) -> None:
    assert _read(_write(tmp_path, "a.zst", SKIPPABLE)) == b""


def test_a_stage_refuses_a_compressed_file_of_no_bytes(tmp_path: Path) -> None:
    source = tmp_path / "in"
    source.mkdir()
    (source / "a.jsonl.gz").touch()
    (source / "b.jsonl").write_text('{"text": "b"}\n')
    ended = run_in_process("extract", source, tmp_path / "out")
    assert ended.code == 2, ended
    assert "a.jsonl.gz: truncated gz data: the file has 0 bytes" in ended.err


@every_codec
def test_many_frames_are_one_file(tmp_path: Path, codec: str) -> None:
    parts = [_text(size, size) for size in (10, 0, 200_000, 1, 70_000, 0)] + [b"last\n"] * 500
    path = _write(tmp_path, f"a.{codec}", b"".join(map(CODECS[codec], parts)))
    assert _read(path) == b"".join(parts)


def test_zstd_skippable_frames_anywhere(tmp_path: Path) -> None:
    empty = b"\x50\x2a\x4d\x18\0\0\0\0"
    path = _write(tmp_path, "a.zst", empty + SKIPPABLE + _zst(b"one ") + SKIPPABLE + _zst(b"two") + SKIPPABLE + empty)
    assert _read(path) == b"one two"


@pytest.mark.parametrize("codec", ["gz", "bz2", "xz"])
def test_zero_padding_after_a_stream(tmp_path: Path, codec: str) -> None:
    first, second = CODECS[codec](b"one "), CODECS[codec](b"two")
    assert _read(_write(tmp_path, f"a.{codec}", first + bytes(8) + second + bytes(100_000))) == b"one two"


@every_codec
def test_every_truncation_is_detected(tmp_path: Path, codec: str) -> None:
    """A cut at any byte that is not the end of a frame."""
    frames = [CODECS[codec](_text(size)) for size in (30, 150)]
    whole = b"".join(frames)
    path = tmp_path / f"a.{codec}"
    for cut in range(1, len(whole)):
        if cut == len(frames[0]):
            continue
        path.write_bytes(whole[:cut])
        with pytest.raises(InputError, match=rf"{path}.*tokenmill download"):
            _read(path)


@every_codec
def test_truncation_of_a_large_file(tmp_path: Path, codec: str) -> None:
    data = CODECS[codec](_text(1_200_000))
    path = _write(tmp_path, f"a.{codec}", data[: len(data) * 2 // 3])
    with pytest.raises(InputError, match=f"truncated {codec} data: the file ends at byte {len(data) * 2 // 3:,}"):
        _read(path)


@every_codec
def test_flipped_bits_never_give_other_data(tmp_path: Path, codec: str) -> None:
    data = _text(60_000)
    whole = CODECS[codec](data)
    pick = random.Random(5)
    path = tmp_path / f"a.{codec}"
    detected = 0
    for _ in range(60):
        flipped = bytearray(whole)
        flipped[pick.randrange(len(whole))] ^= 1 << pick.randrange(8)
        path.write_bytes(flipped)
        try:
            assert _read(path) == data  # some header bits, such as gzip's time, have no effect
        except InputError as error:
            detected += 1
            assert str(path) in str(error)
    assert detected > 50


@every_codec
@pytest.mark.parametrize("garbage", [b"x", b"trailing garbage", b"\0garbage", bytes(3) + b"PK\x03\x04"])
def test_trailing_garbage_is_refused(tmp_path: Path, codec: str, garbage: bytes) -> None:
    whole = CODECS[codec](b"text\n")
    padding = 0 if codec == "zst" else len(garbage) - len(garbage.lstrip(b"\0"))
    with pytest.raises(InputError, match=f"unexpected data after the {codec} data, at byte {len(whole) + padding}"):
        _read(_write(tmp_path, f"a.{codec}", whole + garbage))


@every_codec
def test_wrong_suffix_is_refused(tmp_path: Path, codec: str) -> None:
    path = _write(tmp_path, f"a.jsonl.{codec}", b'{"text": "plain after all"}\n')
    with pytest.raises(InputError, match=f"the name indicates {codec} data, but the content has another format"):
        _read(path)


def test_error_names_the_display_name(tmp_path: Path) -> None:
    path = _write(tmp_path, "attempt-17.zst", b"no")
    with pytest.raises(InputError, match=r"^train/chunk1/a\.zst: "):
        list(open_decompressed(path, display="train/chunk1/a.zst"))


def test_zstd_window_above_128_mb_is_refused(tmp_path: Path) -> None:
    parameters = zstandard.ZstdCompressionParameters(window_log=28, enable_ldm=True)
    stream = zstandard.ZstdCompressor(compression_params=parameters).compressobj()
    path = _write(tmp_path, "a.zst", stream.compress(_text(1000)) + stream.flush())
    with pytest.raises(InputError, match=r"window of 256 MiB, more than the limit of 128 MiB.*--zstd-window 256MiB"):
        _read(path)


def test_zstd_window_of_128_mb_is_accepted(tmp_path: Path) -> None:
    parameters = zstandard.ZstdCompressionParameters(window_log=27, enable_ldm=True)
    stream = zstandard.ZstdCompressor(compression_params=parameters).compressobj()
    data = _text(1000)
    assert _read(_write(tmp_path, "a.zst", stream.compress(data) + stream.flush())) == data


def test_zstd_dictionary_is_refused(tmp_path: Path) -> None:
    samples = [_text(2000, seed) for seed in range(50)]
    trained = zstandard.train_dictionary(8192, samples)
    frame = zstandard.ZstdCompressor(dict_data=trained).compress(samples[0])
    with pytest.raises(InputError, match=f"needs dictionary {trained.dict_id()}"):
        _read(_write(tmp_path, "a.zst", frame))


@every_codec
def test_bomb_gives_bounded_blocks(tmp_path: Path, codec: str) -> None:
    """32 MB of zero bytes in a few KB: no block holds more than a few megabytes."""
    path = _write(tmp_path, f"a.{codec}", CODECS[codec](bytes(32 << 20)))
    sizes = [len(block) for block in open_decompressed(path)]
    assert sum(sizes) == 32 << 20
    assert max(sizes) <= 4 << 20


@every_codec
@settings(max_examples=40)
@given(parts=st.lists(st.binary(max_size=2000), min_size=1, max_size=6), chunk=st.integers(1, 5000))
def test_blocks_of_any_size_join_to_the_data(
    tmp_path_factory: pytest.TempPathFactory, codec: str, parts: list[bytes], chunk: int
) -> None:
    path = tmp_path_factory.mktemp("any") / f"a.{codec}"
    path.write_bytes(b"".join(map(CODECS[codec], parts)))
    blocks = list(open_decompressed(path, chunk=chunk))
    assert all(len(block) == chunk for block in blocks[:-1])
    assert b"".join(blocks) == b"".join(parts) == _read_into(path, chunk)


def test_names() -> None:
    assert strip_compression("a.jsonl.zst") == ("a.jsonl", "zst")
    assert strip_compression("a.jsonl.GZ") == ("a.jsonl", "gz")
    assert strip_compression("a.jsonl") == ("a.jsonl", None)
    assert strip_compression(".zst") == (".zst", None)
    good = ["a.jsonl", "a.json", "a.ndjson.gz", "a.jsonl.zst", "A.JSONL.XZ", "a.json.bz2", "a.parquet"]
    assert all(map(is_data_file, good))
    assert not any(map(is_data_file, ["README.md", ".gitattributes", "a.zst", "a.txt.gz", "a.parquet.gz"]))


def _count_like_a_loop(data: bytes) -> tuple[int, int]:
    lines = data.removeprefix(b"\xef\xbb\xbf").split(b"\n")
    if not lines[-1]:
        lines.pop()
    records = sum(bool(line.strip()) for line in lines)
    return records, len(lines) - records


PIECES = [
    b"\n",
    b"\n\n",
    b" ",
    b"\r\n",
    b"\t",
    b"\v\f",
    b"\xef\xbb\xbf",
    b"\xef",
    b"x",
    b"{}",
    b"\0",
    b"\x1f",
    b"x" * 900,
]


@settings(max_examples=150)
@given(
    pieces=st.lists(st.sampled_from(PIECES), max_size=30),
    repeat=st.sampled_from([1, 40]),
    size=st.integers(1, 400),
)
def test_records_are_counted_as_a_loop_would(pieces: list[bytes], repeat: int, size: int) -> None:
    data = b"".join(pieces) * repeat
    counter = RecordCounter()
    for start in range(0, len(data), size):
        counter.update(data[start : start + size])
    records, blank = _count_like_a_loop(data)
    assert counter.finish() == counter.records == records
    assert counter.blank == blank
    assert counter.ends_with_newline == (data.removeprefix(b"\xef\xbb\xbf")[-1:] in (b"", b"\n"))


@pytest.mark.parametrize(
    ("data", "records"),
    [
        (b"", 0),
        (b"\xef\xbb\xbf", 0),
        (b"\xef\xbb\xbf\n", 0),
        (b"\xef\xbb\xbfx", 1),
        (b"a\nb", 2),
        (b"a\r\n\r\nb\r\n", 2),
    ],
)
def test_records_of_small_files(data: bytes, records: int) -> None:
    counter = RecordCounter()
    counter.update(data)
    assert counter.finish() == records


def test_closed_files_leave_no_decoders_to_the_garbage_collector(tmp_path: Path) -> None:
    """The collector runs rarely, and a decoder has a quarter of a megabyte: 59,166 files took 3.5 GB."""
    path = tmp_path / "a.jsonl.zst"
    path.write_bytes(zstandard.ZstdCompressor().compress(b"text\n" * 1000))

    def resident() -> int:
        return int(Path("/proc/self/statm").read_bytes().split()[1]) * os.sysconf("SC_PAGE_SIZE")

    gc.disable()
    try:
        before = resident()
        for _ in range(2000):
            with open_decompressed(path) as reader:
                assert b"".join(reader)
        assert resident() - before < 40_000_000
    finally:
        gc.enable()


def _pages_in_memory(path: Path) -> int:
    """Count the pages of a file in the page cache, with mincore(2), which does not change them."""
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY) as memory:
        pages = (ctypes.c_ubyte * -(-len(memory) // mmap.PAGESIZE))()
        start = ctypes.c_char.from_buffer(memory)
        failed = ctypes.CDLL(None, use_errno=True).mincore(
            ctypes.c_void_p(ctypes.addressof(start)), ctypes.c_size_t(len(memory)), pages
        )
        del start
    assert not failed, os.strerror(ctypes.get_errno())
    return sum(page & 1 for page in pages)


def _drop_from_cache(path: Path) -> None:
    with path.open("rb") as file:
        os.fsync(file.fileno())
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def _has_uncached_reads(path: Path) -> bool:
    """Return whether the system can read a file without caching it: Linux 6.14 on some file systems."""
    with path.open("rb", buffering=0) as file:
        try:
            return os.preadv(file.fileno(), [bytearray(1)], 0, 0x80) == 1
        except OSError:
            return False


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="only Linux shows the pages in the page cache")
@pytest.mark.parametrize("codec", [None, *CODECS])
def test_reads_do_not_fill_the_page_cache(tmp_path: Path, codec: str | None) -> None:
    data = random.Random(0).randbytes(4 << 20)
    path = _write(tmp_path, f"a.jsonl.{codec}" if codec else "a.jsonl", CODECS[codec](data) if codec else data)
    if not _has_uncached_reads(path):
        pytest.skip("this system has no uncached reads")
    _drop_from_cache(path)
    assert b"".join(open_decompressed(path)) == data
    assert _pages_in_memory(path) * mmap.PAGESIZE < len(data) // 4
    path.read_bytes()
    assert b"".join(open_decompressed(path)) == data
    assert _pages_in_memory(path) * mmap.PAGESIZE >= len(data)  # pages that another reader cached stay cached


@pytest.mark.slow
@pytest.mark.skipif(not Path("/dev/shm").is_dir(), reason="no file system in memory here")
@every_codec
def test_file_system_without_uncached_reads_works(codec: str) -> None:
    data = _text(3 << 20)
    with tempfile.TemporaryDirectory(dir="/dev/shm") as directory:
        for path in (
            _write(Path(directory), "a.jsonl", data),
            _write(Path(directory), f"a.jsonl.{codec}", CODECS[codec](data)),
        ):
            assert _read(path) == data
