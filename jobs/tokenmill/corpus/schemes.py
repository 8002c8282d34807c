"""The registry of source schemes: one entry for each kind of address that a corpus may have.

The factory (`corpus.factory`), the parsing of addresses (`corpus.uri`), the help of the command line and the tests of
documents and charts read it. Importing it loads no source: an entry names its class, which `corpus.factory` imports.
"""

from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum

from tokenmill.corpus import hub_uri


class Authority(Enum):
    """What an address has between :// and its path."""

    HOST = "[USER[:PASSWORD]@]HOST[:PORT]"
    NAME = "NAME"
    CONTAINER = "CONTAINER@ACCOUNT"
    NONE = ""


@dataclass(frozen=True)
class Scheme:
    """A kind of source: `names` are the schemes of its addresses, in lower case.

    `source` names the class, as MODULE:CLASS; it is called with the address and a `corpus.source.Opening`.
    `shown` is how help and messages write such an address, empty for an entry that they leave out. `extra` is the
    extra of this package that installs what the class needs. `credentials` says where credentials come from, in the
    message that refuses a password in the address. `alias` returns the address that another form stands for, such as
    a page's, and None for what is no such form.
    """

    names: tuple[str, ...]
    source: str
    shown: str
    authority: Authority = Authority.NAME
    extra: str | None = None
    credentials: str = "credentials come from the environment"
    alias: Callable[[str], str | None] | None = None


SCHEMES: dict[str, Scheme] = {}
"""Every entry by each of its names, in the order of help."""


def register(scheme: Scheme) -> Scheme:
    """Add an entry to the registry."""
    SCHEMES.update(dict.fromkeys(scheme.names, scheme))
    return scheme


def entries() -> list[Scheme]:
    """Return each entry once, in the order of help."""
    return list(dict.fromkeys(SCHEMES.values()))


def addresses() -> str:
    """Return what a source may be, for help and messages: "hf://datasets/ORG/NAME, https:// or a path"."""
    shown = [scheme.shown for scheme in entries() if scheme.shown and scheme is not FILE]
    return f"{', '.join(shown)} or {FILE.shown}"


_BUCKET = "credentials of a bucket come from the environment, as its provider's tools take them"

FILE = register(Scheme(("file",), "tokenmill.corpus.directory:DirectorySource", "a path", Authority.NONE))
"""The entry that a path without a scheme belongs to."""
register(
    Scheme(
        ("hf",),
        "tokenmill.corpus.hub:HubSource",
        "hf://datasets/ORG/NAME",
        credentials="the Hub's token comes from HF_TOKEN",
        alias=hub_uri.alias,
    )
)
register(Scheme(("https", "http"), "tokenmill.corpus.web:WebSource", "https://", Authority.HOST))
register(Scheme(("s3",), "tokenmill.corpus.bucket:BucketSource", "s3://", extra="s3", credentials=_BUCKET))
register(Scheme(("gs",), "tokenmill.corpus.bucket:BucketSource", "gs://", extra="gs", credentials=_BUCKET))
register(Scheme(("az",), "tokenmill.corpus.bucket:BucketSource", "az://", extra="az", credentials=_BUCKET))
register(
    Scheme(("abfs",), "tokenmill.corpus.bucket:BucketSource", "", Authority.CONTAINER, extra="az", credentials=_BUCKET)
)
