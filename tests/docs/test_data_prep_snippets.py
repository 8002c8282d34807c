"""The Python snippets of docs/data-prep.md run in their order, on small data, and write what the page describes."""

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest
import zstandard

from support.chat import conversations, lines, make_tokenizer
from support.corpus import text
from support.rendering import ROOT
from tokenmill import data_prep
from tokenmill.datasets.formats.indexed.reader import IndexedReader

pytestmark = pytest.mark.slow

PAGE = (ROOT / "docs/data-prep.md").read_text()
SNIPPETS = re.findall(r"^```python\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL)
BLENDS = [json.loads(block) for block in re.findall(r"^```json\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL)]


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Create the datasets, blends and tokenizers that the snippets name."""
    root = tmp_path_factory.mktemp("snippets")
    for name in set(re.findall(r'model="(\S+/\S+)"', PAGE)):
        make_tokenizer(root / name)
    (root / "wiki.jsonl").write_bytes(text(1, 50, 90))
    books = [json.loads(line) for line in text(2, 30, 90).splitlines()]
    (root / "books.jsonl").write_bytes(lines([{"body": row["text"]} for row in books]))
    local = [{**dataset, "path": f"{dataset['name']}.jsonl"} for dataset in BLENDS[0]["datasets"]]
    (root / "data_blend.json").write_text(json.dumps({"datasets": local}))
    rows = [{"instruction": f"question {number}", "response": "answer", "number": number} for number in range(9)]
    (root / "rows.jsonl").write_bytes(lines(rows))
    (root / "chat.jsonl").write_bytes(lines(conversations(1, 30)))
    for blend, data in (("instructions", "rows"), ("chat_data", "chat")):
        (root / f"{blend}.json").write_text(json.dumps({"datasets": [{"name": data, "path": f"{data}.jsonl"}]}))
    return root


@pytest.fixture(scope="module")
def names(directory: Path) -> dict[str, Any]:
    """Run all snippets; return the names that they define."""
    defined: dict[str, Any] = {}
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(directory)
        for number, snippet in enumerate(SNIPPETS):
            exec(compile(snippet, f"docs/data-prep.md, snippet {number}", "exec"), defined)
    return defined


def paths_of(blend: Path) -> dict[str, list[str]]:
    content = json.loads(blend.read_bytes())
    return {split: paths[1::2] for split, paths in content.items() if paths}


def test_pairs_are_divided_into_splits(names: dict[str, Any], directory: Path) -> None:
    artifact = names["artifact"]
    paths = paths_of(artifact.path)
    assert [len(paths[split]) for split in ("train", "valid", "test")] == [30, 1, 1]
    assert paths["train"][0] == str(directory / "output/train/shard_000000")
    readers = [IndexedReader(Path(path)) for split in paths.values() for path in split]
    assert sum(reader.documents for reader in readers) == artifact.total_sequences == 80
    (example,) = (blend for blend in BLENDS if blend.get("test", 0) is None)
    assert example.keys() == json.loads(artifact.path.read_bytes()).keys()


def test_other_formats_are_written(names: dict[str, Any], directory: Path) -> None:
    assert names["pairs"].total_sequences == 80 and (directory / "tokenized/all/shard_000001.idx").exists()
    (path,) = paths_of(names["records"].blend_path)["train"]
    data = zstandard.ZstdDecompressor().decompressobj().decompress(Path(path).read_bytes())
    assert json.loads(data.splitlines()[0]) == {"input": "question 0", "output": "answer"}
    assert len(data.splitlines()) == 9
    for result, masked in ((names["packed"], False), (names["conversations"], True)):
        (path,) = paths_of(result.blend_path)["train"]
        rows = pq.read_table(path, columns=["input_ids", "loss_mask", "seq_start_id"]).to_pylist()
        assert len(rows[0]["input_ids"]) <= 4096
        assert (Path(path).parent / "metadata.json").exists()
        inner = [
            value for row in rows for value in np.delete(row["loss_mask"], np.array(row["seq_start_id"][1:]) - 1)[:-1]
        ]
        assert (0 in inner) is masked and 1 in inner
    texts = [
        json.loads(line)[key]
        for name, key in (("wiki", "text"), ("books", "body"))
        for line in (directory / f"{name}.jsonl").read_text().splitlines()
    ]
    assert 0 < names["filtered"].total_sequences == sum(len(text) >= 200 for text in texts) < 80


def test_tables_name_what_exists() -> None:
    for name in re.findall(r"^\| `(\w+)` \|", PAGE, re.MULTILINE):
        is_field = name in {"name", "path", "weight", "text_field"}
        assert is_field or hasattr(data_prep, name), name
    for name, row in re.findall(r"^\| `(\w+Result|\w+Config|DataBlendsArtifact)` \| (.*) \|$", PAGE, re.MULTILINE):
        fields = getattr(data_prep, name).__dataclass_fields__
        documented = set(re.findall(r"`(\w+)`", row)) - {"PackedOutputConfig"}
        assert documented <= fields.keys(), name


@pytest.mark.parametrize("number", [0, 1])
def test_blends_of_the_page_are_valid(number: int, tmp_path: Path) -> None:
    (tmp_path / "blend.json").write_text(json.dumps(BLENDS[number]))
    blend = data_prep.DataBlend.load(tmp_path / "blend.json")
    assert blend.is_per_split is bool(number)
