"""The registry of source schemes: one entry for each kind of address that a corpus may have.

The factory (`sources.factory`), the address parser (`sources.uri`), the command line's help, and the tests of documents
and charts read the registry. Its import does not load a source: an entry names the class, and `sources.factory` imports
the class.
"""

from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum

from tokenmill.core.buckets.address import EXTRAS
from tokenmill.sources import hub_uri


class Authority(Enum):
    """The form of the part between :// and the path of an address."""

    HOST = "[USER[:PASSWORD]@]HOST[:PORT]"
    NAME = "NAME"
    CONTAINER = "CONTAINER@ACCOUNT"
    NONE = ""


@dataclass(frozen=True)
class Scheme:
    """A kind of source; `names` are the URI schemes of its addresses, in lower case.

    `source` names the class as MODULE:CLASS; `sources.factory` calls the class with the address and a
    `sources.source.OpenSettings`. Help and messages print `display`, an example of an address; an empty `display` hides
    the entry. `extra` is the extra of this package that installs the dependencies of the class. `credentials` is the
    source of the credentials, for the message that refuses a password in the address. `resolve_alias` returns the
    address for another form of it, such as a web page; it returns None for any other text.
    """

    names: tuple[str, ...]
    source: str
    display: str
    authority: Authority = Authority.NAME
    extra: str | None = None
    credentials: str = "credentials come from the environment"
    resolve_alias: Callable[[str], str | None] | None = None


SCHEMES: dict[str, Scheme] = {}
"""The entry of each scheme name, in the order of help."""


def register(scheme: Scheme) -> Scheme:
    """Add an entry to the registry."""
    SCHEMES.update(dict.fromkeys(scheme.names, scheme))
    return scheme


def list_schemes() -> list[Scheme]:
    """Return each entry once, in the order of help."""
    return list(dict.fromkeys(SCHEMES.values()))


def format_addresses() -> str:
    """Return the supported addresses for help and messages: "hf://datasets/ORG/NAME, https:// or a path"."""
    addresses = [scheme.display for scheme in list_schemes() if scheme.display and scheme is not FILE]
    return f"{', '.join(addresses)} or {FILE.display}"


_BUCKET_CREDENTIALS = "bucket credentials come from the environment, in the form that the provider's own tools use"

FILE = register(Scheme(("file",), "tokenmill.sources.directory:DirectorySource", "a path", Authority.NONE))
"""The entry of file:// and of a path without a scheme."""
register(
    Scheme(
        ("hf",),
        "tokenmill.sources.hub:HubSource",
        "hf://datasets/ORG/NAME",
        credentials="the Hub's token comes from HF_TOKEN",
        resolve_alias=hub_uri.resolve_alias,
    )
)
register(Scheme(("https", "http"), "tokenmill.sources.web:WebSource", "https://", Authority.HOST))
for _name, _extra in EXTRAS.items():
    register(
        Scheme(
            (_name,),
            "tokenmill.sources.bucket:BucketSource",
            "" if _name == "abfs" else f"{_name}://",  # another form of az://
            Authority.CONTAINER if _name == "abfs" else Authority.NAME,
            extra=_extra,
            credentials=_BUCKET_CREDENTIALS,
        )
    )
