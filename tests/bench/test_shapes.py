"""The benchmark's shapes are reproducible, and the parts of a corpus are disjoint and complete."""

import json
import subprocess
import sys
from pathlib import Path

import orjson
import pytest
import zstandard

from bench.alternatives import batches

HERE = Path(__file__).parent
BASE = [f"{n} Ways to read chapter {n * 7919}: the value 12345 is given.\n" * (n % 7 + 1) for n in range(300)]
SIZES = {"many": 3, "huge": 1, "long": 1, "pieces": 1, "documents": 5000, "files": 30}
SIZES |= {"chat_4": 20, "chat_16": 5, "chat_short": 3000}
ONE_MB = 1_000_000


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("base") / "base.jsonl"
    path.write_bytes(b"".join(orjson.dumps({"text": text}) + b"\n" for text in BASE))
    return path


def lines(directory: Path) -> list[bytes]:
    collected = []
    for path in sorted((directory / "files").iterdir()):
        data = path.read_bytes()
        if path.suffix == ".zst":
            data = zstandard.ZstdDecompressor().stream_reader(data, read_across_frames=True).readall()
        collected += data.splitlines()
    return collected


@pytest.mark.parametrize("shape", SIZES)
def test_shape_is_reproducible_and_counted(shape: str, base: Path, tmp_path: Path) -> None:
    outputs = []
    for name in ("one", "two"):
        script = [sys.executable, str(HERE / "shapes.py")]
        subprocess.run([*script, shape, str(base), str(tmp_path / name), str(SIZES[shape])], check=True)
        outputs.append(lines(tmp_path / name))
    assert outputs[0] == outputs[1]
    about = json.loads((tmp_path / "one" / "about.json").read_bytes())
    assert about["documents"] == len(outputs[0])
    assert about["files"] == len(list((tmp_path / "one" / "files").iterdir()))
    plain = tmp_path / "one" / "texts.jsonl"
    if plain.exists():
        assert plain.read_bytes().splitlines() == outputs[0]
    if shape.startswith("chat"):
        rows = [orjson.loads(line)["messages"] for line in outputs[0]]
        turns = {"chat_4": 4, "chat_16": 16, "chat_short": 1}[shape]
        assert len(rows) == SIZES[shape]
        assert all([message["role"] for message in row] == ["user", "assistant"] * turns for row in rows)
        assert about["text_bytes"] == sum(len(message["content"].encode()) for row in rows for message in row)
    elif shape == "long":
        texts = [orjson.loads(line)["text"] for line in outputs[0]]
        assert about["text_bytes"] == sum(len(text.encode()) for text in texts) >= ONE_MB
        assert len(set(texts)) > 2 * len(BASE)  # later passes have other texts


@pytest.mark.parametrize("parts", [1, 2, 3, 7])
def test_parts_are_disjoint_and_complete(parts: int, base: Path) -> None:
    texts = [text for part in range(parts) for batch in batches(base, part, parts) for text in batch]
    assert texts == BASE
