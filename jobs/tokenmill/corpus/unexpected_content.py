"""Recognise content that is not what a file's name or --format promises, and name it with its remedy.

Used wherever a file is opened for reading: a Git LFS pointer, a login page or UTF-16 is no file of bad records.
"""

import json
import re
from typing import Any

from tokenmill.errors import InputError

HEAD = 4096
"""Bytes from the beginning of a file that are looked at."""

WRAPPERS = ("data", "rows", "records", "examples", "documents")
"""Keys under which one JSON object may hold all records of a file."""

CHATS = ("messages", "conversations", "conversation")
"""Keys under which a record of chat data holds its turns."""

CHAT = (
    "chat data, which preprocess does not take: it wants a text in each record. Write each conversation as one text "
    "first, with the chat template of the model"
)

_POINTERS = (
    (b"version https://git-lfs.github.com/spec/", "a Git LFS pointer", "git lfs pull"),
    (b"version https://hawser.github.com/spec/", "a Git LFS pointer", "git lfs pull"),
    (b"# xet version ", "a Xet pointer", "git xet checkout"),
    (b"/annex/objects/", "a git-annex pointer", "git annex get"),
)
AS_JSON = "give --format json (in a chart: --set dataset.format=json)"
_SPREAD = "JSON over several lines"
_UNPACK = "unpack it, and give what is in it"
_BINARIES = (
    (b"PK\x03\x04", "a ZIP archive", _UNPACK),
    (b"7z\xbc\xaf\x27\x1c", "a 7-Zip archive", _UNPACK),
    (b"Rar!\x1a\x07", "a RAR archive", _UNPACK),
    (b"\x04\x22\x4d\x18", "LZ4 data", "decompress it (lz4 -d), or compress it as .zst, .gz, .bz2 or .xz"),
    (b"\x5d\x00\x00", "data of the old .lzma format", "decompress it (xz -d), or compress it as .xz"),
    (b"\x1f\x9d", "data of compress (.Z)", "decompress it (gzip -d), or compress it as .gz"),
    (b"%PDF-", "a PDF document", "extract its text first"),
    (b"SQLite format 3\0", "an SQLite database", "export its table as JSON Lines"),
    (b"PAR1", "Parquet", "name it .parquet, or give --format parquet (in a chart: --set dataset.format=parquet)"),
    (b"ARROW1", "Arrow", "name it .arrow, or give --format arrow (in a chart: --set dataset.format=arrow)"),
    (b"\xff\xff\xff\xff", "Arrow", "name it .arrow, or give --format arrow (in a chart: --set dataset.format=arrow)"),
    (b"Obj\x01", "Avro", "convert it to Parquet or JSON Lines"),
    (b"ORC", "ORC", "convert it to Parquet or JSON Lines"),
    (b"\x93NUMPY", "a NumPy array", "preprocess takes text, not arrays"),
    (b"\x89HDF\r\n", "HDF5", "convert it to Parquet or JSON Lines"),
    (b"WARC/1.", "a WARC archive", "extract its text first"),
)
_TAR = 257
"""Where a tar archive has `ustar`."""
_ENCODINGS = (
    (b"\xff\xfe\0\0", "UTF-32LE"),
    (b"\0\0\xfe\xff", "UTF-32BE"),
    (b"\xff\xfe", "UTF-16LE"),
    (b"\xfe\xff", "UTF-16BE"),
)


class UnexpectedContent(InputError):
    """A file whose content is something else than records: not one of them is taken, whatever is done with bad ones."""


def refuse(head: bytes, display: str, *, any_text: bool = False) -> None:
    """Refuse a file by its first bytes; with `any_text` markup is text like any other. Raises ForeignContent."""
    if problem := _content(head, any_text=any_text):
        raise UnexpectedContent(f"{display}: {problem}")


def _content(head: bytes, *, any_text: bool) -> str:
    if encoding := _encoding(head):
        return f"its text is {encoding}, and UTF-8 is wanted: convert it with `iconv -f {encoding} -t UTF-8 OLD > NEW`"
    if len(head) >= 16 and not head.strip(b"\0"):
        return "it begins with zero bytes alone, as a copy that broke off leaves: put a whole copy in its place"
    if head[_TAR : _TAR + 5] == b"ustar":
        return f"its content is a tar archive: {_UNPACK}"
    for magic, name, command in _POINTERS:
        if head.startswith(magic) and (b"git-lfs" not in magic or b"\noid " in head):
            return (
                f"{name} stands in place of the data: run `{command}` where the repository was cloned, or download "
                "the file itself"
            )
    for magic, name, remedy in _BINARIES:
        if head.startswith(magic) and not (any_text and magic.isalnum()):
            return f"its content is {name}: {remedy}"
    return "" if any_text else _markup(head)


def _markup(head: bytes) -> str:
    text = head.removeprefix(b"\xef\xbb\xbf").lstrip().lower()
    if text.startswith((b"<!doctype html", b"<html", b"<head", b"<body")):
        return (
            "an HTML page stands in place of the data, such as the login or error page of a server: download the file "
            "again, with credentials where it wants them"
        )
    if text.startswith(b"<"):
        return (
            "XML or HTML stands in place of the data: if it is the error of a server, download the file again, else "
            "write its texts as JSON Lines"
        )
    return ""


def _encoding(head: bytes) -> str:
    """Name the encoding of a text that is not UTF-8, by its byte-order mark or by where its zero bytes are."""
    if head.startswith(b"\xff\xff\xff\xff"):
        return ""
    for mark, encoding in _ENCODINGS:
        if head.startswith(mark):
            return encoding
    some = head[:64]
    if len(some) >= 8:
        for width, order in ((4, "32"), (2, "16")):
            lanes = [any(some[lane : len(some) // width * width : width]) for lane in range(width)]
            if lanes == [True, *[False] * (width - 1)]:
                return f"UTF-{order}LE"
            if lanes == [*[False] * (width - 1), True]:
                return f"UTF-{order}BE"
    return ""


def misread(line: bytes, *, alone: bool) -> str:
    """Word what a file is whose first line was to be a record and is none; empty where it may be a bad record.

    `alone` says that no record at all could be taken from the beginning of the file: then less is proof enough.
    """
    kind = _misread(line.strip(), alone=alone)
    unless = "; if it is no data, leave it out with --exclude" if kind == _SPREAD else ""
    return f"it is {kind}, not one record a line: {AS_JSON}{unless}" if kind else ""


def refuse_spread(head: bytes, display: str) -> None:
    """Refuse to copy as lines what begins as an array or as JSON over several lines. Raises ForeignContent."""
    line = head.removeprefix(b"\xef\xbb\xbf").lstrip().partition(b"\n")[0].strip()
    if kind := _misread(line, alone=line.startswith(b"[")):
        raise UnexpectedContent(
            f"{display}: it is {kind}, not one record a line, and this stage copies lines; tokenmill preprocess "
            "--format json reads the file itself, without such stages before it; if it is no data, leave it out with "
            "--exclude"
        )


def _misread(text: bytes, *, alone: bool) -> str:
    kind = ""
    if text == b"[" or (alone and text[:1] == b"[" and text[1:].lstrip()[:1] in (b"{", b"")):
        kind = "one JSON array"
    elif text == b"{":
        kind = _SPREAD
    elif alone and text[:1] == b"{":
        kind = _object(text)
    return kind


def _object(text: bytes) -> str:
    """Name what begins with an object and is no record."""
    characters = text.decode(errors="replace")
    try:
        value, end = json.JSONDecoder().raw_decode(characters)
    except (ValueError, RecursionError):
        if text[-1:] in (b"{", b"[", b","):
            return _SPREAD
        wrapper = _open_wrapper(text)
    else:
        rest = characters[end:]
        if rest.strip()[:1] == "{":
            cut = rest[: len(rest) - len(rest.lstrip())]
            return "text whose lines end in CR alone" if "\r" in cut else "JSON records that follow each other"
        wrapper = wrapped(value)
    return f"one JSON object whose {wrapper!r} is an array of records" if wrapper else ""


def _open_wrapper(text: bytes) -> str:
    """Name the key whose array of objects a JSON object begins with, though the object is cut."""
    match = re.match(rb'\{\s*"(%s)"\s*:\s*\[\s*\{' % "|".join(WRAPPERS).encode(), text)
    return match.group(1).decode() if match else ""


def wrapped(value: object) -> str:
    """Name the key under which an object holds records of its own; empty where there is none."""
    if isinstance(value, dict):
        for name in WRAPPERS:
            if _objects(value.get(name)):
                return name
    return ""


def is_chat(value: object) -> bool:
    """Tell whether a value is the turns of a conversation."""
    return _objects(value) and bool({"role", "from"} & set(value[0]))  # type: ignore[index]


def chat_key(record: dict[str, Any]) -> str:
    """Name the key under which a record holds the turns of a conversation; empty where it holds none."""
    return next((name for name in CHATS if is_chat(record.get(name))), "")


def _objects(value: object) -> bool:
    return isinstance(value, list) and bool(value) and isinstance(value[0], dict)


def unlike_json(line: bytes) -> str:
    """Word how to read a file whose first line is no JSON at all; empty where it looks like JSON."""
    if line.lstrip()[:1] in (b"{", b"[", b'"'):
        return ""
    return (
        "if these are texts, --format txt (in a chart: --set dataset.format=txt) takes each file as one, with "
        "--txt-document=line each line; if it is CSV or another table, convert it to JSON Lines or Parquet"
    )
