"""The files of a run that `run` reads: a bounded search in a directory, and bounded reads of hostile files.

A run's directory contains checkpoints with thousands of files, caches, and links. The search looks at a limited number
of entries, does not enter checkpoints except for their trainer_state.json, and opens only regular files.
"""

import os
import re
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from tokenmill.errors import RequestError
from tokenmill.samples.run_record import NAME as RECORD_NAME
from tokenmill.train.runtime.attempts import CURVE_FILE, SETTINGS_FILE

MAX_DEPTH = 4
MAX_ENTRIES = 20_000
"""Directory entries that a search looks at."""
MAX_FILES = 500
"""Files of one kind that a search returns."""
MAX_FILE_BYTES = 2 << 30
"""Bytes at the start of a file of metrics that are read."""
MAX_LINE_BYTES = 1 << 20
"""Bytes of a line; the rest of a longer line is left out."""
MAX_SMALL_BYTES = 4 << 20
"""Size of the largest file of settings that is read."""

TRAINER_STATE = "trainer_state.json"
TRAIN_RECORDS = Path(".tokenmill/train")
"""Directory, next to the checkpoints, with the records of `tokenmill train`: its curve, settings and data."""
IDENTITY_PATH = TRAIN_RECORDS / "identity.json"
CURVE_PATH = TRAIN_RECORDS / CURVE_FILE
SETTINGS_PATH = TRAIN_RECORDS / SETTINGS_FILE
SETTINGS_NAMES = frozenset(
    [
        *("args.json", "config.json", "settings.json", "training_args.json", "train_args.json", "hparams.json"),
        *("hparams.yaml", "config.yaml", "run_config.yaml", "args.yaml"),
    ]
)
_SKIPPED = re.compile(r"iter_\d+|\..*|__pycache__|node_modules|wandb|.*\.(?:git|dist-info)")
_CHECKPOINT = re.compile(r"checkpoint-(\d{1,15})")
_CHUNK_BYTES = 8 << 20


class RunFiles(NamedTuple):
    """The files of a run, by kind; nothing is known about their content yet."""

    logs: list[Path]
    events: list[Path]
    jsonl: list[Path]
    csv: list[Path]
    trainer_states: list[Path]
    """At most one of the run itself, or the one of its newest checkpoint."""
    settings: list[Path]
    records: list[Path]
    """Directories that contain a record of the run's data."""
    identities: list[Path]
    notes: list[str]

    def with_records(self, other: "RunFiles") -> "RunFiles":
        """Return these files with the settings and the records of another directory, which take precedence."""
        return self._replace(
            jsonl=[*self.jsonl, *(path for path in other.jsonl if path.match(str(CURVE_PATH)))],
            settings=[*other.settings, *self.settings],
            records=[*other.records, *self.records],
            identities=[*other.identities, *self.identities],
            notes=[*self.notes, *other.notes],
        )


def list_files(path: Path) -> RunFiles:
    """Return the files of a run in a directory, or one file with the records next to it.

    Raises:
        RequestError: the path does not exist, or is not a directory or a regular file.
    """
    try:
        mode = path.stat().st_mode
    except OSError as error:
        raise RequestError(f"cannot read {path}: {error.strerror}; check the path and its permissions") from None
    files = RunFiles([], [], [], [], [], [], [], [], [])
    if stat.S_ISDIR(mode):
        _search(path, files)
    elif stat.S_ISREG(mode):
        _add_single_file(path, files)
    else:
        raise RequestError(
            f"{path} is neither a directory nor a regular file; specify the directory of a run, or a file"
        )
    return files


def _add_single_file(path: Path, files: RunFiles) -> None:
    if not _classify(path, files):
        files.logs.append(path)  # the name of a log is free
    directory = path.parent
    for name in sorted(SETTINGS_NAMES):
        if (directory / name).is_file() and directory / name != path:
            files.settings.append(directory / name)
    if os.path.lexists(directory / RECORD_NAME):
        files.records.append(directory)
    elif _CHECKPOINT.fullmatch(directory.name) and os.path.lexists(directory.parent / RECORD_NAME):
        files.records.append(directory.parent)
    _add_train_records(directory, files)


def _add_train_records(directory: Path, files: RunFiles) -> None:
    places = (IDENTITY_PATH, files.identities), (CURVE_PATH, files.jsonl), (SETTINGS_PATH, files.settings)
    for path, kind in places:
        if os.path.lexists(directory / path):
            kind.append(directory / path)


def _search(root: Path, files: RunFiles) -> None:
    entries, checkpoints, seen = 0, list[tuple[int, Path]](), set[tuple[int, int]]()
    pending: list[tuple[Path, int]] = [(root, 0)]
    while pending and entries <= MAX_ENTRIES:
        directory, depth = pending.pop(0)
        try:
            listed = sorted(os.scandir(directory), key=lambda entry: entry.name)
        except OSError as error:
            files.notes.append(f"cannot read the directory {directory}: {error.strerror}")
            continue
        _add_train_records(directory, files)
        for entry in listed[: MAX_ENTRIES + 1 - entries]:
            path = Path(entry.path)
            if not entry.is_dir(follow_symlinks=False):
                _add_entry(path, files, seen)
            elif match := _CHECKPOINT.fullmatch(entry.name):
                checkpoints.append((int(match[1]), path))
            elif depth < MAX_DEPTH and not _SKIPPED.fullmatch(entry.name):
                pending.append((path, depth + 1))
        entries += len(listed)
    if entries > MAX_ENTRIES:
        files.notes.append(
            f"the search of {root} stopped after {MAX_ENTRIES:,} files; if something is missing, specify the directory "
            "of the logs"
        )
    if not files.trainer_states and checkpoints:
        newest = max(checkpoints)[1] / TRAINER_STATE
        if newest.is_file():
            files.trainer_states.append(newest)
    for kind in (files.logs, files.events, files.jsonl, files.csv):
        if len(kind) > MAX_FILES:
            files.notes.append(f"{root} has {len(kind):,} files such as {kind[0].name}; the first {MAX_FILES} are read")
            del kind[MAX_FILES:]


def _add_entry(path: Path, files: RunFiles, seen: set[tuple[int, int]]) -> None:
    """Add a regular file, or a link to one, once."""
    try:
        status = path.stat()
    except OSError:
        return
    if stat.S_ISREG(status.st_mode) and (status.st_dev, status.st_ino) not in seen:
        seen.add((status.st_dev, status.st_ino))
        _classify(path, files)


def _classify(path: Path, files: RunFiles) -> bool:
    """Add a file to the list of its kind; return whether its name shows a kind."""
    name = path.name
    if name == RECORD_NAME:
        files.records.append(path.parent)
    elif name == TRAINER_STATE:
        files.trainer_states.append(path)
    elif name in SETTINGS_NAMES:
        files.settings.append(path)
    elif "tfevents" in name:
        files.events.append(path)
    elif name.endswith((".jsonl", ".ndjson")):
        files.jsonl.append(path)
    elif name.endswith(".csv"):
        files.csv.append(path)
    elif name.endswith((".log", ".txt", ".out", ".err")) or name in ("stdout", "stderr", "log"):
        files.logs.append(path)
    else:
        return False
    return True


def open_regular(path: Path) -> int:
    """Open a regular file, and return its descriptor; a pipe, a device or a missing file is an OSError."""
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise OSError(None, "it is not a regular file", str(path))
    return descriptor


def read_small(path: Path, limit: int = MAX_SMALL_BYTES) -> bytes:
    """Return the content of a small file.

    Raises:
        OSError: the file cannot be read, or is larger than the limit.
    """
    with os.fdopen(open_regular(path), "rb") as file:
        data = file.read(limit + 1)
    if len(data) > limit:
        raise OSError(None, f"it is larger than {limit:,} bytes", str(path))
    return data


def read_chunks(path: Path) -> Iterator[bytes]:
    """Yield a file in pieces that end at the end of a line, except for lines longer than a piece.

    Raises:
        OSError: the file cannot be read.
    """
    with os.fdopen(open_regular(path), "rb") as file:
        rest, total = b"", 0
        while total < MAX_FILE_BYTES and (data := file.read(min(_CHUNK_BYTES, MAX_FILE_BYTES - total))):
            total += len(data)
            end = data.rfind(b"\n") + 1
            if end == 0:
                # Only the start of a long line is of interest.
                rest = (rest + data)[: _CHUNK_BYTES + MAX_LINE_BYTES] if len(rest) < MAX_LINE_BYTES else rest
                continue
            yield rest + data[:end]
            rest = data[end:]
        if rest:
            yield rest


def read_lines(path: Path) -> Iterator[tuple[int, bytes, bool]]:
    """Yield (number from 1, line without its end, whether it had an end) for each line of a file.

    A line of more than MAX_LINE_BYTES is cut.

    Raises:
        OSError: the file cannot be read.
    """
    number = 0
    for chunk in read_chunks(path):
        lines = chunk.split(b"\n")
        last = lines.pop()
        for line in lines:
            number += 1
            yield number, line[:MAX_LINE_BYTES], True
        if last:
            number += 1
            yield number, last[:MAX_LINE_BYTES], False
