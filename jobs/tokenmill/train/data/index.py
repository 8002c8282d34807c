"""Megatron-LM's sample index, written on CPUs before GPUs wait for it.

Without it rank 0 builds it at the start, while all other ranks wait. `index_plan` names the files; the arrays are those
of tokenmill's own order (`samples.index_arrays`), so neither Megatron-LM nor torch writes them. What Megatron-LM calls
the tokenizer is part of each name, and differs between its versions, so `tokenizer_child` asks the Megatron-LM of the
run. Without one, the names are those of the pinned version.

Megatron-LM uses an incomplete file without a check. The files of a dataset are therefore written to a staging
directory, and moved when they are complete, the description (.txt) last: Megatron-LM reads an index only when its
description exists. A build that was killed continues with the datasets that are left.
"""

import argparse
import json
import multiprocessing
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator, Sequence, Set
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import numpy as np

from tokenmill.core.files.codec import content_id, read_json, readable_json
from tokenmill.core.files.explain import explain_os_errors
from tokenmill.core.files.lease import STALE_SECONDS, heartbeat, remove_abandoned
from tokenmill.core.files.publish import fsync_directory, write_atomic
from tokenmill.core.files.tree import Tree
from tokenmill.core.machine import available_cpus, describe_memory, exit_with_parent, process_name
from tokenmill.core.typed_json import convert_json
from tokenmill.datasets.formats.indexed.reader import open_index
from tokenmill.datasets.split import cut_share
from tokenmill.errors import MachineError, RequestError, TokenmillError
from tokenmill.samples.draws import Draws
from tokenmill.samples.epochs import count_epochs
from tokenmill.samples.index_arrays import write_blend_index, write_pair_index, write_row_index
from tokenmill.samples.row_order import count_row_epochs, find_rows
from tokenmill.train.data import tokenizer_child
from tokenmill.train.data.data_arguments import (
    EXISTING_INDEX_FLAGS,
    SEQUENCES_FLAG,
    count_samples,
    parse_data_arguments,
)
from tokenmill.train.data.index_plan import (
    DESCRIPTION,
    SPLITS,
    BlendIndex,
    IndexFiles,
    IndexPlan,
    PairIndex,
    plan_index,
)
from tokenmill.train.settings import MEGATRON_LM, Settings

UNSUPPORTED_FLAGS = (
    "--step-batch-size-schedule",
    "--rampup-batch-size",
    "--full-validation",
    "--multiple-validation-sets",
    "--mock-data",
    "--sft",
    "--yaml-cfg",
)
"""Flags that change the samples of a run in a way that this module does not reproduce."""

MIN_SAMPLES = 1 << 22
"""Samples of an index that several processes build."""

PINNED_TOKENIZER = "megatron.core.tokenizers.text.text_tokenizer.MegatronTokenizerText"
"""The class of a tokenizer in the Megatron-LM of the training image."""


class Start(NamedTuple):
    """A start of Megatron-LM: the arguments of its script, and the iteration after which it begins."""

    arguments: Sequence[str]
    iteration: int = 0


class _TokenizerIdentity(msgspec.Struct, frozen=True):
    """What Megatron-LM writes about a tokenizer; the rest is empty without the Megatron-LM of the run."""

    identifiers: dict[str, Any]
    token_bytes: int | None = None
    """Bytes of an id, as it assumes for pairs whose `.idx` it does not read first."""
    fields: tuple[str, ...] = ()
    """The fields of its configuration for an existing index."""


class _Built(msgspec.Struct, frozen=True):
    """The record of a built index: sizes of its files, samples of each split, and flags with which a run uses it."""

    files: dict[str, int]
    samples: dict[str, int]
    flags: tuple[str, ...]


@dataclass(frozen=True)
class IndexCache:
    """The directory of a run's index; below the directory that the settings name, symbolic links are not followed."""

    path: Path
    shared: bool
    """Whether the settings name it (dataset.cachePath), and other runs may write to it; else it is below the
    checkpoints."""

    @property
    def tree(self) -> Tree:
        """The tree of the directory that the settings name."""
        return Tree(self.path.parent if self.shared else self.path.parents[2])

    def count_datasets(self) -> int:
        """Return the number of datasets that have an index, of this and of other starts."""
        return sum(name.endswith(DESCRIPTION) for name in self.tree.names(self.path))


def build_index(
    starts: Sequence[Start],
    cache: IndexCache,
    *,
    script: str,
    python: Sequence[str] = (sys.executable,),
    packed: Set[str] = frozenset(),
    processes: int | None = None,
) -> str:
    """Build the sample index of the starts of a run unless it exists, and return a log line about it.

    Args:
        starts: the starts; a run with phases has one for each phase.
        cache: the directory of the index.
        script: the training script, next to which Megatron-LM may be.
        python: the command of the Python of the run.
        packed: the prefixes of pairs with packed rows, each of which is a sample.
        processes: the number of processes; None for the number of CPUs.

    Raises:
        RequestError: Megatron-LM would refuse the data, or a flag of the run is not supported.
        MachineError: a process was killed, probably because it ran out of memory.
    """
    for start in starts:
        if flag := next(iter({word.partition("=")[0] for word in start.arguments} & {*UNSUPPORTED_FLAGS}), None):
            raise RequestError(
                f"cannot build the sample index in advance for a run with {flag} (extraArgs): start the run without "
                "--build-index"
            )
    started, samples = time.monotonic(), dict[str, int]()
    directory = cache.path
    with explain_os_errors(directory):
        cache.tree.make_directory(directory)
        remove_abandoned(cache.tree, directory)
        missing = [start for start in starts if not _is_finished(start, cache)]
        if not missing:
            return f"the sample index exists: {directory}"
        staging = directory / f".index.{process_name()}.tmp"
        staging.mkdir()
        try:
            with heartbeat(lambda: os.utime(staging)):  # other builds see that this one is alive
                for start in missing:
                    args = parse_data_arguments(start.arguments)
                    tokenizer = _identify_tokenizer(args, script, python, staging)
                    if packed and not tokenizer.fields:
                        raise RequestError(
                            f"{python[0]} cannot import a Megatron-LM with {EXISTING_INDEX_FLAGS[1]}, without which it "
                            "would not read packed rows as samples: start the run in the training image"
                        )
                    plan = plan_index(args, count_samples(args, start.iteration), tokenizer.identifiers, packed)
                    counts = _write_all(plan, staging, directory, processes or available_cpus())
                    flags = _choose_flags(args, plan, tokenizer, directory)
                    files = {path: (directory / path).stat().st_size for path in _list_files(plan)}
                    built = _Built(files, counts, flags)
                    write_atomic(_record_path(args, directory), readable_json(msgspec.to_builtins(built)))
                    samples = {split: samples.get(split, 0) + count for split, count in counts.items()}
        finally:
            shutil.rmtree(staging, ignore_errors=True)
    numbers = ", ".join(f"{count:,} {name}" for name, count in samples.items())
    return f"sample index built in {time.monotonic() - started:.0f} s: {numbers} samples in {directory}"


def find_index_flags(arguments: Sequence[str], cache: IndexCache) -> list[str] | None:
    """Return the flags with which a start uses an index that `build_index` has built; None without such an index.

    Each node calls this function, so it lists the directory instead of asking for the size of each file.
    """
    built = _read_record(arguments, cache)
    if built is None:
        return None
    names = set(cache.tree.names(cache.path))
    known = {*EXISTING_INDEX_FLAGS, *(_name_sequences(cache.path / name) for name in names)}
    # Whoever may write to the cache must not choose other arguments of the run.
    return list(built.flags) if built.files.keys() <= names and known.issuperset(built.flags) else None


def forget_index(arguments: Sequence[str], cache: IndexCache) -> bool:
    """Delete the record of an index with whose flags a start failed; return whether there was one.

    The names of the files may be those of another version of Megatron-LM, which otherwise looks for its own.
    """
    if not find_index_flags(arguments, cache):
        return False
    cache.tree.unlink(_record_path(parse_data_arguments(arguments), cache.path))
    return True


def needs_own_index(settings: Settings) -> bool:
    """Return whether each node builds the index before its ranks start.

    Rank 0 would build it on the disk of its node, and the ranks of the other nodes would not find it.
    """
    shared = settings.dataset.cache_path is not None or not settings.checkpoint.is_in_bucket
    reads_index = settings.trainer.framework == MEGATRON_LM and not settings.sft
    return settings.training.nodes > 1 and reads_index and not shared


def remove_truncated_files(cache: IndexCache) -> list[Path]:
    """Remove truncated index files, with which Megatron-LM would fail at every start, and return their paths.

    Node 0 calls this function before the trainer starts. In a shared cache other runs may be writing, so files that
    changed within the last STALE_SECONDS stay.
    """
    tree = cache.tree
    now = tree.server_time(cache.path) if cache.shared else 0.0
    removed = []
    for path in (cache.path / name for name in tree.names(cache.path) if name.endswith(".npy")):
        status = tree.stat(path)
        if status is None or _has_expected_size(tree, path) or (cache.shared and now - status.st_mtime < STALE_SECONDS):
            continue
        tree.unlink(path)
        removed.append(path)
    return removed


def _has_expected_size(tree: Tree, path: Path) -> bool:
    """Return whether a .npy file has the size that its header specifies."""
    try:
        with tree.open(path) as file:
            major, _ = np.lib.format.read_magic(file)
            read_header = np.lib.format.read_array_header_1_0 if major == 1 else np.lib.format.read_array_header_2_0
            shape, _, dtype = read_header(file)
            expected = file.tell() + int(np.prod(shape, dtype=np.int64)) * dtype.itemsize
            return os.fstat(file.fileno()).st_size == expected
    except (ValueError, EOFError, FileNotFoundError, TypeError, SyntaxError, OverflowError):
        return False


def _record_path(args: argparse.Namespace, cache: Path) -> Path:
    """Return the path of the record of the index for some arguments and the content of their blend file."""
    options = {name: value for name, value in vars(args).items() if not name.endswith("args_path")}
    file = args.data_args_path or args.per_split_data_args_path
    return cache / f"built-{content_id({'lists': Path(file).read_text() if file else None, **options})}.json"


def _read_record(arguments: Sequence[str], cache: IndexCache) -> _Built | None:
    """Return the record of a finished index; its files may have been deleted since."""
    value = read_json(_record_path(parse_data_arguments(arguments), cache.path), tree=cache.tree)
    try:
        return convert_json(value, _Built)
    except msgspec.ValidationError:
        return None


def _is_finished(start: Start, cache: IndexCache) -> bool:
    """Return whether all files of the index of a start have their recorded sizes."""
    built = _read_record(start.arguments, cache)
    return built is not None and all(
        "/" not in name and cache.tree.size(cache.path / name) == size for name, size in built.files.items()
    )


def _list_files(plan: IndexPlan) -> Iterator[str]:
    for files in plan.files:
        yield files.description_file
        yield from map(files.locate, files.names)


def _identify_tokenizer(
    args: argparse.Namespace, script: str, python: Sequence[str], staging: Path
) -> _TokenizerIdentity:
    """Return how the Megatron-LM of the run identifies the tokenizer.

    Raises:
        RequestError: there is no Megatron-LM, and the pinned version's name for the tokenizer is not known.
        TokenmillError: Megatron-LM cannot load the tokenizer.
    """
    order, outcome, log = staging / "order.json", staging / "outcome.json", staging / "log"
    options = {
        name: value for name, value in vars(args).items() if not name.endswith("path") or name == "metadata_path"
    }
    order.write_text(json.dumps({"options": options, "script": script, "outcome": str(outcome)}))
    environ = {**os.environ, "CUDA_VISIBLE_DEVICES": "", "HF_HUB_OFFLINE": "1"}
    command = [*python, "-P", tokenizer_child.__file__, str(order)]
    if shutil.which(python[0]) is None:
        raise RequestError(
            f"there is no {python[0]}, the Python of trainer.launcher: run the command in the training image"
        )
    with log.open("wb") as output:
        code = subprocess.run(
            command, stdin=subprocess.DEVNULL, stdout=output, stderr=output, env=environ, check=False
        ).returncode
    if code == -signal.SIGKILL:
        raise _killed("loads the tokenizer")
    answer = read_json(outcome) if code == 0 else None
    if isinstance(answer, dict) and "tokenizer" in answer:
        return _TokenizerIdentity(answer["tokenizer"], answer["token_bytes"], tuple(answer["fields"]))
    if answer is None:
        raise TokenmillError(
            f"Megatron-LM cannot load the tokenizer, with exit code {code}; see its output:\n"
            f"{log.read_text(errors='replace').strip()[-4000:]}"
        )
    if args.tokenizer_type != "HuggingFaceTokenizer" or args.metadata_path:
        raise RequestError(
            f"cannot name the files of the sample index, because {python[0]} cannot import Megatron-LM: run the "
            "command in the training image"
        )
    values = {
        "chat_template": args.chat_template,
        "vocab_file": args.vocab_file,
        "merges_file": args.merge_file,
        "additional_special_tokens": args.special_tokens or [],
        "use_fast": not args.tokenizer_hf_no_use_fast,
        "trust_remote_code": args.trust_remote_code,
        "include_special_tokens": not args.tokenizer_hf_no_include_special_tokens,
        "use_gigatoken": args.use_gigatoken,
    }
    identifiers = {"class": PINNED_TOKENIZER, "tokenizer_path": args.tokenizer_model}
    return _TokenizerIdentity({**identifiers, **{name: str(value) for name, value in values.items()}})


def _choose_flags(
    args: argparse.Namespace, plan: IndexPlan, tokenizer: _TokenizerIdentity, cache: Path
) -> tuple[str, ...]:
    """Return the flags with which Megatron-LM uses the index without a check, and write the file that one names."""
    fast, defer = EXISTING_INDEX_FLAGS
    flags = []
    per_split = args.split is None or args.per_split_data_args_path
    if "fast_cache_load" in tokenizer.fields and per_split:  # it refuses one list for all splits
        flags.append(fast)
    if "defer_npy_index_mmap" in tokenizer.fields and not args.fim_data:  # the FIM dataset reads them at once
        flags.append(defer)
    counts, sizes = dict[str, list[int]](), set[int]()
    for prefix in {pair.prefix: None for pair in plan.pairs}:
        index = open_index(Path(f"{prefix}.idx"))
        counts[prefix] = [len(index.lengths), len(index.document_indices)]
        sizes.add(index.dtype.itemsize)
    # With it, no header of an .idx is read.
    if "sequences_per_dataset" in tokenizer.fields and sizes == {tokenizer.token_bytes}:
        path = cache / f"sequences-{content_id(counts)}.json"
        write_atomic(path, readable_json(counts))
        flags.append(_name_sequences(path))
    return tuple(flags)


def _name_sequences(path: Path) -> str:
    return f"{SEQUENCES_FLAG}={path}"


def _write_all(plan: IndexPlan, staging: Path, cache: Path, processes: int) -> dict[str, int]:
    """Write the files that are missing; return the samples of each split."""
    samples = sum(pair.samples for pair in plan.pairs)
    processes = min(processes, len(plan.pairs)) if samples >= MIN_SAMPLES else 1
    arguments = (plan.pairs, [staging] * len(plan.pairs), [cache] * len(plan.pairs))
    if processes == 1:
        return _write_blends(plan, staging, cache, map(_write_pair, *arguments))
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(processes, mp_context=context, initializer=exit_with_parent) as pool:
        try:
            chunks = max(1, len(plan.pairs) // (16 * processes))
            return _write_blends(plan, staging, cache, pool.map(_write_pair, *arguments, chunksize=chunks))
        except BrokenProcessPool:
            raise _killed("builds the sample index") from None


def _killed(work: str) -> MachineError:
    return MachineError(
        f"a process that {work} was killed, probably because it ran out of memory ({describe_memory()}): raise the "
        "memory limit"
    )


def _write_blends(plan: IndexPlan, staging: Path, cache: Path, built: Iterable[int]) -> dict[str, int]:
    """Write the blends, for which the pairs need not be finished; return the samples of each split."""
    counts = [_write_blend(blend, staging, cache) for blend in plan.blends]
    sizes = dict(zip((pair.files.stem for pair in plan.pairs), built, strict=True))
    samples = {SPLITS[pair.split]: sizes[pair.files.stem] for pair in plan.pairs}
    for blend, drawn in zip(plan.blends, counts, strict=True):
        samples[SPLITS[blend.split]] = blend.size
        for pair, count in zip(blend.pairs, drawn, strict=True):
            if count > sizes[pair.files.stem]:
                raise RequestError(
                    f"Megatron-LM cannot draw {count:,} {SPLITS[pair.split]} samples from {pair.prefix}, of which it "
                    f"builds {sizes[pair.files.stem]:,}, because it rounds the smallest shares up to one sample each: "
                    "write fewer, larger pairs (tokenmill join), or raise training.evalIterations, or "
                    "--mid-level-dataset-surplus in extraArgs"
                )
    return samples


def _write_blend(blend: BlendIndex, staging: Path, cache: Path) -> list[int]:
    """Write the index of a blend; return the draws of each pair."""
    if _are_complete(blend.files, cache):
        datasets = np.load(cache / blend.files.locate("dataset_index"), mmap_mode="r")
        return [int(count) for count in np.bincount(datasets, minlength=len(blend.pairs))]
    counts = write_blend_index(Draws(blend.weights, blend.size), lambda name: staging / blend.files.locate(name))
    _publish(blend.files, staging, cache)
    return [int(count) for count in counts]


def _write_pair(pair: PairIndex, staging: Path, cache: Path) -> int:
    """Write the index of a pair; return the number of samples."""
    index = open_index(Path(f"{pair.prefix}.idx"))
    first, end = cut_share(pair.bounds, len(index.lengths))
    low, high = find_rows(index.document_indices, first, end) if pair.packed else (first, end)
    tokens = (high - low) * pair.seq_length if pair.packed else int(index.lengths[first:end].sum(dtype=np.int64))
    if tokens <= 0:
        raise RequestError(
            f"{SPLITS[pair.split]} has no {'row' if pair.packed else 'tokens'} in {pair.prefix}; set dataset.split to "
            "give it a larger share, or write fewer, larger pairs (tokenmill join)"
        )
    written = _are_complete(pair.files, cache)

    def locate(name: str) -> Path:
        return staging / pair.files.locate(name)

    if pair.packed:
        epochs = count_row_epochs(high - low, pair.samples)
        samples = epochs * (high - low)
        if not written:
            write_row_index(index.document_indices[low : high + 1], epochs, pair.seed, locate)
    else:
        read = count_epochs(tokens, pair.samples, pair.seq_length)
        samples = read.samples
        if not written:
            write_pair_index(index.lengths, first, end, read, pair.seed, pair.seq_length, locate)
    if not written:
        _publish(pair.files, staging, cache)
    return samples


def _are_complete(files: IndexFiles, cache: Path) -> bool:
    """Return whether a dataset is finished: a description may be that of a start of Megatron-LM that was killed."""
    tree = Tree(cache)
    return (cache / files.description_file).is_file() and all(
        _has_expected_size(tree, cache / files.locate(name)) for name in files.names
    )


def _publish(files: IndexFiles, staging: Path, cache: Path) -> None:
    """Move the files of a dataset into the cache, the description last."""
    (staging / files.description_file).write_text(files.description)
    names = [*map(files.locate, files.names), files.description_file]
    for name in names:
        _fsync(staging / name)
    for name in names:
        (staging / name).replace(cache / name)
    fsync_directory(cache)


def _fsync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
