"""preprocess: JSONL, plain or compressed, or Parquet -> `<name>_<key>_document.{bin,idx}`, as Megatron-LM writes it.

The last data stage. A unit is one output pair per key, made from one input file or from a run of them
(`--target-files`). Work is journaled at input-file boundaries: a killed attempt is taken over there.
"""

import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tokenmill.errors import InputError, RequestError
from tokenmill.files import read_json, readable_json, safe_name, write_atomic
from tokenmill.flow.lineage import DataFile, Dataset
from tokenmill.flow.partition import groups
from tokenmill.flow.planning import refuse_foreign
from tokenmill.flow.progress import Reporter
from tokenmill.flow.provenance import narrow
from tokenmill.flow.record import Counts, Plan, StageRecord, Unit
from tokenmill.flow.workspace import OutputFile, Workspace
from tokenmill.stages.encoder import Encoders, Recipe

if TYPE_CHECKING:
    from tokenmill.corpus.readers import Batch, Rejected
    from tokenmill.tokens.indexed import IndexedWriter

RESUMABLE = True
THREADS = False

MANY_INPUTS = 1024
"""Up to this many inputs each gets an output of its own; Megatron-LM loads fewer than 32,767 datasets."""
FEW_OUTPUTS = 256
"""Outputs made of more inputs than MANY_INPUTS."""
JOURNAL_SECONDS = 1.0
"""The journal is written at the first file boundary after this time: syncing costs milliseconds."""
LOOK_BYTES = 1 << 20
"""How much of the first records is looked at for the keys."""


def prepare(
    dataset: Dataset, output: Path, recipe: Recipe, *, encoder: str, endpoint: str | None, reporter: Reporter
) -> tuple[dict[str, Any], Callable[[], Plan]]:
    """Plan one unit per output; whoever makes the plan resolves the tokenizer and judges the encoders."""
    from tokenmill.stages.naming import check_label
    from tokenmill.tokens.tokenizer import tokenizer_request

    if len(set(recipe.keys)) != len(recipe.keys) or not all(recipe.keys):
        raise RequestError(f"--keys {','.join(recipe.keys)}: name each key once")
    for key in recipe.keys:
        if "/" in key:
            raise RequestError(f"--keys {key}: the key is part of the outputs' names and may hold no /")
    check_label(recipe.name)
    request: dict[str, Any] = {
        "input": dataset.upstream,
        "tokenizer": tokenizer_request(recipe.tokenizer, recipe.tokenizer_revision),
        "keys": list(recipe.keys),
        "append_eod": recipe.append_eod,
        "eod_token": recipe.eod_token,
        "special_tokens": recipe.special_tokens,
        "target_files": recipe.target_files,
        "name": recipe.name,
    }

    encoders = Encoders(StageRecord(output, "preprocess"))
    plan = encoders.record.read_plan()
    if plan is not None and plan.request == request and not encoders.ready(plan, encoder):
        known = plan.details["tokenizer"]
        # Of a branch, the commit that was planned with: the branch may have moved since.
        again = replace(recipe, tokenizer_revision=known["revision"] or recipe.tokenizer_revision)
        found = encoders.resolve(dataset, again, request["tokenizer"], encoder, endpoint, reporter)
        if found.fingerprint != plan.basis["tokenizer"]:
            raise RequestError(
                f"the tokenizer {known['reference']} is not the one {output} was begun with: other versions of "
                "transformers or tokenizers read it differently; use those, or choose another output directory"
            )

    def make() -> Plan:
        units = _units(dataset.files, recipe)
        refuse_foreign(encoders.record, encoders.record.read_plan(), units)
        _check_keys(dataset, recipe.keys)
        tokenizer = encoders.resolve(dataset, recipe, request["tokenizer"], encoder, endpoint, reporter)
        basis = {
            "tokenizer": tokenizer.fingerprint,
            "keys": list(recipe.keys),
            "eod": tokenizer.eod_id if recipe.append_eod else None,
            "special_tokens": recipe.special_tokens,
            "dtype": tokenizer.dtype,
        }
        return Plan(
            "preprocess",
            request,
            units,
            basis=basis,
            details={"tokenizer": tokenizer.to_json()},
            source=dataset.source,
            upstream=dataset.upstream,
            require="tokens",
        )

    return request, make


def _units(files: list[DataFile], recipe: Recipe) -> list[Unit]:
    from tokenmill.stages.naming import distinct, flat

    count = recipe.target_files or (len(files) if len(files) <= MANY_INPUTS else FEW_OUTPUTS)
    if count > len(files):
        raise RequestError(
            f"--target-files {count} is more than the {len(files)} input files; give {len(files)} or fewer: one input "
            "is never cut"
        )
    if recipe.target_files is None and len(files) <= MANY_INPUTS:
        runs = [range(i, i + 1) for i in range(len(files))]
        names = distinct([f.path for f in files], (flat(_stem(f.path)) for f in files))
    else:
        runs = groups([file.bytes for file in files], count)
        names = [f"{recipe.name}-{i:05d}-of-{count:05d}" for i in range(count)]
    units = [
        Unit(
            id=safe_name(name),
            weight=sum(files[i].bytes for i in run),
            spec={
                "name": name,
                "inputs": [
                    {
                        "path": files[i].path,
                        "bytes": files[i].bytes,
                        "identity": files[i].identity,
                        "parts": files[i].parts,
                    }
                    for i in run
                ],
            },
            outputs=[
                *(f"{name}_{key}_document.{kind}" for key in recipe.keys for kind in ("bin", "idx")),
                f"rejected/{name}.jsonl",
            ],
        )
        for name, run in zip(names, runs, strict=True)
    ]
    makers: dict[str, Unit] = {}
    for unit in units:
        for name in unit.outputs:
            other = makers.setdefault(name, unit)
            if other is not unit:  # wiki.jsonl with the key en_text, wiki_en.jsonl with the key text
                raise RequestError(
                    f"{other.spec['inputs'][0]['path']} and {unit.spec['inputs'][0]['path']} with the keys "
                    f"{', '.join(recipe.keys)} would both make {name}; give --target-files {count}, which numbers the "
                    "outputs instead of naming them after the inputs"
                )
    return units


def _stem(path: str) -> str:
    from tokenmill.corpus.compression import strip_compression

    stem = strip_compression(path)[0]
    for suffix in (".jsonl", ".json", ".ndjson", ".parquet"):
        if stem.lower().endswith(suffix) and len(stem) > len(suffix):
            return stem[: -len(suffix)]
    return stem


def _check_keys(dataset: Dataset, keys: Sequence[str]) -> None:
    """Refuse keys that none of the first records has: a wrong key, not bad records."""
    for file in dataset.readable:
        path = dataset.root / file.path
        batch = _first_records(path, keys)
        if batch and batch.documents:
            return
        if batch:
            first = batch.rejected[0]
            raise InputError(
                f"{path}: none of the first {batch.records} records can be taken; line {first.line}: {first.reason}"
                "; choose the key with --keys"
            )


def _first_records(path: Path, keys: Sequence[str]) -> "Batch | None":
    """Return a file's first batch with a record; None of one that is empty, or damaged before: its unit will say so."""
    from tokenmill.corpus.readers import read_documents

    with suppress(InputError):
        for batch in read_documents(path, keys, display=str(path), batch_bytes=LOOK_BYTES, on_bad="quarantine"):
            if batch.records:
                return batch
    return None


def do(unit: Unit, workspace: Workspace) -> Counts:
    """Tokenise one output's files in order."""
    work = _Work(unit, workspace)
    return work.run()


@dataclass
class _Column:
    """One key's output: the .bin being written and the index being spilled."""

    key: str
    prefix: str
    bin: OutputFile
    writer: "IndexedWriter"


class _Work:
    """One unit's state between input files: what the journal holds."""

    def __init__(self, unit: Unit, workspace: Workspace) -> None:
        self.unit = unit
        self.workspace = workspace
        self.basis = workspace.plan.basis
        self.counts: Counts = {"in": 0, "out": 0, "rejected": 0, "blank": 0}
        self.done = 0
        self.parts: list[dict[str, Any]] = []
        self.rejects: OutputFile | None = None
        self.columns: list[_Column] = []
        self.marked = time.monotonic()

    def run(self) -> Counts:
        self._open()
        inputs = self.unit.spec["inputs"]
        for item in inputs[self.done :]:
            self._file(item)
            self.done += 1
            if self.done < len(inputs) and time.monotonic() - self.marked > JOURNAL_SECONDS:
                self._mark()
        return self._finish()

    def _open(self) -> None:
        import numpy as np

        from tokenmill.tokens.indexed import IndexedWriter

        journal = self._journal()
        directory = self.workspace.directory
        for index, key in enumerate(self.basis["keys"]):
            prefix = f"{self.unit.spec['name']}_{key}_document"
            state = journal["columns"][index] if journal else None
            output = self.workspace.open(
                f"{prefix}.bin", temporary=f"bin-{index}", keep=state["bin_bytes"] if state else 0
            )
            writer = (
                IndexedWriter.resume(state, output, directory, f"spill-{index}")
                if state
                else IndexedWriter(output, directory, f"spill-{index}", np.dtype(self.basis["dtype"]))
            )
            self.columns.append(_Column(key, prefix, output, writer))
        if journal:
            self.counts, self.done, self.parts = journal["counts"], journal["done"], journal["parts"]
            self.workspace.inputs = journal["inputs"]
            if journal["rejected_bytes"]:
                self.rejects = self._open_rejects(journal["rejected_bytes"])
            self.workspace.checkpoint(sum(item["bytes"] for item in self.unit.spec["inputs"][: self.done]))

    def _journal(self) -> dict[str, Any] | None:
        """Return a taken-over journal whose files are all there, else None and begin anew."""
        journal = read_json(self.workspace.path("journal.json"))
        if not isinstance(journal, dict):
            return None
        wanted = [("rejected", journal["rejected_bytes"])] if journal["rejected_bytes"] else []
        for index, state in enumerate(journal["columns"]):
            wanted.append((f"bin-{index}", state["bin_bytes"]))
            wanted.append((f"spill-{index}.lengths", 4 * state["sequences"]))
            wanted.append((f"spill-{index}.documents", 8 * state["documents"]))
        for name, size in wanted:
            path = self.workspace.path(name)
            if not path.exists() or path.stat().st_size < size:
                return None
        return journal

    def _mark(self) -> None:
        """Make what is written durable, then say in the journal that it is there."""
        for column in self.columns:
            column.bin.sync()
        if self.rejects:
            self.rejects.sync()
        journal = {
            "done": self.done,
            "columns": [column.writer.mark() for column in self.columns],
            "rejected_bytes": self.rejects.bytes if self.rejects else 0,
            "counts": self.counts,
            "parts": self.parts,
            "inputs": self.workspace.inputs,
        }
        write_atomic(self.workspace.path("journal.json"), readable_json(journal))
        self.marked = time.monotonic()

    def _file(self, item: dict[str, Any]) -> None:
        from tokenmill.corpus.readers import read_documents

        settings = self.workspace.settings
        first, before = self.counts["out"], self.counts["in"]
        refused: list[int] = []
        with self.workspace.reading(item["path"], item["bytes"]) as path:
            for batch in read_documents(path, self.basis["keys"], display=str(path), on_bad=settings["on_bad_record"]):
                self._batch(batch)
                for rejected in batch.rejected:
                    refused.append(rejected.record)
                    self._reject(item["path"], rejected)
                self.workspace.checkpoint(batch.compressed)
        records = self.counts["in"] - before
        self.parts.extend(narrow(item["parts"], records, refused))
        self.workspace.inputs.append({"path": item["path"], "first": first, "count": self.counts["out"] - first})

    def _batch(self, batch: "Batch") -> None:
        from tokenmill.tokens.indexed import assemble

        basis = self.basis
        encoder = Encoders(self.workspace.record).load(
            basis["tokenizer"], basis["special_tokens"], self.workspace.settings["encoder"]
        )
        eod = self.basis["eod"]
        for column, texts in zip(self.columns, batch.texts, strict=True):
            flat, sequences = _flatten(texts)
            ids, offsets = encoder.encode(flat)
            column.writer.add(*assemble(ids, offsets, sequences, eod, column.writer.dtype))
        self.counts["in"] += batch.records
        self.counts["out"] += batch.documents
        self.counts["blank"] += batch.blank

    def _reject(self, name: str, rejected: "Rejected") -> None:
        """Keep a bad record beside the output, as it was, with where it stood and why."""
        limit = self.workspace.settings["max_bad_records"]
        self.counts["rejected"] += 1
        if self.counts["rejected"] > limit:
            raise InputError(
                f"more than {limit} bad records for {self.unit.spec['name']}, the latest in "
                f"{self.workspace.input_root / name}, line {rejected.line}: {rejected.reason}; mend the input, or "
                "raise --max-bad-records"
            )
        if self.rejects is None:
            self.rejects = self._open_rejects(0)
        import base64
        import json

        try:
            raw = {"record": rejected.raw.decode()}
        except UnicodeDecodeError:
            raw = {"record_base64": base64.b64encode(rejected.raw).decode()}
        line = {"file": name, "line": rejected.line, "reason": rejected.reason, **raw}
        self.rejects.write(json.dumps(line).encode() + b"\n")

    def _open_rejects(self, keep: int) -> OutputFile:
        output = self.workspace.open(f"rejected/{self.unit.spec['name']}.jsonl", temporary="rejected", keep=keep)
        output.describe(role="rejected")
        return output

    def _finish(self) -> Counts:
        """Write the indices; a pair without tokens is recorded as empty, since Megatron-LM cannot map it."""
        tokens = sequences = 0
        for column in self.columns:
            writer = column.writer
            about = {"key": column.key, "prefix": column.prefix, "documents": writer.documents}
            if writer.tokens == 0:
                self.workspace.drop(column.bin)
                self.workspace.empty.append(about)
            else:
                about |= {"sequences": writer.sequences, "tokens": writer.tokens}
                column.bin.describe(role="bin", **about, parts=self.parts)
                index = self.workspace.open(f"{column.prefix}.idx")
                index.describe(role="idx", key=column.key, prefix=column.prefix)
                writer.write_index(index)
            tokens += writer.tokens
            sequences += writer.sequences
            writer.discard()
        return {**self.counts, "tokens": tokens, "sequences": sequences}


def _flatten(texts: list[Any]) -> tuple[list[str], Any]:
    """Return the texts as one list, and how many belong to each document (None: one each)."""
    if not any(isinstance(text, list) for text in texts):
        return texts, None
    import numpy as np

    flat = [t for text in texts for t in (text if isinstance(text, list) else (text,))]
    return flat, np.array([len(text) if isinstance(text, list) else 1 for text in texts])
