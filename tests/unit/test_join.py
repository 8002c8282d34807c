"""`tokenmill join`: the pairs of a dataset as fewer ones, with the bytes of one run over their texts."""

import json
import random
import struct
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from support.commandline import finish, run_in_process, start
from support.commandline import tokenmill as command
from support.corpus import TOKENIZER
from support.pairs import write_ids, write_pair
from tokenmill.datasets.formats.indexed.reader import IndexedReader

pytestmark = pytest.mark.slow

FILES = 7


def make_corpus(directory: Path, *, keys: tuple[str, ...] = ("text",)) -> Path:
    """Write files of records with texts, lists of texts and empty texts, in two directories."""
    dice = random.Random(4)
    for number in range(FILES):
        rows: list[dict[str, Any]] = []
        for row in range(dice.randint(1, 60)):
            texts = {key: " ".join(dice.choices(["a", "few", "words"], k=dice.randint(0, 40))) for key in keys}
            rows.append({key: [text, "second"] if row % 5 == 1 else text for key, text in texts.items()})
        file = directory / ("first" if number < 4 else "second") / f"{number}.jsonl"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return directory


def preprocess(corpus: Path, output: Path, *options: Any) -> Path:
    ended = command("preprocess", corpus, output, "--tokenizer", TOKENIZER, *options)
    assert ended.code == 0, ended.err
    return output


def merge(prefixes: list[Path]) -> tuple[bytes, bytes]:
    """Return the files of pairs one after the other, by the layout of Megatron-LM's indexed dataset."""
    readers = [IndexedReader(prefix) for prefix in prefixes]
    lengths = np.concatenate([reader.lengths for reader in readers]).astype("<i4")
    ends = np.cumsum(lengths.astype("<i8") * readers[0].dtype.itemsize)
    pointers = np.concatenate([[0], ends[:-1]]).astype("<i8")
    documents, sequences = [np.zeros(1, "<i8")], 0
    for reader in readers:
        documents.append(np.asarray(reader.document_indices[1:]) + sequences)
        sequences += reader.sequences
    indices = np.concatenate(documents).astype("<i8")
    code = {"uint16": 8, "int32": 4}[readers[0].dtype.name]
    header = b"MMIDIDX\0\0" + struct.pack("<QBQQ", 1, code, len(lengths), len(indices))
    index = header + lengths.tobytes() + pointers.tobytes() + indices.tobytes()
    return b"".join(Path(f"{prefix}.bin").read_bytes() for prefix in prefixes), index


def list_pairs(output: Path, key: str = "text") -> list[Path]:
    return [path.with_suffix("") for path in sorted(output.rglob(f"*_{key}_document.bin"))]


def test_the_bytes_are_those_of_one_pair_after_the_other(tmp_path: Path) -> None:
    dataset = preprocess(make_corpus(tmp_path / "corpus"), tmp_path / "out")
    for count in (1, 3, FILES):
        joined = tmp_path / f"joined-{count}"
        ended = command("join", dataset, joined, "--target-files", count)
        assert ended.code == 0, ended.err
        pairs, parts = list_pairs(joined), list_pairs(dataset)
        assert len(pairs) == count
        for pair in pairs:
            documents, members = IndexedReader(pair).documents, []
            while documents:
                members.append(parts.pop(0))
                documents -= IndexedReader(members[-1]).documents
            data, index = merge(members)
            assert Path(f"{pair}.bin").read_bytes() == data and Path(f"{pair}.idx").read_bytes() == index
        assert not parts
        ended = command("verify", joined)
        assert ended.code == 0 and "no problems" in ended.out, ended.out
    one = preprocess(tmp_path / "corpus", tmp_path / "one", "--target-files", 1)
    for suffix in ("bin", "idx"):
        (expected,), (actual,) = ([*path.glob(f"*.{suffix}")] for path in (one, tmp_path / "joined-1"))
        assert actual.read_bytes() == expected.read_bytes()


def test_documents_keep_their_source(tmp_path: Path) -> None:
    dataset = preprocess(make_corpus(tmp_path / "corpus"), tmp_path / "out")
    assert command("join", dataset, tmp_path / "joined", "--target-files", 1).code == 0
    total = sum(IndexedReader(pair).documents for pair in list_pairs(dataset))
    for number in range(0, total, 9):
        shown = [run_in_process("inspect", path, "--document", number).out for path in (dataset, tmp_path / "joined")]
        before, now = (text.partition("\nfrom ")[2] for text in shown)
        assert before == now != ""


def test_keys_and_directories(tmp_path: Path) -> None:
    corpus = make_corpus(tmp_path / "corpus", keys=("text", "title"))
    for file in (corpus / "first").iterdir():  # no title in some files
        if file.name in ("1.jsonl", "2.jsonl"):
            rows = [json.loads(line) | {"title": ""} for line in file.read_text().splitlines()]
            file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    options = ("--keys", "text,title", "--no-append-eod")
    dataset = preprocess(corpus, tmp_path / "out", *options)
    ended = command("join", dataset, tmp_path / "joined", "--by-source", "--name", "all")
    assert ended.code == 0, ended.err
    names = [path.relative_to(tmp_path / "joined").as_posix() for path in list_pairs(tmp_path / "joined")]
    assert names == ["first/all-00000-of-00002_text_document", "second/all-00001-of-00002_text_document"]
    for name in names:
        text, title = (IndexedReader(tmp_path / "joined" / name.replace("text", key)) for key in ("text", "title"))
        assert text.documents == title.documents
    assert command("verify", tmp_path / "joined").code == 0


def test_sizes(tmp_path: Path) -> None:
    dataset = preprocess(make_corpus(tmp_path / "corpus"), tmp_path / "out")
    size = sum(Path(f"{pair}.bin").stat().st_size for pair in list_pairs(dataset))
    for target, count in ((size, 1), (size // 2, 2), (1, FILES)):
        assert command("join", dataset, tmp_path / f"joined-{target}", "--target-size", target).code == 0
        assert len(list_pairs(tmp_path / f"joined-{target}")) == count


def test_adopted_pairs(tmp_path: Path) -> None:
    for name, seed in (("x", 1), ("y", 2)):
        dice = np.random.default_rng(seed)
        write_pair(tmp_path / f"pairs/{name}", [dice.integers(1, 4000, dice.integers(1, 50)) for _ in range(30)])
    pairs = [tmp_path / "pairs/x", tmp_path / "pairs/y"]
    options = ["--output", tmp_path / "adopted", "--tokenizer", TOKENIZER, "--no-append-eod"]
    ended = command("adopt", *pairs, *options)
    assert ended.code == 0, ended.err
    ended = command("join", tmp_path / "adopted", tmp_path / "joined")
    assert ended.code == 0, ended.err
    (pair,) = [path.with_suffix("") for path in (tmp_path / "joined").glob("*.bin")]
    data, index = merge(pairs)
    assert Path(f"{pair}.bin").read_bytes() == data and Path(f"{pair}.idx").read_bytes() == index


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--target-files", 9], "--target-files 9 is more than the 7 pairs of"),
        (["--target-size", "much"], "'much' is not a size"),
        (["--name", "a/b"], "a/b"),
    ],
)
def test_refusals(options: list[Any], message: str, tmp_path: Path) -> None:
    dataset = preprocess(make_corpus(tmp_path / "corpus"), tmp_path / "out")
    ended = command("join", dataset, tmp_path / "joined", *options)
    assert ended.code == 2 and message in ended.err, ended.err
    ended = command("join", dataset, dataset / "joined")
    assert ended.code == 2 and "contain each other" in ended.err, ended.err


def test_a_changed_pair_is_refused(tmp_path: Path) -> None:
    dataset = preprocess(make_corpus(tmp_path / "corpus"), tmp_path / "out")
    path = Path(f"{list_pairs(dataset)[2]}.bin")
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    ended = command("join", dataset, tmp_path / "joined", "--target-files", 2)
    assert ended.code != 0 and path.name in ended.err, ended.err
    assert len(list_pairs(tmp_path / "joined")) == 1


def test_killed_processes_change_no_byte(tmp_path: Path) -> None:
    dice = np.random.default_rng(5)
    prefixes = [tmp_path / f"pairs/{number}" for number in range(8)]
    for prefix in prefixes:
        lengths = dice.integers(1, 400, 10_000)
        write_ids(prefix, dice.integers(1, 4000, lengths.sum()), lengths)
    options = ["--output", tmp_path / "adopted", "--tokenizer", TOKENIZER, "--no-append-eod"]
    assert command("adopt", tmp_path / "pairs", *options).code == 0
    arguments = ["join", tmp_path / "adopted", tmp_path / "joined", "--target-files", 3, "--processes", 2]
    for _ in range(4):
        process = start(*arguments)
        deadline, files = time.monotonic() + 60, dice.integers(1, 6)
        while process.poll() is None and time.monotonic() < deadline:
            with suppress(FileNotFoundError):  # an attempt that ends at this moment
                if len([*(tmp_path / "joined").rglob("*bin*")]) >= files:
                    break
        process.kill()
        finish(process)
    ended = command(*arguments)
    assert ended.code == 0, ended.err
    assert command("join", tmp_path / "adopted", tmp_path / "once", "--target-files", 3).code == 0
    for path in (tmp_path / "once").glob("*_document.*"):
        assert (tmp_path / "joined" / path.name).read_bytes() == path.read_bytes()
    assert not [path for path in (tmp_path / "joined").rglob("*") if "attempts/" in str(path)]
    shown = [IndexedReader(pair) for pair in list_pairs(tmp_path / "joined")]
    assert sum(reader.documents for reader in shown) == 80_000
