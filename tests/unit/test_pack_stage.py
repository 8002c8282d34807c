"""The stage pack: rows of conversations and documents, splits, blends, epochs, and every refusal with its numbers."""

import json
import re
import shutil
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest

from support import stages
from support.chat import conversations, lines, make_tokenizer
from support.commandline import data_of, tokenmill
from support.corpus import TOKENIZER, text
from support.packing import read_output, read_rows
from tokenmill.datasets.dataset import verify_outputs
from tokenmill.datasets.formats.indexed.reader import IndexedReader
from tokenmill.engine.progress import Reporter
from tokenmill.engine.record import StageRecord
from tokenmill.engine.stage import StageRun
from tokenmill.engine.worker import Summary
from tokenmill.errors import InputError, RequestError
from tokenmill.stages.pack import stage as pack_stage
from tokenmill.stages.pack.blend import ALL, BlendedDataset, PackBlend
from tokenmill.stages.registry import KINDS, PACK, get_stage

pytestmark = pytest.mark.slow

SIZES = {"b": 40, "a": 90, "c": 25}
PACK_SIZE = 1024


def new_run(*, replace: bool = False, worker: int = 0, workers: int = 1, processes: int = 1) -> StageRun:
    return StageRun(Reporter(), worker, workers, processes=processes, replace=replace)


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tokenizer(tmp_path_factory.mktemp("tokenizer") / "chatml")


@pytest.fixture(scope="module")
def chatted(tmp_path_factory: pytest.TempPathFactory, tokenizer: Path) -> Path:
    """Return a finished chat of three files, which no test changes."""
    root = tmp_path_factory.mktemp("chat")
    (root / "in").mkdir()
    for seed, (name, rows) in enumerate(SIZES.items()):
        (root / "in" / f"{name}.jsonl").write_bytes(lines(conversations(seed, rows)))
    stages.chat(root / "in", root / "out", new_run(), tokenizer=str(tokenizer), chat_template="chatml")
    return root / "out"


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory, tokenizer: Path) -> Path:
    """Return a finished preprocess of two files, with the same tokenizer as the chat."""
    root = tmp_path_factory.mktemp("plain")
    (root / "in").mkdir()
    for number in range(2):
        (root / "in" / f"{number}.jsonl").write_bytes(text(number, 60))
    stages.preprocess(root / "in", root / "out", new_run(), tokenizer=str(tokenizer))
    return root / "out"


def pack(source: Any, output: Path, *, replace: bool = False, **options: Any) -> Summary:
    return stages.pack(source, output, new_run(replace=replace), **{"pack_size": PACK_SIZE, **options})


def metadata(output: Path) -> list[dict[str, Any]]:
    value: list[dict[str, Any]] = json.loads((output / "metadata.json").read_text())
    return value


def counts(summary: Summary) -> dict[str, int]:
    assert summary.completion.manifest is not None
    return summary.completion.manifest.counts


def sequences_of(chatted: Path) -> Counter[tuple[tuple[int, ...], tuple[int, ...]]]:
    """Return the ids and the unshifted mask of each sequence of a chat output."""
    sequences: Counter[tuple[tuple[int, ...], tuple[int, ...]]] = Counter()
    for name in SIZES:
        ids, mask = (IndexedReader(chatted / f"{name}_{key}_document") for key in ("chat", "mask"))
        for number in range(ids.sequences):
            sequences[tuple(ids.sequence(number).tolist()), tuple(mask.sequence(number).tolist())] += 1
    return sequences


def split_sequences(rows: list[list[list[int]]]) -> Iterator[tuple[tuple[int, ...], tuple[int, ...]]]:
    """Yield the ids and the shifted mask of each sequence of rows."""
    for ids, mask, starts in rows:
        for begin, end in zip(starts, [*starts[1:], len(ids)], strict=True):
            yield tuple(ids[begin:end]), tuple(mask[begin:end])


def shifted(
    sequences: Counter[tuple[tuple[int, ...], tuple[int, ...]]],
) -> Counter[tuple[tuple[int, ...], tuple[int, ...]]]:
    return Counter({(ids, (*mask[1:], 0)): count for (ids, mask), count in sequences.items()})


# -- rows


@pytest.mark.parametrize("form", ["parquet", "npy", "jsonl"])
def test_conversations_become_rows_of_every_format(chatted: Path, tmp_path: Path, form: str) -> None:
    summary = pack(chatted, tmp_path / "out", format=form, shards=3)
    rows = read_output(tmp_path / "out")
    assert Counter(split_sequences(rows)) == shifted(sequences_of(chatted))
    assert max(len(ids) for ids, _, _ in rows) <= PACK_SIZE
    assert verify_outputs(tmp_path / "out", KINDS, full=True)[1] == []
    (described,) = metadata(tmp_path / "out")
    assert counts(summary) == {
        "in": sum(SIZES.values()),
        "out": sum(SIZES.values()),
        "rows": len(rows),
        "tokens": sum(len(ids) for ids, _, _ in rows),
        "padding": 0,
        "trained": sum(sum(mask) for _, mask, _ in rows),
        "dropped": 0,
    }
    assert described["trained_tokens"] == sum(sum(mask) for _, mask, _ in rows)
    assert described["stored_tokens"] == sum(len(ids) for ids, _, _ in rows)
    assert [len(path.name) for path in sorted((tmp_path / "out").glob("shard_*"))] == [13 + len(form)] * 3


def test_the_source_and_the_row_of_each_sequence(chatted: Path, tmp_path: Path) -> None:
    pack(chatted, tmp_path / "out")
    readers = {name: IndexedReader(chatted / f"{name}_chat_document") for name in SIZES}
    for row in pq.read_table(tmp_path / "out" / "shard_000000.parquet").to_pylist():
        bounds = [*row["seq_start_id"], len(row["input_ids"])]
        for i, (source, number) in enumerate(zip(row["source"], row["row"], strict=True)):
            document = readers[source.removesuffix(".jsonl")].document(number).tolist()
            assert row["input_ids"][bounds[i] : bounds[i + 1]] == document


def test_documents_without_a_mask_train_every_token(plain: Path, tmp_path: Path) -> None:
    pack(plain, tmp_path / "out")
    readers = [IndexedReader(plain / f"{number}_text_document") for number in range(2)]
    expected = Counter(
        (tuple(ids), (1,) * (len(ids) - 1) + (0,))
        for reader in readers
        for number in range(reader.documents)
        if len(ids := reader.document(number).tolist()) > 1
    )
    assert Counter(split_sequences(read_output(tmp_path / "out"))) == expected


def test_metadata_counts_what_the_trainer_reads(chatted: Path, tmp_path: Path) -> None:
    pack(chatted, tmp_path / "out", seed=7)
    rows = read_output(tmp_path / "out")
    (described,) = metadata(tmp_path / "out")
    positions = [len(ids) - len(starts) for ids, _, starts in rows]
    expected = {
        "dataset_max_seqlen": max(len(ids) for ids, _ in sequences_of(chatted)) - 1,
        "max_samples_per_bin": max(len(starts) for _, _, starts in rows),
        "packing_factor": round(sum(SIZES.values()) / len(rows), 2),
        "packing_efficiency": round(100 * sum(positions) / len(rows) / PACK_SIZE, 2),
        "pack_size": PACK_SIZE,
        "min_packed_seqlen": min(positions),
        "split": "train",
        "epoch": 0,
        "algorithm": "first-fit-shuffle",
        "seed": 7,
        "rows": len(rows),
        "documents": sum(SIZES.values()),
    }
    assert {name: described[name] for name in expected} == expected


def test_counting_trained_positions_fills_rows_further(chatted: Path, tmp_path: Path) -> None:
    pack(chatted, tmp_path / "out", count="trained", algorithm="first-fit-decreasing")
    rows = read_output(tmp_path / "out")
    assert max(len(ids) for ids, _, _ in rows) > PACK_SIZE
    assert max(len(ids) - len(starts) for ids, _, starts in rows) <= PACK_SIZE
    assert verify_outputs(tmp_path / "out", KINDS, full=True)[1] == []


def test_padding_for_parallelism(chatted: Path, tmp_path: Path) -> None:
    pack(chatted, tmp_path / "out", cp=2, tp=4, sp=True)
    originals = dict(shifted(sequences_of(chatted)).keys())
    eos = 0
    for ids, mask in split_sequences(read_output(tmp_path / "out")):
        assert (len(ids) - 1) % 8 == 0
        (length,) = (n for n in range(len(ids) - 7, len(ids) + 1) if ids[:n] in originals and set(ids[n:]) <= {eos})
        assert mask == originals[ids[:length]] + (0,) * (len(ids) - length)
    assert verify_outputs(tmp_path / "out", KINDS, full=True)[1] == []


def test_padding_with_an_eos_that_is_not_the_eod(tmp_path: Path) -> None:
    (tmp_path / "in.jsonl").write_bytes(text(0, 20))
    tokenizer = make_tokenizer(tmp_path / "tokenizer")
    stages.preprocess(
        tmp_path / "in.jsonl", tmp_path / "pairs", new_run(), tokenizer=str(tokenizer), eod_token="<|im_end|>"
    )
    pack(tmp_path / "pairs", tmp_path / "out", cp=16)
    last = {ids[-1] for ids, _ in split_sequences(read_output(tmp_path / "out"))}
    assert 0 in last and last <= {0, 4097}
    (backend,) = (tmp_path / "pairs").rglob("backend.json")
    for damage in (lambda: backend.write_bytes(b"{"), backend.unlink):
        damage()
        with pytest.raises(RequestError, match=r"backend\.json is missing or damaged \(.*\), and --cp and"):
            pack(tmp_path / "pairs", tmp_path / "damaged", cp=16)


# -- splits, epochs, multiples


def test_splits_have_different_documents(chatted: Path, tmp_path: Path) -> None:
    output = tmp_path / "out"
    pack(chatted, output, shards=10, valid_shards=2, test_shards=1, epochs=2)
    by_split = {split: Counter(split_sequences(read_output(output, split))) for split in ("train", "valid", "test")}
    everything = shifted(sequences_of(chatted))
    assert set(by_split["train"].values()) == {2}
    assert Counter(set(by_split["train"])) + by_split["valid"] + by_split["test"] == everything
    tokens = {split: sum(len(ids) for ids, _ in sequences) for split, sequences in by_split.items()}
    total = sum(len(ids) for ids, _ in everything)
    assert tokens["valid"] == pytest.approx(0.2 * total, rel=0.1) and tokens["test"] == pytest.approx(
        0.1 * total, rel=0.2
    )
    names = sorted(path.relative_to(output).as_posix() for path in output.rglob("*.parquet"))
    assert names == [
        "test/shard_000000.parquet",
        *(f"train/shard_{i:06d}.parquet" for i in range(14)),
        *(f"valid/shard_{i:06d}.parquet" for i in range(2)),
    ]
    lists = json.loads((output / "blend.json").read_text())
    assert {split: entries[1::2] for split, entries in lists.items()} == {
        split: [str(output / name) for name in names if name.startswith(split)] for split in ("train", "valid", "test")
    }
    rows = {
        split: [len(read_rows("parquet", Path(path).read_bytes())) for path in lists[split][1::2]] for split in lists
    }
    assert {split: list(map(int, entries[::2])) for split, entries in lists.items()} == rows


def test_each_epoch_has_other_rows_of_the_same_sequences(chatted: Path, tmp_path: Path) -> None:
    for algorithm in ("first-fit-shuffle", "first-fit-decreasing", "best-fit", "concatenative"):
        output = tmp_path / algorithm
        pack(chatted, output, epochs=2, algorithm=algorithm)
        first, second = (
            read_rows("parquet", (output / f"shard_00000{epoch}.parquet").read_bytes()) for epoch in range(2)
        )
        assert Counter(split_sequences(first)) == Counter(split_sequences(second))
        assert {tuple(ids) for ids, _, _ in first} != {tuple(ids) for ids, _, _ in second}
        assert [(part["epoch"], part["seed"]) for part in metadata(output)] == [(0, 42), (1, 43)]
        stored = pq.read_schema(output / "shard_000001.parquet").metadata
        assert (stored[b"epoch"], stored[b"split"]) == (b"1", b"train")


def test_rows_are_a_multiple_without_dropping(chatted: Path, tmp_path: Path) -> None:
    pack(chatted, tmp_path / "out", rows_multiple_of=16, shards=8, valid_shards=2)
    for split in ("train", "valid"):
        assert len(read_output(tmp_path / "out", split)) % 16 == 0
    packed = Counter(
        split_sequences([*read_output(tmp_path / "out", "train"), *read_output(tmp_path / "out", "valid")])
    )
    assert packed == shifted(sequences_of(chatted))
    with pytest.raises(
        RequestError, match=r"--rows-multiple-of 1000: the train split has 155 sequences in \d+ rows, too few for 1,000"
    ):
        pack(chatted, tmp_path / "more", rows_multiple_of=1000)


def test_a_split_without_documents_is_not_listed(tmp_path: Path, tokenizer: Path) -> None:
    (tmp_path / "in.jsonl").write_bytes(lines(conversations(1, 1)))
    stages.chat(tmp_path / "in.jsonl", tmp_path / "chat", new_run(), tokenizer=str(tokenizer), chat_template="chatml")
    pack(tmp_path / "chat", tmp_path / "out", shards=4, valid_shards=1, test_shards=1)
    lists = json.loads((tmp_path / "out/blend.json").read_text())
    assert (lists["valid"], lists["test"]) == (None, None)
    assert [path.name for path in (tmp_path / "out").glob("*/*.parquet")] == ["shard_000000.parquet"]


# -- blends


def blend_file(path: Path, content: Any) -> Path:
    path.write_text(json.dumps(content))
    return path


def test_weights_are_shares_of_trained_tokens(chatted: Path, plain: Path, tmp_path: Path) -> None:
    blend = blend_file(
        tmp_path / "blend.json",
        {
            "datasets": [
                {"name": "chats", "path": str(chatted), "weight": 1},
                {"name": "texts", "path": str(plain), "weight": 3},
            ]
        },
    )
    pack(blend, tmp_path / "out")
    rows = pq.read_table(tmp_path / "out" / "shard_000000.parquet").to_pylist()
    trained: Counter[str] = Counter()
    for row in rows:
        bounds = [*row["seq_start_id"], len(row["input_ids"])]
        for i, source in enumerate(row["source"]):
            trained["texts" if source[0].isdigit() else "chats"] += sum(row["loss_mask"][bounds[i] : bounds[i + 1]])
    assert trained["texts"] / trained["chats"] == pytest.approx(3, rel=0.01)
    (described,) = metadata(tmp_path / "out")
    used = {part["name"]: part["repetitions"] for part in described["datasets"]}
    assert used["chats"] == 1.0 and used["texts"] > 3
    assert described["trained_tokens"] == trained.total()


def test_a_blend_with_splits(chatted: Path, plain: Path, tmp_path: Path) -> None:
    content = {"train": [{"name": "a", "path": str(plain)}], "valid": [{"name": "b", "path": str(chatted)}]}
    pack(blend_file(tmp_path / "blend.json", content), tmp_path / "out", shards=2, epochs=2)
    names = sorted(path.relative_to(tmp_path / "out").as_posix() for path in tmp_path.glob("out/*/*"))
    assert [name for name in names if not name.startswith(".")] == [
        *(f"train/shard_{i:06d}.parquet" for i in range(4)),
        "valid/shard_000000.parquet",
    ]
    assert Counter(split_sequences(read_output(tmp_path / "out", "valid"))) == shifted(sequences_of(chatted))


def test_a_blend_object_needs_no_file(chatted: Path, tmp_path: Path) -> None:
    blend = PackBlend({ALL: [BlendedDataset("a", chatted)]})
    pack(blend, tmp_path / "a")
    pack(chatted, tmp_path / "b")
    assert {name: data for name, data in data_of(tmp_path / "a").items() if "shard" in name} == {
        name: data for name, data in data_of(tmp_path / "b").items() if "shard" in name
    }


def write_blend(path: Path, **lists: list[Any]) -> Path:
    path.write_text(json.dumps({name: [{"path": str(entry)} for entry in entries] for name, entries in lists.items()}))
    return path


def test_an_output_that_two_paths_lead_to_is_used_once(chatted: Path, tmp_path: Path) -> None:
    source = shutil.copytree(chatted, tmp_path / "data" / "chat")
    blend = write_blend(tmp_path / "blend.json", datasets=[source, tmp_path / "data"])
    with pytest.raises(
        RequestError,
        match=r"blend\.json: datasets, 'data': .*/data has the output .*/data/chat, which is also used as .*: "
        r"datasets, 'chat', so its documents would be used twice; remove one of the two",
    ):
        pack(blend, tmp_path / "out")


def test_a_copy_of_the_training_data_is_not_for_validation(chatted: Path, tmp_path: Path) -> None:
    copies = [shutil.copytree(chatted, tmp_path / name) for name in ("one", "two")]
    blend = write_blend(tmp_path / "blend.json", train=copies[:1], valid=copies[1:])
    with pytest.raises(
        RequestError,
        match=r"valid, 'two': .*/two has the same documents as .*train, 'one', so the model would be tested with its",
    ):
        pack(blend, tmp_path / "out")
    pack(write_blend(tmp_path / "blend.json", datasets=copies), tmp_path / "out")
    assert metadata(tmp_path / "out")[0]["sequences"] == 2 * sum(sequences_of(chatted).values())


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("missing", r"blend\.json: train, 'missing': .*missing does not exist; specify"),
        ("x" * 300 + "/a", r"blend\.json: train, 'a': .*File name too long; choose"),
        (
            "blend.json",
            r"blend\.json: train, 'blend\.json': .*blend\.json is a file, but pack reads the output directory",
        ),
        ("/dev/null", r"blend\.json: train, 'null': /dev/null is a file, but pack reads"),
        (".", r"blend\.json: train, '\.': there is no output of tokenmill chat or preprocess in .* or below it; run"),
    ],
)
def test_a_path_of_a_blend_without_an_output_is_named(tmp_path: Path, path: str, message: str) -> None:
    with pytest.raises(RequestError, match=message):
        pack(write_blend(tmp_path / "blend.json", train=[path]), tmp_path / "out")
    if len(path) > 250:
        with pytest.raises(RequestError, match="File name too long; choose"):
            pack(Path(path), tmp_path / "out")


def test_a_blend_of_two_tokenizers_is_refused(chatted: Path, tmp_path: Path) -> None:
    (tmp_path / "in.jsonl").write_bytes(text(1, 5))
    stages.preprocess(tmp_path / "in.jsonl", tmp_path / "other", new_run(), tokenizer=str(TOKENIZER))
    entries = [{"path": str(chatted)}, {"path": str(tmp_path / "other")}]
    with pytest.raises(RequestError, match=r"must have the same tokenizer: .* has chatml \(.*other has tiny \("):
        pack(blend_file(tmp_path / "blend.json", {"datasets": entries}), tmp_path / "out")


def test_a_blend_of_two_templates_is_reported(
    chatted: Path, tokenizer: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    template = tmp_path / "own.jinja"
    template.write_text(
        "{% for m in messages %}<|im_start|>{{ m.role }}: {{ m.content }}<|im_end|>{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant: {% endif %}"
    )
    (tmp_path / "in.jsonl").write_bytes(lines(conversations(5, 5)))
    options = {"tokenizer": str(tokenizer), "chat_template": str(template)}
    stages.chat(tmp_path / "in.jsonl", tmp_path / "other", new_run(), **options)
    entries = [{"path": str(chatted)}, {"path": str(tmp_path / "other")}]
    pack(blend_file(tmp_path / "blend.json", {"datasets": entries}), tmp_path / "out")
    assert f"{tmp_path}/other has another chat template than {chatted}" in capfd.readouterr().err


# -- long sequences


def test_sequences_longer_than_a_row(chatted: Path, tmp_path: Path) -> None:
    lengths = [len(ids) for ids, _ in sequences_of(chatted).elements()]
    limit = sorted(lengths)[-10]
    with pytest.raises(RequestError) as refused:
        pack(chatted, tmp_path / "out", pack_size=limit)
    message = str(refused.value)
    assert f"9 of 155 sequences are too long, the longest has {max(lengths)} tokens" in message
    assert f"--pack-size {limit} holds sequences of at most {limit}" in message and "--max-length" in message
    summary = pack(chatted, tmp_path / "out", pack_size=limit, over_long="drop")
    assert (counts(summary)["in"], counts(summary)["dropped"]) == (155, 9)
    assert max(len(ids) for ids, _ in split_sequences(read_output(tmp_path / "out"))) == limit
    with pytest.raises(RequestError, match="--over-long split applies only to documents without a mask"):
        pack(chatted, tmp_path / "split", pack_size=limit, over_long="split")


def test_documents_are_split_with_every_label_once(plain: Path, tmp_path: Path) -> None:
    with pytest.raises(RequestError, match=r"too long.*--over-long drop, .*, or --over-long split"):
        pack(plain, tmp_path / "out", pack_size=40)
    pack(plain, tmp_path / "out", pack_size=40, over_long="split", format="jsonl", algorithm="concatenative")
    documents: dict[tuple[str, int], list[int]] = {}
    for line in (tmp_path / "out/shard_000000.jsonl").read_text().splitlines():
        row = json.loads(line)
        assert len(row["input_ids"]) <= 40
        bounds = [*row["seq_start_id"], len(row["input_ids"])]
        for i, place in enumerate(zip(row["source"], row["row"], strict=True)):
            ids = row["input_ids"][bounds[i] : bounds[i + 1]]
            earlier = documents.setdefault(place, [])
            assert not earlier or earlier[-1] == ids[0]  # a piece begins with the last token of the piece before it
            earlier += ids[1:] if earlier else ids
    for number in range(2):
        reader = IndexedReader(plain / f"{number}_text_document")
        for document in range(reader.documents):
            assert documents[f"{number}.jsonl", document] == reader.document(document).tolist()


def test_padding_lowers_the_longest_sequence(chatted: Path, tmp_path: Path) -> None:
    longest = max(len(ids) for ids, _ in sequences_of(chatted))
    size = -(-longest // 32) * 32
    with pytest.raises(
        RequestError, match=rf"holds sequences of at most {size - 31} tokens, because each is padded to a"
    ):
        pack(chatted, tmp_path / "out", pack_size=size, cp=16)


# -- input


def test_input_without_records(tmp_path: Path, plain: Path) -> None:
    for path in plain.glob("*.[bi][id][nx]"):
        (tmp_path / "bare").mkdir(exist_ok=True)
        shutil.copy(path, tmp_path / "bare")
    with pytest.raises(RequestError, match=r"bare has pairs without records of tokenmill, .*; run tokenmill adopt"):
        pack(tmp_path / "bare", tmp_path / "out")
    (tmp_path / "empty").mkdir()
    with pytest.raises(RequestError, match=r"no output of tokenmill chat or preprocess in .*empty or below it; run"):
        pack(tmp_path / "empty", tmp_path / "out")
    with pytest.raises(RequestError, match=r"missing does not exist"):
        pack(tmp_path / "missing", tmp_path / "out")
    with pytest.raises(RequestError, match=r"text_document\.bin is a file, but pack reads the output directory"):
        pack(next((tmp_path / "bare").glob("*.bin")), tmp_path / "out")


def test_the_last_stage_is_read_unless_another_is_requested(chatted: Path, plain: Path, tmp_path: Path) -> None:
    shutil.copytree(chatted, tmp_path / "data" / "chat")
    shutil.copytree(plain, tmp_path / "data" / "preprocessed")
    pack(tmp_path / "data", tmp_path / "out")
    assert read_output(tmp_path / "out")[0] != []
    assert Counter(split_sequences(read_output(tmp_path / "out"))) == shifted(sequences_of(chatted))
    pack(tmp_path / "data", tmp_path / "other", from_stage="preprocess")
    assert all(set(mask[:-1]) == {1} for _, mask in split_sequences(read_output(tmp_path / "other")))


def test_a_key_of_a_dataset_with_several(chatted: Path, tmp_path: Path) -> None:
    (tmp_path / "in.jsonl").write_text('{"a": "one two three", "b": "four five six seven"}\n' * 5)
    stages.preprocess(tmp_path / "in.jsonl", tmp_path / "pairs", new_run(), tokenizer=str(TOKENIZER), keys="a,b")
    with pytest.raises(
        RequestError, match=r"--key is missing: the keys of .* are a, b, and pack reads one key; choose"
    ):
        pack(tmp_path / "pairs", tmp_path / "out")
    with pytest.raises(RequestError, match=r"invalid --key c: the keys"):
        pack(tmp_path / "pairs", tmp_path / "out", key="c")
    with pytest.raises(RequestError, match=r"--key b: every input is an output of tokenmill chat, .*; leave out --key"):
        pack(chatted, tmp_path / "out", key="b")
    pack(tmp_path / "pairs", tmp_path / "out", key="b")
    expected = IndexedReader(tmp_path / "pairs/in_b_document").document(0).tolist()
    assert {ids for ids, _ in split_sequences(read_output(tmp_path / "out"))} == {tuple(expected)}


def test_documents_that_train_nothing_are_left_out(tmp_path: Path) -> None:
    (tmp_path / "in.jsonl").write_text('{"text": "one two three"}\n{"text": "a"}\n')
    options = {"tokenizer": str(TOKENIZER), "append_eod": False}
    stages.preprocess(tmp_path / "in.jsonl", tmp_path / "pairs", new_run(), **options)
    summary = pack(tmp_path / "pairs", tmp_path / "out")
    assert (counts(summary)["in"], counts(summary)["dropped"]) == (2, 1)
    (tmp_path / "in.jsonl").write_text('{"text": "a"}\n')
    stages.preprocess(tmp_path / "in.jsonl", tmp_path / "single", new_run(), **options)
    with pytest.raises(RequestError, match=r"no sequence to pack as training data \(1 without a loss token\); check"):
        pack(tmp_path / "single", tmp_path / "none")


def copy_chat(chatted: Path, tmp_path: Path) -> Path:
    return shutil.copytree(chatted, tmp_path / "copy")


def test_a_damaged_mask_is_refused(chatted: Path, tmp_path: Path) -> None:
    source = copy_chat(chatted, tmp_path)
    with (source / "a_mask_document.bin").open("r+b") as file:
        file.seek(10)
        file.write(b"\x02")
    with pytest.raises(InputError, match=r"a_mask_document\.bin: the mask of token 10 is 2, but a mask is 0 or 1; run"):
        pack(source, tmp_path / "out")
    (source / "a_mask_document.bin").unlink()
    with pytest.raises(
        RequestError, match=r"1 of its 12 files that pack reads are missing .*: a_mask_document\.bin; run"
    ):
        pack(source, tmp_path / "out")


@pytest.mark.parametrize(
    ("field", "message"),
    [
        ("lengths", r"is not the mask of a_chat_document: its sequence 0 has [\d,]+ values for [\d,]+ tokens; run"),
        ("document_indices", r"is not the mask of a_chat_document: its documents have other numbers of sequences; run"),
    ],
)
def test_the_mask_of_other_sequences_is_refused(chatted: Path, tmp_path: Path, field: str, message: str) -> None:
    """Two entries of the mask's index are exchanged: its sizes stay the same."""
    source = copy_chat(chatted, tmp_path)
    path = source / "a_mask_document.idx"
    data = bytearray(path.read_bytes())
    entries = np.array(getattr(IndexedReader(source / "a_mask_document"), field))
    place = data.index(entries.tobytes())
    other = next(i for i in range(1, len(entries)) if entries[i] != entries[0])
    entries[[0, other]] = entries[[other, 0]]
    data[place : place + entries.nbytes] = entries.tobytes()
    path.write_bytes(data)
    with pytest.raises(InputError, match=message):
        pack(source, tmp_path / "out")


@pytest.mark.parametrize("name", ["a_mask_document.bin", "a_mask_document.idx", "a_chat_document.idx"])
def test_files_of_other_data_with_equal_sizes_are_refused(chatted: Path, tmp_path: Path, name: str) -> None:
    """A mask with the right number of values, or an index that still adds up, is not what the stage has written."""
    source = copy_chat(chatted, tmp_path)
    data = bytearray((source / name).read_bytes())
    if name.endswith(".bin"):
        data.reverse()
    else:  # two neighbouring lengths are exchanged in the index
        first = next(i for i in range(34, 34 + 4 * 50, 4) if data[i : i + 4] != data[i + 4 : i + 8])
        data[first : first + 8] = data[first + 4 : first + 8] + data[first : first + 4]
    (source / name).write_bytes(data)
    message = rf"{re.escape(name)} is damaged, or is a file of another dataset: its hash differs from the one in the"
    if name == "a_mask_document.idx":
        message = r"is not the mask of a_chat_document: its sequence \d+ has"
    with pytest.raises(InputError, match=f"{message}.*run the same tokenmill chat again with --verify-hashes"):
        pack(source, tmp_path / "out")


def test_a_mask_that_was_replaced_after_planning_is_refused(chatted: Path, tmp_path: Path) -> None:
    source = copy_chat(chatted, tmp_path)
    pack(source, tmp_path / "out", shards=3)
    shard = tmp_path / "out" / "shard_000001.parquet"
    good = shard.read_bytes()
    shard.unlink()
    for name in SIZES:
        mask = source / f"{name}_mask_document.bin"
        mask.write_bytes(b"\x01" * mask.stat().st_size)
    with pytest.raises(
        InputError,
        match=rf"^shard_000001\.parquet: its rows train [\d,]+ tokens, but [\d,]+ were planned: a mask in {source} was",
    ):
        pack(source, tmp_path / "out", shards=3)
    assert not shard.exists()
    shutil.copytree(chatted, source, dirs_exist_ok=True)
    pack(source, tmp_path / "out", shards=3)
    assert shard.read_bytes() == good


def test_an_id_outside_the_vocabulary_is_refused(chatted: Path, tmp_path: Path) -> None:
    source = copy_chat(chatted, tmp_path)
    with (source / "a_chat_document.bin").open("r+b") as file:
        file.write(b"\xff\xff")
    with pytest.raises(
        InputError,
        match=r"a_chat_document\.bin: the id 65535 of the record 0 of a\.jsonl is not in the vocabulary of 4,098",
    ):
        pack(source, tmp_path / "out")


def test_a_tokenizer_without_eos_cannot_pad(tmp_path: Path) -> None:
    tokenizer = make_tokenizer(tmp_path / "tokenizer")
    for name in ("tokenizer_config.json", "special_tokens_map.json"):
        if (path := tokenizer / name).exists():
            path.write_text(json.dumps({k: v for k, v in json.loads(path.read_text()).items() if "eos" not in k}))
    (tmp_path / "in.jsonl").write_bytes(text(0, 5))
    options = {"tokenizer": str(tokenizer), "append_eod": False}
    stages.preprocess(tmp_path / "in.jsonl", tmp_path / "pairs", new_run(), **options)
    with pytest.raises(
        RequestError, match=r"--cp 2 and --no-sp pad sequences .*, but tokenizer has no eos token; leave"
    ):
        pack(tmp_path / "pairs", tmp_path / "out", cp=2)
    pack(tmp_path / "pairs", tmp_path / "out")


def test_shards_for_splits_need_a_total(chatted: Path, tmp_path: Path) -> None:
    with pytest.raises(
        RequestError, match=r"--valid-shards 1 and --test-shards 0 are parts of --shards N.*to 2 or more"
    ):
        pack(chatted, tmp_path / "out", valid_shards=1)
    with pytest.raises(RequestError, match=r"parts of --shards 3, and at least one .*set --shards to 4 or more"):
        pack(chatted, tmp_path / "out", valid_shards=2, test_shards=1, shards=3)


def test_more_shards_than_rows(chatted: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    pack(chatted, tmp_path / "out", pack_size=1 << 20, shards=4)
    assert "train: 1 shards instead of 4, because there is only 1 row" in capfd.readouterr().err
    assert [path.name for path in (tmp_path / "out").glob("*.parquet")] == ["shard_000000.parquet"]


# -- plans


def test_more_epochs_keep_the_shards_of_the_earlier_ones(chatted: Path, tmp_path: Path) -> None:
    output = tmp_path / "out"
    pack(chatted, output, shards=3, valid_shards=1)
    with pytest.raises(RequestError, match=r"epochs: 1 -> 2"):
        pack(chatted, output, shards=3, valid_shards=1, epochs=2)
    before = {path.name: path.stat().st_mtime_ns for path in output.glob("train/*")}
    summary = pack(chatted, output, shards=3, valid_shards=1, epochs=2, replace=True)
    after = {path.name: path.stat().st_mtime_ns for path in output.glob("train/*")}
    assert before.items() <= after.items() and len(after) == 4
    assert summary.done_before == 3
    pack(chatted, tmp_path / "fresh", shards=3, valid_shards=1, epochs=2)
    for name, data in data_of(tmp_path / "fresh").items():
        assert name == "blend.json" or data == (output / name).read_bytes()


def test_another_seed_replaces_everything(chatted: Path, tmp_path: Path) -> None:
    output = tmp_path / "out"
    pack(chatted, output, shards=4)
    pack(chatted, output, shards=2, seed=1, replace=True)
    assert sorted(data_of(output)) == ["blend.json", "metadata.json", "shard_000000.parquet", "shard_000001.parquet"]
    assert verify_outputs(output, KINDS, full=True)[1] == []


def test_a_missing_assignment_is_computed_again(chatted: Path, tmp_path: Path) -> None:
    output = tmp_path / "out"
    pack(chatted, output, shards=4)
    expected = (output / "shard_000002.parquet").read_bytes()
    assignment = StageRecord(output, PACK).directory / pack_stage.ASSIGNMENT_FILE
    stored = assignment.read_bytes()
    for damage in (b"", b"other", None):
        (output / "shard_000002.parquet").unlink()
        pack_stage._LOADED.clear()
        if damage is None:
            assignment.unlink()
        else:
            assignment.write_bytes(damage)
        pack(chatted, output, shards=4)
        assert (output / "shard_000002.parquet").read_bytes() == expected
        assert assignment.read_bytes() == stored


def test_a_changed_input_is_planned_again_with_replace(chatted: Path, tokenizer: Path, tmp_path: Path) -> None:
    source, output = copy_chat(chatted, tmp_path), tmp_path / "out"
    pack(source, output)
    (tmp_path / "in.jsonl").write_bytes(lines(conversations(9, 30)))
    options = {"tokenizer": str(tokenizer), "chat_template": "chatml"}
    stages.chat(tmp_path / "in.jsonl", source, new_run(replace=True), **options)
    with pytest.raises(RequestError, match=r"the input of pack in .* changed after it was planned.*--replace"):
        pack(source, output)
    assert counts(pack(source, output, replace=True))["in"] == 30


def test_workers_and_processes_write_the_same_bytes(chatted: Path, tmp_path: Path) -> None:
    options: dict[str, Any] = {"pack_size": PACK_SIZE, "shards": 9, "valid_shards": 2, "cp": 2, "epochs": 2}
    outputs = {}
    for workers, processes in ((1, 1), (3, 1), (7, 1), (1, 2)):
        output = tmp_path / "out"
        for worker in range(workers):
            stages.pack(chatted, output, new_run(worker=worker, workers=workers, processes=processes), **options)
        outputs[workers, processes] = data_of(output)
        assert verify_outputs(output, KINDS, full=True)[1] == []
        shutil.rmtree(output)
    first = outputs.pop((1, 1))
    assert len(first) == 18 and all(other == first for other in outputs.values())


# -- the command


def test_the_command_and_its_report(chatted: Path, tmp_path: Path) -> None:
    result = tokenmill("pack", chatted, tmp_path / "out", "--pack-size", PACK_SIZE, "--processes", 1)
    assert result.code == 0, result.err
    assert "pack: complete, 3 files, " in result.out and "155 sequences, " in result.out
    assert get_stage("pack").next.split()[1] == "verify"
    verified = tokenmill("verify", tmp_path / "out")
    assert (verified.code, "no problems" in verified.out) == (0, True)
    status = tokenmill("status", tmp_path / "out")
    assert "pack in " in status.out and "2/2 units" in status.out
    shard = tmp_path / "out" / "shard_000000.parquet"
    data = bytearray(shard.read_bytes())
    data[len(data) // 2] ^= 1
    shard.write_bytes(data)
    damaged = tokenmill("verify", tmp_path / "out")
    assert damaged.code == 2 and "its content does not match its receipt" in damaged.out
    again = tokenmill("pack", chatted, tmp_path / "out", "--pack-size", PACK_SIZE, "--processes", 1, "--verify-hashes")
    assert again.code == 0 and tokenmill("verify", tmp_path / "out").code == 0


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--algorithm", "worst"], "'worst' is not one of first-fit-shuffle, "),
        (["--pack-size", "1"], "1 is not in the range x>=2"),
        (["--cp", "3"], "4096 is not a multiple of 6"),
        (["--format", "csv"], "'csv' is not one of parquet, npy, jsonl"),
        (["--from", "download"], "--from download: pack reads one of preprocess, chat"),
    ],
)
def test_invalid_options(chatted: Path, tmp_path: Path, options: list[str], message: str) -> None:
    result = tokenmill("pack", chatted, tmp_path / "out", *options)
    assert result.code == 2
    assert message in " ".join(result.err.replace("│", " ").split())
