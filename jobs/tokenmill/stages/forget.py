"""forget --rewrite: a dataset of preprocess -> the dataset that preprocess writes without some documents.

A unit is that of the dataset, with its pairs. It reads all tokens, compares their hash with the record, and writes
those of the other documents. An interrupted unit starts again.
"""

from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import numpy as np
import xxhash

from tokenmill.core.files.hashing import hash_file
from tokenmill.core.files.named_file import open_file
from tokenmill.datasets.contract import PREPROCESS, PairSpec
from tokenmill.datasets.dataset import Dataset
from tokenmill.datasets.formats.base import Destination
from tokenmill.datasets.formats.indexed import SUFFIXES, PairWriter, start_pair
from tokenmill.datasets.formats.indexed.reader import IndexedReader
from tokenmill.engine.contract import EmptyPair, FileEntry, InputFile, InputRange, Upstream
from tokenmill.engine.lineage import narrow
from tokenmill.engine.planning import Request
from tokenmill.engine.record import Counts, Plan, Unit
from tokenmill.engine.stage import Stage, StageRun
from tokenmill.engine.workspace import Workspace
from tokenmill.stages.rewriting import PairGroup, list_groups, plan_rewrite

CHUNK = 256
"""Documents that are in memory together."""


@dataclass(frozen=True, kw_only=True)
class Rewrite(Stage):
    """The stage that writes a dataset again without documents: their numbers by the prefix of the pair, ascending.

    `content` is a hash of the dataset and the documents.
    """

    dataset: Dataset
    output: Path
    documents: dict[str, list[int]]
    content: str

    kind: ClassVar = PREPROCESS
    concurrency: ClassVar = "processes"
    resumable: ClassVar = False

    def prepare(self, run: StageRun, pinned: str | None = None) -> Request:
        """Plan the units of the dataset; copy its tokenizer."""
        dataset = self.dataset
        upstream = Upstream(dataset.record.stage, dataset.manifest.hash)
        request: dict[str, object] = {"command": "forget", "input": upstream.to_json(), "documents": self.content}

        def make_plan() -> Plan:
            files = {entry.path: entry for entry in dataset.manifest.files}
            units = [_plan_unit(group, files) for group in list_groups(dataset)]
            return plan_rewrite(dataset, self.output, request, units)

        return Request(request, make_plan, dataset.record.output)

    def do(self, unit: Unit, workspace: Workspace, shared: None) -> Counts:
        """Write the pairs of a unit."""
        files = {file.path: file for file in unit.spec(PairSpec).inputs}
        entries = [
            self.dataset.entries[str(self.dataset.record.output / path[:-4])] for path in files if path[-4:] == ".bin"
        ]
        documents, dropped = entries[0].documents, len(self.documents[entries[0].prefix])
        counts = {"in": documents, "out": documents - dropped, "dropped": dropped, "tokens": 0, "sequences": 0}
        with ExitStack() as stack:
            for file in files.values():
                stack.enter_context(workspace.reading(file, file.bytes or 0))
            for number, entry in enumerate(entries):
                destination = Destination(
                    workspace, number, entry.key, entry.prefix, self.dataset.basis.get_dtype(entry.key)
                )
                writer, numbers = start_pair(destination), self.documents[entry.prefix]
                index_hash = hash_file(workspace.input_root / f"{entry.prefix}.idx")
                workspace.check_hash(files[f"{entry.prefix}.idx"], index_hash)
                workspace.check_hash(files[f"{entry.prefix}.bin"], _copy(entry, numbers, writer, workspace))
                counts["tokens"] += writer.tokens
                counts["sequences"] += writer.sequences
                writer.finish(narrow(entry.parts or [], documents, numbers))
        workspace.empty += [
            EmptyPair(pair.key, pair.prefix, counts["out"])
            for pair in self.dataset.manifest.empty
            if f"{pair.prefix}.bin" in unit.outputs
        ]
        workspace.inputs = [InputRange(next(iter(files)), 0, documents)]
        return counts


def _plan_unit(group: PairGroup, files: dict[str, FileEntry]) -> Unit:
    """Return the unit that writes the pairs of a unit again; `files` has all files of the dataset by path."""
    names = [f"{pair.prefix}.{suffix}" for pair in group.pairs for suffix in SUFFIXES]
    inputs = [InputFile(name, files[name].xxh3_128, files[name].bytes) for name in names]
    weight = sum(files[name].bytes for name in names)
    return Unit(group.unit.id, weight, PairSpec(group.unit.spec(PairSpec).name, inputs), group.unit.outputs)


def _copy(entry: FileEntry, forgotten: list[int], writer: PairWriter, workspace: Workspace) -> str:
    """Write the documents of a pair that are not forgotten; return the xxh3-128 of all its tokens."""
    prefix = workspace.input_root / entry.prefix
    reader, digest, start = IndexedReader(prefix), xxhash.xxh3_128(), 0
    with open_file(Path(f"{prefix}.bin"), buffering=0) as file:  # pages of a map would stay in memory
        for stop in (*forgotten, reader.documents):
            for first in (*range(start, stop, CHUNK), stop):
                end = min(first + CHUNK, stop) if first < stop else min(stop + 1, reader.documents)
                indices = reader.document_indices[first : end + 1]
                lengths = reader.lengths[int(indices[0]) : int(indices[-1])]
                ids = np.fromfile(file, reader.dtype, int(lengths.sum(dtype=np.int64)))
                digest.update(ids.data)
                if first < stop:
                    writer.add(ids, lengths, np.diff(indices))
                workspace.report_progress(ids.nbytes)
            start = stop + 1
    return digest.hexdigest()
