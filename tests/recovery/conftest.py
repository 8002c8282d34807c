"""The forge, the corpus and the test Hub of the recovery tests."""

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
import zstandard

from support.corpus import REPOSITORY, TOKENIZER, text
from support.hub import Hub
from support.runs import Forge


@pytest.fixture(scope="session")
def forge(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Forge]:
    """Fork runs of the command line."""
    forge = Forge(tmp_path_factory.mktemp("logs"))
    yield forge
    forge.stop()


@pytest.fixture(scope="session")
def shards() -> dict[str, bytes]:
    """Eight compressed files of a corpus, of different sizes."""
    pack = zstandard.ZstdCompressor(level=1).compress
    return {f"train/{i:02d}.jsonl.zst": pack(text(i, 60 + 90 * (i % 4))) for i in range(8)}


@pytest.fixture(scope="session")
def hub(shards: dict[str, bytes]) -> Iterator[Hub]:
    """Serve the corpus; nothing goes wrong on it."""
    with Hub() as hub:
        hub.add_dataset(REPOSITORY, shards)
        yield hub


@pytest.fixture(scope="session")
def corpus(tmp_path_factory: pytest.TempPathFactory, hub: Hub, forge: Forge) -> Path:
    """Return a finished download, to be read by the stages after it and never changed."""
    output = tmp_path_factory.mktemp("corpus") / "corpus"
    forge.done(["download", f"hf://datasets/{REPOSITORY}", output, "--endpoint", hub.endpoint])
    return output


@pytest.fixture(scope="session")
def extracted(tmp_path_factory: pytest.TempPathFactory, corpus: Path, forge: Forge) -> Path:
    """Return a finished extract, to be read and never changed."""
    output = tmp_path_factory.mktemp("extracted") / "extracted"
    forge.done(["extract", corpus, output, "--processes", "1"])
    return output


@pytest.fixture(scope="session")
def tokenised(tmp_path_factory: pytest.TempPathFactory, corpus: Path, forge: Forge) -> Path:
    """Return a finished preprocess of the corpus, to be read and never changed."""
    output = tmp_path_factory.mktemp("tokenised") / "tokenised"
    forge.done(["preprocess", corpus, output, "--tokenizer", TOKENIZER, "--target-files", 6, "--processes", 1])
    return output


@pytest.fixture(scope="session")
def settled(tmp_path_factory: pytest.TempPathFactory, tokenised: Path) -> Path:
    """Return a preprocess output where only the tokenizer is settled, so that planning there takes no seconds."""
    output = tmp_path_factory.mktemp("settled") / "out"
    for part in ("tokenizer", ".tokenmill/preprocess/encoders"):
        shutil.copytree(tokenised / part, output / part)
    return output
