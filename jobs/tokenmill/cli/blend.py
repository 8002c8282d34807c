"""`tokenmill blend`: weights over finished datasets, in Megatron-LM's own form or as values for the chart."""

import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from tokenmill.cli import options as o

if TYPE_CHECKING:
    from tokenmill.training.data.split import Names
    from tokenmill.training.settings import BlendPart

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
    root: Annotated[
        Path, typer.Option("--root", help="Where the volume is mounted: parts, and the values' paths, are below it.")
    ] = Path(),
) -> None:
    """Weight datasets against each other and write what Megatron-LM reads (or, with --values, the chart)."""
    from tokenmill.errors import RequestError
    from tokenmill.files.explain import explained
    from tokenmill.files.publish import write_atomic
    from tokenmill.training import settings as s
    from tokenmill.training.data.blend import gather
    from tokenmill.training.data.flags import listing

    o.one_of("--by", by, "tokens", "documents", "bytes", "given")
    if out.suffix in (".bin", ".idx") or (out.exists() and not out.is_file()):
        raise RequestError(f"{out} is no file to write: first comes the file, then the datasets")
    held_out = bool(validation or test)
    if held_out and split:
        raise RequestError(
            "--split cuts every part, --validation and --test name parts of their own: give one or the other"
        )
    words = {"train" if held_out else "all": parts, "validation": validation, "test": test}
    chosen = s.Blend(**{name: [_part(word, root) for word in given] for name, given in words.items()}, by=by)  # type: ignore[arg-type]
    with explained(out):
        corpus = gather(s.DatasetSettings(blend=chosen, key=key, split=split or "990,9,1"), root, _options())
        flags, _, content = listing(corpus, file=True)
        assert content is not None  # noqa: S101
        write_atomic(out.absolute(), _values(corpus, key, root) if values else content)
    for line in _table(corpus, tokens):
        sys.stdout.write(line + "\n")
    said = f"-f {out}" if values else " ".join([*flags, str(out), *(["--split", corpus.split] if corpus.split else [])])
    sys.stdout.write(f"{'values for the chart' if values else 'for Megatron-LM'}: {said}\n")


def _options() -> "Names":
    """Return what this command calls what names the datasets."""
    from tokenmill.training.data.split import Names

    class Options(Names):
        key = "--key"
        split = "--split"
        apart = "with --validation and --test"

        def part(self, name: str, number: int | None = None) -> str:
            word = f"--{name}" if name in ("validation", "test") else "PART"
            return word if number is None else f"{word} {number + 1}"

    return Options()


def _part(word: str, root: Path) -> "BlendPart":
    """Take a word apart; a path that holds = itself needs a weight, or must exist."""
    from tokenmill.errors import RequestError
    from tokenmill.training import settings as s

    path, equals, weight = word.rpartition("=")
    if not equals or os.path.exists(root / word):  # noqa: PTH110 - which raises nothing, however long the word
        return s.BlendPart(path=word)
    try:
        return s.BlendPart(path=path, weight=float(weight))
    except ValueError:
        raise RequestError(f"{word}: {weight!r} is no weight; give {PART}") from None


def _values(corpus: Any, key: str | None, root: Path) -> bytes:
    """Word the chart's values: paths on the volume, weights as they came out."""
    import yaml

    class Dumper(yaml.SafeDumper):
        """Puts paths in quotes: what is text to PyYAML may be a number to Helm, as 1e5 is."""

    Dumper.add_multi_representer(Path, lambda to, path: to.represent_scalar("tag:yaml.org,2002:str", str(path), '"'))
    shares: dict[str, Any] = {
        name: [{"path": _below(source.path, root), "weight": source.share} for source in sources]
        for name, sources in corpus.lists.items()
    }
    dataset: dict[str, Any] = {"blend": {**shares, "by": "given"}}
    dataset |= {"split": corpus.split} if corpus.split else {}
    dataset |= {"key": key} if key else {}
    return yaml.dump({"dataset": dataset}, Dumper=Dumper, sort_keys=False).encode()


def _below(part: str, root: Path) -> Path:
    """Return a part's path on the volume."""
    from tokenmill.errors import RequestError

    path = Path(os.path.relpath(root / part, root))
    if path.parts[:1] in ((), ("..",)):
        raise RequestError(
            f"{part} is not below {root.absolute()}, and the chart names datasets by their place on its volume: "
            "say with --root where that is mounted"
        )
    return path


def _table(corpus: Any, tokens: float | None) -> list[str]:
    rows = [("split", "dataset", "pairs", "documents", "tokens", "share", "epochs")]
    for name, sources in corpus.lists.items():
        for source in sources:
            epochs = ""
            if tokens and name in ("all", "train"):
                epochs = f"{source.epochs(corpus.split, tokens):.2f}"
            counts = (f"{len(source.pairs):,}", f"{source.documents:,}", f"{source.tokens:,}", f"{source.share:.2%}")
            rows.append((corpus.split or name, source.path, *counts, epochs))
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    lines = []
    for row in rows:
        cells = [cell.rjust(width) for cell, width in zip(row, widths, strict=True)]
        cells[:2] = [cell.ljust(width) for cell, width in zip(row[:2], widths[:2], strict=True)]
        lines.append("  ".join(cells).rstrip())
    return [*lines, *corpus.notes]
