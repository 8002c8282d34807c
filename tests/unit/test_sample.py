"""The sample: real text, the same bytes in every run, and a tokenizer that all encoders support."""

import itertools
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import zstandard

import tokenmill.pipelines.sample as shipped
from support.commandline import tokenmill
from tokenmill.pipelines.sample.harvest import HarvestReport, harvest
from tokenmill.records.readers import read_documents

pytestmark = pytest.mark.slow

TOKENIZER = Path(shipped.__path__[0]) / "tokenizer"
VOCABULARY, EOS = 8192, "<|endoftext|>"

TEXTS = [
    "",
    " ",
    "Hello, world! It's the 3rd of May.",
    "def f(x):\n    return x ** 2  # 平方\n",
    "ža č 😀👩‍👩‍👧 \u200b\ufeff\0\x1b",
    f"before{EOS}after",
    "\n\n \t  many   spaces\r\n" * 20,
]


@pytest.fixture(scope="module")
def sample(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, HarvestReport]:
    directory = tmp_path_factory.mktemp("sample")
    return directory, harvest(directory)


def _files(directory: Path) -> dict[str, bytes]:
    return {p.relative_to(directory).as_posix(): p.read_bytes() for p in directory.rglob("*") if p.is_file()}


def test_the_harvest_is_large_enough_and_readable(sample: tuple[Path, HarvestReport]) -> None:
    directory, report = sample
    texts: list[object] = []
    for path in sorted(directory.rglob("*.zst")):
        for batch in read_documents(path, ["text", "title"], display=path.name, on_bad="fail"):
            texts += batch.texts[0]
    assert len(texts) == len(set(map(str, texts))) == report.documents > 2000
    assert sum(len(str(text).encode()) for text in texts) == report.text_bytes > 10_000_000
    assert sum(report.kinds.values()) == report.documents


def test_the_harvest_is_laid_out_like_a_dataset(sample: tuple[Path, HarvestReport]) -> None:
    directory, report = sample
    assert report.files == sorted(_files(directory))
    train = {file for file in report.files if file.startswith("train/chunk")}
    assert len(train) == 8
    assert len({Path(file).name for file in train}) == 4  # the same names in both chunks
    assert {file.split("/")[0] for file in report.files} - {"train"} == {
        "validation",
        "test",
        "README.md",
        ".gitattributes",
    }
    line = zstandard.ZstdDecompressor().decompress((directory / min(train)).read_bytes()).split(b"\n")[0]
    record = json.loads(line)
    assert set(record) == {"text", "title", "meta"}
    assert set(record["meta"]) == {"source", "kind"}


def test_another_process_harvests_the_same_bytes(sample: tuple[Path, HarvestReport], tmp_path: Path) -> None:
    code = "import sys, pathlib, tokenmill.pipelines.sample.harvest as h; h.harvest(pathlib.Path(sys.argv[1]))"
    environment = os.environ | {"PYTHONHASHSEED": "7", "LC_ALL": "C", "PYTHONUTF8": "0"}
    subprocess.run([sys.executable, "-c", code, tmp_path], check=True, env=environment)
    assert _files(tmp_path) == _files(sample[0])


@pytest.mark.parametrize("shards", [1, 3])
def test_any_number_of_shards(tmp_path: Path, shards: int) -> None:
    report = harvest(tmp_path, shards=shards)
    assert sum(file.startswith("train/") for file in report.files) == shards


def test_the_shipped_tokenizer_gives_equal_tokens_in_every_encoder(
    sample: tuple[Path, HarvestReport], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FASTOKENS_BPE_THREADS", "1")
    import fastokens
    import gigatoken
    import numpy as np
    from transformers import AutoTokenizer

    shard = sample[0] / "validation/chunk1/example_holdout_0.jsonl.zst"
    held_out = next(read_documents(shard, ["text"], display="", on_bad="fail")).texts[0]
    texts = [*TEXTS, *map(str, held_out)]
    reference = AutoTokenizer.from_pretrained(TOKENIZER)
    assert len(reference) == VOCABULARY
    assert (reference.eos_token, reference.eos_token_id) == (EOS, 0)
    expected = [reference.encode(text) for text in texts]
    assert [reference.decode(ids) for ids in expected[:5]] == TEXTS[:5]

    file = str(TOKENIZER / "tokenizer.json")
    data, offsets = fastokens.Tokenizer.from_file(file).encode_batch_flat(texts)
    ids = np.frombuffer(data, np.uint32).tolist()
    ends = np.frombuffer(offsets, np.uint64).tolist()
    assert [ids[start:end] for start, end in itertools.pairwise(ends)] == expected
    assert gigatoken.Tokenizer(file).encode_batch(texts, parallel=False).to_list() == expected

    text_bytes = sum(len(text.encode()) for text in texts)
    assert text_bytes / sum(map(len, expected)) > 3  # the tokenizer compresses text outside its training data


def test_the_shipped_tokenizer_is_small() -> None:
    assert sum(file.stat().st_size for file in TOKENIZER.iterdir()) < 700_000


def test_the_sample_passes_all_stages_and_is_done_in_the_next_run(tmp_path: Path) -> None:
    first, second = (tokenmill("sample", tmp_path / "o ut 9%") for _ in range(2))
    assert (first.code, second.code) == (0, 0), first.err + second.err
    assert "0 units to run" not in first.err and second.err.count("0 units to run") == 4
    assert tokenmill("verify", tmp_path / "o ut 9%").code == 0

    ends = [line.partition(":")[0] for line in first.out.splitlines() if ": complete, " in line]
    assert ends == ["download", "extract", "concatenate", "preprocess"]
    stages = json.loads(tokenmill("report", tmp_path / "o ut 9%/preprocessed", "--json").out)["stages"]
    table = [re.split(r"  +", line) for line in second.out.splitlines()]
    rows = {row[0]: row[1:] for row in table if len(row) > 5 and row[0] != "stage"}
    for stage in stages:
        expected = [f"{stage[name]:,}" for name in ("written", "tokens") if stage[name] is not None]
        assert stage["stage"] == "download" or rows[stage["stage"]][1 : 1 + len(expected)] == expected, rows
    assert rows["preprocess"][0] == "4", "a .bin and its .idx are one file"


def test_the_sample_of_conversations_becomes_packed_rows(tmp_path: Path) -> None:
    ended = tokenmill("sample", tmp_path, "--chat")
    assert ended.code == 0, ended.err
    assert "loss tokens, in " in ended.out and "valid: " in ended.out, ended.out
    shown = tokenmill("inspect", tmp_path / "chat", "--document", 0, "--mask", "--json").result
    trained = "".join(part["text"] for part in shown["sequences"][0]["text"] if part["trained"])
    assert trained.endswith(EOS) and "User: " not in trained
