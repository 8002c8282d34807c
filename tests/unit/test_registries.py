"""The registries of engines and formats: a registration is enough to add an entry."""

import json
import os
import signal
import textwrap
from pathlib import Path

import pytest

from support.commandline import data_of, tokenmill
from support.corpus import TOKENIZER, text
from tokenmill.datasets.formats.indexed.reader import IndexedReader
from tokenmill.tokenize.engines import ENGINES, max_record_bytes

DOCS = Path(__file__).parents[2] / "docs"

TOY_ENGINE = """
    from tokenmill.tokenize import engines
    from tokenmill.tokenize.engines import base

    class Toy(base.ArrayEncoder):
        name = "toy"

        def __init__(self, backend, add_special_tokens, end):
            import tokenizers

            self.tokenizer = tokenizers.Tokenizer.from_file(str(backend))
            self.add, self.after = add_special_tokens, [] if end is None else [end]

        def encode(self, texts):
            encodings = self.tokenizer.encode_batch(texts, add_special_tokens=self.add)
            return base.add_surrounding_ids(*base.concatenate_encodings(encodings), [], self.after)

    engines.register(base.Engine("toy", "tokenizers", {base.Style.BYTE_LEVEL: 1000.0}, Toy))
"""

TOY_FORMAT = """
    import json, os, signal
    import tokenmill.tokenize.unit_tokenizer as unit
    from tokenmill.core.files.hashing import hash_file
    from tokenmill.datasets import formats
    from tokenmill.datasets.formats.base import Problem

    unit.JOURNAL_SECONDS = unit.JOURNAL_FACTOR = 0.0

    class Lines:
        def __init__(self, to, documents=0, sequences=0, tokens=0, bytes=0):
            self.to, self.file, self.marked = to, to.open("ids", keep=bytes), False
            self.documents, self.sequences, self.tokens = documents, sequences, tokens

        def add(self, ids, lengths, sequences_per_document):
            if self.marked and "DIE" in os.environ:
                os.kill(os.getpid(), signal.SIGKILL)
            lengths, ids = lengths.tolist(), ids.tolist()
            for count in [1] * len(lengths) if sequences_per_document is None else sequences_per_document.tolist():
                size = sum(lengths[:count])
                self.file.write(json.dumps(ids[:size]).encode() + b"\\n")
                self.documents, self.sequences, self.tokens = (
                    self.documents + 1, self.sequences + count, self.tokens + size
                )
                del lengths[:count], ids[:size]

        def save_state(self):
            self.file.sync()
            self.marked = True
            return {**self.counts(), "bytes": self.file.bytes}

        def counts(self):
            return {"documents": self.documents, "sequences": self.sequences, "tokens": self.tokens}

        def finish(self, parts):
            self.file.describe(role="ids", key=self.to.key, prefix=self.to.prefix, parts=parts, **self.counts())

    class Toy:
        name, suffixes = "lines", ("ids",)

        def start(self, to):
            return Lines(to)

        def can_resume(self, to, state):
            return to.has(to.path("ids").name, state["bytes"])

        def resume(self, to, state):
            print("resumed", state["documents"])
            return Lines(to, **state)

        def check(self, prefix, files, *, vocab_size, eod, full, foreign_remedy):
            path = prefix.with_name(prefix.name + ".ids")
            right = not full or hash_file(path) == files["ids"].xxh3_128
            return [] if right else [Problem(path, "has other bytes", "make it again")]

    formats.register(Toy())
    formats.DEFAULT = "lines"
"""


def plugin(directory: Path, code: str) -> dict[str, str]:
    """Return an environment in which every Python process executes this code at its start."""
    directory.mkdir()
    (directory / "sitecustomize.py").write_text(textwrap.dedent(code))
    return {"PYTHONPATH": f"{directory}:{os.environ.get('PYTHONPATH', '')}"}


@pytest.mark.slow
def test_a_toy_engine_preprocesses(tmp_path: Path) -> None:
    """A registered engine is offered, is the first in the parity gate because it is the fastest, and encodes."""
    environment = plugin(tmp_path / "plugin", TOY_ENGINE)
    (tmp_path / "a.jsonl").write_bytes(text(0, 300))
    command = ["preprocess", tmp_path / "a.jsonl"]
    options = ["--tokenizer", TOKENIZER, "--processes", 1]
    result = tokenmill(*command, tmp_path / "toy", *options, **environment)
    assert result.code == 0, result.err
    assert "encoder toy passed the parity gate" in result.err
    plain = tokenmill(*command, tmp_path / "plain", *options, "--encoder", "hf")
    assert plain.code == 0, plain.err
    assert data_of(tmp_path / "toy") == data_of(tmp_path / "plain")

    assert tokenmill(*command, tmp_path / "named", *options, "--encoder", "toy", **environment).code == 0
    refused = tokenmill(*command, tmp_path / "none", *options, "--encoder", "toy")
    assert (refused.code, "'toy' is not one of auto, fastokens, gigatoken, hf" in refused.err) == (2, True)


def test_engines_are_described() -> None:
    page = (DOCS / "encoders.md").read_text()
    for name, engine in ENGINES.items():
        assert f"| `{name}` |" in page, f"docs/encoders.md has no row for the engine {name}"
        assert engine.name == name and engine.speed


def test_the_engine_limits_the_length_of_a_record() -> None:
    assert max_record_bytes("auto") == max_record_bytes("fastokens") >= max_record_bytes("hf")


@pytest.mark.slow
def test_a_toy_format_is_written_resumed_and_checked(tmp_path: Path) -> None:
    """A format with one JSON list of ids per document: it resumes after a kill, and verify reads it."""
    environment = plugin(tmp_path / "plugin", TOY_FORMAT)
    (tmp_path / "in").mkdir()
    for number in range(3):  # one block per file
        (tmp_path / "in" / f"{number}.jsonl").write_bytes(text(number, 5000))
    options = ["--tokenizer", TOKENIZER, "--processes", 1, "--target-files", 1]
    command = ["preprocess", tmp_path / "in", tmp_path / "toy", *options]
    assert tokenmill(*command, **environment, DIE="1").code == -signal.SIGKILL
    resumed = tokenmill(*command, **environment)
    assert (resumed.code, "resumed 5000" in resumed.out + resumed.err) == (0, True), resumed.err

    assert tokenmill("preprocess", tmp_path / "in", tmp_path / "plain", *options).code == 0
    (pair,) = (tmp_path / "plain").glob("*.bin")
    reader = IndexedReader(pair.with_suffix(""))
    ids_file = (tmp_path / "toy" / pair.name).with_suffix(".ids")
    documents = [json.loads(line) for line in ids_file.read_text().splitlines()]
    assert documents == [reader.document(number).tolist() for number in range(reader.documents)]

    assert tokenmill("verify", tmp_path / "toy", **environment).code == 0
    unknown = tokenmill("verify", tmp_path / "toy")
    assert (
        unknown.code,
        "unknown output format 'lines': this version of tokenmill supports indexed" in unknown.err,
    ) == (2, True)
    ids_file.write_bytes(ids_file.read_bytes().replace(b"1", b"2", 1))
    wrong = tokenmill("verify", tmp_path / "toy", **environment)
    assert (wrong.code, "has other bytes" in wrong.out + wrong.err) == (2, True)
