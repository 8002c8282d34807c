"""Addresses of sources: what they stand for, whether they name a path, and how they are shown without secrets."""

import re
from pathlib import Path

from tokenmill.corpus.schemes import FILE, SCHEMES, Authority, Scheme, entries
from tokenmill.errors import RequestError

_PLACE = re.compile(r"([^/?#]*@)?(\[[^]/?#]*\]|[^:/?#]*)(:[0-9]*)?([/?#]|$)")
"""What may follow "://": a user, a host and a port."""
_PASSWORD = re.compile("[^/?#]*:[^@]*@")
"""What begins with a user and a password, where there are no ports."""
_ADDRESS = re.compile(r"[A-Za-z][\w+.-]*://[^\s)]*|(?<=url: )\S+")


def scheme_of(uri: str) -> Scheme | None:
    """Return the registry's entry for an address, None where there is none; a path has the one of file://."""
    return SCHEMES.get(uri.partition("://")[0].lower()) if "://" in uri else FILE


def normalize_source(given: str) -> str:
    """Return the address that what people type stands for, such as the page of a dataset or `datasets/ORG/NAME`."""
    for scheme in entries():
        if scheme.alias and (uri := scheme.alias(given)) is not None:
            return uri
    return given


def local_path(uri: str) -> Path | None:
    """Return the file or directory on a disk that a URI names, None for one of another kind."""
    if not uri or scheme_of(uri) is not FILE:
        return None
    return Path(uri.partition("://")[2] if "://" in uri else uri)


def without_secrets(uri: str) -> str:
    """Drop what may be a credential from an address: user and password, query and fragment."""
    scheme, _, rest = uri.partition("://")
    entry = scheme_of(uri)
    authority = entry.authority if entry else Authority.NAME
    if authority is Authority.NONE:
        return uri
    # A password with / ? or # in it, so that what looks like a port is its beginning.
    if not _PLACE.match(rest) or (authority is not Authority.HOST and _PASSWORD.match(rest)):
        rest = rest.rpartition("@")[2] if "@" in rest else rest.partition(":")[0]
    place, slash, path = re.split("[?#]", rest, maxsplit=1)[0].partition("/")
    if authority is not Authority.CONTAINER:
        place = place.rpartition("@")[2]
    return f"{scheme}://{place}{slash}{path}"


def without_addresses(text: str) -> str:
    """Replace the addresses in another library's message, which may be signed or hold a password."""
    return _ADDRESS.sub("<url>", text)


def check_authority(uri: str, scheme: Scheme) -> None:
    """Refuse an address whose user or password cannot be told from its host, or that must not hold a password."""
    rest = uri.partition("://")[2]
    if scheme.authority is Authority.HOST:
        if not _PLACE.match(rest):
            raise RequestError(
                f"{without_secrets(uri)!r} has no host and port where they belong; in a user or a password, write "
                "/ ? # and @ as %2F %3F %23 and %40"
            )
    elif scheme.authority is not Authority.NONE and _PASSWORD.match(rest):
        raise RequestError(
            f"the address of {without_secrets(uri)!r} holds a password; take it out: {scheme.credentials}"
        )
