"""Open the source of an address, through the registry of schemes (`sources.schemes`).

The download stage and the streaming preprocess stage (`tokenize.stream`) call `open_source` first.
"""

import pkgutil
from collections.abc import Callable

from tokenmill.errors import RequestError, missing_package
from tokenmill.sources.schemes import format_addresses
from tokenmill.sources.source import OpenSettings, Source
from tokenmill.sources.uri import check_authority, redact_secrets, scheme_of


def open_source(
    uri: str,
    *,
    stall_seconds: float,
    endpoint: str | None = None,
    warn: Callable[[str], None] = lambda _: None,
    pinned: str | None = None,
) -> Source:
    """Return the source of a URI; the keywords are the fields of `OpenSettings`."""
    if not uri:
        raise RequestError(f"the source is empty; specify {format_addresses()}")
    scheme = scheme_of(uri)
    if scheme is None:
        raise RequestError(f"{redact_secrets(uri)!r} is not a supported source; specify {format_addresses()}")
    check_authority(uri, scheme)
    try:
        source: Source = pkgutil.resolve_name(scheme.source)(uri, OpenSettings(stall_seconds, endpoint, warn, pinned))
    except ImportError as error:
        if not scheme.extra:
            raise
        name = uri.partition("://")[0].lower()
        raise missing_package(name, scheme.extra) from error
    return source
