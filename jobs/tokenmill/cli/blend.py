"""`tokenmill blend`: weights over finished datasets, in Megatron-LM's own form or as values for the chart."""

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from tokenmill.cli import options as o

if TYPE_CHECKING:
    from tokenmill.training.settings import Part

PART = "PART[=WEIGHT]"


def blend(
    out: Annotated[Path, typer.Argument(metavar="OUT", help="File to write.")],
    parts: Annotated[
        list[str],
        typer.Argument(metavar=f"{PART}...", help="Outputs of preprocess, or single pairs of one, to train on."),
    ],
    by: Annotated[
        str, typer.Option("--by", help="tokens, documents or bytes: what a part without weight counts for; or given.")
    ] = "tokens",
    split: Annotated[
        str | None,
        typer.Option("--split", metavar="A,B,C", help="Cut every part so; 990,9,1 unless other parts are held out."),
    ] = None,
    validation: Annotated[
        list[str], typer.Option("--validation", metavar=PART, help="Validate on this instead; repeatable.")
    ] = [],  # noqa: B006 - typer copies it
    test: Annotated[list[str], typer.Option("--test", metavar=PART, help="Test on this instead; repeatable.")] = [],  # noqa: B006
    key: Annotated[str | None, typer.Option("--key", help="Of datasets with several keys, this one.")] = None,
    tokens: Annotated[
        float | None, typer.Option("--tokens", min=1, help="Tokens to train on, for the epochs (such as 300e9).")
    ] = None,
    values: Annotated[bool, typer.Option("--values", help="Write values for the training chart instead.")] = False,
) -> None:
    """Weight datasets against each other and write what Megatron-LM reads (or, with --values, the chart)."""
    from tokenmill.errors import RequestError
    from tokenmill.files import explained, write_atomic
    from tokenmill.training import data
    from tokenmill.training import settings as s

    o.one_of("--by", by, "tokens", "documents", "bytes", "given")
    held_out = bool(validation or test)
    if held_out and split:
        raise RequestError(
            "--split cuts every part, --validation and --test name parts of their own: give one or the other"
        )
    lists = {"train" if held_out else "all": [_part(word) for word in parts]}
    lists |= {"validation": [_part(word) for word in validation], "test": [_part(word) for word in test]}
    chosen = s.Blend(**lists, by=by)  # type: ignore[arg-type]
    corpus = data.gather(s.Dataset(blend=chosen, key=key, split=split or "990,9,1"), None)
    flags, _, content = data.listing(corpus)
    if values:
        content = _values(chosen, corpus, key)
    elif content is None:  # one pair, which needs no file
        content = f"1.0 {corpus.train[0].pairs[0].prefix}\n".encode()
        flags = ["--data-args-path"]
    with explained(out):
        write_atomic(out.absolute(), content)
    for line in _table(corpus, tokens):
        sys.stdout.write(line + "\n")
    said = f"-f {out}" if values else " ".join([*flags, str(out), *(["--split", corpus.split] if corpus.split else [])])
    sys.stdout.write(f"{'values for the chart' if values else 'for Megatron-LM'}: {said}\n")


def _part(word: str) -> "Part":
    """Take a word apart; a path that holds = itself needs a weight, or must exist."""
    from tokenmill.errors import RequestError
    from tokenmill.training import settings as s

    path, equals, weight = word.rpartition("=")
    if not equals or Path(word).exists():
        return s.Part(path=word)
    try:
        return s.Part(path=path, weight=float(weight))
    except ValueError:
        raise RequestError(f"{word}: {weight!r} is no weight; give {PART}") from None


def _values(chosen: Any, corpus: Any, key: str | None) -> bytes:
    """Word the chart's values: paths as they were given, weights as they came out."""
    import yaml

    shares: dict[str, Any] = {
        name: [{"path": source.path, "weight": source.share} for source in sources]
        for name, sources in corpus.lists.items()
    }
    dataset: dict[str, Any] = {"blend": {**shares, "by": "given"}}
    dataset |= {"split": corpus.split} if corpus.split else {}
    dataset |= {"key": key} if key else {}
    return yaml.safe_dump({"dataset": dataset}, sort_keys=False).encode()


def _table(corpus: Any, tokens: float | None) -> list[str]:
    rows = [("split", "dataset", "pairs", "documents", "tokens", "share", "epochs")]
    for name, sources in corpus.lists.items():
        for source in sources:
            epochs = ""
            if tokens and name in ("all", "train"):
                epochs = f"{tokens * source.share / _trained_on(corpus, source):.2f}"
            counts = (f"{len(source.pairs):,}", f"{source.documents:,}", f"{source.tokens:,}", f"{source.share:.2%}")
            rows.append((corpus.split or name, source.path, *counts, epochs))
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    lines = []
    for row in rows:
        cells = [cell.rjust(width) for cell, width in zip(row, widths, strict=True)]
        cells[:2] = [cell.ljust(width) for cell, width in zip(row[:2], widths[:2], strict=True)]
        lines.append("  ".join(cells).rstrip())
    return [*lines, *corpus.notes]


def _trained_on(corpus: Any, source: Any) -> float:
    """Return the tokens of a dataset that go to training."""
    from tokenmill.training.data import sequences_of

    return float(source.tokens * sequences_of(source, corpus.split, "train") / source.sequences)
