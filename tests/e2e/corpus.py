"""The corpus of the end-to-end tests as it lies on a Hub, and what an undisturbed run on this machine makes of it."""

import json
import random
import shutil
from pathlib import Path
from typing import Any

import zstandard

import tokenmill.sample
from support.commandline import data_of
from support.commandline import tokenmill as run
from support.hub import Hub

DATASET = "cerebras/SlimPajama-627B"
MODEL = "openai-community/gpt2"
PARTS = {"train/chunk1/example_train": 130, "validation/chunk1/example_holdout": 5, "test/chunk1/example_holdout": 5}

TOKENIZER = Path(tokenmill.sample.__path__[0]) / "tokenizer"

_WORDS = ("the", "of", "a", "in", "to", "and", "is", "was", "for", "on", "as", "with", "by", "he", "that", "at")


def write_hub(directory: Path) -> Path:
    """Write the files of a Hub: the dataset as its real one is laid out, and a model with a tokenizer."""
    for part, (name, count) in enumerate(PARTS.items()):
        for number in range(count):
            file = directory / "datasets" / DATASET / f"{name}_{number}.jsonl.zst"
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_bytes(zstandard.ZstdCompressor().compress(shard(1000 * part + number)))
    shutil.copytree(TOKENIZER, directory / "models" / MODEL)
    return directory


def shard(seed: int, documents: int = 40) -> bytes:
    """Return JSONL, the same for a seed; sizes differ."""
    dice = random.Random(seed)
    texts = (" ".join(dice.choices(_WORDS, k=dice.randint(5, 200))) for _ in range(dice.randint(1, 2 * documents)))
    return b"".join(json.dumps({"text": text, "meta": {"set": "RedPajamaC4"}}).encode() + b"\n" for text in texts)


def serve(directory: Path, token: str | None = None) -> Hub:
    """Return a Hub of this process with the files of `write_hub`; with a token, it wants that."""
    hub = Hub(token=token)
    for kind, add in (("datasets", hub.add_dataset), ("models", hub.add_model)):
        for repo in (directory / kind).glob("*/*"):
            files = {path.relative_to(repo).as_posix(): path for path in repo.rglob("*") if path.is_file()}
            add(repo.relative_to(directory / kind).as_posix(), files)
    return hub


def run_locally(hub: Hub, root: Path) -> Path:
    """Run the four stages of the README's cluster example on this machine, into `root`."""
    done("download", f"hf://datasets/{DATASET}", root, "--sample", 100, hub=hub)
    done("extract", root, root / "preprocessed")
    done("concatenate", root, "--target-files", 72)
    done("preprocess", root, root / "preprocessed", "--tokenizer", MODEL, hub=hub)
    return root


def done(*arguments: Any, hub: Hub | None = None) -> None:
    """Run a command on this machine, which must succeed."""
    ended = run(*arguments, hub=hub, real_backoff=True, timeout=180)
    assert ended.code == 0, ended.err


def content(root: Path) -> dict[str, bytes]:
    """Return every file of the outputs below a directory, and the manifests: what runs must have in common."""
    manifests = {
        path.relative_to(root).as_posix(): path.read_bytes() for path in root.rglob(".tokenmill/*/manifest.json")
    }
    return data_of(root) | manifests


def assert_same(found: dict[str, bytes], expected: dict[str, bytes]) -> None:
    """Compare contents and name the differences, not the bytes."""
    missing, more = sorted(expected.keys() - found.keys()), sorted(found.keys() - expected.keys())
    other = sorted(name for name in found.keys() & expected.keys() if found[name] != expected[name])
    assert not (missing or more or other), f"missing {missing}, left over {more}, other bytes {other}"


def receipts(output: Path, stage: str) -> dict[str, tuple[str, str]]:
    """Return when and where each unit was finished, which a unit that is kept still says under another plan."""
    found = (json.loads(path.read_bytes()) for path in (output / f".tokenmill/{stage}/receipts").glob("*.json"))
    return {receipt["unit"]: (receipt["finished"], receipt["host"]) for receipt in found}
