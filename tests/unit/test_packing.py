"""Packing without files: rows of lengths, shares of a blend, splits, pieces, and the bytes of each format."""

import io
import json
import math
import random
import tracemalloc
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from support.packing import Buffer, read_rows, rows_of
from tokenmill.engine.options import InvalidOption
from tokenmill.errors import RequestError
from tokenmill.packs.writers import SHARD_FORMATS, ShardInfo
from tokenmill.stages.pack import algorithms, rows
from tokenmill.stages.pack.algorithms import (
    ALGORITHMS,
    BEST_FIT,
    CONCATENATIVE,
    FIRST_FIT_DECREASING,
    FIRST_FIT_SHUFFLE,
    Bins,
    assign,
    shuffle,
    spread,
)
from tokenmill.stages.pack.assignment import SLOT
from tokenmill.stages.pack.blend import ALL, BlendedDataset, Share, get_shares, load_blend, make_blend, repeat, single
from tokenmill.stages.pack.options import PackOptions
from tokenmill.stages.pack.rows import assemble

CAPACITY = 32
LENGTHS = st.lists(st.integers(1, CAPACITY), max_size=80)


def totals(bins: Bins, lengths: list[int]) -> list[int]:
    return [sum(lengths[i] for i in row) for row in bins.lists()]


# -- algorithms


@given(LENGTHS, st.sampled_from(ALGORITHMS), st.integers(0, 5), st.booleans())
def test_each_sequence_is_in_one_row_with_room(lengths: list[int], algorithm: str, seed: int, shuffled: bool) -> None:
    bins = assign(np.array(lengths, dtype="i8"), CAPACITY, algorithm, seed, shuffled=shuffled)
    assert sorted(bins.order.tolist()) == list(range(len(lengths)))
    assert all(bins.lists()) and max(totals(bins, lengths), default=0) <= CAPACITY


def naive_first_fit(order: list[int], lengths: list[int]) -> list[list[int]]:
    rows: list[list[int]] = []
    for number in order:
        for row in rows:
            if sum(lengths[i] for i in row) + lengths[number] <= CAPACITY:
                row.append(number)
                break
        else:
            rows.append([number])
    return rows


@given(LENGTHS, st.integers(0, 5))
def test_first_fit_takes_the_first_row_with_room(lengths: list[int], seed: int) -> None:
    array = np.array(lengths, dtype="i8")
    order = list(range(len(lengths)))
    decreasing = sorted(order, key=lambda i: -lengths[i])
    assert assign(array, CAPACITY, FIRST_FIT_DECREASING, seed).lists() == naive_first_fit(decreasing, lengths)
    random.Random(seed).shuffle(order)
    assert assign(array, CAPACITY, FIRST_FIT_SHUFFLE, seed).lists() == naive_first_fit(order, lengths)


def naive_best_fit(lengths: list[int], capacity: int) -> list[int]:
    """Return the tokens of each row, with a search of all rows for each sequence, the longest first."""
    rows: list[int] = []
    for length in sorted(lengths, reverse=True):
        fitting = [number for number, size in enumerate(rows) if size + length <= capacity]
        if fitting:
            rows[max(fitting, key=rows.__getitem__)] += length
        else:
            rows.append(length)
    return rows


@given(LENGTHS, st.integers(0, 5))
def test_best_fit_takes_the_fullest_row_with_room(lengths: list[int], seed: int) -> None:
    bins = assign(np.array(lengths, dtype="i8"), CAPACITY, BEST_FIT, seed)
    assert sorted(totals(bins, lengths)) == sorted(naive_best_fit(lengths, CAPACITY))


@pytest.mark.parametrize(("median", "capacity"), [(350, 4096), (700, 2048), (60, 100_000)])
def test_best_fit_of_documents_equals_a_complete_sort(median: int, capacity: int) -> None:
    """Equal lengths are placed together: the rows have the same tokens as if each sequence was placed alone."""
    dice = random.Random(median)
    lengths = [min(capacity, max(1, round(median * dice.lognormvariate(0, 1)))) for _ in range(3000)]
    bins = assign(np.array(lengths, dtype="i4"), capacity, BEST_FIT, 0)
    assert sorted(bins.order.tolist()) == list(range(len(lengths)))
    assert sorted(totals(bins, lengths)) == sorted(naive_best_fit(lengths, capacity))


def test_the_seed_of_best_fit_chooses_sequences_of_one_length_and_the_order_of_rows() -> None:
    lengths = np.array(random.Random(1).choices(range(1, CAPACITY), k=200))
    first, again, other = (assign(lengths, CAPACITY, BEST_FIT, seed).lists() for seed in (1, 1, 2))
    assert first == again != other
    longest = [max(lengths[row]) for row in first]
    assert longest != sorted(longest, reverse=True)


@pytest.mark.parametrize("capacity", [1 << 12, (1 << 20) - 1, 1 << 26])
def test_best_fit_costs_little_for_large_rows(capacity: int) -> None:
    """The time and the memory depend on the number of sequences, not on the size of a row."""
    dice = random.Random(capacity)
    lengths = np.array([dice.randint(1, capacity) for _ in range(20_000)])
    tracemalloc.start()
    bins = assign(lengths, capacity, "best-fit", 0)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    sizes = [int(lengths[row].sum()) for row in bins.lists()]
    assert max(sizes) <= capacity
    assert len(sizes) < 1.03 * lengths.sum() / capacity + 1
    assert peak < 32 << 20


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_assignment_needs_little_memory(monkeypatch: pytest.MonkeyPatch, algorithm: str) -> None:
    """Lengths are Python numbers only in parts: 40 bytes for each sequence would be twice as many."""
    monkeypatch.setattr(algorithms, "CHUNK", 1000)
    lengths = np.random.default_rng(1).integers(30, 400, 50_000, dtype="i4")
    tracemalloc.start()
    assign(lengths, 4096, algorithm, 0)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 40 * len(lengths)


def test_concatenative_keeps_the_order() -> None:
    bins = assign(np.array([20, 20, 5, 8, 31, 1]), CAPACITY, CONCATENATIVE, 0)
    assert bins.lists() == [[0], [1, 2], [3], [4, 5]]


def test_another_seed_gives_other_rows_for_every_algorithm() -> None:
    lengths = np.array(random.Random(1).choices(range(1, CAPACITY), k=200))
    for algorithm in ALGORITHMS:
        rows = [assign(lengths, CAPACITY, algorithm, seed, shuffled=True).lists() for seed in (1, 1, 2)]
        assert rows[0] == rows[1] != rows[2]


def test_shuffle_is_python_s() -> None:
    pairs = [(length, number) for number, length in enumerate("abcdefgh")]
    random.Random(42).shuffle(pairs)
    assert shuffle(8, 42).tolist() == [number for _, number in pairs]


@given(LENGTHS, st.integers(1, 9))
def test_spread_makes_more_rows_of_the_same_sequences(lengths: list[int], multiple: int) -> None:
    array = np.array(lengths, dtype="i8")
    bins = assign(array, CAPACITY, FIRST_FIT_SHUFFLE, 0)
    rows = math.ceil(len(bins.ends) / multiple) * multiple
    arranged = spread(bins, array, rows)
    if arranged is None:
        assert len(lengths) < rows
    else:
        assert len(arranged.ends) == rows and all(arranged.lists())
        assert sorted(arranged.order.tolist()) == list(range(len(lengths)))


def test_spread_divides_the_largest_rows_in_half() -> None:
    lengths = np.array([10, 10, 10, 10, 6, 6])
    bins = Bins(np.arange(6), np.array([4, 6]))
    arranged = spread(bins, lengths, 3)
    assert arranged is not None and totals(arranged, lengths.tolist()) == [20, 12, 20]


# -- options


def test_the_multiple_of_parallelism() -> None:
    settings = [(1, 1, False), (2, 1, False), (2, 4, False), (1, 4, True), (2, 2, True), (4, 3, True)]
    multiples = [PackOptions(cp=cp, tp=tp, sp=sp, pack_size=4800).multiple for cp, tp, sp in settings]
    assert multiples == [1, 4, 4, 4, 4, 24]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"pack_size": (1 << 30) + 1}, "1073741825 is more than 1,073,741,824; choose a smaller number"),
        ({"epochs": 1001}, "1001 is more than 1,000; choose a smaller number"),
        ({"seed": 1 << 64}, "18446744073709551616 is more than 4,611,686,018,427,387,904; choose a smaller number"),
        ({"tp": 1 << 64}, "18446744073709551616 is more than 4,611,686,018,427,387,904; choose a smaller number"),
    ],
)
def test_numbers_that_a_plan_cannot_store_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidOption, match=message):
        PackOptions(**options)


def test_a_pack_size_that_parallelism_does_not_divide_is_refused() -> None:
    with pytest.raises(InvalidOption, match=r"4096 is not a multiple of 24, .*--cp 4, --tp 3 and --sp.*choose 4104"):
        PackOptions(cp=4, tp=3, sp=True)


# -- blends


def write_blend(path: Path, content: Any) -> Path:
    path.write_text(content if isinstance(content, str) else json.dumps(content))
    return path


def test_a_blend_of_one_list_or_of_splits(tmp_path: Path) -> None:
    entries = [
        {"name": "a", "path": "one", "weight": 0.5, "text_field": "text"},
        {"path": "/two"},
        {"path": "three", "weight": 0},
    ]
    blend = load_blend(write_blend(tmp_path / "blend.json", {"datasets": entries}))
    expected = [BlendedDataset("a", tmp_path / "one", 0.5), BlendedDataset("two", Path("/two"), 1.0)]
    assert blend.lists == {ALL: expected}
    assert blend.notes == ["left out three: its weight is 0"]
    splits = {"train": entries[:1], "valid": entries[1:2]}
    assert load_blend(write_blend(tmp_path / "blend.json", splits)).lists == {
        "train": expected[:1],
        "valid": expected[1:],
    }
    assert single(tmp_path).lists == {ALL: [BlendedDataset(tmp_path.name, tmp_path)]}


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("{", r"blend\.json is not a blend: "),
        ({"datasets": [{"name": "a"}]}, r"required field `path`"),
        ({"datasets": [{"path": "a", "weight": "x"}]}, r"Expected `float`"),
        ({"train": ["1.0", "/a"]}, r"Expected `object`, got `str`"),
        ({}, r'has neither the key "datasets" nor a key of a split; write'),
        ({"datasets": [], "train": []}, r'has both the key "datasets" and a key of a split; write'),
        ({"datasets": []}, r"has no training data; add"),
        ({"valid": [{"path": "a"}]}, r"has no training data; add"),
        ({"datasets": [{"path": "a", "weight": 0}]}, r"all training data has the weight 0; set"),
        ({"datasets": [{"path": "a", "weight": -1}]}, r"datasets, 'a': the weight is -1\.0, but"),
        ({"datasets": [{"path": "hf://datasets/o/n"}]}, r"is an address, but only a path works here"),
        ({"datasets": [{"path": ""}]}, r"datasets: the path of dataset 0 is '', but it must be the output directory"),
        ({"datasets": [{"path": "a"}, {"path": "b\0"}]}, r"datasets: the path of dataset 1 is 'b\\x00', but"),
        (
            {"train": [{"path": "a", "name": "a\nb"}]},
            r"train: the name of dataset 0 is 'a\\nb', but a name has at most",
        ),
        ({"train": [{"path": "a", "name": "a" * 300}]}, r"train: the name of dataset 0 is 'a{40}', but"),
        (
            {"train": [{"path": "a", "name": "x"}, {"path": "b", "name": "x"}]},
            r"train: two datasets have the name 'x', by which metadata\.json describes them; rename",
        ),
        ('{"datasets": [], "datasets": [{"path": "a"}]}', r"has the key 'datasets' more than once in one object"),
        ('{"datasets": [{"path": "a", "path": "b"}]}', r"has the key 'path' more than once in one object"),
        ('{"datasets": [{"path": "a", "weight": 1e999}]}', r"is not a blend: Number out of range"),
        ('{"datasets": [{"path": "a", "weight": NaN}]}', r"is not a blend: JSON is malformed"),
        ('{"datasets": [{"path": "a"}], "x": ' + "[" * 100_000 + "]" * 100_000 + "}", r"is not a blend: "),
        (
            {"train": [{"path": "a"}], "valid": [{"path": "./a"}]},
            r"valid, 'a': .* is listed twice \(also in train, 'a'\), so the model would be tested with",
        ),
        (
            {"datasets": [{"path": "a"}, {"path": "./a"}]},
            r"datasets, '\./a': .* listed twice \(also in datasets, 'a'\), so its documents would be used twice",
        ),
    ],
)
def test_invalid_blends_are_refused(tmp_path: Path, content: Any, message: str) -> None:
    with pytest.raises(RequestError, match=message):
        load_blend(write_blend(tmp_path / "blend.json", content))


def test_a_large_file_is_not_a_blend(tmp_path: Path) -> None:
    path = tmp_path / "blend.json"
    with path.open("wb") as file:
        file.truncate((64 << 20) + 1)
    with pytest.raises(RequestError, match=r"has 67,108,865 bytes, but a blend has at most 67,108,864; specify"):
        load_blend(path)


def test_names_and_unknown_keys_of_a_blend(tmp_path: Path) -> None:
    entries = [{"path": "one/chat", "wieght": 2}, {"path": "two/chat"}, {"path": "b", "split": "train"}]
    path = tmp_path / "blend.json"
    path.write_bytes(b"\xef\xbb\xbf" + json.dumps({"train": entries, "vaild": []}).encode())
    blend = load_blend(path)
    assert [dataset.name for dataset in blend.lists["train"]] == ["one/chat", "two/chat", "b"]
    assert blend.notes == [f"{path}: ignored the unknown keys 'wieght', 'vaild'"]


@pytest.mark.parametrize("weight", [math.nan, math.inf])
def test_a_weight_is_a_finite_number(weight: float) -> None:
    with pytest.raises(RequestError, match=rf"the weight is {weight}, but a weight must be a number"):
        make_blend({ALL: [BlendedDataset("a", Path("a"), weight)]}, "the blend")


def test_weights_become_repetitions_of_at_least_one() -> None:
    shares = get_shares([0.25, 0.75], [1000, 500], ["a", "b"])
    assert [share.repetitions for share in shares] == [1.0, 6.0]
    used = [share.repetitions * share.trained for share in shares]
    assert used[1] == 3 * used[0]


def test_weights_that_need_too_many_repetitions_are_refused() -> None:
    with pytest.raises(RequestError, match=r"weight 1 of b \(10 loss tokens\) .* repeat b 10,000 times, .* is 1000"):
        get_shares([0.001, 1], [100, 10], ["a", "b"])


@pytest.mark.parametrize("weights", [(5e-324, 1.0), (1e-9, 1e9), (5e-324, 1.7e308)])
def test_weights_of_any_size_are_compared(weights: tuple[float, float]) -> None:
    small, large = weights
    with pytest.raises(
        RequestError,
        match=r"^blend\.json: train: the weight .* of b \(10 loss tokens\) and the weight .* of a \(10\) would "
        r"repeat b more than 1,000,000,000,000 times, but the maximum is 1000; lower the weight of b, or pack a part",
    ):
        get_shares([small, large], [10, 10], ["a", "b"], "blend.json: train")
    assert [share.repetitions for share in get_shares([small, small], [10, 20], ["a", "b"])] == [2.0, 1.0]
    assert [share.repetitions for share in get_shares([large, large], [10, 20], ["a", "b"])] == [2.0, 1.0]


@given(st.lists(st.integers(1, 50), min_size=1, max_size=60), st.floats(1, 4), st.integers(0, 3))
def test_a_repetition_uses_whole_documents(trained: list[int], repetitions: float, seed: int) -> None:
    documents = np.array(sorted(random.Random(seed).choices(range(20), k=len(trained))))
    share = Share(1.0, sum(trained), repetitions)
    numbers = repeat(documents, np.array(trained), share, str(seed))
    used = Counter(numbers.tolist())
    assert set(used.values()) <= {math.floor(repetitions), math.floor(repetitions) + 1, math.ceil(repetitions)}
    for document in set(documents.tolist()):
        assert len({used[int(i)] for i in np.flatnonzero(documents == document)}) == 1
    largest = max(np.bincount(documents, weights=trained))
    assert abs(sum(trained[i] for i in numbers) - repetitions * sum(trained)) <= largest / 2 + 1


def test_pages_of_a_long_pair_are_released_between_its_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """`assemble` reads a pair again for each part, in the order of its tokens, so that one part is in memory."""
    monkeypatch.setattr(rows, "RELEASED_TOKENS", 100)
    ids = np.arange(1000, dtype="i4")
    slots = np.zeros(100, SLOT)
    slots["start"], slots["length"] = np.random.default_rng(0).permutation(100) * 10, 10
    reads: list[int] = []

    def read_pair(number: int) -> tuple[Any, None]:
        reads.append(number)
        return ids, None

    result = assemble(slots, np.arange(1, 101), read_pair)
    assert result.ids.tolist() == [token for start in slots["start"].tolist() for token in range(start, start + 10)]
    assert reads == [0] * 10


# -- formats


@pytest.mark.parametrize("name", SHARD_FORMATS)
def test_each_format_has_the_same_rows(name: str) -> None:
    sequences = [([5, 6, 7], [0, 1, 1]), ([8, 9], [0, 1]), ([70000, 1, 2, 3], [1, 1, 0, 1])]
    rows = rows_of(sequences, Bins(np.array([2, 0, 1]), np.array([1, 3])))
    buffer = Buffer()
    info = ShardInfo(2, 8, ["a.jsonl"], {"split": "train"})
    writer = SHARD_FORMATS[name].start(buffer, info)  # type: ignore[arg-type]
    writer.add(rows)
    writer.finish()
    assert read_rows(name, buffer.data) == [
        [[70000, 1, 2, 3], [1, 0, 1, 0], [0]],
        [[5, 6, 7, 8, 9], [1, 1, 0, 1, 0], [0, 3]],
    ]


def test_a_row_group_has_about_64k_tokens_and_the_sources() -> None:
    sequences = [(list(range(4096)), [1] * 4096) for _ in range(40)]
    rows = rows_of(sequences, Bins(np.arange(40), np.arange(1, 41)))
    buffer = Buffer()
    writer = SHARD_FORMATS["parquet"].start(buffer, ShardInfo(40, 4096, ["a.jsonl"], {"epoch": "0"}))  # type: ignore[arg-type]
    writer.add(rows)
    writer.finish()
    file = pq.ParquetFile(io.BytesIO(buffer.data))
    assert [file.metadata.row_group(i).num_rows for i in range(file.num_row_groups)] == [16, 16, 8]
    assert file.metadata.row_group(0).column(0).compression == "ZSTD"
    assert file.schema_arrow.metadata[b"epoch"] == b"0"
    types = [str(field.type) for field in file.schema_arrow]
    assert types == [f"list<element: {name}>" for name in ("int32", "uint8", "int32", "string", "int64")]
    assert file.read().column("row").to_pylist() == [[i] for i in range(40)]
