"""Files whose errors name the file and the operation; those of Python's own file objects have only a number.

`Tree.open` returns such files, and `open_file` opens a path that is in no tree. `core.files.explain` makes the message.
"""

import io
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

if TYPE_CHECKING:
    from io import BufferedRandom

_MODES = {"rb": "r", "r+b": "r+", "w+b": "w+", "wb": "w", "xb": "w", "ab": "a"}


def add_name(error: OSError, operation: str, path: str | Path) -> None:
    """Add the operation to an error, and the path unless the error has a complete one."""
    if not isinstance(error.filename, str | Path) or not Path(error.filename).is_absolute():
        error.filename = str(path)
    if get_operation(error) is None:
        error.add_note(f"operation: {operation}")


def get_operation(error: OSError) -> str | None:
    """Return the operation that `add_name` added."""
    notes: list[str] = getattr(error, "__notes__", [])
    return next((note.removeprefix("operation: ") for note in notes if note.startswith("operation: ")), None)


@contextmanager
def naming(operation: str, path: str | Path) -> Iterator[None]:
    """Add the operation and the path to an OSError of the block."""
    try:
        yield
    except OSError as error:
        add_name(error, operation, path)
        raise


def _name_errors(operation: str, method: Callable[..., Any]) -> Any:
    """Return a method of a file whose errors name it; no context manager, because the calls are frequent."""

    def call(file: "NamedFile", *arguments: Any) -> Any:
        try:
            return method(file, *arguments)
        except OSError as error:
            add_name(error, operation, file.name)
            raise

    return call


class NamedFile(io.FileIO):
    """A file without a buffer whose errors name it."""

    def __init__(self, file: str | int, mode: str, path: str | Path) -> None:
        """Open a path, or take over a handle; `path` is the path in messages."""
        super().__init__(file, mode)
        self.name = str(path)

    read = _name_errors("read", io.FileIO.read)
    readall = _name_errors("read", io.FileIO.readall)
    readinto = _name_errors("read", io.FileIO.readinto)
    write = _name_errors("write", io.FileIO.write)
    truncate = _name_errors("truncate", io.FileIO.truncate)
    close = _name_errors("close", io.FileIO.close)


def open_handle(handle: int, mode: str, path: str | Path, buffering: int = -1) -> "BufferedRandom":
    """Return a file for an open handle, with mode `rb`, `r+b`, `w+b`, `wb`, `xb` or `ab`."""
    return _buffer(NamedFile(handle, _MODES[mode], path), mode, buffering)


def open_file(path: str | Path, mode: str = "rb", *, buffering: int = -1) -> "BufferedRandom":
    """Open a path with mode `rb`, `r+b`, `w+b` or `wb`."""
    with naming("open", path):
        raw = NamedFile(os.fspath(path), _MODES[mode], path)
    return _buffer(raw, mode, buffering)


def _buffer(raw: NamedFile, mode: str, buffering: int) -> "BufferedRandom":
    if buffering == 0:
        return cast("BufferedRandom", raw)
    kind: Any = io.BufferedRandom if "+" in mode else io.BufferedReader if mode == "rb" else io.BufferedWriter
    return cast("BufferedRandom", kind(raw))
