"""`tokenmill inspect`: show a dataset, a document as text with its source, or which of its tokens are trained."""

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, NamedTuple

import msgspec
import typer
from msgspec import UNSET, UnsetType

from tokenmill.cli import options as o
from tokenmill.cli.commands import location
from tokenmill.core.json_lines import make_portable, print_json
from tokenmill.core.printing import printable
from tokenmill.engine.options import Panel
from tokenmill.errors import RequestError

if TYPE_CHECKING:
    from tokenmill.datasets.contract import ResolvedTokenizer
    from tokenmill.datasets.dataset import Dataset
    from tokenmill.engine.contract import EmptyPair, FileEntry, Origin, StageKind
    from tokenmill.tokenize.mask_view import MaskedSequence, SequenceDecoder


MAX_TEXT = 2000
"""Characters of a document that are shown without --all."""


def inspect(
    path: Annotated[
        Path,
        typer.Argument(parser=location, help="Directory of a dataset, or the output of preprocess, chat or pack."),
    ],
    document: Annotated[
        int | None,
        typer.Option(
            "--document",
            rich_help_panel=Panel.INPUT,
            help="Show this document, counted from 0 through all pairs; -1 is the last one.",
        ),
    ] = None,
    row: Annotated[
        int | None,
        typer.Option(
            "--row",
            rich_help_panel=Panel.INPUT,
            help="Show the sequences and mask of this packed row, from 0 through all shards; -1 is the last one.",
        ),
    ] = None,
    mask: Annotated[
        bool,
        typer.Option(
            "--mask",
            rich_help_panel=Panel.OUTPUT,
            help="Show which tokens of the document are trained, in colour or between marks.",
        ),
    ] = False,
    file: Annotated[
        str | None,
        typer.Option(
            "--file",
            rich_help_panel=Panel.INPUT,
            help="Count only in this pair (part-00000-of-00072_text_document) or shard.",
        ),
    ] = None,
    key: Annotated[
        str | None,
        typer.Option(
            "--key", metavar="KEY", rich_help_panel=Panel.INPUT, help="The key to use from a dataset with several keys."
        ),
    ] = None,
    tokenizer: Annotated[
        Path | None,
        typer.Option(
            "--tokenizer",
            rich_help_panel=Panel.INPUT,
            help="With --row: the output that was packed, or its tokenizer's directory. Default: near PATH.",
        ),
    ] = None,
    iteration: Annotated[
        int | None,
        typer.Option(
            "--iteration",
            rich_help_panel=Panel.SAMPLES,
            min=1,
            help="Show the samples of this iteration of a run, with documents and source files.",
        ),
    ] = None,
    rank: Annotated[
        int | None,
        typer.Option("--rank", rich_help_panel=Panel.SAMPLES, min=0, help="Only those of this data-parallel rank."),
    ] = None,
    ranks: Annotated[
        int | None,
        typer.Option("--ranks", rich_help_panel=Panel.SAMPLES, min=1, help="The data-parallel ranks of the run."),
    ] = None,
    micro_batch: Annotated[
        int | None,
        typer.Option(
            "--micro-batch",
            rich_help_panel=Panel.SAMPLES,
            min=1,
            help="The micro-batch, if the run has no record of it.",
        ),
    ] = None,
    run: Annotated[
        Path | None,
        typer.Option(
            "--run",
            rich_help_panel=Panel.SAMPLES,
            metavar="RUN",
            help="With --document: show the iterations of this run that read it.",
        ),
    ] = None,
    phases: Annotated[
        Path | None,
        typer.Option(
            "--phases", rich_help_panel=Panel.SAMPLES, metavar="FILE", help="The file of the phases of the run."
        ),
    ] = None,
    all_text: Annotated[
        bool,
        typer.Option(
            "--all",
            rich_help_panel=Panel.OUTPUT,
            help=f"Show the complete text of the document, not {MAX_TEXT:,} characters.",
        ),
    ] = False,
    json: o.Json = False,
) -> None:
    """Show a dataset, a document, or its loss tokens.

    A dataset is shown with its pairs and tokenizer, a document with its text and source.

    Examples:
        tokenmill inspect out
        tokenmill inspect out --document 3
    """
    _check_usage(document, row, mask, file, key, tokenizer)
    if iteration is not None:
        from tokenmill.reports.steps import find_step, to_text

        step = find_step(path, iteration, rank=rank, ranks=ranks, micro_batch=micro_batch, phases=phases)
        if json:
            print_json(step, make_portable)
        else:
            sys.stdout.write(f"{to_text(step)}\n")
        return
    if run is not None:
        _show_iterations(path, document, key, file, run, phases, json=json)
        return
    if row is not None:
        shown = _show_row(path, row, file, tokenizer)
    elif document is None:
        shown = _show_output(path)
    else:
        shown = _show_document(path, document, key, file, mask=mask)
    if json:
        print_json(shown.content)
        return
    sys.stdout.write("".join(f"{printable(line)}\n" for line in shown.lines))
    if shown.text is not None:
        from tokenmill.tokenize.mask_view import escape

        text = shown.text if all_text else shown.text[:MAX_TEXT]
        sys.stdout.write(f"{escape(text)}\n")
        if len(text) < len(shown.text):
            sys.stdout.write(f"... and {len(shown.text) - len(text):,} more characters; --all shows them\n")
    if shown.sequences is not None:
        _print_sequences(shown)


def _show_iterations(
    path: Path, document: int | None, key: str | None, file: str | None, run: Path, phases: Path | None, *, json: bool
) -> None:
    """Show the iterations of a run that read a document."""
    from tokenmill.datasets.dataset import find_dataset, find_document
    from tokenmill.reports.steps import find_iterations, to_sentences

    if document is None:
        raise typer.BadParameter("--run shows the iterations that read a document; add --document")
    dataset = find_dataset(path, _pair_kinds())
    chosen = find_document(dataset, document, key=key, prefix=file)
    iterations = find_iterations(run, dataset.record.output / chosen.pair.prefix, chosen.number, phases)
    if json:
        print_json(iterations, make_portable)
    else:
        sys.stdout.write("".join(f"{line}\n" for line in to_sentences(iterations)))


def _check_usage(
    document: int | None, row: int | None, mask: bool, file: str | None, key: str | None, tokenizer: Path | None
) -> None:
    """Raise typer.BadParameter for options that do not belong together."""
    if document is not None and row is not None:
        raise typer.BadParameter("--document shows a document of pairs, and --row a row of a pack; choose one of them")
    if document is None and row is None:
        if file or key:
            raise typer.BadParameter("--file and --key select the documents to count; add --document")
        if mask:
            raise typer.BadParameter("--mask shows the loss tokens of a document; add --document")
    if row is None and tokenizer:
        raise typer.BadParameter("--tokenizer decodes a packed row; add --row, or remove --tokenizer")
    if row is not None and key:
        raise typer.BadParameter("--key selects pairs, but a packed row has no keys; remove --key")


class InspectedPair(msgspec.Struct, frozen=True):
    """A pair of an output."""

    prefix: str
    documents: int
    sequences: int
    tokens: int


class InspectedDataset(msgspec.Struct, frozen=True):
    """The JSON of an output with pairs."""

    output: Path
    source: "Origin"
    tokenizer: "ResolvedTokenizer"
    counts: dict[str, int]
    pairs: list[InspectedPair]
    empty: "list[EmptyPair]"


class InspectedView(msgspec.Struct, frozen=True):
    """A view of a pair: ranges of its tokens."""

    prefix: str
    source: str
    ranges: int
    tokens: int


class InspectedViews(msgspec.Struct, frozen=True):
    """The JSON of a directory of views."""

    views: list[InspectedView]


class InspectedShard(msgspec.Struct, frozen=True):
    """A shard of a pack."""

    path: str
    rows: int | None
    sequences: int
    tokens: int


class InspectedPack(msgspec.Struct, frozen=True, kw_only=True):
    """The JSON of an output with packed rows."""

    output: Path
    source: "Origin"
    tokenizer: "ResolvedTokenizer"
    counts: dict[str, int]
    pack_size: int
    format: str
    shards: list[InspectedShard]


class TrainedText(msgspec.Struct, frozen=True):
    """A part of a sequence's text, and whether its tokens are trained."""

    text: str
    trained: bool


class RecordPlace(msgspec.Struct, frozen=True):
    """The source file and the number of a record."""

    file: str
    record: int


class InspectedSequence(msgspec.Struct, frozen=True):
    """A sequence: its ids, their trained spans, and its text; only the sequences of a row have a source each."""

    tokens: list[int]
    trained_tokens: int
    trained: list[tuple[int, int]]
    text: list[TrainedText]
    source: RecordPlace | UnsetType = UNSET


class DocumentSource(msgspec.Struct, frozen=True):
    """The fields of the `Origin` of a document, and the file and the number of its record."""

    uri: str | UnsetType
    revision: str | UnsetType | None
    adopted: str | UnsetType
    file: str | None
    record: int | None


class InspectedDocument(msgspec.Struct, frozen=True):
    """The JSON of a document: with its text, or with --mask its sequences."""

    document: int
    pair: str
    tokens: list[int]
    source: DocumentSource
    text: str | UnsetType = UNSET
    sequences: list[InspectedSequence] | UnsetType = UNSET


class InspectedRow(msgspec.Struct, frozen=True):
    """The JSON of a packed row."""

    row: int
    shard: str
    source: "Origin"
    sequences: list[InspectedSequence]


class _Shown(NamedTuple):
    """The content of an output: its JSON, its lines of text, and the sequences whose mask is shown below them.

    `sources` has the source file and the record of each sequence, if they are not the same for all.
    """

    content: InspectedDataset | InspectedViews | InspectedPack | InspectedDocument | InspectedRow
    lines: list[str]
    text: str | None = None
    sequences: "list[MaskedSequence] | None" = None
    decoder: "SequenceDecoder | None" = None
    sources: Sequence[tuple[str, int]] = ()


def _is_only_pack(path: Path) -> bool:
    """Return whether a directory has an output of pack and no pairs."""
    from tokenmill.engine.stage_input import find_records
    from tokenmill.stages.registry import PACK

    return next(find_records(path, _pair_kinds()), None) is None and next(find_records(path, [PACK]), None) is not None


def _show_output(path: Path) -> _Shown:
    """Describe an output: its pairs, or its shards if it is a pack without pairs next to it."""
    from tokenmill.datasets.dataset import find_dataset
    from tokenmill.engine.record import describe_rejected
    from tokenmill.samples.phases.views import list_views
    from tokenmill.stages.registry import PACK

    if views := list_views(path):
        return _show_views(views)
    if _is_only_pack(path):
        return _show_pack(find_dataset(path, [PACK]))
    dataset = find_dataset(path, _pair_kinds())
    source, tokenizer, counts = dataset.manifest.source, dataset.tokenizer, dataset.manifest.counts
    pairs = [InspectedPair(pair.prefix, pair.documents, pair.sequences, pair.tokens) for pair in dataset.pairs]
    content = InspectedDataset(dataset.record.output, source, tokenizer, counts, pairs, dataset.manifest.empty)
    lines = [
        f"dataset {dataset.record.output}",
        f"source: {_describe_origin(dataset)}",
        f"tokenizer: {tokenizer.reference}, {tokenizer.vocab_size:,} entries, ids as "
        f"{', '.join(dataset.dtypes)}, {_describe_eod(dataset)}",
        *(f"{pair.prefix}: {_count_documents(dataset, pair)}, {pair.tokens:,} tokens" for pair in dataset.pairs),
        *(
            f"{pair.prefix}: {pair.documents:,} documents without tokens: not written"
            for pair in dataset.manifest.empty
        ),
        *([f"trained: {counts['trained']:,} of {counts['tokens']:,} tokens"] if dataset.basis.mask else []),
        *filter(None, [describe_rejected(counts, dataset.record.output)]),
    ]
    return _Shown(content, lines)


def _show_views(prefixes: list[Path]) -> _Shown:
    from tokenmill.datasets.formats.indexed.reader import find_source, read_view

    views = [
        InspectedView(str(prefix), str(find_source(prefix, record)), record.sequences, record.tokens)
        for prefix in prefixes
        if (record := read_view(prefix)) is not None
    ]
    lines = [f"view {view.prefix}: {view.ranges:,} ranges, {view.tokens:,} tokens of {view.source}" for view in views]
    return _Shown(InspectedViews(views), lines)


def _show_pack(dataset: "Dataset") -> _Shown:
    from tokenmill.packs.contract import PackBasis, PackDetails
    from tokenmill.packs.view import list_shards

    source, counts, output = dataset.manifest.source, dataset.manifest.counts, dataset.record.output
    basis = PackBasis.from_json(dataset.plan.basis)
    tokenizer, shards = PackDetails.from_json(dataset.plan.details).tokenizer, list_shards(dataset.manifest)
    content = InspectedPack(
        output=output,
        source=source,
        tokenizer=tokenizer,
        counts=counts,
        pack_size=basis.pack_size,
        format=basis.format,
        shards=[InspectedShard(shard.path, shard.records, shard.sequences, shard.tokens) for shard in shards],
    )
    lines = [
        f"packed rows {output}",
        f"source: {_describe_origin(dataset)}",
        f"tokenizer: {tokenizer.reference}, {tokenizer.vocab_size:,} entries",
        f"rows of at most {basis.pack_size:,} tokens, in the format {basis.format}",
        *(
            f"{shard.path}: {shard.records:,} rows, {shard.sequences:,} sequences, {shard.tokens:,} tokens"
            for shard in shards
        ),
        f"trained: {counts['trained']:,} of {counts['tokens']:,} tokens",
    ]
    return _Shown(content, lines)


def _count_documents(dataset: "Dataset", pair: "FileEntry") -> str:
    """Describe the documents of a pair, which are rows if they are packed."""
    if dataset.basis.rows is None:
        return f"{pair.documents:,} documents"
    return f"{pair.documents:,} rows of {dataset.basis.rows.pack_size:,} tokens, {pair.sequences:,} sequences"


def _show_document(path: Path, number: int, key: str | None, file: str | None, *, mask: bool) -> _Shown:
    from tokenmill.datasets.dataset import find_dataset, find_document
    from tokenmill.datasets.formats.indexed.reader import list_origins
    from tokenmill.samples.phases.views import list_views
    from tokenmill.tokenize.encoder_store import Encoders
    from tokenmill.tokenize.mask_view import SequenceDecoder, read_masked_document
    from tokenmill.tokenize.tokenizer import decode

    if views := list_views(path):
        raise RequestError(
            f"{path} has views, which number documents differently; specify {next(list_origins(views[0])).parent}"
        )
    if _is_only_pack(path):
        raise RequestError(
            f"{path} has packed rows and no documents; set --row {number} instead of --document, or specify the input "
            "of the pack"
        )
    dataset = find_dataset(path, _pair_kinds())
    source = dataset.manifest.source
    shown = find_document(dataset, number, key=key, prefix=file)
    name, record = shown.source or (None, None)
    place = DocumentSource(source.uri, source.revision, source.adopted, name, record)
    content = InspectedDocument(shown.number, shown.pair.prefix, shown.ids, place)
    kind = "row" if dataset.basis.rows else "document"
    lines = [
        f"{kind} {shown.number} of {dataset.record.output / shown.pair.prefix}: {len(shown.ids):,} tokens",
        *([f"from record {record} (counted from 0, blank lines not counted) of {name}"] if shown.source else []),
        f"in {_describe_origin(dataset)}",
        "",
    ]
    backend = Encoders(dataset.record).backend(dataset.basis)
    if mask:
        sequences, decoder = read_masked_document(dataset, shown), SequenceDecoder(backend)
        content = msgspec.structs.replace(content, sequences=_describe_sequences(sequences, decoder))
        return _Shown(content, lines, sequences=sequences, decoder=decoder)
    eod = dataset.basis.eod
    text = decode(backend, shown.ids[:-1] if shown.ids and shown.ids[-1] == eod else shown.ids)
    return _Shown(msgspec.structs.replace(content, text=text), lines, text)


def _show_row(path: Path, number: int, file: str | None, tokenizer: Path | None) -> _Shown:
    from tokenmill.datasets.dataset import find_dataset
    from tokenmill.packs.view import find_tokenizer, read_packed_row
    from tokenmill.stages.registry import PACK
    from tokenmill.tokenize.mask_view import SequenceDecoder

    dataset = find_dataset(path, [PACK])
    row = read_packed_row(dataset.record, dataset.plan, dataset.manifest, number, file)
    decoder = SequenceDecoder(find_tokenizer(dataset.record, dataset.plan, _pair_kinds(), tokenizer))
    tokens = sum(len(sequence.ids) for sequence in row.sequences)
    sequences = _describe_sequences(row.sequences, decoder, row.sources)
    content = InspectedRow(row.number, row.shard.path, dataset.manifest.source, sequences)
    lines = [
        f"row {row.number} of {dataset.record.output / row.shard.path}: {len(row.sequences):,} sequences, "
        f"{tokens:,} tokens",
        f"in {_describe_origin(dataset)}",
        "the stored mask is shifted: it has 1 where the next token is trained. Here, a loss token itself is shown",
        "",
    ]
    return _Shown(content, lines, None, row.sequences, decoder, row.sources)


def _describe_sequences(
    sequences: "Sequence[MaskedSequence]", decoder: "SequenceDecoder", sources: Sequence[tuple[str, int]] = ()
) -> list[InspectedSequence]:
    """Describe the sequences for JSON; `sources` has the source file and the record of each of the first ones."""
    from tokenmill.tokenize.mask_view import join_parts

    return [
        InspectedSequence(
            sequence.ids,
            sequence.trained_count,
            sequence.spans,
            [TrainedText(text, trained) for text, trained in join_parts(decoder.cut(sequence))],
            RecordPlace(*sources[number]) if number < len(sources) else UNSET,
        )
        for number, sequence in enumerate(sequences)
    ]


def _print_sequences(shown: _Shown) -> None:
    from tokenmill.tokenize.mask_view import MaskPrinter

    assert shown.sequences is not None and shown.decoder is not None  # noqa: S101
    printer = MaskPrinter()
    sys.stdout.write(f"{printer.legend}\n")
    for number, sequence in enumerate(shown.sequences):
        origin = ""
        if number < len(shown.sources):
            name, record = shown.sources[number]
            origin = f", from record {record} of {printable(name)}"
        sys.stdout.write(
            f"\nsequence {number}: {len(sequence.ids):,} tokens, {sequence.trained_count:,} trained{origin}\n"
        )
        printer.print(shown.decoder.cut(sequence))


def _pair_kinds() -> "list[StageKind]":
    """Return the kinds of the stages whose outputs are pairs."""
    from tokenmill.stages.registry import CHAT, PREPROCESS

    return [PREPROCESS, CHAT]


def _describe_eod(dataset: "Dataset") -> str:
    eod = dataset.basis.eod
    return "no EOD" if eod is None else f"EOD {dataset.tokenizer.eod_token!r} ({eod})"


def _describe_origin(dataset: "Dataset") -> str:
    from tokenmill.reports.stages import find_source

    source, place = dataset.manifest.source, find_source(dataset.record, dataset.plan)
    if source.adopted:
        return f"{place}, adopted {source.adopted}; the source text is not recorded"
    return f"{place} at revision {source.commit}" if source.commit else place
