"""Removal of credentials from everything that this process prints or records.

A server may quote the token of a request in a header, and a library may quote a key of the environment. `install` puts
`redact` in front of standard output and standard error, so tracebacks and lines of other programs are redacted, too.
Records and JSON events call `redact` or `redact_json` themselves. The module redacts the secrets of the environment,
and those that a caller registers (`register_secrets`).
"""

import base64
import contextlib
import io
import json
import os
import re
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any
from urllib.parse import unquote

REDACTED = "<redacted>"

SECRET_NAME = re.compile(
    "(^|_)(TOKEN|SECRET|PASSWORD|PASSWD|CREDENTIALS?|KEY|SAS|CONNECTION_STRING|PROXY)(_|$)", re.IGNORECASE
)
"""Names of environment variables that may contain a secret: the token of the Hub, cloud keys, a proxy's password."""

_SECRET_FIELD = re.compile(
    "token|secret|passw|pwd|credential|signature|sas|session|auth|jwt|(^|[_-])(sig|key|code)($|[_-])|(access|account|api|"
    "private|shared)[_-]?key",
    re.IGNORECASE,
)
"""Names of fields that may contain a secret in a larger value: a query, a connection string, a JSON object."""

MIN_SECRET_LENGTH = 8
"""Characters of the shortest value that is redacted; a shorter value would match ordinary text."""
MIN_SENT_PASSWORD_LENGTH = 6
"""The same limit for a password that this process sent, if the password has both letters and digits."""
MIN_PART_LENGTH = 16
"""Characters of the shortest part of a longer secret that is redacted when the text contains only this part."""
_BLOCK_LENGTH = MIN_PART_LENGTH // 2  # every part of MIN_PART_LENGTH has one complete block
_MAX_FILE_BYTES = 64 << 10  # a larger file is not a file of credentials

_ESCAPE = re.compile(
    r"%(?:25)*(?P<percent>[0-9A-Fa-f]{2})|\\+(?:u|x(?=[0-9A-Fa-f]{2}))(?P<escape>(?<=u)[0-9A-Fa-f]{4}|(?<=x)[0-9A-Fa-f]{2})"
    r"|&#(?:x(?P<entity>[0-9A-Fa-f]{1,4})|(?P<decimal>[0-9]{1,5}));|\\+[rnt]"
)
_TOKEN = re.compile(f"{_ESCAPE.pattern}|.", re.DOTALL)
_IGNORED = " \t\r\n\v\f\\\"',"
"""Characters that may separate the characters of a secret: commas join repeated headers, newlines fold long ones."""
_NORMALIZATION = {ord(c): None for c in _IGNORED} | {code: code + 32 for code in range(ord("A"), ord("Z") + 1)}
_NAME_VALUE = re.compile(r"(?:^|[;&?\s])([\w.-]+)\s*=\s*([^;&\s]+)")

STREAMS = {"stdout": "standard output", "stderr": "standard error"}
"""The names of the standard streams in the errors of a write."""

_secrets: dict[str, None] = {}
_sent: dict[str, None] = {}
_registered: set[str] = set()
_scanned = False


def install() -> None:
    """Redact all later writes to standard output and standard error."""
    _scan()
    for name, description in STREAMS.items():
        stream = getattr(sys, name)
        if isinstance(stream, io.TextIOWrapper) and not isinstance(stream, _RedactingStream):
            stream.flush()
            redacting = _RedactingStream(
                stream.buffer,
                stream.encoding,
                stream.errors,
                line_buffering=stream.line_buffering,
                write_through=stream.write_through,
            )
            redacting.description, redacting.original = description, stream
            setattr(sys, name, redacting)


class _RedactingStream(io.TextIOWrapper):
    """A text stream that redacts its text, and whose errors name it."""

    description = ""
    original: io.TextIOWrapper | None = None
    """The stream with the same buffer, which its end would close."""

    def write(self, text: str, /) -> int:
        """Redact and write a text."""
        with self._naming_errors():
            super().write(redact(text))
        return len(text)

    def flush(self) -> None:
        """Write the buffered text."""
        with self._naming_errors():
            super().flush()

    @contextlib.contextmanager
    def _naming_errors(self) -> Iterator[None]:
        try:
            yield
        except BrokenPipeError:  # the reader has gone: the command continues
            raise
        except OSError as error:
            error.filename = self.description
            raise


def register_secrets(*values: str | None) -> None:
    """Register credentials that this process sends to a server: passwords, tokens, Authorization headers."""
    for value in filter(None, values):
        if value in _registered:
            continue
        _registered.add(value)
        scheme, _, rest = value.partition(" ")
        credentials = [value]
        if rest and scheme.lower() in ("basic", "bearer"):
            credentials = [rest.strip()]
            if scheme.lower() == "basic":
                try:
                    login = base64.b64decode(rest).decode("latin-1")
                except ValueError:
                    login = ""
                credentials += [login, login.partition(":")[2]]
        for secret in credentials:
            mixed = re.search("[0-9]", secret) and re.search("[A-Za-z]", secret)
            for encoding in _encodings(secret, MIN_SENT_PASSWORD_LENGTH if mixed else MIN_SECRET_LENGTH):
                _secrets[encoding] = _sent[encoding] = None


def register_address_secrets(url: str) -> None:
    """Register the password of a URL and the values of its query that may be a signature."""
    register_secrets(*_secrets_of_address(url))


def register_secret_file(path: str | Path) -> None:
    """Register the secrets of a small file of credentials, if the file exists."""
    for secret in _secrets_of_file(Path(path).expanduser()):
        _secrets.update(dict.fromkeys(_encodings(secret)))


def redact(text: str, address: str = "") -> str:
    """Replace each credential in a text by REDACTED.

    A credential may be complete or a part, and it may be encoded for a URL, a header or JSON. `address` is the URL of
    a request, which may be signed; its secrets are replaced, too.
    """
    if not _scanned:
        _scan()
    normalized = _normalize(text)
    more = [encoding for secret in _secrets_of_address(address) for encoding in _encodings(secret)]
    hits = [secret for secret in (*_secrets, *more) if any(block in normalized for block in _search_blocks(secret))]
    if not hits:
        return text
    characters = list(_normalized_characters(text))
    spans = sorted(
        (characters[start][1], characters[end - 1][2])
        for secret in hits
        for start, end in _find_spans(secret, normalized)
    )
    result, done = "", 0
    for start, end in spans:
        if start >= done:
            result += text[done:start] + REDACTED
        done = max(done, end)
    return result + text[done:]


def redact_json(value: Any) -> Any:
    """Redact all strings of a JSON value except the keys of objects."""
    if isinstance(value, str):
        return redact(value)
    if isinstance(value, dict):
        return {key: redact_json(item) for key, item in value.items()}
    return [redact_json(item) for item in value] if isinstance(value, list | tuple) else value


def contains_sent_credential(text: str) -> bool:
    """Return whether a server's text contains a credential that this process sent; do not record such a text."""
    normalized = _normalize(text)
    return any(any(True for _ in _find_spans(secret, normalized)) for secret in tuple(_sent))


def _scan() -> None:
    """Register the secrets of the environment."""
    global _scanned  # noqa: PLW0603
    _scanned = True
    for name, value in os.environ.items():
        for secret in _secrets_of_variable(name, value):
            _secrets.update(dict.fromkeys(_encodings(secret)))


def _secrets_of_variable(name: str, value: str) -> Iterator[str]:
    value = value.strip()
    if "://" in value and not value.startswith("{"):
        yield from _secrets_of_address(value)
    if not SECRET_NAME.search(name) and not name.startswith("FSSPEC_"):
        return
    if value.startswith(("/", "~", ".")) and (path := Path(value).expanduser()).exists():
        yield from _secrets_of_file(path)
    elif not name.upper().endswith(("_PATH", "_FILE", "_DIR", "_PROXY", "_URL")):
        yield from _secrets_of_text(value)


def _secrets_of_text(value: str) -> Iterator[str]:
    """Yield the secrets in a value: the secret fields if the value has fields, else the complete value."""
    try:
        parsed = json.loads(value) if value.startswith("{") else None
    except ValueError:
        parsed = None
    if parsed is not None:
        yield from _secrets_of_json(parsed)
    elif "\n" in value:  # PEM or an INI file
        pairs = [pair for pair in _NAME_VALUE.findall(value) if _SECRET_FIELD.search(pair[0])]
        yield from (secret for _, secret in pairs)
        if not pairs:
            yield from (line.strip() for line in value.splitlines() if not line.startswith("-----"))
    elif "://" in value:
        yield from _secrets_of_address(value)
    elif len(pairs := _NAME_VALUE.findall(value)) > 1 and re.search("[;&]", value):
        yield from (secret for name, secret in pairs if _SECRET_FIELD.search(name))
    else:
        yield value


def _secrets_of_json(value: Any) -> Iterator[str]:
    for name, item in value.items() if isinstance(value, dict) else ():
        if isinstance(item, dict):
            yield from _secrets_of_json(item)
        elif isinstance(item, str) and _SECRET_FIELD.search(name):
            yield from _secrets_of_text(item)


def _secrets_of_address(value: str) -> Iterator[str]:
    scheme, _, rest = value.partition("://")
    login, mark, _ = re.split("[/?#]", rest, maxsplit=1)[0].rpartition("@")
    user, colon, password = login.partition(":")
    if colon:
        yield from {password, unquote(password)}
    elif mark and scheme.lower() in ("http", "https") and _is_random(user):
        yield user
    for name, item in _NAME_VALUE.findall(rest.partition("?")[2].partition("#")[0]):
        if _SECRET_FIELD.search(name) or _is_random(item):
            yield unquote(item)


def _is_random(value: str) -> bool:
    """Return whether a value looks like a key, not like a name or a number."""
    return (
        len(value) >= MIN_PART_LENGTH
        and "." not in value
        and bool(re.search("[0-9]", value) and re.search("[A-Za-z]", value))
    )


def _secrets_of_file(path: Path) -> Iterator[str]:
    try:
        if path.is_file() and path.stat().st_size <= _MAX_FILE_BYTES:
            yield from _secrets_of_text(path.read_text(errors="replace").strip())
    except OSError:
        return


def _encodings(secret: str, min_length: int = MIN_SECRET_LENGTH) -> Iterator[str]:
    """Yield the encodings of a secret, normalized: plain text, base64 and hexadecimal digits."""
    secret = secret.strip()
    data = secret.encode("utf-8", "surrogatepass")
    plain = {secret, secret.replace(" ", "+"), data.decode("latin-1")}
    encodings = [(encoding, min_length) for encoding in plain]
    if len(data) >= min_length:
        encodings.append((data.hex(), 2 * min_length))
        for offset in range(3):  # base64 encodes 3 bytes at a time: the text depends on the secret's offset
            skipped, bits = (0, 2, 3)[offset], 8 * (offset + len(data))
            text = base64.b64encode(b"\0" * offset + data).decode()[skipped : bits // 6]
            encodings += [
                (encoding, MIN_SECRET_LENGTH) for encoding in {text, text.replace("+", "-").replace("/", "_")}
            ]
    for encoding, min_characters in encodings:
        normalized = _normalize(encoding)
        if len(normalized) >= min_characters:
            yield normalized


def _search_blocks(secret: str) -> Iterable[str]:
    """Return blocks of a secret such that every part to redact contains at least one of them."""
    if len(secret) < MIN_PART_LENGTH:
        return (secret,)
    return (secret[start : start + _BLOCK_LENGTH] for start in range(0, len(secret) - _BLOCK_LENGTH + 1, _BLOCK_LENGTH))


def _find_spans(secret: str, normalized: str) -> Iterator[tuple[int, int]]:
    """Yield (start, end) of each occurrence of a secret, or of a long part of it, in a normalized text."""
    min_length = min(MIN_PART_LENGTH, len(secret))
    width = len(secret) if len(secret) < MIN_PART_LENGTH else _BLOCK_LENGTH
    for first in range(0, len(secret) - width + 1, width):
        block, start = secret[first : first + width], -1
        while (start := normalized.find(block, start + 1)) >= 0:
            low, high = 0, width
            while low < min(first, start) and secret[first - low - 1] == normalized[start - low - 1]:
                low += 1
            while secret[first + high : first + high + 1] == normalized[start + high : start + high + 1] != "":
                high += 1
            if low + high >= min_length:
                yield start - low, start + high


def _normalize(text: str) -> str:
    """Decode escapes, remove the _IGNORED characters and convert to lower case, as clients do with host names."""
    if "%" in text or "\\" in text or "&#" in text:
        text = _ESCAPE.sub(_decode_escape, text)
    return text.translate(_NORMALIZATION)


def _normalized_characters(text: str) -> Iterator[tuple[str, int, int]]:
    """Yield each character of the normalized text, with its start and end in the original text."""
    for match in _TOKEN.finditer(text):
        character = (_decode_escape(match) if len(match.group()) > 1 else match.group()).translate(_NORMALIZATION)
        if character:
            yield character, match.start(), match.end()


def _decode_escape(escape: re.Match[str]) -> str:
    digits, decimal = escape["percent"] or escape["escape"] or escape["entity"], escape["decimal"]
    return chr(int(digits, 16)) if digits else chr(int(decimal)) if decimal else ""
