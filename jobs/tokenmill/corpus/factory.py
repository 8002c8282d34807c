"""Open the source that an address names, by the registry of schemes."""

import pkgutil
from collections.abc import Callable

from tokenmill.corpus.schemes import addresses
from tokenmill.corpus.source import OpenSettings, Source
from tokenmill.corpus.uri import check_authority, scheme_of, without_secrets
from tokenmill.errors import RequestError


def open_source(
    uri: str,
    *,
    stall_seconds: float,
    endpoint: str | None = None,
    warn: Callable[[str], None] = lambda _: None,
    pinned: str | None = None,
) -> Source:
    """Return the source that a URI names; the keywords are the fields of `Opening`."""
    if not uri:
        raise RequestError(f"the source is empty; give {addresses()}")
    scheme = scheme_of(uri)
    if scheme is None:
        raise RequestError(f"{without_secrets(uri)!r} is no source tokenmill knows; give {addresses()}")
    check_authority(uri, scheme)
    try:
        source: Source = pkgutil.resolve_name(scheme.source)(uri, OpenSettings(stall_seconds, endpoint, warn, pinned))
    except ImportError as error:
        if not scheme.extra:
            raise
        name = uri.partition("://")[0].lower()
        raise RequestError(
            f"{name}:// needs a package that is not installed: pip install 'tokenmill[{scheme.extra}]'"
        ) from error
    return source
