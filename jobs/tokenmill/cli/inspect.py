"""`tokenmill inspect`: a document as text, and where it came from."""

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
    path: Annotated[Path, typer.Argument(help="A dataset's directory, or the output of preprocess.")],
    document: Annotated[
        int | None,
        typer.Option("--document", help="Show this document, counted from 0 through the pairs; -1 is the last."),
    ] = None,
    file: Annotated[
        str | None, typer.Option("--file", help="Count within this pair (part-00000-of-00072_text_document).")
    ] = None,
    key: Annotated[str | None, typer.Option("--key", help="Of a dataset with several keys, this one.")] = None,
    json: o.Json = False,
) -> None:
    """Show a dataset's pairs and tokenizer; with --document, a document's text and its source file and revision."""
    from tokenmill.flow.record import kept_aside
    from tokenmill.tokens.dataset import find_dataset, find_document
    from tokenmill.tokens.tokenizer import decode

    if document is None and (file or key):
        raise typer.BadParameter("--file and --key choose among documents: give --document as well")
    dataset = find_dataset(path)
    source, tokenizer = dataset.manifest.source, dataset.tokenizer
    if document is None:
        facts: dict[str, Any] = {
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
            f"source: {_origin(source)}",
            f"tokenizer: {tokenizer.reference}, {tokenizer.vocab_size:,} entries, ids as "
            f"{', '.join(dataset.dtypes)}, {_eod(dataset)}",
            *(f"{pair.prefix}: {pair.documents:,} documents, {pair.tokens:,} tokens" for pair in dataset.pairs),
            *(
                f"{pair.prefix}: {pair.documents:,} documents without tokens: left out"
                for pair in dataset.manifest.empty
            ),
            *filter(None, [kept_aside(dataset.manifest.counts, dataset.record.output)]),
        ]
    else:
        found = find_document(dataset, document, key=key, prefix=file)
        eod = dataset.basis.eod
        ids = found.ids[:-1] if found.ids and found.ids[-1] == eod else found.ids
        text = decode(dataset.backend, ids)
        name, record = found.source or (None, None)
        facts = {
            "document": found.number,
            "pair": found.pair.prefix,
            "tokens": found.ids,
            "text": text,
            "source": {**source.to_json(), "file": name, "record": record},
        }
        lines = [
            f"document {found.number} of {dataset.record.output / found.pair.prefix}: {len(found.ids):,} tokens",
            f"from record {record} (counted from 0, blank lines not counted) of {name}",
            f"in {_origin(source)}",
            "",
            text,
        ]
    sys.stdout.write(jsonlib.dumps(facts) + "\n" if json else "\n".join(lines) + "\n")


def _eod(dataset: "Dataset") -> str:
    eod = dataset.basis.eod
    return "no EOD" if eod is None else f"EOD {dataset.tokenizer.eod_token!r} ({eod})"


def _origin(source: "Origin") -> str:
    if source.adopted:
        return f"{source.uri}, adopted {source.adopted}: no record says which text it was made from"
    return f"{source.uri} at revision {source.commit}" if source.commit else f"{source.uri}, which has no revisions"
