"""Keep the credentials that this process holds out of everything that it writes.

A server may quote the token that it was sent in a header, a library may quote a key of the environment. `install` puts
`redact` before standard output and standard error, so that tracebacks and other programs' lines pass it too; records
and JSON events call it themselves. It knows what the environment holds, and whatever `remember` was told.
"""

import base64
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
"""Names of variables that may hold a secret: the Hub's token, a cloud's keys, a proxy's password."""

_SECRET_FIELD = re.compile(
    "token|secret|passw|pwd|credential|signature|sas|session|auth|jwt|(^|[_-])(sig|key|code)($|[_-])|(access|account|api|"
    "private|shared)[_-]?key",
    re.IGNORECASE,
)
"""Names of parts of a larger value that may hold a secret: of a query, a connection string, a JSON object."""

SHORTEST = 8
"""Characters of the shortest value that is taken for a secret; shorter ones would be found in ordinary text."""
SHORTEST_SENT = 6
"""The same of a password that was sent, and has both letters and digits."""
PART = 16
"""Characters of a longer secret that are redacted where not all of it is there."""
_BLOCK = PART // 2
_FILE_BYTES = 64 << 10

_ESCAPE = re.compile(
    r"%(?:25)*(?P<percent>[0-9A-Fa-f]{2})|\\+(?:u|x(?=[0-9A-Fa-f]{2}))(?P<escape>(?<=u)[0-9A-Fa-f]{4}|(?<=x)[0-9A-Fa-f]{2})"
    r"|&#(?:x(?P<entity>[0-9A-Fa-f]{1,4})|(?P<decimal>[0-9]{1,5}));|\\+[rnt]"
)
_TOKEN = re.compile(f"{_ESCAPE.pattern}|.", re.DOTALL)
_DROPPED = " \t\r\n\v\f\\\"',"
"""What may stand between the characters of a secret: headers of one name are joined by commas, long ones folded."""
_SQUEEZE = {ord(c): None for c in _DROPPED} | {code: code + 32 for code in range(ord("A"), ord("Z") + 1)}
_PAIR = re.compile(r"(?:^|[;&?\s])([\w.-]+)\s*=\s*([^;&\s]+)")

_secrets: dict[str, None] = {}
_sent: dict[str, None] = {}
_remembered: set[str] = set()
_scanned = False


def install() -> None:
    """Redact what is written to standard output and standard error from now on."""
    _scan()
    for name in ("stdout", "stderr"):
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
            setattr(sys, name, redacting)


class _RedactingStream(io.TextIOWrapper):
    """A text stream without secrets."""

    def write(self, text: str, /) -> int:
        """Write text."""
        super().write(redact(text))
        return len(text)


def remember(*values: str | None) -> None:
    """Note credentials that are sent to a server: passwords, tokens, values of an Authorization header."""
    for value in filter(None, values):
        if value in _remembered:
            continue
        _remembered.add(value)
        scheme, _, rest = value.partition(" ")
        sent = [value]
        if rest and scheme.lower() in ("basic", "bearer"):
            sent = [rest.strip()]
            if scheme.lower() == "basic":
                try:
                    login = base64.b64decode(rest).decode("latin-1")
                except ValueError:
                    login = ""
                sent += [login, login.partition(":")[2]]
        for secret in sent:
            mixed = re.search("[0-9]", secret) and re.search("[A-Za-z]", secret)
            for form in _forms(secret, SHORTEST_SENT if mixed else SHORTEST):
                _secrets[form] = _sent[form] = None


def remember_address(url: str) -> None:
    """Note the password of an address, and what of its query may be a signature."""
    remember(*_of_address(url))


def remember_file(path: str | Path) -> None:
    """Note the secrets that a small file of credentials holds, if it is there."""
    for secret in _of_file(Path(path).expanduser()):
        _secrets.update(dict.fromkeys(_forms(secret)))


def redact(text: str, address: str = "") -> str:
    """Replace each credential in a text, as it is or encoded for an address, a header or JSON, or as a part.

    `address`: one that was asked, and may be signed; its secrets are replaced, too.
    """
    if not _scanned:
        _scan()
    squeezed = _squeezed(text)
    more = [form for secret in _of_address(address) for form in _forms(secret)]
    hits = [secret for secret in (*_secrets, *more) if any(block in squeezed for block in _blocks(secret))]
    if not hits:
        return text
    characters = list(_characters(text))
    spans = sorted(
        (characters[start][1], characters[end - 1][2]) for secret in hits for start, end in _spans(secret, squeezed)
    )
    made, done = "", 0
    for start, end in spans:
        if start >= done:
            made += text[done:start] + REDACTED
        done = max(done, end)
    return made + text[done:]


def redacted(value: Any) -> Any:
    """Redact all texts of a JSON value."""
    if isinstance(value, str):
        return redact(value)
    if isinstance(value, dict):
        return {key: redacted(item) for key, item in value.items()}
    return [redacted(item) for item in value] if isinstance(value, list | tuple) else value


def quotes_credential(text: str) -> bool:
    """Tell whether a server's text quotes a credential that was sent: then nothing of it is to be recorded."""
    squeezed = _squeezed(text)
    return any(any(True for _ in _spans(secret, squeezed)) for secret in tuple(_sent))


def _scan() -> None:
    """Look through the environment once."""
    global _scanned  # noqa: PLW0603
    _scanned = True
    for name, value in os.environ.items():
        for secret in _of_variable(name, value):
            _secrets.update(dict.fromkeys(_forms(secret)))


def _of_variable(name: str, value: str) -> Iterator[str]:
    value = value.strip()
    if "://" in value and not value.startswith("{"):
        yield from _of_address(value)
    if not SECRET_NAME.search(name) and not name.startswith("FSSPEC_"):
        return
    if value.startswith(("/", "~", ".")) and (path := Path(value).expanduser()).exists():
        yield from _of_file(path)
    elif not name.upper().endswith(("_PATH", "_FILE", "_DIR", "_PROXY", "_URL")):
        yield from _of_text(value)


def _of_text(value: str) -> Iterator[str]:
    """Yield the secrets in a value that holds some: all of it, or the secret parts of what has parts."""
    try:
        parsed = json.loads(value) if value.startswith("{") else None
    except ValueError:
        parsed = None
    if parsed is not None:
        yield from _of_json(parsed)
    elif "\n" in value:  # PEM, or an INI file
        pairs = [pair for pair in _PAIR.findall(value) if _SECRET_FIELD.search(pair[0])]
        yield from (secret for _, secret in pairs)
        if not pairs:
            yield from (line.strip() for line in value.splitlines() if not line.startswith("-----"))
    elif "://" in value:
        yield from _of_address(value)
    elif len(pairs := _PAIR.findall(value)) > 1 and re.search("[;&]", value):
        yield from (secret for name, secret in pairs if _SECRET_FIELD.search(name))
    else:
        yield value


def _of_json(value: Any) -> Iterator[str]:
    for name, item in value.items() if isinstance(value, dict) else ():
        if isinstance(item, dict):
            yield from _of_json(item)
        elif isinstance(item, str) and _SECRET_FIELD.search(name):
            yield from _of_text(item)


def _of_address(value: str) -> Iterator[str]:
    scheme, _, rest = value.partition("://")
    login, mark, _ = re.split("[/?#]", rest, maxsplit=1)[0].rpartition("@")
    user, colon, password = login.partition(":")
    if colon:
        yield from {password, unquote(password)}
    elif mark and scheme.lower() in ("http", "https") and _is_random(user):
        yield user
    for name, item in _PAIR.findall(rest.partition("?")[2].partition("#")[0]):
        if _SECRET_FIELD.search(name) or _is_random(item):
            yield unquote(item)


def _is_random(value: str) -> bool:
    """Tell whether a value looks like a key and not like a name or a number."""
    return len(value) >= PART and "." not in value and bool(re.search("[0-9]", value) and re.search("[A-Za-z]", value))


def _of_file(path: Path) -> Iterator[str]:
    try:
        if path.is_file() and path.stat().st_size <= _FILE_BYTES:
            yield from _of_text(path.read_text(errors="replace").strip())
    except OSError:
        return


def _forms(secret: str, shortest: int = SHORTEST) -> Iterator[str]:
    """Yield the forms that a secret may be written in, squeezed: itself, and in base64 or hexadecimal digits."""
    secret = secret.strip()
    data = secret.encode("utf-8", "surrogatepass")
    plain = {secret, secret.replace(" ", "+"), data.decode("latin-1")}
    forms = [(form, shortest) for form in plain]
    if len(data) >= shortest:
        forms.append((data.hex(), 2 * shortest))
        for before in range(3):  # where in its base64 a secret begins depends on what stands before it
            skipped, bits = (0, 2, 3)[before], 8 * (before + len(data))
            text = base64.b64encode(b"\0" * before + data).decode()[skipped : bits // 6]
            forms += [(form, SHORTEST) for form in {text, text.replace("+", "-").replace("/", "_")}]
    for form, least in forms:
        squeezed = _squeezed(form)
        if len(squeezed) >= least:
            yield squeezed


def _blocks(secret: str) -> Iterable[str]:
    """Return the pieces of which every part that is redacted has at least one."""
    if len(secret) < PART:
        return (secret,)
    return (secret[start : start + _BLOCK] for start in range(0, len(secret) - _BLOCK + 1, _BLOCK))


def _spans(secret: str, squeezed: str) -> Iterator[tuple[int, int]]:
    """Yield where a secret, or a long part of it, stands in a squeezed text."""
    least = min(PART, len(secret))
    width = len(secret) if len(secret) < PART else _BLOCK
    for first in range(0, len(secret) - width + 1, width):
        block, start = secret[first : first + width], -1
        while (start := squeezed.find(block, start + 1)) >= 0:
            low, high = 0, width
            while low < min(first, start) and secret[first - low - 1] == squeezed[start - low - 1]:
                low += 1
            while secret[first + high : first + high + 1] == squeezed[start + high : start + high + 1] != "":
                high += 1
            if low + high >= least:
                yield start - low, start + high


def _squeezed(text: str) -> str:
    """Return a text without escapes and separators, in lower case: host names lose theirs."""
    if "%" in text or "\\" in text or "&#" in text:
        text = _ESCAPE.sub(_decoded, text)
    return text.translate(_SQUEEZE)


def _characters(text: str) -> Iterator[tuple[str, int, int]]:
    """Yield the characters of the squeezed text, with where they stand in the text."""
    for match in _TOKEN.finditer(text):
        character = (_decoded(match) if len(match.group()) > 1 else match.group()).translate(_SQUEEZE)
        if character:
            yield character, match.start(), match.end()


def _decoded(escape: re.Match[str]) -> str:
    digits, decimal = escape["percent"] or escape["escape"] or escape["entity"], escape["decimal"]
    return chr(int(digits, 16)) if digits else chr(int(decimal)) if decimal else ""
