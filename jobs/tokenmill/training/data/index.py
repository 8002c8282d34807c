"""Megatron-LM's sample index, built on a CPU before GPUs wait for it.

`build_index` starts `index_child` under a Python that has Megatron-LM and gives it the run's own command line.
GPTDataset itself then makes the files that rank 0 would make while every GPU waits, under the names that it will look
for: an MD5 over path, split, seed, sequence length, tokenizer and number of samples
(megatron/core/datasets/megatron_dataset.py). Megatron-LM's own saves are not atomic, and it takes any file for a whole
one; so the files are made elsewhere and moved, their descriptions last, without which none is looked at.
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
from pathlib import Path
from typing import Any

from tokenmill.errors import MachineError, RequestError, TokenmillError
from tokenmill.files.codec import content_id, read_json, readable_json
from tokenmill.files.explain import explained
from tokenmill.files.lease import STALE_SECONDS, abandoned, heartbeat
from tokenmill.files.publish import fsync_directory, size_of, write_atomic
from tokenmill.files.tree import Tree
from tokenmill.machine import memory_words, process_name
from tokenmill.training.arguments import megatron_arguments
from tokenmill.training.data import index_child
from tokenmill.training.data.datasets import TrainingData
from tokenmill.training.data.flags import cache_path, data_flags
from tokenmill.training.settings import Settings

UNKNOWN = (
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
"""Flags that change which samples there are in ways that are not followed here."""


def build_index(
    settings: Settings, corpus: TrainingData, *, python: Sequence[str] = (sys.executable,), threads: int | None = None
) -> str:
    """Build the sample index of a run, unless it is there; return what to say of it.

    `python` is an interpreter with torch and, if it does not lie beside the training script, Megatron-LM.
    A killed build leaves nothing that counts. Raises RequestError where Megatron-LM refuses the data.
    """

    cache = cache_path(corpus, settings)
    with explained(cache):
        _tree(cache, shared=settings.dataset.cache_path is not None).make_directory(cache)
        for left in cache.glob(".index.*.tmp"):
            if abandoned(left):
                shutil.rmtree(left, ignore_errors=True)
        staging = _staging(cache)
        try:
            words = megatron_arguments(settings, data_flags(corpus, settings, staging))
            flag = next((word.partition("=")[0] for word in words if word.partition("=")[0] in UNKNOWN), None)
            if flag:
                raise RequestError(
                    f"the sample index of a run with {flag} (extraArgs) cannot be built beforehand: start it without"
                )
            args = index_child.parse(words)
            asked = {k: v for k, v in vars(args).items() if not k.endswith("args_path")}
            done = cache / f"built-{content_id({'lists': _words(args), **asked})}.json"
            if _holds(done):
                return f"the sample index is there: {cache}"
            started = time.monotonic()
            made = staging / "made"
            order = {
                "words": words,
                "cache": str(made),
                "script": settings.trainer.script,
                "threads": threads or len(os.sched_getaffinity(0)),
                "outcome": str(staging / "outcome.json"),
            }
            (staging / "order.json").write_text(json.dumps(order))
            outcome = _run([*python, "-P", index_child.__file__, str(staging / "order.json")], staging)
            files = sorted(made.iterdir(), key=lambda path: (path.suffix == ".txt", path.name))
            sizes = {path.name: path.stat().st_size for path in files}
            for path in files:
                _sync(path)
            for path in files:
                path.replace(cache / path.name)
            fsync_directory(cache)
            write_atomic(done, readable_json({"samples": outcome["samples"], "files": sizes}))
        finally:
            shutil.rmtree(staging, ignore_errors=True)
    there = ", ".join(f"{count:,} {name}" for name, count in outcome["samples"].items())
    return f"sample index built in {time.monotonic() - started:.0f} s: {there} samples in {cache}"


def sweep(cache: Path, *, shared: bool) -> list[Path]:
    """Remove index files that were cut short, which Megatron-LM would take and fail on at every start.

    For node 0, before the trainer starts. In a cache that other runs write to (`shared`), what was written
    lately (STALE_SECONDS) is left alone. Returns what was removed.
    """
    tree = _tree(cache, shared=shared)
    now = tree.server_time(cache) if shared else 0.0
    removed = []
    for path in (cache / name for name in tree.names(cache) if name.endswith(".npy")):
        status = tree.stat(path)
        if status is None or _whole(tree, path) or (shared and now - status.st_mtime < STALE_SECONDS):
            continue
        tree.unlink(path)
        removed.append(path)
    return removed


def _tree(cache: Path, *, shared: bool) -> Tree:
    """Return the directory that was named, below which no link is followed: the checkpoints', or dataset.cachePath."""

    return Tree(cache.parent if shared else cache.parents[2])


def _whole(tree: Tree, path: Path) -> bool:
    """Tell whether a .npy file has the size that its header says."""
    import numpy as np

    try:
        with tree.open(path) as file:
            major, _ = np.lib.format.read_magic(file)
            read = np.lib.format.read_array_header_1_0 if major == 1 else np.lib.format.read_array_header_2_0
            shape, _, dtype = read(file)
            expected = file.tell() + int(np.prod(shape, dtype=np.int64)) * dtype.itemsize
            return os.fstat(file.fileno()).st_size == expected
    except (ValueError, EOFError, FileNotFoundError, TypeError, SyntaxError, OverflowError):
        return False


def _staging(cache: Path) -> Path:
    """Make a directory for this build alone, whose name says who to look for."""
    staging = cache / f".index.{process_name()}.tmp"
    staging.mkdir()
    return staging


def _words(args: argparse.Namespace) -> Any:
    """Return the content of the file that names the datasets."""
    path = args.data_args_path or args.per_split_data_args_path
    return Path(path).read_text() if path else None


def _holds(done: Path) -> bool:
    """Tell whether an index was built, and its files are there as they were made."""

    said = read_json(done)
    files = said.get("files") if isinstance(said, dict) else None
    return isinstance(files, dict) and all(
        "/" not in name and size_of(done.parent / name) == size for name, size in files.items()
    )


def _sync(path: Path) -> None:
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def _run(command: Sequence[str], staging: Path) -> Any:
    """Run the build; a heartbeat on its directory keeps others from taking it for a dead one's."""

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
            f"the process building the sample index was killed, most likely for want of memory ({memory_words()}): "
            "raise the limit, or build with fewer threads"
        )
    if isinstance(outcome, dict) and "refused" in outcome:
        raise RequestError(outcome["refused"])
    said = (staging / "log").read_text(errors="replace").strip()
    raise TokenmillError(f"building the sample index ended with exit code {code}:\n{said[-4000:]}")
