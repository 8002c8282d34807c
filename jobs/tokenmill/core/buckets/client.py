"""List, read and write the objects of a bucket; every error says whether a retry can help."""

import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from tokenmill.core.buckets.address import EXTRAS, BucketAddress
from tokenmill.core.buckets.stores import open_store
from tokenmill.core.machine import ProcessId, this_process
from tokenmill.core.redaction import redact
from tokenmill.errors import missing_package

if TYPE_CHECKING:
    from obstore import UpdateVersion

PART_BYTES = 16 << 20
"""Bytes of a part of an upload: with at most 10,000 parts, a file has at most 156 GiB."""
PARTS_AT_ONCE = 4
"""Parts of an upload that are sent at the same time, and are in memory."""
BLOCK_BYTES = 8 << 20
"""Bytes of a block of a stream."""
STALL_SECONDS = 60.0
"""Longest time without data on a connection, unless the caller chooses another one."""
RETRY_SECONDS = 60.0
"""How long a failed request is repeated, unless the caller repeats requests itself."""
_STATUS = re.compile(r"status code: (\d{3}[^:\n]*)")
_CODE = re.compile(r"<Code>(\w+)</Code>")
_REFUSALS = ("401", "403")
_EXPIRED = re.compile(r"\((ExpiredToken|TokenRefreshRequired|InvalidToken)\)")
_MAX_CHARACTERS = 300


class BucketObject(NamedTuple):
    """An object of a bucket.

    Attributes:
        key: its key.
        size: its size in bytes.
        version: its ETag without quotes, which changes with its content.
        written: the time of its last write by the store's clock, in seconds since 1970.
        generation: the number of the write, if the store counts writes (Google Cloud Storage, versioned buckets).
    """

    key: str
    size: int
    version: str | None
    written: float = 0.0
    generation: str | None = None


class BucketPart(NamedTuple):
    """Bytes of an object, and the object from which they come."""

    data: bytes
    entry: BucketObject


class BucketError(Exception):
    """A request to a store failed; a retry may help."""


class ObjectMissing(BucketError):
    """The object, or its bucket, does not exist."""


class BucketRefused(BucketError):
    """The store, or a library of the provider, refuses these credentials, or has none; a retry cannot change that."""


class InvalidKey(BucketRefused):
    """An object has a name that the client cannot address, with an empty part or with `..`."""


class CredentialsExpired(BucketError):
    """The credentials were valid before; new ones help."""


class ObjectChanged(BucketError):
    """The object has another version than the caller expects."""


class ForkedProcess(BucketError):
    """This process is a fork of one that used a bucket: the threads of the client are not there, and it would hang."""


class OutOfRange(BucketError):
    """The object ends before the requested bytes."""


class BucketClient:
    """The objects of a bucket; all threads of a process may share one client."""

    def __init__(
        self, address: BucketAddress, stall_seconds: float = STALL_SECONDS, retry_seconds: float = RETRY_SECONDS
    ) -> None:
        """Open a bucket without sending a request to it; the errors are those of `stores.open_store`."""
        try:
            import obstore

            self._store = open_store(address, stall_seconds, retry_seconds)
        except ImportError as error:
            raise missing_package(address.scheme, EXTRAS[address.scheme]) from error
        self._library = obstore

    def list_objects(self, prefix: str) -> list[BucketObject]:
        """Return all objects below a prefix, which ends before a slash, sorted by key."""
        with _translate_errors():
            chunks = self._library.list(self._store, prefix=prefix or None, chunk_size=1000)
            return sorted(_make_object(meta) for chunk in chunks for meta in chunk)

    def list_directory(self, prefix: str) -> tuple[list[str], list[BucketObject]]:
        """Return the prefixes and the objects directly below a prefix."""
        with _translate_errors():
            result = self._library.list_with_delimiter(self._store, prefix=prefix or None)
            return list(result["common_prefixes"]), [_make_object(meta) for meta in result["objects"]]

    def find(self, key: str) -> BucketObject | None:
        """Return an object, or None if it does not exist."""
        try:
            try:
                with _translate_errors():
                    meta = self._library.head(self._store, key)
            except BucketRefused:  # the answer to HEAD has no code, which says more
                return self.read(key, 0, 1).entry
        except ObjectMissing:
            return None
        return _make_object(meta)

    def read(self, key: str, start: int = 0, stop: int | None = None, version: str | None = None) -> BucketPart:
        """Return the bytes of an object from `start` to `stop` or its end, and the object.

        Raises:
            ObjectMissing: there is no such object.
            ObjectChanged: the object has another version.
        """
        options: dict[str, object] = {"if_match": f'"{version}"'} if version else {}
        if stop is not None:
            options["range"] = (start, stop)
        elif start:
            options["range"] = {"offset": start}
        try:
            with _translate_errors():
                result = self._library.get(self._store, key, options=options)  # type: ignore[arg-type]
                return BucketPart(bytes(result.bytes()), _make_object(result.meta))
        except OutOfRange:  # of an empty object, no range exists
            if start or stop is None:
                raise
            return self.read(key, version=version)

    def put(self, key: str, data: bytes) -> None:
        """Write an object."""
        with _translate_errors():
            self._library.put(self._store, key, data)

    def create(self, key: str, data: bytes) -> bool:
        """Write an object unless it exists; return whether its content is that of this call.

        After a response that was lost, the repeated request finds the object of the first one.
        """
        try:
            with _translate_errors():
                self._library.put(self._store, key, data, mode="create", use_multipart=False)
        except ObjectChanged:
            try:
                return self.read(key).data == data
            except ObjectMissing:
                return False
        return True

    def replace(self, entry: BucketObject, data: bytes) -> bool:
        """Write an object again if it has not been written since; return whether this call wrote it."""
        known: UpdateVersion = {"e_tag": f'"{entry.version}"'}
        if entry.generation is not None:
            known["version"] = entry.generation
        try:
            with _translate_errors():
                self._library.put(self._store, entry.key, data, mode=known, use_multipart=False)
        except (ObjectChanged, ObjectMissing):
            return False
        return True

    def upload(self, key: str, path: Path) -> str:
        """Write a file as an object that appears when it is complete, and return its version."""
        with _translate_errors():
            result = self._library.put(self._store, key, path, chunk_size=PART_BYTES, max_concurrency=PARTS_AT_ONCE)
            return _unquote(result["e_tag"] or "")

    def delete(self, keys: Sequence[str]) -> None:
        """Delete objects; a missing one is not an error."""
        for begin in range(0, len(keys), 1000):
            with suppress(ObjectMissing), _translate_errors():
                self._library.delete(self._store, list(keys[begin : begin + 1000]))

    def stream(self, entry: BucketObject, offset: int = 0, stop: int | None = None) -> Iterator[memoryview]:
        """Yield the bytes of an object from an offset to `stop` or its end, in blocks.

        Raises:
            ObjectMissing: it was deleted.
            ObjectChanged: it has another version now.
        """
        if offset >= entry.size:
            return
        options: dict[str, object] = {"range": {"offset": offset} if stop is None else (offset, stop)}
        if entry.version:
            options["if_match"] = f'"{entry.version}"'
        try:
            with _translate_errors():
                result = self._library.get(self._store, entry.key, options=options)  # type: ignore[arg-type]
                for block in result.stream(min_chunk_size=BLOCK_BYTES):
                    yield memoryview(block)
        except ObjectChanged:
            if self.find(entry.key) is None:  # Azure refuses the condition of a deleted object with the same status
                raise ObjectMissing(f"{entry.key} does not exist") from None
            raise


def _make_object(meta: Mapping[str, Any]) -> BucketObject:
    written, tag = meta["last_modified"].timestamp(), meta["e_tag"]
    return BucketObject(meta["path"], meta["size"], tag and _unquote(tag), written, meta["version"])


def _unquote(tag: str) -> str:
    """Return an ETag without quotes, which only some responses of Azure have."""
    return tag.removeprefix("W/").strip('"')


@cache
def _first_process() -> ProcessId:
    """Return the process that sent the first request; also a fork of it."""
    return this_process()


@contextmanager
def _translate_errors() -> Iterator[None]:
    """Raise the errors of obstore and of the providers' libraries as a BucketError, without addresses' secrets."""
    from obstore import exceptions

    if _first_process() != this_process():
        raise ForkedProcess("this process was forked from one that has used a bucket")
    try:
        yield
    except FileNotFoundError as error:
        raise ObjectMissing(_describe(error)) from error
    except (exceptions.PreconditionError, exceptions.AlreadyExistsError) as error:
        raise ObjectChanged(_describe(error)) from error
    except (exceptions.InvalidPathError, ValueError) as error:
        raise InvalidKey(_describe(error)) from error
    except (exceptions.BaseError, OSError) as error:
        reason = _describe(error)
        if reason.startswith("404"):
            raise ObjectMissing(reason) from error
        if _EXPIRED.search(reason):
            raise CredentialsExpired(f"the credentials have expired ({reason})") from error
        if reason.startswith("416"):
            raise OutOfRange(reason) from error
        refused = isinstance(error, exceptions.UnauthenticatedError | exceptions.PermissionDeniedError)
        refused = refused or reason.startswith(_REFUSALS)
        raise (BucketRefused if refused else BucketError)(reason) from error


def _describe(error: Exception) -> str:
    """Return the status and the code of a response, or else the first line of an error."""
    text = redact(str(error))
    if match := _STATUS.search(text):
        code = _CODE.search(text)
        return match[1].strip() + (f" ({code[1]})" if code else "")
    line = text.strip().splitlines()[0] if text.strip() else type(error).__name__
    return line.removeprefix("The operation lacked valid authentication credentials for path ")[:_MAX_CHARACTERS]
