"""Fixtures of the recovery tests: forked runs, a corpus, a test Hub, finished stages and training jobs."""

import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import zstandard

from support.corpus import REPOSITORY, TOKENIZER, text
from support.disk import Disk
from support.hub import Hub
from support.runs import Forge
from support.train import Job, make_settings


@pytest.fixture(scope="session")
def forge(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Forge]:
    """Start runs of the command line as forks."""
    forge = Forge(tmp_path_factory.mktemp("logs"))
    yield forge
    forge.stop()


@pytest.fixture(scope="session")
def shards() -> dict[str, bytes]:
    """Return eight compressed files of a corpus, of different sizes."""
    pack = zstandard.ZstdCompressor(level=1).compress
    return {f"train/{i:02d}.jsonl.zst": pack(text(i, 60 + 90 * (i % 4))) for i in range(8)}


@pytest.fixture(scope="session")
def hub(shards: dict[str, bytes]) -> Iterator[Hub]:
    """Serve the corpus without faults."""
    with Hub() as hub:
        hub.add_dataset(REPOSITORY, shards)
        yield hub


@pytest.fixture(scope="session")
def corpus(tmp_path_factory: pytest.TempPathFactory, hub: Hub, forge: Forge) -> Path:
    """Return a finished download, which later stages read and no test changes."""
    output = tmp_path_factory.mktemp("corpus") / "corpus"
    forge.complete(["download", f"hf://datasets/{REPOSITORY}", output, "--endpoint", hub.endpoint])
    return output


@pytest.fixture(scope="session")
def extracted(tmp_path_factory: pytest.TempPathFactory, corpus: Path, forge: Forge) -> Path:
    """Return a finished extract, which later stages read and no test changes."""
    output = tmp_path_factory.mktemp("extracted") / "extracted"
    forge.complete(["extract", corpus, output, "--processes", "1"])
    return output


@pytest.fixture(scope="session")
def tokenized(tmp_path_factory: pytest.TempPathFactory, corpus: Path, forge: Forge) -> Path:
    """Return a finished preprocess of the corpus, which no test changes."""
    output = tmp_path_factory.mktemp("tokenized") / "tokenized"
    forge.complete(["preprocess", corpus, output, "--tokenizer", TOKENIZER, "--target-files", 6, "--processes", 1])
    return output


@pytest.fixture(scope="session")
def prepared(tmp_path_factory: pytest.TempPathFactory, tokenized: Path) -> Path:
    """Return a preprocess output that has only its tokenizer and verdict, so that planning there is fast."""
    output = tmp_path_factory.mktemp("prepared") / "out"
    for part in ("tokenizer", ".tokenmill/preprocess/encoders"):
        shutil.copytree(tokenized / part, output / part)
    return output


@pytest.fixture
def job(tmp_path: Path, tokenized: Path, forge: Forge) -> Iterator[Callable[..., Job]]:
    """Return a function that makes a training job; a keyword `section__name` replaces one setting."""
    jobs: list[Job] = []

    def make(step: float = 0.01, save: float = 0.0, **changed: Any) -> Job:
        settings = make_settings(tmp_path / "checkpoints", tokenized)
        for key, value in changed.items():
            section, _, name = key.partition("__")
            if name:
                settings.setdefault(section, {})[name] = value
            else:
                settings[section] = value
        jobs.append(Job(tmp_path / f"job{len(jobs)}", settings, step, save, forge=forge))
        return jobs[-1]

    yield make
    for node in (node for run in jobs for node in run.started):
        node.kill()
        node.wait(30)


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Disk]:
    """Mount a small file system."""
    if os.geteuid() != 0:
        pytest.skip("mounting a small file system needs root")
    try:
        disk = Disk(tmp_path / "disk")
    except OSError as error:
        pytest.skip(f"no file system can be mounted here: {error}")
    yield disk
    disk.unmount()
