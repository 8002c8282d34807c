"""What the registries hold is added by registering it: nothing else has to know it."""

import os
import textwrap
from pathlib import Path

import pytest

from support.commandline import data_of, tokenmill
from support.corpus import TOKENIZER, text
from tokenmill.tokens.engines import ENGINES, longest_record

DOCS = Path(__file__).parents[2] / "docs"

TOY_ENGINE = """
    from tokenmill.tokens import engines
    from tokenmill.tokens.engines import base

    class Toy(base.Arrays):
        name = "toy"

        def __init__(self, backend, add_special_tokens, end):
            import tokenizers

            self.tokenizer = tokenizers.Tokenizer.from_file(str(backend))
            self.add, self.after = add_special_tokens, [] if end is None else [end]

        def encode(self, texts):
            encodings = self.tokenizer.encode_batch(texts, add_special_tokens=self.add)
            return base.wrap(*base.flatten(encodings), [], self.after)

    engines.register(base.Engine("toy", "tokenizers", {base.Style.BYTE_LEVEL: 1000.0}, Toy))
"""


def plugin(directory: Path, code: str) -> dict[str, str]:
    """Return the environment in which each Python process executes some code when it starts."""
    directory.mkdir()
    (directory / "sitecustomize.py").write_text(textwrap.dedent(code))
    return {"PYTHONPATH": f"{directory}:{os.environ.get('PYTHONPATH', '')}"}


@pytest.mark.slow
def test_a_toy_engine_preprocesses(tmp_path: Path) -> None:
    """An engine that a module registers is offered, judged first since it is the fastest, and encodes."""
    environment = plugin(tmp_path / "plugin", TOY_ENGINE)
    (tmp_path / "a.jsonl").write_bytes(text(0, 300))
    command = ["preprocess", tmp_path / "a.jsonl"]
    options = ["--tokenizer", TOKENIZER, "--processes", 1]
    made = tokenmill(*command, tmp_path / "toy", *options, **environment)
    assert made.code == 0, made.err
    assert "toy agrees on" in made.err
    plain = tokenmill(*command, tmp_path / "plain", *options, "--encoder", "hf")
    assert plain.code == 0, plain.err
    assert data_of(tmp_path / "toy") == data_of(tmp_path / "plain")

    assert tokenmill(*command, tmp_path / "named", *options, "--encoder", "toy", **environment).code == 0
    refused = tokenmill(*command, tmp_path / "none", *options, "--encoder", "toy")
    assert (refused.code, "'toy' is not one of auto, fastokens, gigatoken, hf" in refused.err) == (2, True)


def test_engines_are_described() -> None:
    described = (DOCS / "encoders.md").read_text()
    for name, engine in ENGINES.items():
        assert f"| `{name}` |" in described, f"docs/encoders.md has no row for the engine {name}"
        assert engine.name == name and engine.speed


def test_a_record_may_be_as_long_as_the_engine_has_memory_for() -> None:
    assert longest_record("auto") == longest_record("fastokens") >= longest_record("hf")
