"""adopt: pairs that another tool made -> a dataset as preprocess writes it, with hashes, a manifest and a tokenizer.

Input: `.bin/.idx` pairs. Output: the state files of the stage preprocess, so later commands read the pairs like a
dataset of preprocess. Without an output directory, the stage adopts the pairs in place: it writes the state files next
to the pairs and does not copy or change the pairs. With an output directory, the stage copies each pair there.

A unit is one pair: the stage checks the pair like `verify` and hashes it. An interrupted unit starts again.
"""

import os
import stat
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

from tokenmill.core.files.codec import content_id
from tokenmill.core.files.named_file import open_file
from tokenmill.core.files.paths import safe_name
from tokenmill.core.files.tree import Tree
from tokenmill.datasets.contract import PREPROCESS, PairBasis, PairDetails, PairSpec, parse_basis, parse_tokenizer
from tokenmill.datasets.formats.indexed import SUFFIXES
from tokenmill.engine.contract import (
    COPIED,
    IN_PLACE,
    Adopted,
    EmptyPair,
    FileEntry,
    InputFile,
    InputRange,
    Origin,
    Upstream,
)
from tokenmill.engine.inputs import walk_files
from tokenmill.engine.lineage import narrow, source_parts
from tokenmill.engine.output_names import make_distinct
from tokenmill.engine.planning import Request, check_no_foreign_files
from tokenmill.engine.progress import Reporter
from tokenmill.engine.record import Counts, Plan, StageRecord, Unit
from tokenmill.engine.stage import Stage, StageRun
from tokenmill.engine.workspace import OutputFile, Workspace
from tokenmill.errors import InputError, RequestError, TransientError
from tokenmill.tokenize.encoder_store import Encoders
from tokenmill.tokenize.engines import REFERENCE
from tokenmill.tokenize.options import PreprocessOptions, TokenizerOptions
from tokenmill.tokenize.tokenizer import tokenizer_request

if TYPE_CHECKING:
    from tokenmill.tokenize.tokenizer import ResolvedTokenizer


KEY = "text"
"""The key in the records of adopted pairs, because the key of the original texts is unknown."""

ENCODER = REFERENCE
"""The stage encodes no text: it requires only Hugging Face's own engine, which decodes ids."""

SAMPLED_PAIRS, SAMPLED_DOCUMENTS = 64, 16
"""The number of pairs, and of documents at each end of a pair, in which the planner checks for EOD."""

DAMAGED = (
    "the pair is damaged, or has another format; write the pair again with its original tool, and run the same "
    "tokenmill adopt again"
)
"""The remedy in messages common_fields pairs that another tool made."""


class AdoptedPairs(NamedTuple):
    """The pairs to adopt.

    Attributes:
        root: the common directory of the pairs.
        output: the directory of the records.
        adoption: IN_PLACE or COPIED.
        files: the two files of each pair, by the pair's prefix relative to `root`.
        notes: lines to log when the stage starts.
    """

    root: Path
    output: Path
    adoption: Adopted
    files: dict[str, tuple[InputFile, InputFile]]
    notes: list[str]

    @property
    def identities(self) -> dict[str, str]:
        """The identity of each file, by its path."""
        return {file.path: file.identity for pair in self.files.values() for file in pair}


def find_pairs(paths: Sequence[Path], output: Path | None) -> AdoptedPairs:
    """Find the pairs of the paths: prefixes, `.bin` or `.idx` files, or directories.

    Raises:
        RequestError: a path has no pair, one file of a pair is missing, or a pair cannot be adopted in place.
    """
    notes: list[str] = []
    directories, prefixes = [], []
    for path in paths:
        prefix = path.parent / path.name.removesuffix(".bin").removesuffix(".idx")
        present = [suffix for suffix in SUFFIXES if os.path.lexists(f"{prefix}.{suffix}")]
        if path.is_dir() and present:
            raise RequestError(
                f"{path} is a directory, and {prefix}.{present[0]} is next to it: specify {prefix}.{present[0]}, or "
                "the pairs in the directory"
            )
        if path.is_dir():
            directories.append(path.resolve())
            prefixes += _prefixes_below(path.resolve(), output, notes)
        elif present:
            directories.append(prefix.parent.resolve())
            prefixes.append(prefix.parent.resolve() / prefix.name)
        else:
            raise RequestError(
                f"{str(path)!r} is neither a pair of .bin and .idx nor a directory with such pairs; specify the path "
                "of a pair, with or without the suffix, or a directory with pairs"
            )
    common = Path(os.path.commonpath(directories))
    if output is None and common not in directories:
        folders = ", ".join(sorted({str(directory) for directory in directories})[:5])
        raise RequestError(
            f"the pairs are in several directories ({folders}), but their records must be in one directory: run adopt "
            f"for each directory (blend accepts several), specify {common}, or copy the pairs with --output DIRECTORY"
        )
    adoption = IN_PLACE if output is None else COPIED
    files = {}
    for prefix in sorted(set(prefixes)):
        name = prefix.relative_to(common).as_posix()
        files[name] = (_input_file(common, f"{name}.bin", adoption), _input_file(common, f"{name}.idx", adoption))
    notes.append(f"reading {len(files)} pairs in {common}")
    return AdoptedPairs(common, output or common, adoption, files, notes)


def _prefixes_below(directory: Path, output: Path | None, notes: list[str]) -> list[Path]:
    walk = walk_files(directory, output)
    endings = tuple(f".{suffix}" for suffix in SUFFIXES)
    for obstacle in walk.obstacles:
        # `_input_file` refuses an obstacle that has the name of a pair's file.
        if not obstacle.data_only and not obstacle.path.endswith(endings):
            raise RequestError(obstacle.problem)
    notes.extend(walk.notes)
    names = {name[:-4] for name in walk.files if name.endswith(endings)}
    hidden = [name for name in walk.hidden if name.endswith(endings)]
    if not names:
        others = f" (it has {len(walk.files)} other files, such as {walk.files[0]!r})" if walk.files else ""
        raise RequestError(f"no pair of .bin and .idx is in {directory}{others}; specify a directory with pairs")
    if hidden:
        notes.append(f"left out {len(hidden)} hidden files, such as {hidden[0]!r}")
    if walk.outputs:
        more = ", ..." if len(walk.outputs) > 3 else ""
        notes.append(
            f"left out {', '.join(map(str, walk.outputs[:3]))}{more}: outputs of tokenmill, which have records"
        )
    return [directory / name for name in names]


def _input_file(root: Path, name: str, adoption: str) -> InputFile:
    """Return one file of a pair for the plan.

    Raises:
        RequestError: the file is missing, is not a regular file, or cannot be recorded.
    """
    path = root / name
    if not str(path).isprintable():
        raise RequestError(
            f"{str(path)!a}: the name has control characters or is not UTF-8, but Megatron-LM reads lists of pairs "
            "line by line; rename the pair"
        )
    try:
        status = path.stat()
    except (FileNotFoundError, NotADirectoryError):
        raise RequestError(
            f"{path}: missing, or a link to a missing file; a pair is a .bin and an .idx of the same name: restore the "
            "file, or specify the pairs to adopt one by one"
        ) from None
    if not stat.S_ISREG(status.st_mode):
        raise RequestError(f"{path}: not a regular file; a pair is a .bin and an .idx: specify the pairs to adopt")
    if adoption == IN_PLACE and Path(os.path.realpath(path)) != path:
        raise RequestError(
            f"{path}: a symbolic link, or below one, to {os.path.realpath(path)}; records next to the link would "
            "describe a file in another directory: specify the directory of the target, or copy the pairs with "
            "--output DIRECTORY"
        )
    return InputFile(name, _identity(status), status.st_size)


def _identity(status: os.stat_result) -> str:
    return f"{status.st_size}@{status.st_mtime_ns}"


def _check_not_own_output(pairs: AdoptedPairs, plan: Plan | None) -> None:
    """Raise RequestError if tokenmill made or copied the files of the output; a new plan could remove these files."""
    if plan is not None and plan.adopted != pairs.adoption:
        content = f"pairs adopted {plan.adopted}" if plan.adopted else "an output of tokenmill preprocess"
        raise RequestError(
            f"{pairs.output} contains {content}, which already has its records: pass this directory to blend, train, "
            f"inspect or verify; to adopt other pairs {pairs.adoption}, use another directory"
        )


def _plan_units(pairs: AdoptedPairs) -> list[Unit]:
    names = list(pairs.files)
    sources = [str(pairs.root / name) for name in names]
    outputs = (
        names if pairs.adoption == IN_PLACE else make_distinct(sources, (safe_name(Path(name).name) for name in names))
    )
    return [
        Unit(
            id=unit_id,
            weight=sum(file.bytes or 0 for file in pairs.files[name]),
            spec=PairSpec(output, list(pairs.files[name]), pairs.adoption),
            outputs=[f"{output}.{suffix}" for suffix in SUFFIXES],
        )
        for name, output, unit_id in zip(names, outputs, make_distinct(names, map(safe_name, outputs)), strict=True)
    ]


def _detect_eod(pairs: AdoptedPairs, tokenizer: "ResolvedTokenizer", reporter: Reporter) -> int | None:
    """Return the tokenizer's EOD if all checked documents end with it; else print a warning and return None."""
    names = list(pairs.files)
    step = -(-len(names) // SAMPLED_PAIRS)
    tokens = [token for name in names[::step] for token in _last_tokens(pairs.root / name, reporter)]
    others = [token for token in tokens if token.id != tokenizer.eod_id]
    if not others:
        return tokenizer.eod_id
    count = "none" if len(others) == len(tokens) else f"only {len(tokens) - len(others)}"
    example = f"document {others[0].document} of {others[0].prefix} ends with {others[0].id}"
    eod = f"{tokenizer.eod_token!r} ({tokenizer.eod_id})" if tokenizer.eod_id is not None else "(no eos token)"
    reporter.warn(
        f"{count} of the {len(tokens)} documents that were checked end with the tokenizer's EOD {eod}: {example}; "
        "tokenmill adopts the pairs without EOD, so training cannot detect where a document ends. If the documents end "
        "with another token, run the command again with --eod-token TOKEN --replace"
    )
    return None


class _LastToken(NamedTuple):
    """The id of the last token of a document."""

    prefix: Path
    document: int
    id: int


def _last_tokens(prefix: Path, reporter: Reporter) -> Iterator[_LastToken]:
    """Yield the last tokens of the first and the last documents of a pair.

    A damaged pair yields nothing: its unit reports the damage.
    """
    from tokenmill.datasets.formats.indexed.reader import DamagedPair, IndexedReader

    try:
        reader = IndexedReader(prefix)
        if reader.dtype.kind == "f":
            return
        if reader.modes.any():
            reporter.warn(
                f"{prefix}: a multimodal pair: some sequences have a mode other than 0, and the pre-training of a GPT "
                "model reads all of them as text"
            )
        last_documents = range(max(SAMPLED_DOCUMENTS, reader.documents - SAMPLED_DOCUMENTS), reader.documents)
        for number in (*range(min(SAMPLED_DOCUMENTS, reader.documents)), *last_documents):
            if (ids := reader.document(number)).size:
                yield _LastToken(prefix, number, int(ids[-1]))
    except (DamagedPair, ValueError):
        return


@dataclass(frozen=True, kw_only=True)
class Adopt(Stage):
    """The stage that checks and hashes pairs of another tool and records them as an output of preprocess.

    `append_eod` is None if the planner detects from some documents whether documents end with EOD.
    """

    pairs: AdoptedPairs
    output: Path
    tokenizer: TokenizerOptions
    append_eod: bool | None = None
    endpoint: str | None = None

    kind: ClassVar = PREPROCESS
    concurrency: ClassVar = "processes"
    resumable: ClassVar = False

    def prepare(self, run: StageRun, pinned: str | None = None) -> Request:
        """Plan one unit per pair; the planner resolves the tokenizer and detects whether documents end with EOD."""
        pairs, append_eod, reporter = self.pairs, self.append_eod, run.reporter
        for note in pairs.notes:
            reporter.log(note)
        options = PreprocessOptions(**vars(self.tokenizer), keys=KEY, append_eod=bool(append_eod), encoder=ENCODER)
        # Without the root: the same pairs have the same plan in every directory.
        listing = content_id(sorted(pairs.identities.items()))
        upstream = Upstream(None, listing=listing)
        request: dict[str, object] = {
            "input": upstream.to_json(),
            "tokenizer": tokenizer_request(options.tokenizer, options.tokenizer_revision),
            "append_eod": append_eod,
            "eod_token": options.eod_token,
            "adopted": pairs.adoption,
            **options.choices(),
        }
        encoders = Encoders(StageRecord(pairs.output, PREPROCESS))
        plan = encoders.record.read_plan()
        _check_not_own_output(pairs, plan)
        if plan is not None and plan.request == request and not encoders.ready(plan, ENCODER):
            recorded = parse_tokenizer(plan)
            pinned_options = replace(options, tokenizer_revision=recorded.revision or options.tokenizer_revision)
            tokenizer = encoders.resolve([], pinned_options, request["tokenizer"], self.endpoint, reporter)
            if tokenizer.fingerprint != recorded.fingerprint:
                raise RequestError(
                    f"the tokenizer {recorded.reference} differs from the recorded tokenizer of {pairs.output}: other "
                    "versions of transformers or tokenizers read it differently; install the versions of the first run"
                )

        def make_plan() -> Plan:
            old_plan = encoders.record.read_plan()
            _check_not_own_output(pairs, old_plan)
            units = _plan_units(pairs)
            names = [] if pairs.adoption == IN_PLACE else [name for unit in units for name in unit.outputs]
            check_no_foreign_files(encoders.record, old_plan, names)
            tokenizer = encoders.resolve([], options, request["tokenizer"], self.endpoint, reporter)
            eod = tokenizer.eod_id if append_eod else None
            if append_eod is None:
                eod = _detect_eod(pairs, tokenizer, reporter)
            basis = PairBasis(
                tokenizer=tokenizer.fingerprint,
                keys=[KEY],
                eod=eod,
                special_tokens=options.special_tokens,
                dtype=tokenizer.dtype,
                rows=None,
                **options.choices(),
            )
            return Plan(
                PREPROCESS.name,
                request,
                units,
                basis=basis.to_json(),
                details=PairDetails(tokenizer).to_json(),
                source=Origin(f"file:{pairs.root.name}", adopted=pairs.adoption),
                upstream=upstream,
                require="tokens",
            )

        return Request(request, make_plan, pairs.root, inputs=pairs.identities)

    def do(self, unit: Unit, workspace: Workspace, shared: None) -> Counts:
        """Check one pair like `verify` and hash it; copy the pair first if the stage has its own output directory."""
        from tokenmill.datasets.formats.indexed.check import examine

        plan, spec, root = workspace.plan, unit.spec(PairSpec), workspace.input_root
        files = spec.inputs
        source = root / files[0].path.removesuffix(".bin")
        for file in files:
            _check_unchanged(root, file, plan.adopted)
        outputs = _copy_pair(unit, files, workspace) if plan.adopted == COPIED else []
        examination = examine(
            outputs[0].path.with_suffix("") if outputs else source,
            vocab_size=parse_tokenizer(plan).vocab_size,
            eod=parse_basis(plan).eod,
            foreign_remedy=DAMAGED,
            read_blocks=partial(_read_blocks, files, outputs, workspace),
            heartbeat=workspace.report_progress,
        )
        for file in files:
            _check_unchanged(root, file, plan.adopted)
        if examination.problems:
            problems = [
                replace(problem, path=Path(f"{source}{problem.path.suffix}")) for problem in examination.problems
            ]
            raise InputError("\n".join(map(str, problems)))
        index = examination.index
        assert index is not None  # noqa: S101  (without an index, there are problems)
        documents, sequences = len(index.document_indices) - 1, len(index.lengths)
        tokens = index.bin_bytes // index.dtype.itemsize
        workspace.inputs = [InputRange(files[0].path, 0, documents)]
        common_fields = {"key": KEY, "prefix": spec.name}
        counts = {"documents": documents, "sequences": sequences, "tokens": tokens, "dtype": index.dtype.name}
        entries: dict[str, dict[str, Any]] = {
            "bin": {"role": "bin", **common_fields, **counts, "parts": narrow(source_parts(files[0].path), documents)},
            "idx": {"role": "idx", **common_fields},
        }
        if not tokens:  # Megatron-LM cannot map an empty file
            workspace.empty.append(EmptyPair(KEY, spec.name, documents))
        for output in outputs:
            if tokens:
                output.describe(**entries[output.final[-3:]])
            else:
                workspace.drop(output)
        if tokens and plan.adopted == IN_PLACE:
            for file in files:
                suffix = file.path[-3:]
                entry = FileEntry(file.path, file.bytes or 0, examination.hashes[suffix], **entries[suffix])
                workspace.adopted.append(entry)
        return {"in": documents, "out": documents, "rejected": 0, "blank": 0, "tokens": tokens, "sequences": sequences}


def _copy_pair(unit: Unit, files: Sequence[InputFile], workspace: Workspace) -> list[OutputFile]:
    """Copy a pair into the attempt; `_read_blocks` hashes the copies.

    The copy shares blocks with the pair if the file system supports this.
    """
    from tokenmill.datasets.formats.indexed.check import BLOCK

    outputs = []
    for file, final in zip(files, unit.outputs, strict=True):
        output, size = workspace.open(final, temporary=final, read_soon=False), file.bytes or 0
        outputs.append(output)
        with open_file(workspace.input_root / file.path, buffering=0) as source:
            for offset in range(0, size, BLOCK):
                output.copy_from(source, offset, min(BLOCK, size - offset))
                workspace.report_progress()
    return outputs


def _read_blocks(
    files: Sequence[InputFile], outputs: Sequence[OutputFile], workspace: Workspace, path: Path
) -> Iterator[bytes]:
    """Yield the blocks of one file of the pair, or of its copy, up to its planned size, and report the progress."""
    from tokenmill.datasets.formats.indexed.check import BLOCK

    (remaining,) = (file.bytes or 0 for file in files if file.path.endswith(path.suffix))
    copies = [output for output in outputs if output.path == path]
    with open_file(path) as stream:
        while remaining:
            data = stream.read(min(BLOCK, remaining))
            if not data:
                raise TransientError(f"{path} became shorter while tokenmill read it; run the same command again")
            for output in copies:
                output.hash(memoryview(data))
            workspace.report_progress(len(data))
            remaining -= len(data)
            yield data


def _check_unchanged(root: Path, file: InputFile, adoption: str | None) -> None:
    """Raise TransientError for a file that changed after planning; another program may still write the pair."""
    status = Tree(root).stat(file.path) if adoption == IN_PLACE else (root / file.path).stat()
    if status is None or _identity(status) != file.identity:
        raise TransientError(
            f"{root / file.path} has changed since tokenmill planned it: another program writes to it; wait until the "
            "file is complete and run the same command again"
        )
