"""Addresses of sources: their scheme, their local path, and a form without secrets.

Command lines and stages normalize an address here before `sources.factory` opens it; messages and plans contain the
form without secrets.
"""

import re
from pathlib import Path

from tokenmill.core.redaction import redact
from tokenmill.errors import RequestError
from tokenmill.sources.schemes import FILE, SCHEMES, Authority, Scheme, list_schemes

_AUTHORITY = re.compile(r"([^/?#]*@)?(\[[^]/?#]*\]|[^:/?#]*)(:[0-9]*)?([/?#]|$)")
"""The text after "://" up to the path: a user, a host and a port."""
_PASSWORD = re.compile("[^/?#]*:[^@]*@")
"""A user and a password at the start, for addresses that cannot have a port."""
_ADDRESS = re.compile(r"[A-Za-z][\w+.-]*://[^\s)]*|(?<=url: )\S+")


def scheme_of(uri: str) -> Scheme | None:
    """Return the registry's entry for an address, or None without one; a path has the entry of file://."""
    return SCHEMES.get(uri.partition("://")[0].lower()) if "://" in uri else FILE


def normalize_source(text: str) -> str:
    """Return the address for the text that a user typed, such as the web page of a dataset or `datasets/ORG/NAME`."""
    for scheme in list_schemes():
        if scheme.resolve_alias and (uri := scheme.resolve_alias(text)) is not None:
            return uri
    return text


def local_path(uri: str) -> Path | None:
    """Return the local file or directory of a URI, or None for another kind of source."""
    if not uri or scheme_of(uri) is not FILE:
        return None
    return Path(uri.partition("://")[2] if "://" in uri else uri)


def redact_secrets(uri: str) -> str:
    """Remove possible credentials from an address: user and password, query and fragment."""
    scheme, _, rest = uri.partition("://")
    entry = scheme_of(uri)
    authority = entry.authority if entry else Authority.NAME
    if authority is Authority.NONE:
        return uri
    # A password may contain / ? or #, so that its first characters look like a port.
    if not _AUTHORITY.match(rest) or (authority is not Authority.HOST and _PASSWORD.match(rest)):
        rest = rest.rpartition("@")[2] if "@" in rest else rest.partition(":")[0]
    host, slash, path = re.split("[?#]", rest, maxsplit=1)[0].partition("/")
    if authority is not Authority.CONTAINER:
        host = host.rpartition("@")[2]
    return f"{scheme}://{host}{slash}{path}"


def redact_addresses(text: str) -> str:
    """Replace the addresses and credentials in another library's message, before the caller shortens it."""
    return _ADDRESS.sub("<url>", redact(text))


def check_authority(uri: str, scheme: Scheme) -> None:
    """Raise RequestError when the host of an address is ambiguous, or when the address must not contain a password."""
    rest = uri.partition("://")[2]
    if scheme.authority is Authority.HOST:
        if not _AUTHORITY.match(rest):
            raise RequestError(
                f"cannot find the host and port in {redact_secrets(uri)!r}; write / ? # and @ in a user name or a "
                "password as %2F %3F %23 and %40"
            )
    elif scheme.authority is not Authority.NONE and _PASSWORD.match(rest):
        raise RequestError(
            f"the address of {redact_secrets(uri)!r} contains a password; remove the password: {scheme.credentials}"
        )
