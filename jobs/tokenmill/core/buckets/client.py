"""List and read the objects of a bucket; every error says whether a retry can help."""

import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple

from tokenmill.core.buckets.stores import BucketAddress, open_store
from tokenmill.core.redaction import redact

BLOCK_BYTES = 8 << 20
"""Bytes of a block of a stream."""
STALL_SECONDS = 60.0
"""Longest time without data on a connection, unless the caller chooses another one."""
_STATUS = re.compile(r"status code: (\d{3}[^:\n]*)")
_CODE = re.compile(r"<Code>(\w+)</Code>")
_REFUSALS = ("401", "403")
_MAX_CHARACTERS = 300


class BucketObject(NamedTuple):
    """An object: its key, its size in bytes, and the ETag, which changes with its content."""

    key: str
    size: int
    version: str | None


class BucketError(Exception):
    """A request to a store failed; a retry may help."""


class ObjectMissing(BucketError):
    """The object, or its bucket, does not exist."""


class BucketRefused(BucketError):
    """The store, or a library of the provider, refuses these credentials, or has none; a retry cannot change that."""


class ObjectChanged(BucketError):
    """The object has another version than the caller expects."""


class BucketClient:
    """The objects of a bucket; all threads of a process may share one client."""

    def __init__(self, address: BucketAddress, stall_seconds: float = STALL_SECONDS) -> None:
        """Open a bucket without sending a request to it; the errors are those of `stores.open_store`."""
        import obstore

        self.address = address
        self._library = obstore
        self._store = open_store(address, stall_seconds)

    def list_objects(self, prefix: str) -> list[BucketObject]:
        """Return all objects below a prefix, which ends before a slash, sorted by key."""
        with _translate_errors():
            chunks = self._library.list(self._store, prefix=prefix or None, chunk_size=1000)
            objects = [BucketObject(meta["path"], meta["size"], meta["e_tag"]) for chunk in chunks for meta in chunk]
        return sorted(objects)

    def find(self, key: str) -> BucketObject | None:
        """Return an object, or None if it does not exist."""
        try:
            with _translate_errors():
                meta = self._library.head(self._store, key)
        except ObjectMissing:
            return None
        return BucketObject(key, meta["size"], meta["e_tag"])

    def stream(self, entry: BucketObject, offset: int = 0) -> Iterator[memoryview]:
        """Yield the bytes of an object from an offset, in blocks.

        Raises:
            ObjectMissing: it was deleted.
            ObjectChanged: it has another version now.
        """
        if offset >= entry.size:
            return
        options: dict[str, object] = {"range": {"offset": offset}}
        if entry.version:  # Azure's listing has no quotes
            options["if_match"] = entry.version if '"' in entry.version else f'"{entry.version}"'
        try:
            with _translate_errors():
                result = self._library.get(self._store, entry.key, options=options)  # type: ignore[arg-type]
                for block in result.stream(min_chunk_size=BLOCK_BYTES):
                    yield memoryview(block)
        except ObjectChanged:
            if self.find(entry.key) is None:  # Azure's answer about a deleted object, too
                raise ObjectMissing(f"{entry.key} does not exist") from None
            raise


@contextmanager
def _translate_errors() -> Iterator[None]:
    """Raise the errors of obstore and of the providers' libraries as a BucketError, without addresses' secrets."""
    from obstore import exceptions

    try:
        yield
    except FileNotFoundError as error:
        raise ObjectMissing(_describe(error)) from error
    except exceptions.PreconditionError as error:
        raise ObjectChanged(_describe(error)) from error
    except (exceptions.UnauthenticatedError, exceptions.PermissionDeniedError, exceptions.InvalidPathError) as error:
        raise BucketRefused(_describe(error)) from error
    except (exceptions.BaseError, OSError) as error:
        reason = _describe(error)
        if reason.startswith("404"):
            raise ObjectMissing(reason) from error
        raise (BucketRefused if reason.startswith(_REFUSALS) else BucketError)(reason) from error


def _describe(error: Exception) -> str:
    """Return the status and the code of a response, or else the first line of an error."""
    text = redact(str(error))
    if match := _STATUS.search(text):
        code = _CODE.search(text)
        return match[1].strip() + (f" ({code[1]})" if code else "")
    line = text.strip().splitlines()[0] if text.strip() else type(error).__name__
    return line.removeprefix("The operation lacked valid authentication credentials for path ")[:_MAX_CHARACTERS]
