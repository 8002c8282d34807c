"""preprocess: JSONL, plain or compressed, or Parquet -> `<name>_<key>_document.{bin,idx}`, as Megatron-LM writes it.

The last data stage. A unit is one output pair per key, made from one input file or from a run of them
(`--target-files`). Work is journaled at input-file boundaries: a killed attempt is taken over there.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, closing, contextmanager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from tokenmill.corpus.kinds import LINES
from tokenmill.errors import InputError, RequestError
from tokenmill.files.paths import safe_name
from tokenmill.flow.lineage import DataFile, Dataset
from tokenmill.flow.partition import groups
from tokenmill.flow.planning import refuse_foreign
from tokenmill.flow.progress import Reporter
from tokenmill.flow.record import REJECTED, Counts, Plan, StageRecord, Unit
from tokenmill.flow.stage import Job
from tokenmill.flow.workspace import Workspace
from tokenmill.tokens.contract import PREPROCESS, PairBasis, PairDetails, PairSpec, tokenizer_of
from tokenmill.tokens.encoder_store import Encoders, Recipe
from tokenmill.tokens.unit_tokenizer import SharedByUnits, Tokenising

if TYPE_CHECKING:
    from tokenmill.corpus.readers import Batch
    from tokenmill.corpus.source import Patience
    from tokenmill.stages.stream import Stream
    from tokenmill.tokens.workers.pool import EncoderProcesses


MANY_INPUTS = 1024
"""Up to this many inputs each gets an output of its own; Megatron-LM loads fewer than 32,767 datasets."""
FEW_OUTPUTS = 256
"""Outputs made of more inputs than MANY_INPUTS."""
WORTH_A_PROCESS = 8 << 20
"""Bytes of input for which another encoder process is worth what it takes until its table of words is warm."""
FIRST_BYTES = 1 << 20
"""How much of the first records is looked at for the keys."""


class Found(NamedTuple):
    """The files to tokenise, what they come from, and local paths of some files, or of their beginnings, to look at."""

    files: list[DataFile]
    upstream: dict[str, Any]
    source: dict[str, Any]
    beginnings: Callable[[], AbstractContextManager[list[Path]]]


class Corpus(NamedTuple):
    """What is tokenised: `request` names it in the plan, and `find` lists it for whoever makes the plan."""

    request: dict[str, Any]
    find: Callable[[], Found]


def local(dataset: Dataset) -> Corpus:
    """Tokenise the files of an earlier stage, or files somebody brought."""

    def beginnings() -> AbstractContextManager[list[Path]]:
        return nullcontext([dataset.root / file.path for file in dataset.readable])

    found = Found(dataset.files, dataset.upstream, dataset.source, beginnings)
    return Corpus({"input": dataset.upstream}, lambda: found)


def streamed(stream: "Stream", wanted: str | None, say: Callable[[str], None], patience: "Patience") -> Corpus:
    """Tokenise the shards of a source, which come one by one; `wanted` is their format."""

    def find() -> Found:
        shards, source = stream.find(wanted, say, patience)
        return Found(shards, {}, source, lambda: stream.heads(shards, wanted, source["revision"], say, patience))

    return Corpus({"source": stream.request()}, find)


def prepare(
    corpus: Corpus, output: Path, recipe: Recipe, *, encoder: str, endpoint: str | None, reporter: Reporter
) -> tuple[dict[str, Any], Callable[[], Plan]]:
    """Plan one unit per output; whoever makes the plan resolves the tokenizer and judges the encoders."""
    from tokenmill.flow.output_names import check_label
    from tokenmill.tokens.tokenizer import tokenizer_request

    if len(set(recipe.keys)) != len(recipe.keys) or not all(recipe.keys):
        raise RequestError(f"--keys {','.join(recipe.keys)!r}: name each key once, and none that is empty")
    for key in recipe.keys:
        if "/" in key:
            raise RequestError(f"--keys {key}: the key is part of the outputs' names and may hold no /")
    check_label(recipe.name)
    if recipe.reading.format == "txt" and len(recipe.keys) > 1:
        raise RequestError(
            f"--keys {','.join(recipe.keys)}: a text has no keys; with --format txt give one, to name it"
        )
    request: dict[str, Any] = {
        **corpus.request,
        "tokenizer": tokenizer_request(recipe.tokenizer, recipe.tokenizer_revision),
        "keys": list(recipe.keys),
        "append_eod": recipe.append_eod,
        "eod_token": recipe.eod_token,
        "special_tokens": recipe.special_tokens,
        "target_files": recipe.target_files,
        "name": recipe.name,
        **recipe.choices(),
        **_format(recipe),
    }

    encoders = Encoders(StageRecord(output, PREPROCESS))
    plan = encoders.record.read_plan()
    if plan is not None and plan.request == request and not encoders.ready(plan, encoder):
        known = tokenizer_of(plan)
        # Of a branch, the commit that was planned with: the branch may have moved since.
        again = recipe._replace(tokenizer_revision=known.revision or recipe.tokenizer_revision)
        with corpus.find().beginnings() as paths:
            found = encoders.resolve(paths, again, request["tokenizer"], encoder, endpoint, reporter)
        if found.fingerprint != known.fingerprint:
            raise RequestError(
                f"the tokenizer {known.reference} is not the one {output} was begun with: other versions of "
                "transformers or tokenizers read it differently; use those, or choose another output directory"
            )

    def make() -> Plan:
        found = corpus.find()
        units = _units(found.files, recipe)
        refuse_foreign(encoders.record, encoders.record.read_plan(), units)
        with found.beginnings() as paths:
            _check_keys(paths, recipe)
            tokenizer = encoders.resolve(paths, recipe, request["tokenizer"], encoder, endpoint, reporter)
        basis = PairBasis(
            tokenizer=tokenizer.fingerprint,
            keys=list(recipe.keys),
            eod=tokenizer.eod_id if recipe.append_eod else None,
            special_tokens=recipe.special_tokens,
            dtype=tokenizer.dtype,
            **recipe.choices(),
            **_format(recipe),
        )
        return Plan(
            PREPROCESS.name,
            request,
            units,
            basis=basis.to_json(),
            details=PairDetails(tokenizer).to_json(),
            source=found.source,
            upstream=found.upstream,
            require="tokens",
        )

    return request, make


def _format(recipe: Recipe) -> dict[str, str]:
    """Return what the plan has of the format; nothing where none was asked for."""
    wanted = recipe.reading.format
    document = {"txt_document": "line" if recipe.reading.lines else "file"} if wanted == "txt" else {}
    return {"format": wanted, **document} if wanted else {}


def _units(files: list[DataFile], recipe: Recipe) -> list[Unit]:
    from tokenmill.flow.output_names import distinct, flat

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
            spec=PairSpec(name, [files[i].input for i in run]),
            outputs=[
                *(f"{name}_{key}_document.{kind}" for key in recipe.keys for kind in ("bin", "idx")),
                f"{REJECTED}/{name}.jsonl",
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
                    f"{other.inputs[0].path} and {unit.inputs[0].path} with the keys "
                    f"{', '.join(recipe.keys)} would both make {name}; give --target-files {count}, which numbers the "
                    "outputs instead of naming them after the inputs"
                )
    return units


def _stem(path: str) -> str:
    from tokenmill.suffixes import LINE_SUFFIXES, strip_compression

    stem = strip_compression(path)[0]
    for suffix in (*LINE_SUFFIXES, ".parquet", ".arrow", ".txt"):
        if stem.lower().endswith(suffix) and len(stem) > len(suffix):
            return stem[: -len(suffix)]
    return stem


def _check_keys(paths: Sequence[Path], recipe: Recipe) -> None:
    """Refuse keys that none of the first records has: a wrong key, not bad records."""
    from tokenmill.corpus.foreign import CHAT, ForeignContent, unlike_json
    from tokenmill.corpus.readers import unit_of

    foreign: ForeignContent | None = None
    for path in paths:
        try:
            batch = _first_records(path, recipe)
        except ForeignContent as error:  # of one file among others its unit will say so
            foreign = foreign or error
            continue
        if batch and batch.documents:
            return
        if batch:
            first = batch.rejected[0]
            unit = unit_of(path, recipe.reading, batch.kind)
            where = f"{path}: none of the first {batch.records} records can be taken; {unit} {first.line}"
            if CHAT in first.reason:
                raise InputError(f"{where}: {first.reason}")
            hint = unlike_json(first.raw) if batch.kind == LINES and recipe.reading.format in (None, "jsonl") else ""
            unless = ", or, if the file is no data, leave it out with --exclude" if len(paths) > 1 else ""
            raise InputError(f"{where}: {first.reason}; {hint or 'choose the key with --keys'}{unless}")
    if foreign:
        raise foreign


def _first_records(path: Path, recipe: Recipe) -> "Batch | None":
    """Return a file's first batch with a record; None of one that is empty, or damaged before: its unit will say so."""
    from tokenmill.corpus.foreign import ForeignContent
    from tokenmill.corpus.readers import LOOK_BYTES, read_documents

    look = LOOK_BYTES
    try:
        for batch in read_documents(
            path, recipe.keys, display=str(path), batch_bytes=FIRST_BYTES, on_bad="quarantine", reading=recipe.reading
        ):
            look -= batch.bytes
            if batch.records or look <= 0:
                return batch if batch.records else None
    except ForeignContent:
        raise
    except InputError:
        pass
    return None


class Preprocess:
    """Tokenise runs of files into pairs."""

    kind: Final = PREPROCESS
    concurrency: Final = "threads"
    resumable: Final = True

    @contextmanager
    def shared(
        self, job: Job, plan: Plan, todo: Sequence[Unit], warn: Callable[[str], None]
    ) -> Iterator[SharedByUnits]:
        """Have the encoder processes load the encoder: as many as there are, and no more than the work is worth."""
        settings = job.settings
        processes: EncoderProcesses = settings["encoders"]
        stream: Stream | None = settings["stream"]
        with (
            stream.shards(plan.source["revision"], warn) if stream else nullcontext() as shards,
            closing(processes),
        ):
            worth = 1 + sum(unit.weight for unit in todo) // WORTH_A_PROCESS
            processes.begin(Encoders(job.record).task(plan, settings["encoder"], settings["verify_encoder"]), worth)
            yield SharedByUnits(processes, shards)

    def do(self, unit: Unit, workspace: Workspace) -> Counts:
        """Tokenise one output's files in order."""
        return Tokenising(unit, workspace).run()
