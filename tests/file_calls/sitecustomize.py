"""Log the calls to the file system that this process and its children make, one line per call.

A program that starts with this directory in PYTHONPATH imports this file first. FILE_CALLS names the log, and
FILE_CALLS_BELOW a directory: calls outside it are not logged. A line has the call and its path below the directory.
`support.file_calls` reads the log. strace counts the same calls, and runs on fewer machines.

FILE_CALLS_FAULT injects a fault into calls below the directory: `short write 3` lets the third write of each process
write half of its bytes, `EIO read 1` lets the first read fail. The number `all` means every call. FILE_CALLS_MATCH is
a regular expression that the path must contain. Native code that opens files itself is not observed.
"""

import builtins
import errno
import functools
import io
import itertools
import os
import re

LOG, BELOW = os.environ.get("FILE_CALLS"), os.path.realpath(os.environ.get("FILE_CALLS_BELOW", "/"))
CALLS = ("open", "stat", "lstat", "listdir", "scandir", "access", "readlink", "statvfs")
CHANGES = ("mkdir", "rmdir", "rename", "replace", "link", "unlink", "remove", "utime", "truncate")
readlink, write = os.readlink, os.write
FAULT, CALL, NUMBER = os.environ.get("FILE_CALLS_FAULT", "none none 0").split()
MATCH = re.compile(os.environ.get("FILE_CALLS_MATCH", ""))
matching_calls = itertools.count(1)


def locate(path, directory):
    """Return the path of a call below the observed directory, or None."""
    if isinstance(path, int):
        path = readlink(f"/proc/self/fd/{path}")
    path = os.fsdecode(path)
    if not path.startswith("/"):
        path = f"{readlink(f'/proc/self/fd/{directory}') if directory is not None else os.getcwd()}/{path}"
    path = os.path.normpath(path)
    return path[len(BELOW) + 1 :] or "." if path == BELOW or path.startswith(BELOW + "/") else None


def log(call, path, directory=None):
    """Write a line of the log."""
    try:
        place = locate(path, directory)
    except OSError:
        return
    if place is not None:
        if descriptor is not None:
            write(descriptor, f"{call}\t{place}\n".encode())
        inject(call, place)


def is_faulty(call, place):
    """Count a call below the directory; return whether it has the fault."""
    if call != CALL or not MATCH.search(place):
        return False
    number = next(matching_calls)
    return NUMBER == "all" or number == int(NUMBER)


def inject(call, place):
    """Raise the fault of a call."""
    if is_faulty(call, place) and FAULT != "short":
        number = getattr(errno, FAULT)
        raise OSError(number, os.strerror(number))


class FaultyFile(io.FileIO):
    """A file whose reads, writes and close can have a fault."""

    def place(self):
        """Return the path below the directory, or None."""
        try:
            return locate(self.fileno(), None)
        except (OSError, ValueError):
            return None

    def write(self, data):
        """Write the data, or a part of it."""
        place = self.place()
        view = memoryview(data).cast("B")
        if place is not None and FAULT == "short":
            view = view[: max(1, len(view) // 2)] if is_faulty("write", place) else view
        elif place is not None:
            inject("write", place)
        return super().write(view)

    def inject_read(self):
        """Raise the fault of a read."""
        place = self.place()
        if place is not None:
            inject("read", place)

    def read(self, size=-1):
        """Read bytes."""
        self.inject_read()
        return super().read(size)

    def readall(self):
        """Read all bytes."""
        self.inject_read()
        return super().readall()

    def readinto(self, buffer):
        """Read into a buffer."""
        self.inject_read()
        return super().readinto(buffer)

    def close(self):
        """Close the file, also if its close fails."""
        place = None if self.closed else self.place()
        super().close()
        if place is not None:
            inject("close", place)


def open_faulty(file, mode="r", buffering=-1, encoding=None, errors=None, newline=None, closefd=True, opener=None):
    """Open a file like `open`."""
    if not isinstance(file, int) and opener is None:
        log("create" if set(mode) & set("wxa") else "open", file)
    raw = FaultyFile(file, mode.replace("b", "").replace("t", ""), closefd, opener)
    if buffering == 0:
        return raw
    kind = io.BufferedRandom if "+" in mode else io.BufferedReader if "r" in mode else io.BufferedWriter
    buffer = kind(raw, max(buffering, 8192))
    return buffer if "b" in mode else io.TextIOWrapper(buffer, encoding, errors, newline, buffering == 1)


def close(handle, *, function=os.close):
    """Close a handle, and raise the fault."""
    try:
        place = locate(handle, None)
    except OSError:
        place = None
    function(handle)
    if place is not None:
        inject("close", place)


def short(function):
    """Return a function like os.pwrite that can write a part of its data."""

    @functools.wraps(function)
    def call(handle, data, *arguments):
        place = locate(handle, None)
        if place is not None and is_faulty("write", place):
            data = data[: max(1, len(data) // 2)]
        return function(handle, data, *arguments)

    return call


def logged(name, function):
    """Return a function that logs its calls."""

    @functools.wraps(function)
    def call(path=".", *arguments, **options):
        creates = name == "open" and arguments and arguments[0] & os.O_CREAT
        log("create" if creates else name, path, options.get("dir_fd", options.get("src_dir_fd")))
        return function(path, *arguments, **options)

    return call


def log_builtin_open(function):
    """Return an `open` that logs paths; handles were opened by os.open."""

    @functools.wraps(function)
    def call(file, mode="r", *arguments, **options):
        if not isinstance(file, int) and "opener" not in options:
            log("create" if set(mode) & set("wxa") else "open", file)
        return function(file, mode, *arguments, **options)

    return call


descriptor = None
if LOG or FAULT != "none":
    if LOG:
        descriptor = os.open(LOG, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o666)
    for name in (*CALLS, *CHANGES, "fsync", "fdatasync"):
        function = getattr(os, name)
        setattr(os, name, logged(name, function))
        for supported in (os.supports_dir_fd, os.supports_fd, os.supports_follow_symlinks):
            if function in supported:  # shutil looks for the functions themselves
                supported.add(getattr(os, name))
    if FAULT != "none":
        io.FileIO = FaultyFile
        os.close = close
    builtins.open = io.open = log_builtin_open(builtins.open) if FAULT == "none" else open_faulty
    if FAULT == "short":
        os.write, os.pwrite = short(os.write), short(os.pwrite)
