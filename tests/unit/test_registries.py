"""The registry of engines: a registration is enough to add an entry."""

import os
import textwrap
from pathlib import Path

import pytest

from support.commandline import data_of, tokenmill
from support.corpus import TOKENIZER, text
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
    options = ["--tokenizer", TOKENIZER, "--processes", 1, "--json"]
    result = tokenmill(*command, tmp_path / "toy", *options, **environment)
    assert result.code == 0, result.err
    assert "encoder toy passed the encoder check" in result.err
    plain = tokenmill(*command, tmp_path / "plain", *options, "--encoder", "hf")
    assert plain.code == 0, plain.err
    assert data_of(tmp_path / "toy") == data_of(tmp_path / "plain")

    assert tokenmill(*command, tmp_path / "named", *options, "--encoder", "toy", **environment).code == 0
    refused = tokenmill(*command, tmp_path / "none", *options, "--encoder", "toy")
    assert (refused.code, "'toy' is not one of auto, fastokens, gigatoken, hf" in refused.err) == (2, True)


def test_engines_are_described() -> None:
    page = (DOCS / "internals/encoders.md").read_text()
    for name, engine in ENGINES.items():
        assert f"| `{name}` |" in page, f"docs/internals/encoders.md has no row for the engine {name}"
        assert engine.name == name and engine.speed


def test_the_engine_limits_the_length_of_a_record() -> None:
    assert max_record_bytes("auto") == max_record_bytes("fastokens") >= max_record_bytes("hf")
