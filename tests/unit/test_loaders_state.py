"""The order of samples and its state: every rank, every step, killed anywhere and resumed with other ranks."""

import json
import logging
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest

import tokenmill.data
from support.pairs import random_sequences, write_pair
from tokenmill.data import Order, Samples
from tokenmill.errors import RequestError
from tokenmill.loaders.state import LoaderState, check_state, describe, log_start

WORLDS = (1, 2, 4, 8)


def megatron_batches(total: int, consumed: int, micro_batch: int, rank: int, world: int) -> list[list[int]]:
    """Return the batches of a rank as MegatronPretrainingSampler of Megatron-LM: it fills a step and cuts a slice."""
    batches, step = [], []
    for number in range(consumed, total):
        step.append(number)
        if len(step) == micro_batch * world:
            batches.append(step[rank * micro_batch : (rank + 1) * micro_batch])
            step = []
    return batches


def steps(orders: list[Order]) -> list[int]:
    """Take one step of all ranks; return its samples in the order of the ranks."""
    return [number for order in orders for number in next(iter(order))]


@pytest.fixture
def pair(tmp_path: Path) -> Path:
    return write_pair(tmp_path / "data/a", random_sequences(1, 40, 30))


@pytest.fixture
def samples(pair: Path) -> Samples:
    return tokenmill.data.open(pair, seq_length=16, samples=100)


def test_order_is_that_of_megatron() -> None:
    generate = random.Random(1)
    for _ in range(200):
        world, micro_batch, total = generate.choice(WORLDS), generate.randint(1, 5), generate.randint(1, 200)
        consumed = generate.randint(0, total)
        for rank in range(world):
            order = Order(total, micro_batch, rank=rank, world=world, consumed=consumed)
            expected = megatron_batches(total, consumed, micro_batch, rank, world)
            assert len(order) == len(expected)
            assert list(order) == expected


def test_order_without_drop_last_has_every_sample_once() -> None:
    ranks = [list(Order(11, 2, rank=rank, world=3, drop_last=False)) for rank in range(3)]
    assert ranks == [[[0, 1], [6, 7]], [[2, 3], [8, 9]], [[4, 5], [10]]]


def test_a_rank_without_samples_in_the_last_step(samples: Samples, pair: Path) -> None:
    """All ranks make the same number of steps, and an empty batch has the shape of a batch of no samples."""
    orders = [Order(20, 4, rank=rank, world=4, drop_last=False) for rank in range(4)]
    assert [list(order) for order in orders][3] == [[12, 13, 14, 15], []]
    assert {len(order) for order in orders} == {2}
    for documents in ("none", "positions", "varlen", "mask"):
        opened = tokenmill.data.open(pair, seq_length=16, samples=100, documents=documents)
        batch = opened.batch([])
        assert batch.tokens.shape == batch.labels.shape == batch.loss_mask.shape == batch.position_ids.shape == (0, 16)
        if documents == "varlen":
            assert (batch.cu_seqlens.tolist(), batch.max_seqlen) == ([0], 0)
    for wrong in ([0.5], [[]], ["a"]):
        with pytest.raises(ValueError, match="a batch needs"):
            samples.batch(wrong)


@pytest.mark.parametrize("drop_last", [True, False])
def test_a_second_pass_over_an_order_repeats_it(drop_last: bool) -> None:
    order = Order(11, 2, world=2, drop_last=drop_last)
    first = list(order)
    assert len(order) == len(first) and not order  # no step of the first pass is left
    assert list(order) == first and len(first) == (2 if drop_last else 3)
    assert next(iter(order)) == first[0]
    assert (order.consumed, next(iter(order))) == (4, first[1])  # an iteration that did not end continues
    resumed = Order(11, 2, consumed=8)
    assert (list(resumed), len(list(resumed))) == ([[8, 9]], 5)
    assert list(Order(8, 2, consumed=8)) == []


def test_the_boundaries_of_documents_belong_to_the_state(pair: Path, samples: Samples) -> None:
    positions = tokenmill.data.open(pair, seq_length=16, samples=100, documents="positions")
    at_eod = tokenmill.data.open(pair, seq_length=16, samples=100, documents="positions", boundaries="eod", eod=5)
    opened = [samples, positions, at_eod]
    assert len({item.fingerprint() for item in opened}) == 3
    for before in opened:
        state = LoaderState.capture(before.identity, 24, 8)
        for now in opened:
            if now is before:
                assert check_state(state, now).consumed == 24
                continue
            changed = "documents was" if "none" in (before.documents, now.documents) else "boundary was"
            with pytest.raises(RequestError, match=changed):
                check_state(state, now)


def test_a_state_without_the_boundaries_of_documents_resumes(pair: Path) -> None:
    """The states of earlier versions do not have them."""
    samples = tokenmill.data.open(pair, seq_length=16, samples=100, documents="positions")
    earlier = msgspec.structs.replace(samples.identity, documents=None, boundary=None)
    state = LoaderState.capture(earlier, 24, 8)
    identity = json.loads(state["identity"])
    del identity["documents"], identity["boundary"]
    assert check_state({**state, "identity": json.dumps(identity)}, samples).consumed == 24


def test_a_killed_run_continues_on_other_ranks() -> None:
    """The ranks of each part of the run together take what is left of the samples, in their order."""
    generate = random.Random(2)
    for _ in range(50):
        total, taken, consumed = generate.randint(50, 300), [], 0
        while True:
            world, micro_batch = generate.choice(WORLDS), generate.randint(1, 4)
            orders = [Order(total, micro_batch, rank=rank, world=world, consumed=consumed) for rank in range(world)]
            if not orders[0]:
                break
            for _ in range(generate.randint(1, len(orders[0]))):
                taken += steps(orders)
            (consumed,) = {order.consumed for order in orders}
        assert taken == list(range(len(taken)))
        assert consumed == len(taken) > total - 8 * 4


def test_a_copy_of_an_order_runs_ahead_alone() -> None:
    order = Order(10, 2)
    ahead = order.copy()
    assert list(ahead)[-1] == [8, 9]
    assert (order.consumed, order.peek()) == (0, [0, 1])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"micro_batch": 0}, "invalid micro_batch 0, world 1"),
        ({"rank": 2, "world": 2}, "invalid rank 2: it must be at least 0 and below world, 2"),
        ({"consumed": 11}, "invalid consumed 11: there are 10 samples"),
    ],
)
def test_order_refuses_numbers(arguments: dict[str, int], message: str) -> None:
    with pytest.raises(RequestError, match=message):
        Order(**{"total": 10, "micro_batch": 1, **arguments})


def test_state_survives_json(samples: Samples) -> None:
    state = json.loads(json.dumps(LoaderState.capture(samples.identity, 24, 8)))
    content = check_state(state, samples)
    assert (content.consumed, content.global_batch, content.fingerprint) == (24, 8, samples.fingerprint())


def test_state_moves_with_the_data(pair: Path, samples: Samples, tmp_path: Path) -> None:
    state = LoaderState.capture(samples.identity, 24, 8)
    moved = pair.parent.rename(tmp_path / "moved") / "a"
    assert check_state(state, tokenmill.data.open(moved, seq_length=16, samples=100)).consumed == 24


def refusal(before: Samples, now: Samples) -> str:
    """Return the message with which samples refuse the state of others."""
    with pytest.raises(RequestError) as caught:
        check_state(LoaderState.capture(before.identity, 8, 8), now)
    return str(caught.value)


def test_data_made_again_under_the_same_path_are_refused(pair: Path, samples: Samples) -> None:
    write_pair(pair, random_sequences(2, 40, 30))
    message = refusal(samples, tokenmill.data.open(pair, seq_length=16, samples=100))
    assert f"{pair} has another content" in message
    assert "Restore the data and the arguments of the checkpoint" in message


def test_a_token_changed_in_place_is_refused(pair: Path, samples: Samples) -> None:
    path = Path(f"{pair}.bin")
    content = bytearray(path.read_bytes())
    content[100] ^= 1
    path.write_bytes(content)
    assert f"{pair} has another content" in refusal(samples, tokenmill.data.open(pair, seq_length=16, samples=100))


def test_a_changed_blend_is_refused(pair: Path, tmp_path: Path) -> None:
    other = write_pair(tmp_path / "data/b", random_sequences(3, 40, 30))

    def blend(*sources: tuple[float, Path]) -> Samples:
        return tokenmill.data.open(list(sources), seq_length=16, samples=100)

    before = blend((0.3, pair), (0.7, other))
    assert f"the weight of {pair} was 0.3, and is 0.4 now" in refusal(before, blend((0.4, pair), (0.6, other)))
    assert "the blend had 2 datasets, and has 1 now" in refusal(before, blend((1, pair)))
    assert f"{other} has another content" in refusal(before, blend((0.3, other), (0.7, pair)))


def test_another_tokenizer_is_refused(samples: Samples, pair: Path) -> None:
    now = tokenmill.data.open(pair, seq_length=16, samples=100)
    now.identity = msgspec.structs.replace(now.identity, tokenizer="other")
    assert "the tokenizer was unknown, and is other now" in refusal(samples, now)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"seq_length": 32}, "seq_length was 16, and is 32 now"),
        ({"seed": 5}, "the seed was 1234, and is 5 now"),
        ({"samples": 101}, "the number of requested samples was 100, and is 101 now"),
        ({"split": "9,1,0"}, "the split was 1,0,0, and is 9,1,0 now"),
    ],
)
def test_other_arguments_are_refused(pair: Path, samples: Samples, change: dict[str, Any], message: str) -> None:
    now = tokenmill.data.open(pair, **{"seq_length": 16, "samples": 100, **change})
    assert message in refusal(samples, now)


def test_a_long_list_of_differences_is_cut(samples: Samples) -> None:
    sources = tuple(msgspec.structs.replace(samples.identity.sources[0], content=str(number)) for number in range(30))
    before = msgspec.structs.replace(samples.identity, sources=sources)
    now = tokenmill.data.open("synthetic:9", seq_length=16, samples=100)
    now.identity = msgspec.structs.replace(samples.identity, sources=sources[::-1])
    with pytest.raises(RequestError, match="and 22 more differences"):
        check_state(LoaderState.capture(before, 0, 1), now)


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda state: None, "a NoneType without the entry consumed"),
        (lambda state: b"state", "a bytes without the entry consumed"),
        (lambda state: {}, "a dict without the entry consumed"),
        (lambda state: state | {"format": 2}, "format '2', but this version of tokenmill reads format 1"),
        (lambda state: state | {"format": True}, "format 'True'"),
        (lambda state: state | {"consumed": -1}, "damaged state of a loader"),
        (lambda state: state | {"consumed": 1.0}, "damaged state of a loader"),
        (lambda state: state | {"consumed": True}, "damaged state of a loader"),
        (lambda state: state | {"consumed": "8"}, "damaged state of a loader"),
        (lambda state: state | {"consumed": 2**70}, "damaged state of a loader"),
        (lambda state: state | {"consumed": 10**6}, "1,000,000 samples were consumed of"),
        (lambda state: state | {"global_batch": -1}, "damaged state of a loader"),
        (lambda state: state | {"identity": "[" * 100_000}, "damaged state of a loader"),
        (lambda state: state | {"identity": "{}"}, "damaged state of a loader"),
        (lambda state: state | {"identity": 5}, "damaged state of a loader"),
        (lambda state: state | {"identity": "\ud800"}, "damaged state of a loader"),
        (lambda state: state | {"fingerprint": "\x1b[31m"}, r"not \\x1b\[31m"),
        (lambda state: {key: state[key] for key in ("consumed", "format")}, "damaged state of a loader"),
        (lambda state: state | {1: 2}, "damaged state of a loader"),
    ],
)
def test_hostile_states_are_refused(samples: Samples, damage: Callable[[Any], object], message: str) -> None:
    with pytest.raises(RequestError, match=message):
        check_state(damage(LoaderState.capture(samples.identity, 8, 8)), samples)


def test_control_characters_of_a_checkpoint_are_not_printed(samples: Samples) -> None:
    source = msgspec.structs.replace(samples.identity.sources[0], path="\x1b[31mred", content="other")
    before = msgspec.structs.replace(samples.identity, sources=(source,))
    with pytest.raises(RequestError) as caught:
        check_state(LoaderState.capture(before, 0, 1), samples)
    assert "\\x1b[31mred" in str(caught.value)
    assert str(caught.value).isprintable()


def test_the_start_is_logged(samples: Samples, caplog: pytest.LogCaptureFixture) -> None:
    assert describe(samples, 8, 1, 4) == (
        f"tokenmill data: fingerprint={samples.fingerprint()} samples={len(samples)} seq_length=16 consumed=8 "
        "rank 1 of 4"
    )
    synthetic = tokenmill.data.open("synthetic:50", seq_length=16, samples=10)
    with caplog.at_level(logging.INFO, "tokenmill"):
        caplog.clear()
        log_start(samples, 0, 0, 1)
        log_start(synthetic, 0, 0, 1)
    assert [record.message.startswith("SYNTHETIC: ") for record in caplog.records] == [False, True]
    assert [record.levelname for record in caplog.records] == ["INFO", "WARNING"]


def test_a_refusal_of_synthetic_data_says_synthetic(samples: Samples) -> None:
    assert refusal(samples, tokenmill.data.open("synthetic:50", seq_length=16, samples=10)).startswith("SYNTHETIC: ")


def test_synthetic_runs_resume() -> None:
    synthetic = tokenmill.data.open("synthetic:50", seq_length=16, samples=10)
    assert check_state(LoaderState.capture(synthetic.identity, 8, 8), synthetic).consumed == 8
