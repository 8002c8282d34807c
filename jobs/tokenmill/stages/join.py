"""join: the pairs of a dataset -> fewer, larger pairs, as Megatron-LM's `merge_datasets` writes them.

A unit is one output: the pairs of consecutive units of the dataset, for each key. It reads all tokens, and compares
their hashes with the record. An interrupted unit starts again.
"""

from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import groupby, pairwise
from pathlib import Path, PurePosixPath
from typing import ClassVar

import numpy as np
import xxhash

from tokenmill.core.files.hashing import hash_file
from tokenmill.core.files.named_file import open_file
from tokenmill.datasets.contract import PREPROCESS, PairSpec
from tokenmill.datasets.dataset import Dataset
from tokenmill.datasets.formats.base import Destination
from tokenmill.datasets.formats.indexed import SUFFIXES, PairWriter, start_pair
from tokenmill.datasets.formats.indexed.reader import open_index
from tokenmill.engine.contract import FileEntry, InputFile, InputRange, Part, Upstream
from tokenmill.engine.lineage import narrow
from tokenmill.engine.output_names import check_label
from tokenmill.engine.partition import split_by_weight
from tokenmill.engine.planning import Request
from tokenmill.engine.record import Counts, Plan, Unit
from tokenmill.engine.stage import Stage, StageRun
from tokenmill.engine.workspace import Workspace
from tokenmill.errors import RequestError
from tokenmill.stages.rewriting import PairGroup, check_apart, list_groups, plan_rewrite

CHUNK_BYTES = 8 << 20
"""Bytes of documents that are copied together; a longer document is copied alone."""


@dataclass(frozen=True, kw_only=True)
class Join(Stage):
    """The stage that joins the pairs of `dataset`, an output of preprocess or adopt.

    It writes `target_files` pairs for each key, or, without that, pairs of about `target_bytes`. With `by_source`, no
    pair has the documents of two sources: directories of the files with their texts.
    """

    dataset: Dataset
    output: Path
    target_files: int | None = None
    target_bytes: int | None = None
    by_source: bool = False
    name: str = "part"

    kind: ClassVar = PREPROCESS
    concurrency: ClassVar = "processes"
    resumable: ClassVar = False

    def prepare(self, run: StageRun, pinned: str | None = None) -> Request:
        """Plan one unit for each output; copy the dataset's tokenizer.

        Raises:
            RequestError: the dataset has fewer pairs than are requested.
        """
        check_label(self.name)
        dataset = self.dataset
        check_apart(self.output, dataset)
        upstream = Upstream(dataset.record.stage, dataset.manifest.hash)
        request: dict[str, object] = {
            "command": "join",
            "input": upstream.to_json(),
            "target_files": self.target_files,
            "target_bytes": self.target_bytes,
            "by_source": self.by_source,
            "name": self.name,
        }

        def make_plan() -> Plan:
            return plan_rewrite(dataset, self.output, request, self._plan_units())

        return Request(request, make_plan, dataset.record.output)

    def _plan_units(self) -> list[Unit]:
        dataset = self.dataset
        files = {entry.path: entry for entry in dataset.manifest.files}
        parts = [part for named in self._partition(list_groups(dataset)) for part in named]
        units = []
        for index, (directory, groups) in enumerate(parts):
            id_ = f"{self.name}-{index:05d}-of-{len(parts):05d}"
            name = str(PurePosixPath(directory) / id_)
            names = [f"{pair.prefix}.{suffix}" for group in groups for pair in group.pairs for suffix in SUFFIXES]
            inputs = [InputFile(path, files[path].xxh3_128, files[path].bytes) for path in names]
            outputs = [f"{name}_{key}_document.{suffix}" for key in dataset.basis.keys for suffix in SUFFIXES]
            units.append(Unit(id_, sum(files[path].bytes for path in names), PairSpec(name, inputs), outputs))
        return units

    def _partition(self, groups: list[PairGroup]) -> Iterator[list[tuple[str, list[PairGroup]]]]:
        """Yield the groups of each output, and the directory of the output, by the sources that are kept apart.

        Raises:
            RequestError: there are fewer pairs than outputs.
        """

        def find_source(group: PairGroup) -> str:
            pair = group.pairs[0]
            file = pair.parts[0].source if pair.parts else pair.prefix
            return str(PurePosixPath(file).parent) if self.by_source else "."

        groups = sorted(groups, key=find_source)  # stable: the order of the units of a source stays
        for directory, members in groupby(groups, find_source):
            chosen = list(members)
            sizes = [sum(pair.bytes for pair in group.pairs) for group in chosen]
            count = self.target_files or max(1, min(len(chosen), round(sum(sizes) / (self.target_bytes or 1))))
            if count > len(chosen):
                source = self.dataset.record.output
                place = f"{source}, from {directory}" if self.by_source else source
                raise RequestError(
                    f"--target-files {count} is more than the {len(chosen)} pairs of {place}; choose {len(chosen)} or "
                    "fewer"
                )
            yield [(directory, [chosen[i] for i in run]) for run in split_by_weight(sizes, count)]

    def do(self, unit: Unit, workspace: Workspace, shared: None) -> Counts:
        """Copy the documents of a unit's pairs, key by key."""
        spec = unit.spec(PairSpec)
        dataset = self.dataset
        files = {file.path: file for file in spec.inputs}
        groups = [group for group in list_groups(dataset) if f"{group.pairs[0].prefix}.bin" in files]
        documents = sum(group.pairs[0].documents for group in groups)
        counts = {"in": documents, "out": documents, "tokens": 0, "sequences": 0}
        for number, key in enumerate(dataset.basis.keys):
            destination = Destination(
                workspace, number, key, f"{spec.name}_{key}_document", dataset.basis.get_dtype(key)
            )
            writer, parts = start_pair(destination), list[Part]()
            for group in groups:
                pair = next((pair for pair in group.pairs if pair.key == key), None)
                if pair is None:  # its documents have no tokens under this key
                    _add_empty(writer, group.pairs[0].documents)
                else:
                    _copy(pair, files, writer, workspace)
                parts += narrow(group.pairs[0].parts or [], group.pairs[0].documents) if group.pairs[0].parts else []
            counts["tokens"] += writer.tokens
            counts["sequences"] += writer.sequences
            writer.finish(parts if all(group.pairs[0].parts for group in groups) else [])
        first = 0
        for group in groups:
            workspace.inputs.append(InputRange(f"{group.pairs[0].prefix}.bin", first, group.pairs[0].documents))
            first += group.pairs[0].documents
        return counts


def _add_empty(writer: PairWriter, documents: int) -> None:
    writer.add(np.empty(0, np.uint16), np.empty(0, "<i4"), np.zeros(documents, np.int64))


def _copy(pair: FileEntry, files: dict[str, InputFile], writer: PairWriter, workspace: Workspace) -> None:
    """Append the documents of a pair, and compare the hashes of its files with the record."""
    names = [f"{pair.prefix}.{suffix}" for suffix in SUFFIXES]
    with ExitStack() as stack:
        bin_path, idx_path = (
            stack.enter_context(workspace.reading(files[name], files[name].bytes or 0)) for name in names
        )
        workspace.check_hash(files[names[1]], hash_file(idx_path))
        index, digest = open_index(idx_path), xxhash.xxh3_128()
        file = stack.enter_context(open_file(bin_path, buffering=0))  # pages of a map would stay in memory
        for first, end in _cut(index.document_indices, index.pointers, index.bin_bytes):
            indices = index.document_indices[first : end + 1]
            lengths = index.lengths[int(indices[0]) : int(indices[-1])]
            ids = np.fromfile(file, index.dtype, int(lengths.sum(dtype=np.int64)))
            digest.update(ids.data)
            writer.add(ids, lengths, np.diff(indices))
            workspace.report_progress(ids.nbytes)
        workspace.check_hash(files[names[0]], digest.hexdigest())


def _cut(indices: np.ndarray, pointers: np.ndarray, size: int) -> Iterator[tuple[int, int]]:
    """Yield ranges of documents with about CHUNK_BYTES."""
    documents = len(indices) - 1
    count = max(1, -(-size // CHUNK_BYTES))
    bounds: Sequence[int] = np.unique(np.linspace(0, documents, count + 1).astype(np.int64)).tolist()
    yield from pairwise(bounds)
