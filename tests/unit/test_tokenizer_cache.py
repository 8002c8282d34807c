"""A tokenizer is settled and judged once a machine; what cannot be trusted or used is settled anew."""

import json
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from support.commandline import CommandResult, data_of, tokenmill
from support.corpus import TOKENIZER, text

pytestmark = pytest.mark.slow

JUDGED = "and running the parity gate"
KEPT = "using the cached resolution of the tokenizer"


@pytest.fixture
def cache(tmp_path: Path) -> Path:
    return tmp_path / "cache"


@pytest.fixture
def preprocess(tmp_path: Path, cache: Path) -> Callable[..., CommandResult]:
    """Preprocess into a new output, with a cache of this test's own."""
    (tmp_path / "a.jsonl").write_bytes(text(0, 50))
    outputs = iter(range(100))

    def run(*options: object, directory: Path | str = cache) -> CommandResult:
        output = tmp_path / f"out{next(outputs)}"
        command = ["preprocess", tmp_path / "a.jsonl", output, "--tokenizer", TOKENIZER, "--processes", 1, *options]
        ended = tokenmill(*command, TOKENMILL_CACHE_DIR=str(directory))
        assert ended.code == 0, ended.err
        assert (JUDGED in ended.err) != (KEPT in ended.err), ended.err
        return ended

    return run


def entries(cache: Path) -> list[Path]:
    return sorted((cache / "tokenizers").iterdir())


def test_a_second_output_judges_no_encoder_and_is_the_same(
    tmp_path: Path, cache: Path, preprocess: Callable[..., CommandResult]
) -> None:
    assert JUDGED in preprocess().err
    assert KEPT in preprocess().err
    assert data_of(tmp_path / "out0") == data_of(tmp_path / "out1")
    for place in ("tokenizer", ".tokenmill/preprocess/encoders"):
        first, second = (
            {path.relative_to(tmp_path / out): path.read_bytes() for path in (tmp_path / out / place).rglob("*.json")}
            for out in ("out0", "out1")
        )
        assert first == second
    assert JUDGED in preprocess("--encoder", "hf").err
    assert JUDGED in preprocess("--no-special-tokens").err
    assert len(entries(cache)) == 3


def test_an_entry_that_is_damaged_is_made_again(cache: Path, preprocess: Callable[..., CommandResult]) -> None:
    preprocess()
    (entry,) = entries(cache)
    backend = entry / "backend-backend.json"
    good = backend.read_bytes()
    backend.write_bytes(good[:-1])
    assert JUDGED in preprocess().err
    assert backend.read_bytes() == good
    (entry / "index.json").write_text(json.dumps({"../../x": "0" * 64}))
    assert JUDGED in preprocess().err
    backend.unlink()
    backend.symlink_to("/etc/hostname")
    assert JUDGED in preprocess().err
    assert KEPT in preprocess().err


def test_a_directory_that_others_may_write_to_is_not_used(cache: Path, preprocess: Callable[..., CommandResult]) -> None:
    preprocess()
    cache.chmod(0o777)
    assert JUDGED in preprocess().err
    cache.chmod(0o700)
    if os.geteuid() == 0:
        os.chown(cache, 12345, -1)
        assert JUDGED in preprocess().err


def test_without_a_cache_everything_goes_on(tmp_path: Path, preprocess: Callable[..., CommandResult]) -> None:
    (tmp_path / "file").touch()
    for directory in (tmp_path / "file" / "cache", ""):
        assert JUDGED in preprocess(directory=directory).err
        assert JUDGED in preprocess(directory=directory).err
