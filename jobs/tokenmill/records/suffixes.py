"""Rules for file names: the codec, the format, and whether a file contains records.

Listings and stages select input files by these rules, before any file is read.
"""

from collections.abc import Callable
from functools import partial

COMPRESSIONS = {
    "zst": "zst",
    "zstd": "zst",
    "gz": "gz",
    "gzip": "gz",
    "bz2": "bz2",
    "bzip2": "bz2",
    "xz": "xz",
}
"""The codec of each suffix."""

LINE_SUFFIXES = (".jsonl", ".json", ".ndjson", ".jsonlines")
DATA_SUFFIXES = (
    *(f"{base}{end}" for base in LINE_SUFFIXES for end in ("", *(f".{suffix}" for suffix in COMPRESSIONS))),
    ".parquet",
    ".arrow",
)


def strip_compression(name: str) -> tuple[str, str | None]:
    """Split `a.jsonl.zst` into `a.jsonl` and `zst`. The codec is None for a name without a known suffix."""
    stem, _, suffix = name.rpartition(".")
    codec = COMPRESSIONS.get(suffix.lower())
    return (stem, codec) if stem and codec else (name, None)


_NOT_TEXT = (
    *(".png", ".jpg", ".jpeg", ".gif", ".svg", ".pdf", ".zip", ".tar", ".tgz", ".7z", ".rar"),
    *(".bin", ".idx", ".pt", ".safetensors", ".npy", ".npz", ".pkl", ".crc", ".md5", ".sha256", "/_success"),
    *("/readme", "/readme.md", "/readme.txt", "/license", "/license.md", "/license.txt"),
)
_NOT_RECORDS = (*_NOT_TEXT, ".md", ".rst", ".html", ".css", ".py", ".ipynb", ".sh", ".yaml", ".yml", ".toml", ".cfg")
_LINE_DATA_SUFFIXES = tuple(name for name in DATA_SUFFIXES if name not in (".parquet", ".arrow"))
_EXCLUDED_SUFFIXES = {
    "jsonl": (*_NOT_RECORDS, ".parquet", ".arrow"),
    "json": (*_NOT_RECORDS, ".parquet", ".arrow"),
    "txt": (*_NOT_TEXT, *_LINE_DATA_SUFFIXES, ".parquet", ".arrow"),
    "parquet": (*_NOT_RECORDS, *_LINE_DATA_SUFFIXES, ".txt", ".arrow"),
    "arrow": (*_NOT_RECORDS, *_LINE_DATA_SUFFIXES, ".txt", ".parquet"),
}
"""For each requested format: suffixes of names that belong to another format."""


def is_data_file(name: str, requested: str | None = None) -> bool:
    """Return whether a name indicates a file of records.

    With a requested format, this is each name that does not belong to another format.
    """
    if requested is None:
        return name.lower().endswith(DATA_SUFFIXES)
    return not f"/{name.lower()}".endswith(_EXCLUDED_SUFFIXES[requested])


def make_file_filter(suffixes: tuple[str, ...], requested: str | None) -> tuple[str, ...] | Callable[[str], bool]:
    """Return which files of a directory a stage reads: names with a suffix, or a test for a requested format."""
    return partial(is_data_file, requested=requested) if requested else suffixes
