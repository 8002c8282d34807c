"""Removal of credentials from everything that this process prints or records.

A server may quote the token of a request in a header, and a library may quote a key of the environment. `install` puts
`redact` in front of standard output and standard error, so tracebacks and lines of other programs are redacted, too.
Records and JSON events call `redact` or `redact_json` themselves. The module redacts the secrets of the environment,
and those that a caller registers (`register_secrets`), as they are and as a URL contains them.
"""

import base64
import contextlib
import io
import json
import os
import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from urllib.parse import quote, unquote

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
_MIN_RANDOM_LENGTH = 16  # characters of the shortest value of a URL that looks like a key
_MAX_FILE_BYTES = 64 << 10  # a larger file is not a file of credentials

_NAME_VALUE = re.compile(r"(?:^|[;&?\s])([\w.-]+)\s*=\s*([^;&\s]+)")

STREAMS = {"stdout": "standard output", "stderr": "standard error"}
"""The names of the standard streams in the errors of a write."""

_rewriters: list[Callable[[str], str]] = []
_secrets: set[str] = set()
_sent: set[str] = set()
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
        scheme, _, rest = value.partition(" ")
        credentials = [value]
        if rest and scheme.lower() in ("basic", "bearer"):
            credentials = [rest]
        if rest and scheme.lower() == "basic":
            with contextlib.suppress(ValueError):
                login = base64.b64decode(rest).decode("latin-1")
                credentials += [login, login.partition(":")[2]]
        for secret in credentials:
            mixed = re.search("[0-9]", secret) and re.search("[A-Za-z]", secret)
            _sent.update(_forms(secret, MIN_SENT_PASSWORD_LENGTH if mixed else MIN_SECRET_LENGTH))
    _secrets.update(_sent)


def register_address_secrets(url: str) -> None:
    """Register the password of a URL and the values of its query that may be a signature."""
    register_secrets(*_secrets_of_address(url))


def register_secret_file(path: str | Path) -> None:
    """Register the secrets of a small file of credentials, if the file exists."""
    for secret in _secrets_of_file(Path(path).expanduser()):
        _secrets.update(_forms(secret))


def redact(text: str, address: str = "") -> str:
    """Replace each credential in a text by REDACTED.

    `address` is the URL of a request, which may be signed; its secrets are replaced, too.
    """
    if not _scanned:
        _scan()
    of_address = {form for secret in _secrets_of_address(address) for form in _forms(secret)}
    for secret in sorted(_secrets | of_address, key=len, reverse=True):
        text = text.replace(secret, REDACTED)
    for rewrite in _rewriters:
        text = rewrite(text)
    return text


def rewrite_with(rewrite: Callable[[str], str]) -> None:
    """Change all texts that are redacted with a function, which replaces what a reader does not know."""
    _rewriters.append(rewrite)


def redact_json(value: Any) -> Any:
    """Redact all strings of a JSON value except the keys of objects."""
    if isinstance(value, str):
        return redact(value)
    if isinstance(value, dict):
        return {key: redact_json(item) for key, item in value.items()}
    return [redact_json(item) for item in value] if isinstance(value, list | tuple) else value


def contains_sent_credential(text: str) -> bool:
    """Return whether a server's text contains a credential that this process sent; do not record such a text."""
    return any(secret in text for secret in tuple(_sent))


def _scan() -> None:
    """Register the secrets of the environment."""
    global _scanned  # noqa: PLW0603
    _scanned = True
    for name, value in os.environ.items():
        for secret in _secrets_of_variable(name, value):
            _secrets.update(_forms(secret))


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
        yield password
    elif mark and scheme.lower() in ("http", "https") and _is_random(user):
        yield user
    for name, item in _NAME_VALUE.findall(rest.partition("?")[2].partition("#")[0]):
        if _SECRET_FIELD.search(name) or _is_random(item):
            yield item


def _is_random(value: str) -> bool:
    """Return whether a value looks like a key, not like a name or a number."""
    return (
        len(value) >= _MIN_RANDOM_LENGTH
        and "." not in value
        and bool(re.search("[0-9]", value) and re.search("[A-Za-z]", value))
    )


def _secrets_of_file(path: Path) -> Iterator[str]:
    try:
        if path.is_file() and path.stat().st_size <= _MAX_FILE_BYTES:
            yield from _secrets_of_text(path.read_text(errors="replace").strip())
    except OSError:
        return


def _forms(secret: str, min_length: int = MIN_SECRET_LENGTH) -> set[str]:
    """Return a secret as it is and as a URL contains it; nothing if it is too short."""
    secret = secret.strip()
    return {secret, unquote(secret), quote(secret, safe="")} if len(secret) >= min_length else set()
