"""Log the calls to the file system that this process and its children make, one line per call.

A program that starts with this directory in PYTHONPATH imports this file first. FILE_CALLS names the log, and
FILE_CALLS_BELOW a directory: calls outside it are not logged. A line has the call and its path below the directory.
`support.file_calls` reads the log. strace counts the same calls, and runs on fewer machines.
"""

import builtins
import functools
import io
import os

LOG, BELOW = os.environ.get("FILE_CALLS"), os.path.realpath(os.environ.get("FILE_CALLS_BELOW", "/"))
CALLS = ("open", "stat", "lstat", "listdir", "scandir", "access", "readlink", "statvfs")
CHANGES = ("mkdir", "rmdir", "rename", "replace", "link", "unlink", "remove", "utime", "truncate")
readlink, write = os.readlink, os.write


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
        write(descriptor, f"{call}\t{place}\n".encode())


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


if LOG:
    descriptor = os.open(LOG, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o666)
    for name in (*CALLS, *CHANGES, "fsync", "fdatasync"):
        function = getattr(os, name)
        setattr(os, name, logged(name, function))
        for supported in (os.supports_dir_fd, os.supports_fd, os.supports_follow_symlinks):
            if function in supported:  # shutil looks for the functions themselves
                supported.add(getattr(os, name))
    builtins.open = io.open = log_builtin_open(builtins.open)
