"""Convert JSON to records with types, in any thread.

msgspec builds a description of a type when the type is used for the first time, and publishes the description before it
is complete. A second thread that uses the same type at that moment reads a null pointer, and the process ends with
SIGSEGV (msgspec 0.22.0, `StructInfo_Convert_lock_held` in `_core.c`). Therefore only one thread at a time describes a
type here. Ruff refuses msgspec's own functions in all other modules.
"""

import threading
from typing import Any, TypeVar, overload

from msgspec import DecodeError, convert, json

T = TypeVar("T")

JsonObject = dict[str, Any]
"""A JSON object of another program or of a user, whose keys are not known: a row, a tokenizer's file, a response."""

_lock = threading.RLock()  # a signal handler may use a type while its thread has the lock
_described: set[Any] = set()


@overload
def convert_json(value: Any, kind: type[T], *, strict: bool = True) -> T: ...
@overload
def convert_json(value: Any, kind: Any, *, strict: bool = True) -> Any: ...
def convert_json(value: Any, kind: Any, *, strict: bool = True) -> Any:
    """Check decoded JSON and convert it to `kind`.

    Args:
        value: JSON as Python objects.
        kind: the type of the result.
        strict: refuse text as a number; False accepts it.

    Raises:
        msgspec.ValidationError: the JSON has another form; the message contains the reason and the position.
    """
    _describe(kind)
    return convert(value, kind, strict=strict)


@overload
def decode_json(data: bytes | str, kind: type[T]) -> T: ...
@overload
def decode_json(data: bytes | str, kind: Any = Any) -> Any: ...
def decode_json(data: bytes | str, kind: Any = Any) -> Any:
    """Decode JSON, check it and convert it to `kind`.

    Raises:
        msgspec.DecodeError: the data is not JSON, not UTF-8, or nested too deeply.
        msgspec.ValidationError: the JSON has another form; the message contains the reason and the position.
    """
    _describe(kind)
    try:
        return json.decode(data, type=kind)
    except UnicodeDecodeError as error:
        raise DecodeError(str(error)) from error
    except RecursionError as error:
        raise DecodeError("it is nested too deeply") from error


def _describe(kind: Any) -> None:
    """Let msgspec describe the type and all types in it, unless this has been done."""
    if kind not in _described:
        with _lock:
            json.Decoder(kind)
            _described.add(kind)
