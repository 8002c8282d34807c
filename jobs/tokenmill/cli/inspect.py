"""`tokenmill inspect`: show a dataset, or a document as text with its source."""

import json as jsonlib
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from tokenmill.cli import options as o

if TYPE_CHECKING:
    from tokenmill.flow.contract import Origin
    from tokenmill.tokens.dataset import Dataset


def inspect(
    path: Annotated[Path, typer.Argument(help="Directory of a dataset, or the output of preprocess.")],
    document: Annotated[
        int | None,
        typer.Option("--document", help="Show this document, counted from 0 through all pairs; -1 is the last one."),
    ] = None,
    file: Annotated[
        str | None, typer.Option("--file", help="Count only in this pair (part-00000-of-00072_text_document).")
    ] = None,
    key: Annotated[str | None, typer.Option("--key", help="The key to use from a dataset with several keys.")] = None,
    json: o.Json = False,
) -> None:
    """Show a dataset's pairs and tokenizer; with --document, a document's text and its source file and revision."""
    from tokenmill.flow.record import describe_rejected
    from tokenmill.tokens.dataset import find_dataset, find_document
    from tokenmill.tokens.tokenizer import decode

    if document is None and (file or key):
        raise typer.BadParameter("--file and --key select the documents to count; add --document")
    dataset = find_dataset(path)
    source, tokenizer = dataset.manifest.source, dataset.tokenizer
    if document is None:
        event: dict[str, Any] = {
            "output": str(dataset.record.output),
            "source": source,
            "tokenizer": tokenizer.to_json(),
            "counts": dataset.manifest.counts,
            "pairs": [
                {name: getattr(pair, name) for name in ("prefix", "documents", "sequences", "tokens")}
                for pair in dataset.pairs
            ],
            "empty": [pair.to_json() for pair in dataset.manifest.empty],
        }
        lines = [
            f"dataset {dataset.record.output}",
            f"source: {_describe_origin(source)}",
            f"tokenizer: {tokenizer.reference}, {tokenizer.vocab_size:,} entries, ids as "
            f"{', '.join(dataset.dtypes)}, {_describe_eod(dataset)}",
            *(f"{pair.prefix}: {pair.documents:,} documents, {pair.tokens:,} tokens" for pair in dataset.pairs),
            *(
                f"{pair.prefix}: {pair.documents:,} documents without tokens: not written"
                for pair in dataset.manifest.empty
            ),
            *filter(None, [describe_rejected(dataset.manifest.counts, dataset.record.output)]),
        ]
    else:
        shown = find_document(dataset, document, key=key, prefix=file)
        eod = dataset.basis.eod
        ids = shown.ids[:-1] if shown.ids and shown.ids[-1] == eod else shown.ids
        text = decode(dataset.backend, ids)
        name, record = shown.source or (None, None)
        event = {
            "document": shown.number,
            "pair": shown.pair.prefix,
            "tokens": shown.ids,
            "text": text,
            "source": {**source.to_json(), "file": name, "record": record},
        }
        lines = [
            f"document {shown.number} of {dataset.record.output / shown.pair.prefix}: {len(shown.ids):,} tokens",
            f"from record {record} (counted from 0, blank lines not counted) of {name}",
            f"in {_describe_origin(source)}",
            "",
            text,
        ]
    sys.stdout.write(jsonlib.dumps(event) + "\n" if json else "\n".join(lines) + "\n")


def _describe_eod(dataset: "Dataset") -> str:
    eod = dataset.basis.eod
    return "no EOD" if eod is None else f"EOD {dataset.tokenizer.eod_token!r} ({eod})"


def _describe_origin(source: "Origin") -> str:
    if source.adopted:
        return f"{source.uri}, adopted {source.adopted}; the source text is not recorded"
    return f"{source.uri} at revision {source.commit}" if source.commit else f"{source.uri}, which has no revisions"
