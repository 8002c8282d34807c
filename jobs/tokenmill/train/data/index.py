"""Megatron-LM's sample index, built on a CPU before GPUs wait for it.

`build_index` starts the subprocess `index_child` with a Python that has Megatron-LM, and passes the run's own command
line to it. GPTDataset itself then writes the files that rank 0 would write while every GPU waits. Their names are those
for which Megatron-LM searches: an MD5 hash of path, split, seed, sequence length, tokenizer and number of samples
(megatron/core/datasets/megatron_dataset.py). Megatron-LM does not write the files atomically, and it uses an incomplete
file without a check. tokenmill therefore lets the subprocess write to a staging directory, and moves the files. The
description files (.txt) move last, because Megatron-LM reads an index only when its description exists.
"""

import argparse
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from tokenmill.core.files.codec import content_id, read_json, readable_json
from tokenmill.core.files.explain import explain_os_errors
from tokenmill.core.files.lease import STALE_SECONDS, heartbeat, remove_abandoned
from tokenmill.core.files.publish import fsync_directory, get_size, write_atomic
from tokenmill.core.files.tree import Tree
from tokenmill.core.machine import describe_memory, process_name
from tokenmill.datasets.training_data import TrainingData
from tokenmill.errors import MachineError, RequestError, TokenmillError
from tokenmill.train.arguments import megatron_arguments
from tokenmill.train.data import index_child
from tokenmill.train.data.flags import cache_path, write_data_arguments
from tokenmill.train.settings import MEGATRON_LM, Settings

UNSUPPORTED_FLAGS = (
    "--train-samples",
    "--step-batch-size-schedule",
    "--phase-transition-iterations",
    "--skip-train",
    "--full-validation",
    "--multiple-validation-sets",
    "--mock-data",
    "--fim-data",
    "--sft",
    "--train-data-path",
    "--valid-data-path",
    "--test-data-path",
    "--per-dataset-sequences-path",
    "--dataloader-fast-cache-load",
    "--dataloader-defer-npy-index-mmap",
    "--yaml-cfg",
)
"""Flags that change the samples of a run in a way that this module does not reproduce."""


def build_index(
    settings: Settings, data: TrainingData, *, python: Sequence[str] = (sys.executable,), threads: int | None = None
) -> str:
    """Build the sample index of a run unless it exists, and return a log line about it.

    `python` is the command of an interpreter with torch, and with Megatron-LM unless that is next to the training
    script. A killed build leaves only a staging directory, which a later build removes.

    Raises:
        RequestError: Megatron-LM refuses the data, or a flag of the run is not supported.
        MachineError: the subprocess was killed, probably because it ran out of memory.
        TokenmillError: the subprocess failed for another reason.
    """

    cache = cache_path(data, settings)
    with explain_os_errors(cache):
        tree = _open_tree(cache, shared=settings.dataset.cache_path is not None)
        tree.make_directory(cache)
        remove_abandoned(tree, cache)
        staging = _make_staging(cache)
        try:
            arguments = megatron_arguments(settings, write_data_arguments(data, settings, staging))
            flag = next(
                (
                    argument.partition("=")[0]
                    for argument in arguments
                    if argument.partition("=")[0] in UNSUPPORTED_FLAGS
                ),
                None,
            )
            if flag:
                raise RequestError(
                    f"cannot build the sample index in advance for a run with {flag} (extraArgs): start the run "
                    "without --build-index"
                )
            args = index_child.parse_data_arguments(arguments)
            options = {name: value for name, value in vars(args).items() if not name.endswith("args_path")}
            built = cache / f"built-{content_id({'lists': _read_blend_file(args), **options})}.json"
            if _is_complete(built):
                return f"the sample index exists: {cache}"
            started = time.monotonic()
            output = staging / "made"
            order = index_child.IndexOrder(
                words=arguments,
                cache=str(output),
                script=settings.trainer.script,
                threads=threads or len(os.sched_getaffinity(0)),
                outcome=str(staging / "outcome.json"),
            )
            (staging / "order.json").write_text(json.dumps(asdict(order)))
            outcome = _run_child([*python, "-P", index_child.__file__, str(staging / "order.json")], staging)
            files = sorted(output.iterdir(), key=lambda path: (path.suffix == ".txt", path.name))
            sizes = {path.name: path.stat().st_size for path in files}
            for path in files:
                _fsync(path)
            for path in files:
                path.replace(cache / path.name)
            fsync_directory(cache)
            write_atomic(built, readable_json({"samples": outcome["samples"], "files": sizes}))
        finally:
            shutil.rmtree(staging, ignore_errors=True)
    samples = ", ".join(f"{count:,} {name}" for name, count in outcome["samples"].items())
    return f"sample index built in {time.monotonic() - started:.0f} s: {samples} samples in {cache}"


def needs_own_index(settings: Settings) -> bool:
    """Return whether each node builds the index before its ranks start.

    Rank 0 would build it on the disk of its node, and the ranks of the other nodes would not find it.
    """
    shared = settings.dataset.cache_path is not None or not settings.checkpoint.is_in_bucket
    reads_index = settings.trainer.framework == MEGATRON_LM and not settings.sft and not settings.training.phases
    return settings.training.nodes > 1 and reads_index and not shared


def remove_truncated_files(cache: Path, *, shared: bool) -> list[Path]:
    """Remove truncated index files, with which Megatron-LM would fail at every start, and return their paths.

    Node 0 calls this function before the trainer starts. In a `shared` cache other runs may be writing, so files that
    changed within the last STALE_SECONDS stay.
    """
    tree = _open_tree(cache, shared=shared)
    now = tree.server_time(cache) if shared else 0.0
    removed = []
    for path in (cache / name for name in tree.names(cache) if name.endswith(".npy")):
        status = tree.stat(path)
        if status is None or _has_expected_size(tree, path) or (shared and now - status.st_mtime < STALE_SECONDS):
            continue
        tree.unlink(path)
        removed.append(path)
    return removed


def _open_tree(cache: Path, *, shared: bool) -> Tree:
    """Return the tree of the directory that the settings name, the checkpoints or dataset.cachePath.

    Below this directory, symbolic links are not followed.
    """

    return Tree(cache.parent if shared else cache.parents[2])


def _has_expected_size(tree: Tree, path: Path) -> bool:
    """Return whether a .npy file has the size that its header specifies."""
    import numpy as np

    try:
        with tree.open(path) as file:
            major, _ = np.lib.format.read_magic(file)
            read_header = np.lib.format.read_array_header_1_0 if major == 1 else np.lib.format.read_array_header_2_0
            shape, _, dtype = read_header(file)
            expected = file.tell() + int(np.prod(shape, dtype=np.int64)) * dtype.itemsize
            return os.fstat(file.fileno()).st_size == expected
    except (ValueError, EOFError, FileNotFoundError, TypeError, SyntaxError, OverflowError):
        return False


def _make_staging(cache: Path) -> Path:
    """Create a directory for this build only; its name identifies this process."""
    staging = cache / f".index.{process_name()}.tmp"
    staging.mkdir()
    return staging


def _read_blend_file(args: argparse.Namespace) -> Any:
    """Return the content of the file that lists the datasets; None without such a file."""
    path = args.data_args_path or args.per_split_data_args_path
    return Path(path).read_text() if path else None


def _is_complete(built: Path) -> bool:
    """Return whether the record of a finished index exists, and all files of the index have their recorded sizes."""

    record = read_json(built)
    files = record.get("files") if isinstance(record, dict) else None
    return isinstance(files, dict) and all(
        "/" not in name and get_size(built.parent / name) == size for name, size in files.items()
    )


def _fsync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _run_child(command: Sequence[str], staging: Path) -> Any:
    """Run the build and return its outcome; a heartbeat on `staging` shows other builds that this one is alive."""

    environ = {**os.environ, "CUDA_VISIBLE_DEVICES": "", "HF_HUB_OFFLINE": "1"}
    with (staging / "log").open("wb") as log:
        child = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=environ)
        try:
            with heartbeat(lambda: os.utime(staging)):
                code = child.wait()
        finally:
            child.kill()
            child.wait()
    outcome = read_json(staging / "outcome.json")
    if code == 0 and isinstance(outcome, dict) and "samples" in outcome:
        return outcome
    if code == -signal.SIGKILL:
        raise MachineError(
            f"the process that builds the sample index was killed, probably because it ran out of memory "
            f"({describe_memory()}): raise the memory limit, or use fewer threads"
        )
    if isinstance(outcome, dict) and "refused" in outcome:
        raise RequestError(outcome["refused"])
    output = (staging / "log").read_text(errors="replace").strip()
    raise TokenmillError(f"building the sample index failed with exit code {code}; see its output:\n{output[-4000:]}")
