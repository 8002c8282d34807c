"""The corpus of the end-to-end tests on a test Hub, and the output of an uninterrupted local run."""

import json
import random
import shutil
from pathlib import Path
from typing import Any

import zstandard

import tokenmill.pipelines.sample
from support.commandline import data_of
from support.commandline import tokenmill as run
from support.hub import Hub

DATASET = "cerebras/SlimPajama-627B"
MODEL = "openai-community/gpt2"
PARTS = {"train/chunk1/example_train": 130, "validation/chunk1/example_holdout": 5, "test/chunk1/example_holdout": 5}

TOKENIZER = Path(tokenmill.pipelines.sample.__path__[0]) / "tokenizer"

_WORDS = ("the", "of", "a", "in", "to", "and", "is", "was", "for", "on", "as", "with", "by", "he", "that", "at")


def write_hub(directory: Path) -> Path:
    """Write the files of a Hub: the dataset in its original layout, and a model with a tokenizer."""
    for part, (name, count) in enumerate(PARTS.items()):
        for number in range(count):
            file = directory / "datasets" / DATASET / f"{name}_{number}.jsonl.zst"
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_bytes(zstandard.ZstdCompressor().compress(shard(1000 * part + number)))
    shutil.copytree(TOKENIZER, directory / "models" / MODEL)
    return directory


def shard(seed: int, documents: int = 40) -> bytes:
    """Return JSONL with a size that depends on the seed; the same seed gives the same text."""
    dice = random.Random(seed)
    texts = (" ".join(dice.choices(_WORDS, k=dice.randint(5, 200))) for _ in range(dice.randint(1, 2 * documents)))
    return b"".join(json.dumps({"text": text, "meta": {"set": "RedPajamaC4"}}).encode() + b"\n" for text in texts)


def serve(directory: Path, token: str | None = None) -> Hub:
    """Return a Hub in this process with the files of `write_hub`; it requires the token, if there is one."""
    hub = Hub(token=token)
    for kind, add in (("datasets", hub.add_dataset), ("models", hub.add_model)):
        for repo in (directory / kind).glob("*/*"):
            files = {path.relative_to(repo).as_posix(): path for path in repo.rglob("*") if path.is_file()}
            add(repo.relative_to(directory / kind).as_posix(), files)
    return hub


def run_locally(hub: Hub, root: Path) -> Path:
    """Run the four stages of the README's cluster example on this machine, into `root`."""
    run_checked("download", f"hf://datasets/{DATASET}", root, "--sample", 100, hub=hub)
    run_checked("extract", root, root / "preprocessed")
    run_checked("concatenate", root, "--target-files", 72)
    run_checked("preprocess", root, root / "preprocessed", "--tokenizer", MODEL, hub=hub)
    return root


def run_checked(*arguments: Any, hub: Hub | None = None, **environment: str) -> None:
    """Run a command on this machine, which must succeed."""
    result = run(*arguments, hub=hub, real_backoff=True, timeout=180, **environment)
    assert result.code == 0, result.err


def content(root: Path) -> dict[str, bytes]:
    """Return every file of the outputs below a directory, and the manifests: equal runs have equal content."""
    manifests = {
        path.relative_to(root).as_posix(): path.read_bytes() for path in root.rglob(".tokenmill/*/manifest.json")
    }
    return data_of(root) | manifests


def assert_same(actual: dict[str, bytes], expected: dict[str, bytes]) -> None:
    """Compare contents, and report the names of the differences without the bytes."""
    missing, more = sorted(expected.keys() - actual.keys()), sorted(actual.keys() - expected.keys())
    other = sorted(name for name in actual.keys() & expected.keys() if actual[name] != expected[name])
    assert not (missing or more or other), f"missing {missing}, left over {more}, other bytes {other}"


def receipts(output: Path, stage: str) -> dict[str, tuple[str, str]]:
    """Return for each unit the time and the host of its end; a unit that is kept under another plan keeps both."""
    contents = (json.loads(path.read_bytes()) for path in (output / f".tokenmill/{stage}/receipts").glob("*.json"))
    return {receipt["unit"]: (receipt["finished"], receipt["host"]) for receipt in contents}


def write_files(directory: Path, files: dict[str, bytes]) -> Path:
    """Write files to a new directory."""
    directory.mkdir()
    directory.chmod(0o777)
    for name, data in files.items():
        (directory / name).write_bytes(data)
    return directory
