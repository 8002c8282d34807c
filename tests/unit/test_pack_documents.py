"""pack --format megatron: whole documents in rows, the order in which they are read, and every refusal."""

import pickle
import re
import sys
from collections import Counter
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import tokenmill.data
import tokenmill.loaders.megatron
from support import stages
from support.chat import conversations, lines
from support.commandline import tokenmill as run_command
from support.packing import pack_documents
from tokenmill.datasets.dataset import find_dataset, verify_outputs
from tokenmill.datasets.formats.indexed.check import check_pair
from tokenmill.datasets.formats.indexed.reader import IndexedReader
from tokenmill.engine.progress import Reporter
from tokenmill.engine.record import Manifest
from tokenmill.engine.stage import StageRun
from tokenmill.errors import RequestError
from tokenmill.models.model import Model
from tokenmill.pipelines.forget import ForgetRequest, forget
from tokenmill.samples.row_order import build_row_index, count_row_epochs, find_rows
from tokenmill.stages.registry import KINDS
from tokenmill.train.data.index import build_index
from tokenmill.train.data.resolve import resolve
from tokenmill.train.runtime.prepare import find_index_cache, list_packed, list_starts
from tokenmill.train.settings import CheckpointSettings, DatasetSettings, Settings, Training, derive_settings

pytestmark = pytest.mark.slow

SIZE, EOD = 128, 0


@pytest.fixture(scope="module")
def packed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a packed dataset of one pair, next to the dataset `pairs` of two; no test changes them."""
    return pack_documents(tmp_path_factory.mktemp("packed"), SIZE)


def pack(source: Path, output: Path, **options: Any) -> Manifest:
    run = StageRun(Reporter(), processes=1)
    manifest = stages.pack(source, output, run, format="megatron", **options).completion.manifest
    assert manifest is not None
    return manifest


def read_documents(directory: Path) -> list[tuple[int, ...]]:
    """Return the ids of all documents."""
    readers = [IndexedReader(path.with_suffix("")) for path in sorted(directory.glob("*.idx"))]
    return [tuple(reader.document(number).tolist()) for reader in readers for number in range(reader.documents)]


def read_rows(prefix: Path) -> list[list[tuple[int, ...]]]:
    """Return the rows of a pair: the ids of each of their sequences."""
    reader = IndexedReader(prefix)
    rows = [
        [tuple(reader.sequence(number).tolist()) for number in range(first, end)]
        for first, end in pairwise(reader.document_indices.tolist())
    ]
    assert {sum(map(len, row)) for row in rows} == {SIZE}
    return rows


def cut(documents: list[tuple[int, ...]]) -> list[tuple[int, ...]]:
    """Return the documents, of those longer than a row the pieces."""
    return [document[first : first + SIZE] for document in documents for first in range(0, len(document), SIZE)]


def assert_packed(rows: list[list[tuple[int, ...]]], pieces: list[tuple[int, ...]]) -> None:
    """Check that rows have these pieces once, and padding only at their ends."""
    sequences = Counter(sequence for row in rows for sequence in row)
    expected = Counter(pieces)
    assert expected <= sequences
    padding = sequences - expected
    assert all(set(sequence) == {EOD} for sequence in padding)
    assert padding <= Counter(row[-1] for row in rows)


def get_prefix(directory: Path) -> Path:
    (path,) = directory.glob("*.idx")
    return path.with_suffix("")


def test_documents_that_fit_are_whole(packed: Path) -> None:
    documents, rows = read_documents(packed.parent / "pairs"), read_rows(get_prefix(packed))
    assert_packed(rows, cut(documents))
    assert verify_outputs(packed, KINDS, full=True)[1] == []


@pytest.mark.parametrize("mean", [0, 1 << 30])
def test_short_and_long_pieces_are_read_alike(
    packed: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mean: int
) -> None:
    monkeypatch.setattr("tokenmill.stages.pack.documents.SHORT_PIECE", mean)
    pack(packed.parent / "pairs", tmp_path / "out", pack_size=SIZE)
    assert (
        get_prefix(tmp_path / "out").with_suffix(".bin").read_bytes()
        == get_prefix(packed).with_suffix(".bin").read_bytes()
    )


def test_the_manifest_counts_rows_and_cut_documents(packed: Path) -> None:
    documents, rows = read_documents(packed.parent / "pairs"), read_rows(get_prefix(packed))
    ends = np.cumsum([len(document) for document in documents])
    starts = [0, *ends.tolist()[:-1]]
    assert find_dataset(packed).manifest.counts == {
        "in": len(documents),
        "out": len(documents),
        "dropped": 0,
        "rows": len(rows),
        "sequences": len(cut(documents)),
        "tokens": int(ends[-1]),
        "padding": len(rows) * SIZE - int(ends[-1]),
        "cut": sum(len(document) > SIZE for document in documents),
        "cut_unpacked": sum(
            any(start < bound < end for bound in range(0, end, SIZE))
            for start, end in zip(starts, ends.tolist(), strict=True)
        ),
    }


def test_the_pieces_of_a_document_follow_each_other(packed: Path) -> None:
    """The last label of a complete piece is the next token of its document, unless rows hold several last pieces."""
    rows, documents = read_rows(get_prefix(packed)), read_documents(packed.parent / "pairs")
    nexts = {
        document[first : first + SIZE]: document[first + SIZE]
        for document in documents
        for first in range(0, len(document) - SIZE, SIZE)
    }
    followed = [nexts[row[0]] == later[0][0] for row, later in pairwise(rows) if row[0] in nexts]
    assert len(followed) > 20 and sum(followed) > 0.6 * len(followed)


def test_rows_are_samples_with_documents(packed: Path) -> None:
    prefix = get_prefix(packed)
    rows = read_rows(prefix)
    samples = tokenmill.data.open(packed, seq_length=SIZE, samples=len(rows) + 5, seed=3, documents="varlen")
    assert len(samples) == 2 * len(rows)
    seen: Counter[tuple[tuple[int, ...], ...]] = Counter()
    for number in range(len(rows)):
        batch = samples[number]
        assert batch.cu_seqlens is not None
        assert batch.loss_mask.all()
        row = [tuple(batch.tokens[0, a:b].tolist()) for a, b in pairwise(batch.cu_seqlens.tolist())]
        seen[tuple(row)] += 1
        pieces = samples.origin(number)
        assert [piece.length for piece in pieces] == [*map(len, row), 1]
    assert seen == Counter(tuple(row) for row in rows)
    assert pickle.loads(pickle.dumps(samples)).digest(0, 50) == samples.digest(0, 50)
    numbers = samples.find_document(prefix, 4)
    assert numbers is not None and len(numbers) == 2
    for number in numbers.tolist():
        assert samples.origin(number)[0].document == 4


def test_megatron_s_index_gives_the_rows(packed: Path) -> None:
    """The arrays, read as GPTDataset reads them, give the samples of the loaders; conformance reads with GPTDataset."""
    reader = IndexedReader(get_prefix(packed))
    first, end = find_rows(reader.document_indices, 0, reader.sequences)
    assert (first, end) == (0, reader.documents)
    epochs = count_row_epochs(end - first, 2 * end + 1)
    index = build_row_index(reader.document_indices, epochs, 3)
    samples = tokenmill.data.open(packed, seq_length=SIZE, samples=2 * end + 1, seed=3)
    assert len(samples) == len(index.shuffle_index) == 3 * end
    for number in [*range(40), end - 1, end, 3 * end - 1]:
        (begin, _), (stop, _) = index.sample_index[index.shuffle_index[number] :][:2].tolist()
        ids = [token for place in range(begin, stop) for token in reader.sequence(index.document_index[place])]
        ids.append(int(reader.sequence(index.document_index[stop])[0]))
        batch = samples[number]
        assert batch.tokens[0].tolist() == ids[:-1] and batch.labels[0].tolist() == ids[1:]


def test_a_part_has_complete_rows(packed: Path) -> None:
    parts = {
        part: tokenmill.data.open(packed, seq_length=SIZE, split="80,20", part=part) for part in ("train", "validation")
    }
    rows = {
        part: {samples.origin(number)[0].document for number in range(len(samples))} for part, samples in parts.items()
    }
    total = len(read_rows(get_prefix(packed)))
    assert not rows["train"] & rows["validation"]
    assert total - 1 <= len(rows["train"]) + len(rows["validation"]) <= total


def test_dropped_documents_are_counted(packed: Path, tmp_path: Path) -> None:
    documents = read_documents(packed.parent / "pairs")
    manifest = pack(packed.parent / "pairs", tmp_path / "out", pack_size=SIZE, over_long="drop")
    kept = [document for document in documents if len(document) <= SIZE]
    assert_packed(read_rows(get_prefix(tmp_path / "out")), kept)
    assert manifest.counts["dropped"] == len(documents) - len(kept) and manifest.counts["cut"] == 0


def test_the_command_reports_cut_documents_and_fill(packed: Path, tmp_path: Path) -> None:
    options = ["--pack-size", str(SIZE), "--format", "megatron", "--shards", "2"]
    done = run_command("pack", packed.parent / "pairs", tmp_path / "out", *options)
    assert done.code == 0, done.err
    assert re.search(
        r"pack: complete, 2 files, .* 240 documents, [\d,]+ rows, [\d,]+ documents cut without packing, [\d,]+ "
        r"documents longer than a row and cut, [\d,]+ tokens, 9\d\.\d\d% of the rows filled in",
        done.out,
    )
    shown = run_command("inspect", tmp_path / "out")
    assert re.search(r"shard-00000-of-00002_text_document: [\d,]+ rows of 128 tokens, [\d,]+ sequences", shown.out)
    assert run_command("inspect", tmp_path / "out", "--document", "1").out.startswith("row 1 of ")


def test_verify_finds_a_row_of_another_length(packed: Path) -> None:
    (problem,) = check_pair(get_prefix(packed), row_tokens=SIZE - 1)
    assert re.search(r"\.idx: row 0 has 128 tokens instead of 127; ", str(problem))


# -- refusals


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"epochs": 2}, r"--epochs is not for --format megatron: the training decides about it; leave it out"),
        ({"cp": 2}, r"--cp is not for --format megatron"),
        ({"valid_shards": 1, "shards": 2}, r"--valid-shards is not for --format megatron"),
        ({"shards": 3}, r"--shards 3 is more than the 2 pairs of .*; choose 2 or fewer"),
        ({"over_long": "fail"}, r"documents are longer than --pack-size 128, and the longest has [\d,]+ tokens; raise"),
        ({"key": "title"}, r"invalid --key title: the keys of .* are text, and pack reads one key; choose"),
        ({"from_stage": "chat"}, r"invalid --from chat: --format megatron packs the output of preprocess; leave out"),
    ],
)
def test_options_that_cannot_work_are_refused(
    packed: Path, tmp_path: Path, options: dict[str, Any], message: str
) -> None:
    with pytest.raises(RequestError, match=message):
        pack(packed.parent / "pairs", tmp_path / "out", **{"pack_size": SIZE, **options})


def test_inputs_that_cannot_be_packed_are_refused(packed: Path, tmp_path: Path) -> None:
    with pytest.raises(RequestError, match=r"is packed, in rows of 128 tokens; specify the dataset from"):
        pack(packed, tmp_path / "out")
    with pytest.raises(RequestError, match=r"contain each other; choose another output directory"):
        pack(packed.parent / "pairs", packed.parent / "pairs" / "packed")
    (tmp_path / "blend.json").write_text("{}")
    with pytest.raises(RequestError, match=r"blend\.json is a file, but --format megatron packs one dataset; specify"):
        pack(tmp_path / "blend.json", tmp_path / "out")
    (tmp_path / "in.jsonl").write_bytes(lines(conversations(1, 5)))
    run = StageRun(Reporter(), processes=1)
    tokenizer = str(packed.parent / "tokenizer")
    stages.chat(tmp_path / "in.jsonl", tmp_path / "chat", run, tokenizer=tokenizer, chat_template="chatml")
    with pytest.raises(RequestError, match=r"has conversations, whose mask --format megatron cannot hold; choose"):
        pack(tmp_path / "chat", tmp_path / "out")


def open_phases(packed: Path, directory: Path) -> object:
    (directory / "phases.yaml").write_text(
        f"phases:\n- samples: 10\n  blend:\n  - {{path: {packed}, weight: 1}}\n"
        f"- samples: 10\n  blend:\n  - {{path: {packed}, weight: 1}}\n"
    )
    return tokenmill.data.open(phases=directory / "phases.yaml", seq_length=SIZE)


def forget_documents(packed: Path, directory: Path) -> object:
    (directory / "list").write_text(f"{get_prefix(packed).name}:1\n")
    request = ForgetRequest(packed, directory / "out", directory / "list", [], None, rewrite=False, allow_missing=False)
    return forget(request, StageRun(Reporter(), processes=1))


def settings_of(packed: Path, seq_length: int, *extra: str, checkpoints: str = "/checkpoints") -> Settings:
    return Settings(
        release="run",
        model=Model(num_layers=2, hidden_size=64, num_attention_heads=4, seq_length=seq_length),
        training=Training(gpus_per_node=1, iterations=4, global_batch_size=2, eval_interval=2, max_epochs=1e9),
        checkpoint=CheckpointSettings(path=checkpoints),
        dataset=DatasetSettings(path=str(packed), split="60,30,10"),
        extra_args=list(extra),
    )


def build_train_index(packed: Path, directory: Path) -> object:
    settings = derive_settings(settings_of(packed, SIZE, checkpoints=str(directory / "checkpoints")))
    data = resolve(settings)
    starts, cache = list_starts(settings, data, None, directory), find_index_cache(data, settings)
    return build_index(starts, cache, script="/nowhere/x.py", python=[sys.executable], packed=list_packed(data))


READERS: dict[str, tuple[Callable[[Path, Path], object], str]] = {
    "another length": (
        lambda packed, _: tokenmill.data.open(packed, seq_length=64),
        r"invalid seq_length 64: the rows of .* have 128 tokens; use seq_length 128, or run tokenmill pack",
    ),
    "no row": (
        lambda packed, _: tokenmill.data.open(packed, seq_length=SIZE, split="9999,1", part="validation"),
        r"validation has no row of .*; set split to give it a larger share",
    ),
    "megatron-core": (
        lambda packed, directory: tokenmill.loaders.megatron.describe_data(packed, seq_length=SIZE, cache=directory),
        r"has packed rows, which GPTDataset with an index of its own does not read yet; specify the dataset from",
    ),
    "train, another length": (
        lambda packed, _: resolve(settings_of(packed, 64)),
        r"the rows of .* have 128 tokens, but model.custom.seqLength is 64; set it to 128, or run tokenmill pack with",
    ),
    "train, Megatron-LM's reader of buckets": (
        lambda packed, _: resolve(settings_of(packed, SIZE, "--object-storage-cache-path=/tmp")),
        r"own reader of buckets \(--object-storage-cache-path\) cannot read packed rows; remove the argument",
    ),
    "train without Megatron-LM": (
        build_train_index,
        r"cannot import a Megatron-LM with --dataloader-defer-npy-index-mmap, without which it would not read packed",
    ),
    "forget": (
        forget_documents,
        r"has packed rows, and its documents cannot be left out; run tokenmill forget on the dataset from which",
    ),
    "phases": (open_phases, r"has packed rows, which a run with phases does not read yet; specify the dataset from"),
}


@pytest.mark.parametrize("name", READERS)
def test_readers_that_cannot_read_rows_refuse_them(packed: Path, tmp_path: Path, name: str) -> None:
    read, message = READERS[name]
    with pytest.raises(RequestError, match=message):
        read(packed, tmp_path)
