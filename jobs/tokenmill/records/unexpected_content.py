"""Detect content that differs from what the file name or --format declares, and describe it with a remedy.

Stages call this module when they open an input file. Examples are a Git LFS pointer, a login page, or text in UTF-16.
The error then names the real problem, instead of one bad record per line.
"""

import json
import re

from tokenmill.core.typed_json import JsonObject
from tokenmill.errors import InputError

HEAD_BYTES = 4096
"""Bytes from the start of a file that the checks inspect."""

WRAPPER_KEYS = ("data", "rows", "records", "examples", "documents")
"""Keys under which a single JSON object can contain all records of a file."""

CHAT_KEYS = ("messages", "conversations", "conversation")
"""Keys under which a record of chat data contains its turns."""

CHAT_UNSUPPORTED = (
    "chat data, which preprocess does not support: each record must contain a text. Use tokenmill chat, which renders "
    "each conversation with the chat template of the model"
)

_POINTERS = (
    (b"version https://git-lfs.github.com/spec/", "a Git LFS pointer", "git lfs pull"),
    (b"version https://hawser.github.com/spec/", "a Git LFS pointer", "git lfs pull"),
    (b"# xet version ", "a Xet pointer", "git xet checkout"),
    (b"/annex/objects/", "a git-annex pointer", "git annex get"),
)
USE_JSON = "use --format json (in a chart: --set dataset.format=json)"
_MULTILINE_JSON = "JSON over several lines"
_UNPACK = "extract the archive, and pass the extracted files"
_BINARIES = (
    (b"PK\x03\x04", "a ZIP archive", _UNPACK),
    (b"7z\xbc\xaf\x27\x1c", "a 7-Zip archive", _UNPACK),
    (b"Rar!\x1a\x07", "a RAR archive", _UNPACK),
    (b"\x04\x22\x4d\x18", "LZ4 data", "decompress it (lz4 -d), or convert it to .zst, .gz, .bz2 or .xz"),
    (b"\x5d\x00\x00", "data in the legacy .lzma format", "decompress it (xz -d), or convert it to .xz"),
    (b"\x1f\x9d", "data of compress (.Z)", "decompress it (gzip -d), or convert it to .gz"),
    (b"%PDF-", "a PDF document", "extract its text first"),
    (b"SQLite format 3\0", "an SQLite database", "export its table as JSON Lines"),
    (b"PAR1", "Parquet", "rename it to .parquet, or use --format parquet (in a chart: --set dataset.format=parquet)"),
    (b"ARROW1", "Arrow", "rename it to .arrow, or use --format arrow (in a chart: --set dataset.format=arrow)"),
    (
        b"\xff\xff\xff\xff",
        "Arrow",
        "rename it to .arrow, or use --format arrow (in a chart: --set dataset.format=arrow)",
    ),
    (b"Obj\x01", "Avro", "convert it to Parquet or JSON Lines"),
    (b"ORC", "ORC", "convert it to Parquet or JSON Lines"),
    (b"\x93NUMPY", "a NumPy array", "pass text instead; preprocess does not read arrays"),
    (b"\x89HDF\r\n", "HDF5", "convert it to Parquet or JSON Lines"),
    (b"WARC/1.", "a WARC archive", "extract its text first"),
)
_TAR_MAGIC_OFFSET = 257
"""Offset of `ustar` in a tar archive, in bytes."""
_BYTE_ORDER_MARKS = (
    (b"\xff\xfe\0\0", "UTF-32LE"),
    (b"\0\0\xfe\xff", "UTF-32BE"),
    (b"\xff\xfe", "UTF-16LE"),
    (b"\xfe\xff", "UTF-16BE"),
)


class UnexpectedContent(InputError):
    """An input file does not contain records in the expected format.

    Stages read no record of this file, whatever the option for bad records is.
    """


def reject_unexpected(head: bytes, display: str, *, any_text: bool = False) -> None:
    """Raise UnexpectedContent when the first bytes of a file are not records.

    With `any_text`, every text is accepted, markup included.
    """
    if problem := _describe_content(head, any_text=any_text):
        raise UnexpectedContent(f"{display}: {problem}")


def _describe_content(head: bytes, *, any_text: bool) -> str:
    """Return the problem with the content and its remedy, empty when there is no problem."""
    if encoding := _detect_encoding(head):
        return (
            f"the text encoding is {encoding}, not UTF-8: convert the file with `iconv -f {encoding} -t UTF-8 OLD > "
            "NEW`"
        )
    if len(head) >= 16 and not head.strip(b"\0"):
        return "the file starts with only zero bytes, as after an interrupted copy: replace it with a complete copy"
    if head[_TAR_MAGIC_OFFSET : _TAR_MAGIC_OFFSET + 5] == b"ustar":
        return f"the content is a tar archive: {_UNPACK}"
    for magic, name, command in _POINTERS:
        if head.startswith(magic) and (b"git-lfs" not in magic or b"\noid " in head):
            return (
                f"the file contains {name} instead of the data: run `{command}` in the clone of the repository, or "
                "download the file itself"
            )
    for magic, name, remedy in _BINARIES:
        if head.startswith(magic) and not (any_text and magic.isalnum()):
            return f"the content is {name}: {remedy}"
    return "" if any_text else _describe_markup(head)


def _describe_markup(head: bytes) -> str:
    text = head.removeprefix(b"\xef\xbb\xbf").lstrip().lower()
    if text.startswith((b"<!doctype html", b"<html", b"<head", b"<body")):
        return (
            "the file contains an HTML page instead of the data, for example the login or error page of a server: "
            "download the file again, with credentials if the server requires them"
        )
    if text.startswith(b"<"):
        return (
            "the file contains XML or HTML instead of the data: if this is the error of a server, download the file "
            "again; otherwise convert the texts to JSON Lines"
        )
    return ""


def _detect_encoding(head: bytes) -> str:
    """Return the encoding of a text that is not UTF-8, empty for other content.

    The evidence is the byte-order mark or the position of the zero bytes.
    """
    if head.startswith(b"\xff\xff\xff\xff"):
        return ""
    for mark, encoding in _BYTE_ORDER_MARKS:
        if head.startswith(mark):
            return encoding
    start = head[:64]
    if len(start) >= 8:
        for width, order in ((4, "32"), (2, "16")):
            lanes = [any(start[lane : len(start) // width * width : width]) for lane in range(width)]
            if lanes == [True, *[False] * (width - 1)]:
                return f"UTF-{order}LE"
            if lanes == [*[False] * (width - 1), True]:
                return f"UTF-{order}BE"
    return ""


def describe_mismatch(line: bytes, *, no_documents: bool) -> str:
    """Return the real layout of a file whose first line is not a record, with the remedy.

    The result is empty when the line can be a bad record. `no_documents` is true when the first block of the file has
    no valid record. Weaker evidence is then sufficient.
    """
    kind = _detect_mismatch(line.strip(), no_documents=no_documents)
    unless = "; if the file is not data, add --exclude for it" if kind == _MULTILINE_JSON else ""
    return f"the content is {kind}, not one record per line: {USE_JSON}{unless}" if kind else ""


def reject_multiline_json(head: bytes, display: str) -> None:
    """Raise UnexpectedContent for an array or JSON over several lines, which cannot be copied line by line."""
    line = head.removeprefix(b"\xef\xbb\xbf").lstrip().partition(b"\n")[0].strip()
    if kind := _detect_mismatch(line, no_documents=line.startswith(b"[")):
        raise UnexpectedContent(
            f"{display}: the content is {kind}, not one record per line, and this stage copies lines; run tokenmill "
            "preprocess --format json on the file directly, without this stage; if the file is not data, add --exclude "
            "for it"
        )


def _detect_mismatch(text: bytes, *, no_documents: bool) -> str:
    kind = ""
    if text == b"[" or (no_documents and text[:1] == b"[" and text[1:].lstrip()[:1] in (b"{", b"")):
        kind = "one JSON array"
    elif text == b"{":
        kind = _MULTILINE_JSON
    elif no_documents and text[:1] == b"{":
        kind = _detect_object_layout(text)
    return kind


def _detect_object_layout(text: bytes) -> str:
    """Return the layout of content that starts with an object but is not a record."""
    characters = text.decode(errors="replace")
    try:
        value, end = json.JSONDecoder().raw_decode(characters)
    except (ValueError, RecursionError):
        if text[-1:] in (b"{", b"[", b","):
            return _MULTILINE_JSON
        wrapper = _find_truncated_wrapper(text)
    else:
        rest = characters[end:]
        if rest.strip()[:1] == "{":
            separator = rest[: len(rest) - len(rest.lstrip())]
            return (
                "text whose lines end with CR only"
                if "\r" in separator
                else "JSON records without newlines between them"
            )
        wrapper = find_wrapper_key(value)
    return f"one JSON object whose {wrapper!r} is an array of records" if wrapper else ""


def _find_truncated_wrapper(text: bytes) -> str:
    """Return the key at the start of a truncated JSON object for an array of objects, or an empty string."""
    match = re.match(rb'\{\s*"(%s)"\s*:\s*\[\s*\{' % "|".join(WRAPPER_KEYS).encode(), text)
    return match.group(1).decode() if match else ""


def find_wrapper_key(value: object) -> str:
    """Return the key under which an object contains an array of records; empty if there is no such key."""
    if isinstance(value, dict):
        for key in WRAPPER_KEYS:
            if _is_object_list(value.get(key)):
                return key
    return ""


def is_chat(value: object) -> bool:
    """Return whether a value is a list of conversation turns."""
    return _is_object_list(value) and bool({"role", "from"} & set(value[0]))  # type: ignore[index]


def find_chat_key(record: JsonObject) -> str:
    """Return the key under which a record contains the turns of a conversation; empty if there is no such key."""
    return next((key for key in CHAT_KEYS if is_chat(record.get(key))), "")


def _is_object_list(value: object) -> bool:
    return isinstance(value, list) and bool(value) and isinstance(value[0], dict)


def suggest_text_format(line: bytes) -> str:
    """Return a remedy for a file whose first line is not JSON; empty if the line looks like JSON."""
    if line.lstrip()[:1] in (b"{", b"[", b'"'):
        return ""
    return (
        "if the files are texts, use --format txt (in a chart: --set dataset.format=txt), which reads each file as one "
        "document, or each line with --txt-document=line; if the file is CSV or another table, convert it to JSON "
        "Lines or Parquet"
    )
