"""The tokenizer cache: one resolution and parity gate per machine; invalid or untrusted entries are not used."""

import json
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from support.commandline import CommandResult, data_of, tokenmill
from support.corpus import TOKENIZER, text

pytestmark = pytest.mark.slow

RESOLVED = "and checking the encoders"
CACHED = "using the cached resolution of the tokenizer"


@pytest.fixture
def cache(tmp_path: Path) -> Path:
    return tmp_path / "cache"


@pytest.fixture
def preprocess(tmp_path: Path, cache: Path) -> Callable[..., CommandResult]:
    """Preprocess into a new output, with a separate cache for each test."""
    (tmp_path / "a.jsonl").write_bytes(text(0, 50))
    outputs = iter(range(100))

    def run(*options: object, directory: Path | str = cache) -> CommandResult:
        output = tmp_path / f"out{next(outputs)}"
        command = [
            "preprocess",
            tmp_path / "a.jsonl",
            output,
            "--tokenizer",
            TOKENIZER,
            "--processes",
            1,
            "--json",
            *options,
        ]
        result = tokenmill(*command, TOKENMILL_CACHE_DIR=str(directory))
        assert result.code == 0, result.err
        assert (RESOLVED in result.err) != (CACHED in result.err), result.err
        return result

    return run


def entries(cache: Path) -> list[Path]:
    return sorted((cache / "tokenizers").iterdir())


def test_a_second_output_uses_the_cache_and_is_equal(
    tmp_path: Path, cache: Path, preprocess: Callable[..., CommandResult]
) -> None:
    assert RESOLVED in preprocess().err
    assert CACHED in preprocess().err
    assert data_of(tmp_path / "out0") == data_of(tmp_path / "out1")
    for place in ("tokenizer", ".tokenmill/preprocess/encoders"):
        first, second = (
            {path.relative_to(tmp_path / out): path.read_bytes() for path in (tmp_path / out / place).rglob("*.json")}
            for out in ("out0", "out1")
        )
        assert first == second
    assert RESOLVED in preprocess("--encoder", "hf").err
    assert RESOLVED in preprocess("--no-special-tokens").err
    assert len(entries(cache)) == 3


def test_a_damaged_entry_is_replaced(cache: Path, preprocess: Callable[..., CommandResult]) -> None:
    preprocess()
    (entry,) = entries(cache)
    backend = entry / "backend-backend.json"
    good = backend.read_bytes()
    backend.write_bytes(good[:-1])
    assert RESOLVED in preprocess().err
    assert backend.read_bytes() == good
    (entry / "index.json").write_text(json.dumps({"../../x": "0" * 64}))
    assert RESOLVED in preprocess().err
    backend.unlink()
    backend.symlink_to("/etc/hostname")
    assert RESOLVED in preprocess().err
    assert CACHED in preprocess().err


def test_a_directory_that_others_may_write_to_is_not_used(
    cache: Path, preprocess: Callable[..., CommandResult]
) -> None:
    preprocess()
    cache.chmod(0o777)
    assert RESOLVED in preprocess().err
    cache.chmod(0o700)
    if os.geteuid() == 0:
        os.chown(cache, 12345, -1)
        assert RESOLVED in preprocess().err


def test_preprocess_works_without_a_cache(tmp_path: Path, preprocess: Callable[..., CommandResult]) -> None:
    (tmp_path / "file").touch()
    for directory in (tmp_path / "file" / "cache", ""):
        assert RESOLVED in preprocess(directory=directory).err
        assert RESOLVED in preprocess(directory=directory).err
