"""The output directory of a data preparation: the files of each split under their documented names, and blend.json.

    <output>/blend.json                         the files with their weights, for Megatron-LM and Megatron-Bridge
    <output>/train/shard_000000.{bin,idx}       the files of a split: hard links to the files of the stages
    <output>/datasets/<name>-<hash>/...         the outputs of the stages, with their state files (`data_prep.run`)
    <output>/.tokenmill/data_prep/files.json    the names of the files that this module made
    <output>/.tokenmill/data_prep/run.json      the parameters of the last call, and their hash

A stage's files keep their names and their state files, so that `tokenmill verify` and a later call find them unchanged.
The file system stores a hard link and its file once. Without hard links, the files are copied.
"""

import errno
import os
import shutil
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from tokenmill.core.files.codec import read_json, readable_json
from tokenmill.core.files.explain import explain_os_errors
from tokenmill.core.files.lease import remove_abandoned
from tokenmill.core.files.paths import RECORDS_DIRECTORY
from tokenmill.core.files.tree import Tree
from tokenmill.data_prep.config import InvalidField
from tokenmill.datasets.split import FILE_NAMES

BLEND_FILE = "blend.json"
ARGUMENTS_FILE = "blend.txt"
"""The blend for `--data-args-path`, which Megatron-LM reads together with `--split`."""

_RECORDS = f"{RECORDS_DIRECTORY}/data_prep"
_FILES_RECORD = f"{_RECORDS}/files.json"
_RUN_RECORD = f"{_RECORDS}/run.json"
_TEMPORARY = f"{_RECORDS}/link.tmp"
_NO_LINKS = (errno.EPERM, errno.EXDEV, errno.ENOSYS, errno.ENOTSUP, errno.EOPNOTSUPP, errno.EMLINK)


class PlacedFile(NamedTuple):
    """A file of the output, by its path relative to the output directory, and the stage's file with its content."""

    path: str
    source: Path


def check_names(output: Path, names: Iterable[str]) -> None:
    """Raise InvalidField if one of these files exists and no earlier call made it."""
    tree = Tree(output)
    old = _read_placed(tree)
    for name in names:
        if name not in old and tree.exists(name):
            raise InvalidField(
                f"{output / name} exists, and no record shows that tokenmill made it; move it away, or set another "
                "output directory"
            )


def place_files(output: Path, files: Sequence[PlacedFile]) -> None:
    """Link the files into the output directory, and remove the files that an earlier call placed there.

    The record of the files has old and new names until the end, so that a killed call leaves no file without record.

    Raises:
        InvalidField: a path has a file that no earlier call placed there.
    """
    tree = Tree(output)
    new, old = {file.path for file in files}, _read_placed(tree)
    with explain_os_errors(output):
        check_names(output, new)
        remove_abandoned(tree, "", _RECORDS)
        # A blend must never list files of two runs.
        for name in (BLEND_FILE, ARGUMENTS_FILE):
            if name in old:
                tree.unlink(name)
        tree.write_atomic(_FILES_RECORD, readable_json(sorted(old | new)))
        for path in sorted(old - new):
            tree.unlink(path)
        for file in files:
            _link(tree, file)
        for directory in {file.path.rpartition("/")[0] for file in files}:
            tree.fsync(directory)


def write_blend(output: Path, lists: Mapping[str, Sequence[str]], split: str | None) -> Path:
    """Write blend.json, and with the shares of `split` also blend.txt; return the path of blend.json.

    `lists` has a flat list of weights and paths for each split. Megatron-LM requires the keys train, valid and test,
    and null instead of an empty list (megatron/training/utils/common_utils.py, `get_blend_and_blend_per_split`). With
    `split`, the only list is for `--data-args-path`, and the shares are for `--split`.
    """
    tree = Tree(output)
    names = [BLEND_FILE]
    content: dict[str, object]
    if split is None:
        content = {name: list(lists.get(name, ())) or None for name in FILE_NAMES}
    else:
        (paths,) = lists.values()
        _check_no_white_space(paths[1::2])
        names.append(ARGUMENTS_FILE)
        lines = "".join(f"{weight} {path}\n" for weight, path in zip(paths[::2], paths[1::2], strict=True))
    with explain_os_errors(output):
        tree.write_atomic(_FILES_RECORD, readable_json(sorted(_read_placed(tree) | set(names))))
        if split is not None:
            tree.write_atomic(ARGUMENTS_FILE, lines.encode(), directory=_RECORDS)
            content = {"data_paths": list(paths), "split": split}
        tree.write_atomic(BLEND_FILE, readable_json(content), directory=_RECORDS)
    return output / BLEND_FILE


def finish_record(output: Path, files: Iterable[PlacedFile], split: str | None) -> None:
    """Remove from the record the names of files that are removed."""
    names = {file.path for file in files} | {BLEND_FILE, *([ARGUMENTS_FILE] if split is not None else [])}
    Tree(output).write_atomic(_FILES_RECORD, readable_json(sorted(names)))


def record_run(output: Path, run_hash: str, parameters: Mapping[str, object]) -> None:
    """Record the parameters of the call that made the output."""
    Tree(output).write_atomic(_RUN_RECORD, readable_json({"run": run_hash, "parameters": parameters}))


def _read_placed(tree: Tree) -> set[str]:
    value = read_json(tree.root / _FILES_RECORD, tree=tree)
    return {name for name in value if isinstance(name, str)} if isinstance(value, list) else set()


def _link(tree: Tree, file: PlacedFile) -> None:
    """Make `file.path` a second name of the stage's file, or a copy of it."""
    status = tree.stat(file.path)
    source = file.source.stat()
    if status is not None and (status.st_size, status.st_mtime_ns) == (source.st_size, source.st_mtime_ns):
        return  # the link or the copy of an earlier call
    tree.make_directory(file.path.rpartition("/")[0])
    tree.unlink(_TEMPORARY)
    try:
        os.link(file.source, tree.root / _TEMPORARY, follow_symlinks=False)
    except OSError as error:
        if error.errno not in _NO_LINKS:
            raise
        with file.source.open("rb") as reader, tree.open(_TEMPORARY, "wb") as writer:
            shutil.copyfileobj(reader, writer, 8 << 20)
            writer.flush()
            os.fsync(writer.fileno())
        os.utime(tree.root / _TEMPORARY, ns=(source.st_atime_ns, source.st_mtime_ns))
    tree.rename(_TEMPORARY, file.path)


def _check_no_white_space(paths: Iterable[str]) -> None:
    for path in paths:
        if len(path.split()) > 1:
            raise InvalidField(
                f"{path!r} contains white space, at which Megatron-LM splits paths; rename the directory, or use "
                "per_split instead of split"
            )
