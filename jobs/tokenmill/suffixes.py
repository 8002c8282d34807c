"""What the name of a file says about its content: the codec, the format, and whether it holds records at all."""

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
    """Split `a.jsonl.zst` into `a.jsonl` and `zst`; without a known suffix the codec is None."""
    stem, _, suffix = name.rpartition(".")
    codec = COMPRESSIONS.get(suffix.lower())
    return (stem, codec) if stem and codec else (name, None)


_NO_TEXT = (
    *(".png", ".jpg", ".jpeg", ".gif", ".svg", ".pdf", ".zip", ".tar", ".tgz", ".7z", ".rar"),
    *(".bin", ".idx", ".pt", ".safetensors", ".npy", ".npz", ".pkl", ".crc", ".md5", ".sha256", "/_success"),
    *("/readme", "/readme.md", "/readme.txt", "/license", "/license.md", "/license.txt"),
)
_NO_RECORDS = (*_NO_TEXT, ".md", ".rst", ".html", ".css", ".py", ".ipynb", ".sh", ".yaml", ".yml", ".toml", ".cfg")
_LINES = tuple(name for name in DATA_SUFFIXES if name not in (".parquet", ".arrow"))
_OTHER = {
    "jsonl": (*_NO_RECORDS, ".parquet", ".arrow"),
    "json": (*_NO_RECORDS, ".parquet", ".arrow"),
    "txt": (*_NO_TEXT, *_LINES, ".parquet", ".arrow"),
    "parquet": (*_NO_RECORDS, *_LINES, ".txt", ".arrow"),
    "arrow": (*_NO_RECORDS, *_LINES, ".txt", ".parquet"),
}
"""Endings of names that are of something else than a format that was asked for."""


def is_data_file(name: str, wanted: str | None = None) -> bool:
    """Tell by its name whether a file holds records: with a format that is wanted, any name that is of no other."""
    if wanted is None:
        return name.lower().endswith(DATA_SUFFIXES)
    return not f"/{name.lower()}".endswith(_OTHER[wanted])


def usable(endings: tuple[str, ...], wanted: str | None) -> tuple[str, ...] | Callable[[str], bool]:
    """Return which files of a directory are read: those with these endings, or those that may be of a wanted format."""
    return partial(is_data_file, wanted=wanted) if wanted else endings
