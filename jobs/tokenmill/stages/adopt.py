"""adopt: pairs that another tool made -> an output of preprocess, with hashes, a manifest and their tokenizer.

Stands in the place of preprocess, whose records it writes, so that nothing after it needs to know. A unit is one
pair: it is checked as `verify` checks it, and hashed. In place the records lie beside the pairs, of which no byte
is copied or changed; with an output of its own each pair is copied there.
"""

import os
import stat
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

from tokenmill.errors import InputError, RequestError, TransientError
from tokenmill.files.codec import content_id
from tokenmill.files.paths import safe_name
from tokenmill.files.tree import Tree
from tokenmill.flow.contract import (
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
from tokenmill.flow.output_names import distinct
from tokenmill.flow.planning import Request, refuse_foreign
from tokenmill.flow.progress import Reporter
from tokenmill.flow.provenance import narrow, whole
from tokenmill.flow.record import Counts, Plan, StageRecord, Unit
from tokenmill.flow.stage import Run, Stage
from tokenmill.flow.workspace import OutputFile, Workspace
from tokenmill.inputs import walk_files
from tokenmill.tokens.contract import PREPROCESS, PairBasis, PairDetails, PairSpec, basis_of, tokenizer_of
from tokenmill.tokens.encoder_store import Encoders
from tokenmill.tokens.engines import REFERENCE
from tokenmill.tokens.options import PreprocessOptions, TokenizerOptions
from tokenmill.tokens.tokenizer import tokenizer_request

if TYPE_CHECKING:
    from tokenmill.tokens.tokenizer import ResolvedTokenizer


KEY = "text"
"""The key that adopted pairs are recorded under: who made them may have had any."""

SUFFIXES = ("bin", "idx")

ENCODER = REFERENCE
"""Nothing is encoded: only Hugging Face's own backend is wanted, which turns ids back into text."""

LOOK_PAIRS, LOOK_DOCUMENTS = 64, 16
"""In how many pairs, and at how many documents at each end of a pair, the planner looks for EOD."""

DAMAGED = (
    "the pair is damaged, or has another format; make it again with the tool that made it, and run the same tokenmill "
    "adopt again"
)


class Pairs(NamedTuple):
    """Pairs to adopt, by their prefixes below `root`; `how` is IN_PLACE or COPIED, `notes` are to be said."""

    root: Path
    output: Path
    how: Adopted
    files: dict[str, tuple[InputFile, InputFile]]
    notes: list[str]

    @property
    def identities(self) -> dict[str, str]:
        """The identities of all files by path."""
        return {file.path: file.identity for pair in self.files.values() for file in pair}


def find_pairs(named: Sequence[Path], output: Path | None) -> Pairs:
    """Find the pairs that prefixes, names of `.bin` or `.idx` files and directories stand for.

    Raises RequestError for a name without a pair, for half a pair, and for what cannot be adopted where it lies.
    """
    notes: list[str] = []
    directories, prefixes = [], []
    for path in named:
        prefix = path.parent / path.name.removesuffix(".bin").removesuffix(".idx")
        present = [suffix for suffix in SUFFIXES if os.path.lexists(f"{prefix}.{suffix}")]
        if path.is_dir() and present:
            raise RequestError(
                f"{path} is a directory, and {prefix}.{present[0]} lies beside it: name {prefix}.{present[0]}, or the "
                "pairs in the directory"
            )
        if path.is_dir():
            directories.append(path.resolve())
            prefixes += _prefixes_below(path.resolve(), output, notes)
        elif present:
            directories.append(prefix.parent.resolve())
            prefixes.append(prefix.parent.resolve() / prefix.name)
        else:
            raise RequestError(
                f"{str(path)!r} is neither a pair of .bin and .idx nor a directory with such pairs; give their path, "
                "with or without the suffix, or their directory"
            )
    common = Path(os.path.commonpath(directories))
    if output is None and common not in directories:
        lie_in = ", ".join(sorted({str(directory) for directory in directories})[:5])
        raise RequestError(
            f"the pairs lie in several directories ({lie_in}), and records lie in one: adopt each directory by itself "
            f"(blend takes several), or all of {common}, or give --output a directory to copy them to"
        )
    how = IN_PLACE if output is None else COPIED
    files = {}
    for prefix in sorted(set(prefixes)):
        name = prefix.relative_to(common).as_posix()
        files[name] = (_file(common, f"{name}.bin", how), _file(common, f"{name}.idx", how))
    notes.append(f"reading {len(files)} pairs in {common}")
    return Pairs(common, output or common, how, files, notes)


def _prefixes_below(directory: Path, output: Path | None, notes: list[str]) -> list[Path]:
    walk = walk_files(directory, output)
    endings = tuple(f".{suffix}" for suffix in SUFFIXES)
    for obstacle in walk.obstacles:
        # One in place of a pair's file is refused where the pair is opened.
        if not obstacle.data_only and not obstacle.path.endswith(endings):
            raise RequestError(obstacle.problem)
    notes.extend(walk.notes)
    names = {name[:-4] for name in walk.files if name.endswith(endings)}
    hidden = [name for name in walk.hidden if name.endswith(endings)]
    if not names:
        other = f"; it has {len(walk.files)} other files, such as {walk.files[0]!r}" if walk.files else ""
        raise RequestError(f"no pair of .bin and .idx lies in {directory}{other}")
    if hidden:
        notes.append(f"left out {len(hidden)} hidden files, such as {hidden[0]!r}")
    if walk.ours:
        more = ", ..." if len(walk.ours) > 3 else ""
        notes.append(f"left out {', '.join(map(str, walk.ours[:3]))}{more}: outputs of tokenmill, which have records")
    return [directory / name for name in names]


def _file(root: Path, name: str, how: str) -> InputFile:
    """Look at half a pair; refuse what is missing, is no regular file, or cannot be recorded."""
    path = root / name
    if not str(path).isprintable():
        raise RequestError(
            f"{str(path)!a}: the name has control characters or is not UTF-8, and names of pairs stand in lists that "
            "Megatron-LM reads line by line; rename the pair"
        )
    try:
        status = path.stat()
    except (FileNotFoundError, NotADirectoryError):
        raise RequestError(
            f"{path}: missing, or a link that leads nowhere; a pair is a .bin and an .idx of the same name: put it "
            "there, or name the pairs to adopt one by one"
        ) from None
    if not stat.S_ISREG(status.st_mode):
        raise RequestError(f"{path}: not a regular file; a pair is a .bin and an .idx: name the pairs to adopt")
    if how == IN_PLACE and Path(os.path.realpath(path)) != path:
        raise RequestError(
            f"{path}: a symbolic link, or below one, to {os.path.realpath(path)}; records beside it would vouch for a "
            "file that lies elsewhere: adopt the directory that it leads to, or give --output a directory to copy to"
        )
    return InputFile(name, _identity(status), status.st_size)


def _identity(status: os.stat_result) -> str:
    return f"{status.st_size}@{status.st_mtime_ns}"


def _refuse_ours(pairs: Pairs, plan: Plan | None) -> None:
    """Refuse an output whose files tokenmill made or copied: a new plan might remove what is to be adopted."""
    if plan is not None and plan.adopted != pairs.how:
        what = f"pairs adopted {plan.adopted}" if plan.adopted else "an output of tokenmill preprocess"
        raise RequestError(
            f"{pairs.output} holds {what}, which has its records: give it to blend, train, inspect or verify as it is; "
            f"to adopt other pairs {pairs.how}, use another directory"
        )


def _units(pairs: Pairs) -> list[Unit]:

    names = list(pairs.files)
    sources = [str(pairs.root / name) for name in names]
    outputs = names if pairs.how == IN_PLACE else distinct(sources, (safe_name(Path(name).name) for name in names))
    return [
        Unit(
            id=unit_id,
            weight=sum(file.bytes or 0 for file in pairs.files[name]),
            spec=PairSpec(output, list(pairs.files[name]), pairs.how),
            outputs=[f"{output}.{suffix}" for suffix in SUFFIXES],
        )
        for name, output, unit_id in zip(names, outputs, distinct(names, map(safe_name, outputs)), strict=True)
    ]


def _settled_eod(pairs: Pairs, tokenizer: "ResolvedTokenizer", reporter: Reporter) -> int | None:
    """Return the tokenizer's EOD where all documents that are looked at end with it; else say so, and None."""
    names = list(pairs.files)
    step = -(-len(names) // LOOK_PAIRS)
    ends = [end for name in names[::step] for end in _look(pairs.root / name, reporter)]
    others = [end for end in ends if end.token != tokenizer.eod_id]
    if not others:
        return tokenizer.eod_id
    some = "none" if len(others) == len(ends) else f"only {len(ends) - len(others)}"
    example = f"document {others[0].document} of {others[0].prefix} ends with {others[0].token}"
    eod = f"{tokenizer.eod_token!r} ({tokenizer.eod_id})" if tokenizer.eod_id is not None else "(no eos token)"
    reporter.warn(
        f"{some} of the {len(ends)} documents that were looked at end with the tokenizer's EOD {eod}: {example}; "
        "adopted as pairs without EOD, where training cannot tell a document's end. If they end with another token, "
        "name it with --eod-token, and --replace"
    )
    return None


class _End(NamedTuple):
    """The last token of a document."""

    prefix: Path
    document: int
    token: int


def _look(prefix: Path, reporter: Reporter) -> Iterator[_End]:
    """Yield how the first and the last documents of a pair end; of a damaged pair nothing, as its unit will say why."""
    from tokenmill.tokens.formats.indexed.reader import DamagedPair, IndexedReader

    try:
        reader = IndexedReader(prefix)
        if reader.dtype.kind == "f":
            return
        if reader.modes.any():
            reporter.warn(
                f"{prefix}: a multimodal pair, some of whose sequences have a mode other than 0; pre-training of a GPT "
                "model reads them all as text"
            )
        last = range(max(LOOK_DOCUMENTS, reader.documents - LOOK_DOCUMENTS), reader.documents)
        for number in (*range(min(LOOK_DOCUMENTS, reader.documents)), *last):
            if (ids := reader.document(number)).size:
                yield _End(prefix, number, int(ids[-1]))
    except (DamagedPair, ValueError):
        return


@dataclass(frozen=True, kw_only=True)
class Adopt(Stage):
    """Check pairs that another tool made, and hash them; they stand where preprocess writes its own.

    `append_eod` None leaves what ends a document to what some documents end with.
    """

    pairs: Pairs
    output: Path
    tokenizer: TokenizerOptions
    append_eod: bool | None = None
    endpoint: str | None = None

    kind: ClassVar = PREPROCESS
    concurrency: ClassVar = "processes"
    resumable: ClassVar = False

    def prepare(self, run: Run, pinned: str | None = None) -> Request:
        """Plan one unit per pair; whoever plans resolves the tokenizer and settles whether EOD ends documents."""

        pairs, append_eod, reporter = self.pairs, self.append_eod, run.reporter
        for note in pairs.notes:
            reporter.say(note)
        options = PreprocessOptions(**vars(self.tokenizer), keys=KEY, append_eod=bool(append_eod), encoder=ENCODER)
        # Not the root: the same pairs give the same plan wherever they lie.
        listing = content_id(sorted(pairs.identities.items()))
        upstream = Upstream(None, listing=listing)
        request: dict[str, Any] = {
            "input": upstream.to_json(),
            "tokenizer": tokenizer_request(options.tokenizer, options.tokenizer_revision),
            "append_eod": append_eod,
            "eod_token": options.eod_token,
            "adopted": pairs.how,
            **options.choices(),
        }
        encoders = Encoders(StageRecord(pairs.output, PREPROCESS))
        plan = encoders.record.read_plan()
        _refuse_ours(pairs, plan)
        if plan is not None and plan.request == request and not encoders.ready(plan, ENCODER):
            known = tokenizer_of(plan)
            again = replace(options, tokenizer_revision=known.revision or options.tokenizer_revision)
            tokenizer = encoders.resolve([], again, request["tokenizer"], self.endpoint, reporter)
            if tokenizer.fingerprint != known.fingerprint:
                raise RequestError(
                    f"the tokenizer {known.reference} is not the one {pairs.output} was adopted with: other versions "
                    "of transformers or tokenizers read it differently; use those"
                )

        def make() -> Plan:
            old = encoders.record.read_plan()
            _refuse_ours(pairs, old)
            units = _units(pairs)
            names = [] if pairs.how == IN_PLACE else [name for unit in units for name in unit.outputs]
            refuse_foreign(encoders.record, old, names)
            tokenizer = encoders.resolve([], options, request["tokenizer"], self.endpoint, reporter)
            eod = tokenizer.eod_id if append_eod else None
            if append_eod is None:
                eod = _settled_eod(pairs, tokenizer, reporter)
            basis = PairBasis(
                tokenizer=tokenizer.fingerprint,
                keys=[KEY],
                eod=eod,
                special_tokens=options.special_tokens,
                dtype=tokenizer.dtype,
                **options.choices(),
            )
            return Plan(
                PREPROCESS.name,
                request,
                units,
                basis=basis.to_json(),
                details=PairDetails(tokenizer).to_json(),
                source=Origin(f"file:{pairs.root.name}", adopted=pairs.how),
                upstream=upstream,
                require="tokens",
            )

        return Request(request, make, pairs.root, inputs=pairs.identities)

    def do(self, unit: Unit, workspace: Workspace, shared: None) -> Counts:
        """Check one pair as `verify` does, and hash it; copied first where it is to lie elsewhere."""
        from tokenmill.tokens.formats.indexed.check import examine

        plan, spec, root = workspace.plan, unit.spec(PairSpec), workspace.input_root
        files = spec.inputs
        source = root / files[0].path.removesuffix(".bin")
        for file in files:
            _check_unchanged(root, file, plan.adopted)
        outputs = _copy(unit, files, workspace) if plan.adopted == COPIED else []
        examination = examine(
            outputs[0].path.with_suffix("") if outputs else source,
            vocab_size=tokenizer_of(plan).vocab_size,
            eod=basis_of(plan).eod,
            foreign=DAMAGED,
            blocks=partial(_blocks, files, outputs, workspace),
            beat=workspace.checkpoint,
        )
        for file in files:
            _check_unchanged(root, file, plan.adopted)
        if examination.problems:
            problems = [
                replace(problem, path=Path(f"{source}{problem.path.suffix}")) for problem in examination.problems
            ]
            raise InputError("\n".join(map(str, problems)))
        index = examination.index
        assert index is not None  # noqa: S101  (else there were problems)
        documents, sequences = len(index.document_indices) - 1, len(index.lengths)
        tokens = index.bin_bytes // index.dtype.itemsize
        workspace.inputs = [InputRange(files[0].path, 0, documents)]
        about = {"key": KEY, "prefix": spec.name}
        counted = {"documents": documents, "sequences": sequences, "tokens": tokens, "dtype": index.dtype.name}
        described: dict[str, dict[str, Any]] = {
            "bin": {"role": "bin", **about, **counted, "parts": narrow(whole(files[0].path), documents)},
            "idx": {"role": "idx", **about},
        }
        if not tokens:  # Megatron-LM cannot map an empty file
            workspace.empty.append(EmptyPair(KEY, spec.name, documents))
        for output in outputs:
            if tokens:
                output.describe(**described[output.final[-3:]])
            else:
                workspace.drop(output)
        if tokens and plan.adopted == IN_PLACE:
            for file in files:
                suffix = file.path[-3:]
                entry = FileEntry(file.path, file.bytes or 0, examination.hashes[suffix], **described[suffix])
                workspace.adopted.append(entry)
        return {"in": documents, "out": documents, "rejected": 0, "blank": 0, "tokens": tokens, "sequences": sequences}


def _copy(unit: Unit, files: Sequence[InputFile], workspace: Workspace) -> list[OutputFile]:
    """Copy a pair into the attempt, blocks shared where the file system can; its hashes are left to `_blocks`."""
    from tokenmill.tokens.formats.indexed.check import BLOCK

    outputs = []
    for file, final in zip(files, unit.outputs, strict=True):
        output, size = workspace.open(final, temporary=final, read_soon=False), file.bytes or 0
        outputs.append(output)
        with (workspace.input_root / file.path).open("rb", buffering=0) as source:
            for offset in range(0, size, BLOCK):
                output.copy_from(source, offset, min(BLOCK, size - offset))
                workspace.checkpoint()
    return outputs


def _blocks(
    files: Sequence[InputFile], outputs: Sequence[OutputFile], workspace: Workspace, path: Path
) -> Iterator[bytes]:
    """Read half of the pair, or of its copy, as far as it was planned, and report the progress."""
    from tokenmill.tokens.formats.indexed.check import BLOCK

    (left,) = (file.bytes or 0 for file in files if file.path.endswith(path.suffix))
    copies = [output for output in outputs if output.path == path]
    with path.open("rb") as opened:
        while left:
            data = opened.read(min(BLOCK, left))
            if not data:
                raise TransientError(f"{path} became shorter while it was read; run the same command again")
            for output in copies:
                output.hash(memoryview(data))
            workspace.checkpoint(len(data))
            left -= len(data)
            yield data


def _check_unchanged(root: Path, file: InputFile, how: str | None) -> None:
    """Refuse a file that is not any more what was planned; a pair that is being written is never whole."""
    status = Tree(root).stat(file.path) if how == IN_PLACE else (root / file.path).stat()
    if status is None or _identity(status) != file.identity:
        raise TransientError(
            f"{root / file.path} is not what it was when it was planned: somebody writes to it. Run the same command "
            "again once it is whole"
        )
