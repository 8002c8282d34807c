"""tokenmill.data: samples of pairs and of packed rows, boundaries of documents, identities, origins."""

import hashlib
import json
import os
import pickle
import re
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import tokenmill.data
from support import stages
from support.chat import conversations, lines, make_tokenizer
from support.commandline import tokenmill as run
from support.corpus import TOKENIZER, text
from support.packing import read_output
from support.pairs import random_sequences, write_pair
from tokenmill.data import Samples, list_differences
from tokenmill.datasets.dataset import find_dataset, find_document
from tokenmill.datasets.formats.indexed.reader import IndexedReader
from tokenmill.engine.progress import Reporter
from tokenmill.engine.stage import StageRun
from tokenmill.errors import RequestError

CONFORMANCE = Path(__file__).parents[1] / "conformance"
CASES = json.loads((CONFORMANCE / "samples.json").read_text())["cases"]


def new_run() -> StageRun:
    return StageRun(Reporter(), 0, 1, processes=1)


@pytest.fixture(scope="module")
def raw(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a pair without a record: 80 sequences of 0 to 40 tokens, of which 7 ends some."""
    return write_pair(tmp_path_factory.mktemp("raw") / "pair", random_sequences(1, 80, 20, 50))


@pytest.fixture(scope="module")
def outputs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a directory with two outputs of preprocess, `a` of two pairs and `b` of one; no test changes it."""
    root = tmp_path_factory.mktemp("outputs")
    for name, count in (("a", 2), ("b", 1)):
        (root / f"{name}-in").mkdir()
        for number in range(count):
            (root / f"{name}-in" / f"{number}.jsonl").write_bytes(text(number + len(name), 60))
        stages.preprocess(root / f"{name}-in", root / name, new_run(), tokenizer=str(TOKENIZER))
    return root


@pytest.fixture(scope="module")
def packed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return an output of pack with rows for train and valid, next to the output of chat."""
    root = tmp_path_factory.mktemp("packed")
    tokenizer = make_tokenizer(root / "chatml")
    (root / "in").mkdir()
    for seed in range(3):
        (root / "in" / f"{seed}.jsonl").write_bytes(lines(conversations(seed, 60)))
    stages.chat(root / "in", root / "chat", new_run(), tokenizer=str(tokenizer), chat_template="chatml")
    stages.pack(root / "chat", root / "packed", new_run(), pack_size=1024, shards=3, valid_shards=1)
    return root


def read(samples: Samples) -> list[list[int]]:
    """Return the tokens of each sample with its last label."""
    batch = samples.batch(range(len(samples)))
    return [[*tokens, int(labels[-1])] for tokens, labels in zip(batch.tokens.tolist(), batch.labels, strict=True)]


# -- Megatron-LM's samples


@pytest.mark.slow
def test_samples_are_those_of_the_conformance_data(tmp_path: Path) -> None:
    (tmp_path / "in").mkdir()
    for name in ("escaped", "mixed", "odd"):
        shutil.copy(CONFORMANCE / "inputs" / f"{name}.jsonl", tmp_path / "in")
    stages.preprocess(tmp_path / "in", tmp_path / "out", new_run(), tokenizer=str(CONFORMANCE / "tokenizers" / "tiny"))
    for case in CASES:
        prefixes = [str(tmp_path / "out" / name) for name in case["datasets"]]
        samples = tokenmill.data.open(
            list(zip(case["weights"], prefixes, strict=True)) if case["weights"] else prefixes,
            seq_length=case["sequence_length"],
            # A quarter and an eighth of the training samples were requested for validation and test.
            samples=case["asked"] // {"train": 1, "valid": 4, "test": 8}[case["part"]],
            seed=case["seed"],
            split=case["split"],
            part=case["part"],
        )
        batch = samples.batch(range(len(case["samples"])))
        hashes = [
            {name: hashlib.sha256(ids.tobytes()).hexdigest()[:32] for name, ids in (("tokens", row), ("labels", label))}
            for row, label in zip(batch.tokens, batch.labels, strict=True)
        ]
        assert len(samples) == case["length"]
        assert hashes == case["samples"]
        assert batch.tokens[0, :16].tolist() == case["first"]


def test_one_epoch_has_each_token_once(raw: Path) -> None:
    reader = IndexedReader(raw)
    samples = tokenmill.data.open(raw, seq_length=16)
    windows = read(samples)
    assert len(samples) == (reader.ids.size - 1) // 16
    order = sorted(range(len(windows)), key=lambda number: [origin.sequence for origin in samples.origin(number)])
    for number in order:
        ids = [
            token
            for origin in samples.origin(number)
            for token in reader.sequence(origin.sequence)[origin.offset : origin.offset + origin.length].tolist()
        ]
        assert ids == windows[number]
    starts = {(origin[0].sequence, origin[0].offset) for origin in map(samples.origin, range(len(samples)))}
    assert len(starts) == len(samples)


def test_batches_have_the_samples_in_any_order_and_in_the_buffers_of_the_caller(raw: Path) -> None:
    samples = tokenmill.data.open([(0.3, raw), (0.7, raw)], seq_length=8, samples=200)
    numbers = [5, 150, 5, 0, 199]
    buffers = samples.allocate(len(numbers))
    batch = samples.batch(numbers, out=buffers)
    assert batch is buffers
    for row, number in enumerate(numbers):
        item = samples[number]
        assert item.tokens[0].tolist() == batch.tokens[row].tolist()
        assert item.labels[0].tolist() == batch.labels[row].tolist()
        assert item.tokens[0, 1:].tolist() == item.labels[0, :-1].tolist()
    assert batch.loss_mask.dtype == np.float32
    assert batch.loss_mask.all()
    assert batch.position_ids.tolist() == [list(range(8))] * len(numbers)
    assert samples[-1].tokens.tolist() == samples[len(samples) - 1].tokens.tolist()
    with pytest.raises(ValueError, match="call allocate"):
        samples.batch([1], out=buffers)
    for name, buffer in (("tokens", buffers.tokens.astype(np.uint8)), ("labels", None)):
        with pytest.raises(ValueError, match=f"the buffer {name} is .*call allocate"):
            samples.batch(numbers, out=replace(buffers, **{name: buffer}))
    assert samples.batch([]).tokens.shape == (0, 8)
    for wrong in ([1.5], [True], ["1"], [[1]], [[]]):
        with pytest.raises(ValueError, match="pass integers"):
            samples.batch(wrong)
    with pytest.raises(ValueError, match="pass a first sample"):
        samples.digest(len(samples), 1)
    for invalid in ([-1], [len(samples)]):
        with pytest.raises(IndexError):
            samples.batch(invalid)
    with pytest.raises(IndexError):
        samples[len(samples)]


@pytest.mark.slow
def test_samples_can_be_sent_to_another_process(raw: Path, packed: Path) -> None:
    for samples in (
        tokenmill.data.open([(0.3, raw), (0.7, raw)], seq_length=8, samples=50),
        tokenmill.data.open(packed / "packed", seq_length=1024),
        tokenmill.data.open("synthetic:100", seq_length=8, samples=5),
    ):
        samples.batch([0])
        sent = pickle.dumps(samples)
        assert len(sent) < 20_000
        assert pickle.loads(sent).digest() == samples.digest()
        assert pickle.loads(sent).origin(1) == samples.origin(1)


# -- documents


@pytest.mark.parametrize("boundaries", ["sequence", "eod"])
def test_boundaries_of_documents(raw: Path, boundaries: Any) -> None:
    options: dict[str, Any] = {"seq_length": 32, "samples": 120, "boundaries": boundaries, "eod": 7}
    samples = {
        name: tokenmill.data.open([(0.5, raw), (0.5, raw)], documents=name, **options)
        for name in ("none", "positions", "varlen", "mask")
    }
    numbers = [3, 0, 111, 57]
    batches = {name: opened.batch(numbers) for name, opened in samples.items()}
    starts = []
    for row, number in enumerate(numbers):
        if boundaries == "eod":
            tokens = batches["none"].tokens[row]
            places = [0, *(np.flatnonzero(tokens == 7) + 1).tolist()]
        else:
            lengths = [origin.length for origin in samples["none"].origin(number)]
            places = [0, *np.cumsum(lengths).tolist()]
        starts.append(sorted({place for place in places if place < 32}))
    positions = [[p - max(start for start in row if start <= p) for p in range(32)] for row in starts]
    for name in ("positions", "varlen", "mask"):
        assert batches[name].position_ids.tolist() == positions
        assert batches[name].tokens.tolist() == batches["none"].tokens.tolist()
    flat = [32 * row + start for row, begins in enumerate(starts) for start in begins] + [4 * 32]
    cu_seqlens = batches["varlen"].cu_seqlens
    assert cu_seqlens is not None
    assert cu_seqlens.tolist() == flat
    assert cu_seqlens.dtype == np.int32
    assert batches["varlen"].max_seqlen == max(np.diff(flat))
    mask = batches["mask"].attention_mask
    assert mask is not None
    for row, begins in enumerate(starts):
        document = [sum(start <= p for start in begins) for p in range(32)]
        expected = [[q >= k and document[q] == document[k] for k in range(32)] for q in range(32)]
        assert mask[row, 0].tolist() == expected


def test_a_partial_sample_is_padded_and_not_trained(raw: Path) -> None:
    tokens = IndexedReader(raw).ids.size
    seq_length = next(length for length in range(30, 60) if (tokens - 1) % length)
    options: dict[str, Any] = {"seq_length": seq_length, "split": None, "part": "valid"}
    kept = tokenmill.data.open({"valid": raw}, keep_partial=True, **options)
    dropped = tokenmill.data.open({"valid": raw}, **options)
    assert len(kept) == len(dropped) + 1
    batch = kept.batch(range(len(kept)))
    padding = batch.loss_mask == 0
    assert padding.sum() == seq_length - (tokens - 1) % seq_length
    assert not batch.labels[padding].any()
    assert batch.masked_labels()[padding].tolist() == [-100] * int(padding.sum())


def test_ids_that_are_not_trained(raw: Path) -> None:
    plain = tokenmill.data.open(raw, seq_length=16).batch(range(20))
    masked = tokenmill.data.open(raw, seq_length=16, mask_eod=True, eod=7, pad=9).batch(range(20))
    assert (masked.loss_mask == 0).tolist() == ((plain.tokens == 7) | (plain.labels == 9)).tolist()
    assert masked.tokens.tolist() == np.where(plain.tokens == 9, 0, plain.tokens).tolist()
    same = tokenmill.data.open(raw, seq_length=16, pad=7, eod=7).batch(range(20))
    assert same.loss_mask.all(), "Megatron-LM does not mask a pad that is the EOD"


OPEN_MANY = """
import resource, sys
import tokenmill.data
from tokenmill.errors import RequestError
resource.setrlimit(resource.RLIMIT_NOFILE, (64, int(sys.argv[1])))
try:
    opened = [tokenmill.data.open(sys.argv[2:], seq_length=8) for _ in range(3)]
    print(*map(len, opened))
except RequestError as error:
    print(error)
"""


@pytest.mark.parametrize("limit", [4096, 220, 128])
def test_many_pairs_raise_the_limit_of_open_files_or_name_it(limit: int, tmp_path: Path) -> None:
    """Each pair keeps two files open, also for several parts of a run, and many systems allow 1,024."""
    pairs = [write_pair(tmp_path / f"{number}", [np.arange(1, 18)]) for number in range(70)]
    done = subprocess.run([sys.executable, "-c", OPEN_MANY, str(limit), *pairs], check=False, capture_output=True)
    expected = b"140 140 140\n" if limit > 128 else b"this process may have 128; raise the limit (ulimit -n)"
    assert (done.returncode, done.stderr) == (0, b"")
    assert expected in done.stdout


# -- datasets of tokenmill


@pytest.mark.slow
def test_directories_have_the_order_of_a_blend_of_megatron(outputs: Path, tmp_path: Path) -> None:
    directories = [(0.25, outputs / "a"), (0.75, outputs / "b")]
    samples = tokenmill.data.open(directories, seq_length=64, samples=500)
    named = [f"{path}={weight}" for weight, path in directories]
    assert run("blend", tmp_path / "blend.txt", *named, "--split", "1,0,0").code == 0
    assert tokenmill.data.open(tmp_path / "blend.txt", seq_length=64, samples=500).digest() == samples.digest()
    held_out = ["--validation", str(outputs / "b")]
    assert run("blend", tmp_path / "blend.json", outputs / "a", *held_out).code == 0
    for part, directory in (("train", "a"), ("valid", "b")):
        opened = tokenmill.data.open(tmp_path / "blend.json", seq_length=64, samples=90, part=part)
        alone = tokenmill.data.open(outputs / directory, seq_length=64, samples=90)
        assert opened.digest() == alone.digest()
    with pytest.raises(RequestError, match="has only train, validation; choose"):
        tokenmill.data.open(tmp_path / "blend.json", seq_length=64, part="test")


@pytest.mark.slow
def test_origin_names_the_document_the_file_and_the_record(outputs: Path) -> None:
    samples = tokenmill.data.open(outputs / "a", seq_length=64, samples=40)
    dataset = find_dataset(outputs / "a")
    for number in range(40):
        for origin in samples.origin(number):
            prefix = Path(origin.path).relative_to(outputs / "a").as_posix()
            assert origin.document is not None
            document = find_document(dataset, origin.document, key=None, prefix=prefix)
            assert document.source == (origin.file, origin.record)
            ids = IndexedReader(Path(origin.path)).sequence(origin.sequence)
            assert document.ids == ids.tolist(), "each of these documents has one sequence"
            assert 0 <= origin.offset < origin.offset + origin.length <= len(ids)
    assert samples.origin(0)[0].uri == dataset.manifest.source.uri


@pytest.mark.slow
def test_fingerprint_depends_on_content_and_settings_and_not_on_the_place(outputs: Path, tmp_path: Path) -> None:
    options: dict[str, Any] = {"seq_length": 64, "samples": 100}
    source = [(1.0, outputs / "a"), (2.0, outputs / "b")]
    samples = tokenmill.data.open(source, **options)
    shutil.copytree(outputs, tmp_path / "moved")
    moved = tokenmill.data.open([(1.0, tmp_path / "moved" / "a"), (2.0, tmp_path / "moved" / "b")], **options)
    assert moved.fingerprint() == samples.fingerprint()
    assert list_differences(samples.identity, moved.identity) == []
    others = {
        "the seed was 1234, and is 1 now": tokenmill.data.open(source, **options, seed=1),
        "seq_length was 64, and is 32 now": tokenmill.data.open(source, **options | {"seq_length": 32}),
        "the split was 1,0,0, and is 8,2 now": tokenmill.data.open(source, **options, split="8,2"),
        f"the weight of {outputs / 'b'} was 2.0, and is 3.0 now": tokenmill.data.open(
            [source[0], (3.0, outputs / "b")], **options
        ),
        "the blend had 2 datasets, and has 1 now": tokenmill.data.open([source[0]], **options),
    }
    for difference, other in others.items():
        assert other.fingerprint() != samples.fingerprint()
        assert list_differences(samples.identity, other.identity) == [difference]
    named = [find_dataset(outputs / name).pairs for name in ("a", "b")]
    prefixes = [outputs / name / pair.prefix for name, pairs in zip(("a", "b"), named, strict=True) for pair in pairs]
    single = tokenmill.data.open(prefixes, **options)
    both = tokenmill.data.open([outputs / "a", outputs / "b"], **options)
    assert len(single) != len(both), "Megatron-LM reads pairs without weights once"
    assert single.fingerprint() != both.fingerprint()
    swapped = tokenmill.data.open([(1.0, outputs / "b"), (2.0, outputs / "a")], **options)
    assert any("has another content" in line for line in list_differences(samples.identity, swapped.identity))


def test_a_raw_pair_with_other_tokens_has_another_fingerprint(tmp_path: Path) -> None:
    sequences = random_sequences(3, 50, 30)
    first = tokenmill.data.open(write_pair(tmp_path / "pair", sequences), seq_length=8).fingerprint()
    sequences[20][3] += 1
    assert tokenmill.data.open(write_pair(tmp_path / "pair", sequences), seq_length=8).fingerprint() != first


def test_a_directory_of_megatron_next_to_a_pair_is_ignored(tmp_path: Path) -> None:
    prefix = write_pair(tmp_path / "pair", random_sequences(3, 50, 30))
    digest = tokenmill.data.open(prefix, seq_length=8).digest()
    (tmp_path / "pair" / "cache" / "GPTDataset_indices").mkdir(parents=True)
    for name in (prefix, f"{prefix}.bin", f"{prefix}.idx"):
        assert tokenmill.data.open(name, seq_length=8).digest() == digest


# -- packed rows


@pytest.mark.slow
def test_packed_rows_are_samples_with_their_masks(packed: Path) -> None:
    for part, name in (("train", "train"), ("validation", "valid")):
        samples = tokenmill.data.open(packed / "packed", seq_length=1024, part=part, documents="varlen")
        rows = {}
        for ids, mask, starts in read_output(packed / "packed", name):
            ends = [*starts[1:], len(ids)]
            inputs = [p for start, end in zip(starts, ends, strict=True) for p in range(start, end - 1)]
            rows[tuple(ids[p] for p in inputs)] = ([ids[p + 1] for p in inputs], [mask[p] for p in inputs], starts)
        assert len(samples) == len(rows)
        for number in range(len(samples)):
            batch = samples[number]
            assert batch.cu_seqlens is not None
            tokens = tuple(batch.tokens[0].tolist())
            count = next(count for count in range(1024, 0, -1) if tokens[:count] in rows)
            labels, mask, starts = rows.pop(tokens[:count])
            assert batch.labels[0, :count].tolist() == labels
            assert batch.loss_mask[0].tolist() == [float(value != 0) for value in mask] + [0.0] * (1024 - count)
            assert batch.cu_seqlens.tolist() == sorted({*(s - i for i, s in enumerate(starts)), count, 1024})
            assert [origin.file for origin in samples.origin(number)]
    repeated = tokenmill.data.open(packed / "packed", seq_length=1024, samples=100)
    epoch = len(tokenmill.data.open(packed / "packed", seq_length=1024))
    assert len(repeated) == -(-100 // epoch) * epoch
    first, second = (sorted(read(repeated)[start : start + epoch]) for start in (0, epoch))
    assert first == second
    assert read(repeated)[:epoch] != read(repeated)[epoch : 2 * epoch]


@pytest.mark.slow
def test_what_a_pack_cannot_do(packed: Path, tmp_path: Path) -> None:
    pack = packed / "packed"
    refusals: list[tuple[Any, dict[str, Any], str]] = [
        (pack, {"seq_length": 512}, "have 1,024 tokens; use seq_length 1024"),
        ([(1.0, pack)], {"seq_length": 1024, "samples": 5}, "cannot be blended; run tokenmill pack on a blend.json"),
        (pack, {"seq_length": 1024, "split": "9,1"}, "remove split"),
        (pack, {"seq_length": 1024, "part": "test"}, "has no rows for test, only for train, validation; choose"),
        (pack / "valid", {"seq_length": 1024}, "is the part validation, not train; set part"),
        (packed / "chat", {"seq_length": 1024}, "run tokenmill pack on the output of chat"),
        (packed / "chat" / "0_chat_document", {"seq_length": 1024}, "run tokenmill pack on the output of chat"),
    ]
    for source, options, message in refusals:
        with pytest.raises(RequestError, match=message):
            tokenmill.data.open(source, **options)
    stages.pack(packed / "chat", tmp_path / "npy", new_run(), pack_size=1024, format="npy")
    with pytest.raises(RequestError, match=r"format npy.*run tokenmill pack with --format parquet"):
        tokenmill.data.open(tmp_path / "npy", seq_length=1024)
    damaged = shutil.copytree(packed, tmp_path / "copy") / "packed"
    shard = next(path for path in sorted((damaged / "train").iterdir()) if path.suffix == ".parquet")
    data = bytearray(shard.read_bytes())
    data[4:64] = bytes(60)
    shard.write_bytes(data)
    with pytest.raises(RequestError, match="run tokenmill verify"):
        tokenmill.data.open(damaged, seq_length=1024).digest()


@pytest.mark.slow
def test_options_of_pairs_are_refused_for_packs_and_synthetic_tokens(packed: Path) -> None:
    options: list[dict[str, Any]] = [{"boundaries": "eod"}, {"eod": 1}, {"mask_eod": True}, {"pad": 0}, {"key": "text"}]
    for source in (packed / "packed", "synthetic:9"):
        for option in [*options, {"keep_partial": True}]:
            (name,) = option
            with pytest.raises(RequestError, match=f"invalid {name}: it belongs to pairs.*remove {name}"):
                tokenmill.data.open(source, seq_length=1024, samples=5, **option)


@pytest.mark.slow
def test_forked_processes_read_the_same_rows(packed: Path) -> None:
    samples = tokenmill.data.open(packed / "packed", seq_length=1024, samples=60)
    digest = samples.digest()
    children = []
    for _ in range(4):
        if (child := os.fork()) == 0:
            os._exit(0 if all(samples.digest() == digest for _ in range(3)) else 1)
        children.append(child)
    assert [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children] == [0] * 4


# -- several threads and processes


@pytest.mark.slow
def test_threads_read_the_same_samples(raw: Path) -> None:
    options: dict[str, Any] = {"seq_length": 2, "samples": 300_000}
    source = [(0.2, raw), (0.3, raw), (0.5, raw)]
    numbers = np.arange(0, 300_000, 1000)
    expected = tokenmill.data.open(source, **options).batch(numbers).tokens
    shared = tokenmill.data.open(source, **options)
    with ThreadPoolExecutor(8) as threads:
        for batch in threads.map(lambda _: shared.batch(numbers), range(16)):
            assert batch.tokens.tolist() == expected.tolist()


@pytest.mark.slow
def test_a_late_start_reads_stored_counts(raw: Path, tmp_path: Path) -> None:
    options: dict[str, Any] = {"seq_length": 2, "samples": 1_600_000, "index_cache": tmp_path / "cache"}
    source = [(weight, raw) for weight in (0.2, 0.3, 0.5)]
    numbers = [1_590_000, 7, 300_000]
    expected = tokenmill.data.open(source, **options).batch(numbers).tokens.tolist()
    (stored,) = (path for path in (tmp_path / "cache" / "draws").iterdir() if path.suffix != ".lock")
    assert tokenmill.data.open(source, **options).batch(numbers).tokens.tolist() == expected
    counts = bytearray(stored.read_bytes())
    counts[-40] ^= 1
    stored.write_bytes(counts)
    assert tokenmill.data.open(source, **options).batch(numbers).tokens.tolist() == expected


def test_a_pair_that_was_replaced_is_not_read_in_another_process(tmp_path: Path) -> None:
    sequences = random_sequences(3, 50, 30)
    samples = tokenmill.data.open(write_pair(tmp_path / "pair", sequences), seq_length=8)
    sent = pickle.dumps(samples)
    write_pair(tmp_path / "pair", sequences[::-1])
    with pytest.raises(RequestError, match="it was replaced while"):
        pickle.loads(sent)


# -- refusals


def test_synthetic_tokens_are_requested_by_name_and_marked(caplog: pytest.LogCaptureFixture) -> None:
    samples = tokenmill.data.open("synthetic:500", seq_length=16, samples=30)
    assert "SYNTHETIC" in caplog.text
    assert samples.identity.synthetic
    ids = np.array(read(samples))
    assert 0 <= ids.min() < ids.max() < 500
    assert read(tokenmill.data.open("synthetic:500", seq_length=16, samples=30)) == ids.tolist()
    assert read(tokenmill.data.open("synthetic:500", seq_length=16, samples=30, seed=1)) != ids.tolist()
    for source, options, message in (
        ("synthetic:", {"samples": 1}, "write the size of the vocabulary"),
        ("synthetic:0", {"samples": 1}, "write the size of the vocabulary"),
        ("synthetic:9", {}, "specify the number of samples"),
    ):
        with pytest.raises(RequestError, match=message):
            tokenmill.data.open(source, seq_length=16, **options)


INVALID: dict[str, tuple[dict[str, Any], str]] = {
    "seq_length": ({"seq_length": 1}, "invalid seq_length 1: it must be an integer from 2"),
    "samples": ({"samples": 0}, "invalid samples 0: it must be an integer from 1"),
    "seed": ({"seed": -1}, "invalid seed -1: it must be an integer from 0"),
    "split": ({"split": "a,b"}, "invalid split 'a,b': specify"),
    "no shares": ({"split": ""}, "invalid split ''"),
    "part": ({"part": "dev"}, "invalid part 'dev': choose"),
    "empty part": ({"part": "test", "split": "9,1,0"}, "set split to give test a share"),
    "no tokens": ({"part": "test", "split": "1000,1,0.1"}, "test has no tokens in .*; set split"),
    "too long": ({"seq_length": 5000}, "fewer than one sample of 5,000 and its last label; use a smaller seq_length"),
    "documents": ({"documents": "all"}, "invalid documents 'all': choose"),
    "boundaries": ({"boundaries": "eod"}, "specify its id with eod"),
    "surplus": ({"surplus": -1}, "invalid surplus -1"),
    "a float": ({"seq_length": 16.0}, "invalid seq_length 16.0: it must be an integer"),
    "a bool": ({"samples": True}, "invalid samples True: it must be an integer"),
    "no text": ({"split": (9, 1)}, "invalid split .*: specify a text"),
    "full width": ({"split": "\uff11,0"}, "invalid split"),
    "no number": ({"surplus": "x"}, "invalid surplus 'x'"),
    "too many": ({"samples": 1 << 50}, "use fewer samples or a larger dataset"),
}


@pytest.mark.parametrize("name", INVALID)
def test_invalid_arguments_are_refused_with_the_remedy(name: str, raw: Path) -> None:
    options, message = INVALID[name]
    with pytest.raises(RequestError, match=message):
        tokenmill.data.open(raw, **{"seq_length": 16, **options})


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ([], "names no dataset"),
        ([(1.0, "PAIR"), "PAIR"], "specify a weight for every dataset"),
        ([(0.0, "PAIR")], "has the weight 0.0: it must be above 0"),
        ([(float("nan"), "PAIR")], "has the weight nan: it must be above 0"),
        (5, "invalid source '5', a int: specify a path"),
        ([5], "invalid source '5', a int: specify a path"),
        ([("a", "PAIR")], r"specify a path, a list of paths, a list of \(weight, path\)"),
        ([(1.0, "PAIR", 3)], r"specify a path, a list of paths, a list of \(weight, path\)"),
        ({"valid": "PAIR", "validation": "PAIR"}, "use one of them"),
        ({"dev": "PAIR"}, "use train, valid and test"),
        ({"valid": "PAIR"}, "the source has only validation"),
    ],
)
def test_invalid_sources_are_refused_with_the_remedy(source: Any, message: str, raw: Path) -> None:
    named = json.loads(json.dumps(source).replace("PAIR", str(raw)))
    if isinstance(named, list):
        named = [tuple(entry) if isinstance(entry, list) else entry for entry in named]
    with pytest.raises(RequestError, match=message):
        tokenmill.data.open(named, seq_length=16, samples=10)


def test_weights_need_a_number_of_samples(raw: Path) -> None:
    with pytest.raises(RequestError, match="specify samples"):
        tokenmill.data.open([(1.0, raw)], seq_length=16)


@pytest.mark.parametrize("offset", [34, 34 + 4 * 80], ids=["a length", "a pointer"])
def test_a_damaged_index_is_an_error_and_no_other_memory(offset: int, raw: Path, tmp_path: Path) -> None:
    for suffix in (".bin", ".idx"):
        shutil.copy(f"{raw}{suffix}", tmp_path / f"pair{suffix}")
    data = bytearray((tmp_path / "pair.idx").read_bytes())
    for value in (b"\xff" * 8, b"\x00\x00\x00\x7f" * 2):
        size = 4 if offset == 34 else 8
        data[offset + 5 * size : offset + 6 * size] = value[:size]
        (tmp_path / "pair.idx").write_bytes(data)
        with pytest.raises(RequestError, match=r"pair\.idx"):
            tokenmill.data.open(tmp_path / "pair", seq_length=8).digest()


# -- blends as people write them


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("blend.txt", "3 A 1 B"),
        ("blend.json", '[3, "A", "1", "B"]'),
        ("blend.json", '{"train": ["3", "A", 1, "B"], "valid": null}'),
        (
            "blend.yaml",
            "- {dataset_prefix: A, dataset_weight: 3, dataset_split: train}\n"
            "- {dataset_prefix: B, dataset_weight: 1.0, dataset_split: train}\n"
            "- {dataset_prefix: B, dataset_weight: 1.0, dataset_split: validation}\n",
        ),
        ("blend.yml", "- {path: A, weight: 3}\n- {path: B, weight: 1}\n"),
        ("blend.yaml", "blend: [[A, B], [3, 1]]"),
        ("blend.json", '{"blend_per_split": [[["A", "B"], [3, 1]], [["B"], null], null]}'),
        ("blend.yaml", "train:\n- {path: A, weight: 3}\n- {path: B, weight: 1}\nvalidation: [B]\n"),
    ],
)
def test_blends_as_people_write_them(name: str, text: str, tmp_path: Path) -> None:
    a, b = (write_pair(tmp_path / part, random_sequences(number, 50, 40)) for number, part in enumerate(("x", "y")))
    (tmp_path / name).write_text(re.sub(r"\b[AB]\b", lambda match: str(a if match[0] == "A" else b), text))
    expected = tokenmill.data.open([(3, a), (1, b)], seq_length=16, samples=100)
    assert tokenmill.data.open(tmp_path / name, seq_length=16, samples=100).digest() == expected.digest()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("- {path: a}\n- {pth: b}\n", r"\[1\] is not a dataset of a blend .*pth"),
        ("- {path: a}\n- {weight: 2}\n", r"\[1\] has no path"),
        ("- {path: a, split: dev}\n", r"\[0\] has the split 'dev'"),
        ("- {path: a, split: train}\n- {path: b}\n", "with and without a split"),
        ("- a\n- [b]\n", r"\[1\] is \"\['b'\]\"; write a prefix"),
        ("blend: [[a, b], [1]]", "2 prefixes and 1 weights"),
        ("trian: [a]", "it has 'trian'"),
        ("train: 5", "train is not a list of datasets"),
        ("train: [", "is not a blend file"),
        ("a: &a [x]\ntrain: *a\n", "is not a blend file .*alias"),
        ("train: 2024-99-99", "is not a blend file"),
        ("valid: [a]\nvalidation: [b]\ntrain: [c]\n", "valid and validation; use one"),
        ("train:\n- {path: a, split: test}\n", "train has an entry of the split test"),
    ],
)
def test_the_first_wrong_entry_of_a_blend_is_named(text: str, message: str, tmp_path: Path) -> None:
    (tmp_path / "blend.yaml").write_text(text)
    with pytest.raises(RequestError, match=message):
        tokenmill.data.open(tmp_path / "blend.yaml", seq_length=16, samples=100)
