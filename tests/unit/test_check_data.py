"""`tokenmill check-data`: its rows, its exit codes, and the messages for data that cannot be read."""

import json
import os
import pydoc_data.topics as topics
import re
import shutil
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from support.chat import conversations, lines, make_tokenizer
from support.commandline import CommandResult, run_in_process, tokenmill
from support.messages import REMEDY
from support.pairs import write_pair
from support.tokenizer_files import bytes_vocabulary, write_tokenizer
from tokenmill import data
from tokenmill.errors import RequestError
from tokenmill.loaders.check.framework_records import FrameworkPart, FrameworkRequest
from tokenmill.loaders.check.frameworks import FRAMEWORKS, SampleReader, check_framework, compare_digests

TEXT = "".join(topics.topics.values()).encode()
DOCUMENTS = [TEXT[start : start + 400] for start in range(0, 60_000, 400)]


@pytest.fixture(scope="module")
def text_pair(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a pair of text, as bytes, without a record."""
    prefix = tmp_path_factory.mktemp("text") / "pair"
    return write_pair(prefix, [np.frombuffer(document, np.uint8) for document in DOCUMENTS])


@pytest.fixture(scope="module")
def random_pair(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a pair of random ids, some of which end documents."""
    random = np.random.default_rng(0)
    sequences = [np.append(random.integers(0, 50_000, 399), 0) for _ in range(100)]
    return write_pair(tmp_path_factory.mktemp("random") / "pair", sequences)


@pytest.fixture(scope="module")
def dataset(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return an output of preprocess with two keys, whose tokenizer's pad is its EOD and not its eos."""
    directory = tmp_path_factory.mktemp("dataset")
    vocabulary = bytes_vocabulary()
    added = {"<|endoftext|>": len(vocabulary), "<|im_end|>": len(vocabulary) + 1}
    special = {"eos_token": "<|im_end|>", "pad_token": "<|endoftext|>"}
    tokenizer = write_tokenizer(directory / "tokenizer", vocabulary, added, **special)
    (directory / "in").mkdir()
    for name, documents in (("a", DOCUMENTS[:100]), ("b", DOCUMENTS[100:])):
        records = [
            {"text": text, "title": text[:20]} for text in (document.decode(errors="ignore") for document in documents)
        ]
        (directory / "in" / f"{name}.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    command = ["preprocess", directory / "in", directory / "out", "--tokenizer", tokenizer, "--processes", "1"]
    options = ["--eod-token", "<|endoftext|>", "--keys", "text,title"]
    done = tokenmill(*command, *options)
    assert done.code == 0, done.err
    return directory / "out"


def check(*arguments: Any) -> CommandResult:
    return run_in_process("check-data", *arguments)


def rows(*arguments: Any) -> dict[str, tuple[str, str]]:
    """Return the result and the detail of each check."""
    event = json.loads(check(*arguments, "--json").out)
    return {row["check"]: (row["result"], row["detail"]) for row in event["rows"]}


# -- pairs without a record


def test_text_is_accepted_as_a_table_and_as_json(text_pair: Path) -> None:
    result = check(text_pair, "--seq-length", 64, "--split", "80,20", "--vocab-size", 256)
    assert result.code == 0, result.out
    shown = result.out.splitlines()
    assert shown[0] == f"{text_pair}: pairs, seq_length 64, seed 1234, split 80,20"
    assert [line.split()[0] for line in shown[1:-1]] == [
        "check",
        "pairs",
        "record",
        "vocabulary",
        "EOD",
        "text",
        "train",
        "validation",
    ]
    assert shown[-1] == "no differences, 2 not checked"
    done = check(text_pair, "--seq-length", 64, "--split", "80,20", "--vocab-size", 256, "--json")
    event = json.loads(done.out)
    samples = data.open(text_pair, seq_length=64, split="80,20")
    assert (done.code, event["event"], event["differences"], event["synthetic"]) == (0, "check-data", 0, False)
    assert event["fingerprints"]["train"] == samples.fingerprint()
    detail = event["rows"][-2]["detail"]
    assert detail.startswith(f"120 sequences, 48,000 tokens; {len(samples)} samples of 64 = 47,936 tokens; 1.00 epochs")


def test_random_tokens_are_a_difference(random_pair: Path) -> None:
    result = check(random_pair, "--seq-length", 64)
    assert result.code == 1
    assert "text        differs      the tokens look random: " in result.out
    assert result.out.endswith("1 difference, 3 not checked\n")


def test_a_random_dataset_in_a_blend_is_named(text_pair: Path, random_pair: Path, tmp_path: Path) -> None:
    blend = tmp_path / "blend.txt"
    blend.write_text(f"0.9 {text_pair} 0.1 {random_pair}")
    result = check(blend, "--seq-length", 64, "--vocab-size", 50_000)
    assert result.code == 1 and f"differs      {random_pair}: the tokens look random" in result.out
    # The weights need a number of samples: by default that of all tokens.
    assert "1,562 requested" in result.out


def test_the_help_names_every_framework() -> None:
    text = " ".join(check("--help").out.split()).replace("- ", "-")  # lines are broken at hyphens
    assert f"all, {', '.join([*FRAMEWORKS][:-1])} or {[*FRAMEWORKS][-1]};" in text


@pytest.mark.parametrize(
    ("option", "result"),
    [(["--vocab-size", "121"], "differs"), (["--vocab-size", "122"], "differs"), (["--model", "125m"], "ok")],
)
def test_ids_are_compared_with_the_vocabulary_of_the_model(text_pair: Path, option: list[str], result: str) -> None:
    largest = max(TEXT[:60_000])
    if option[1] == "122":
        option, result = ["--vocab-size", str(largest + 1)], "ok"
    (shown, detail) = rows(text_pair, "--seq-length", 64, *option)["vocabulary"]
    assert shown == result and (REMEDY.search(detail) or result == "ok")


def test_a_part_without_a_sample_is_not_checked(text_pair: Path) -> None:
    found_rows = rows(text_pair, "--seq-length", 512, "--split", "98,1,1")
    assert found_rows["train"][0] == "ok"
    assert found_rows["validation"][0] == "not checked" and "use a smaller seq_length" in found_rows["validation"][1]
    assert check(text_pair, "--seq-length", 512, "--split", "98,1,1", "--part", "validation").code == 2


def test_a_damaged_pointer_is_a_difference(text_pair: Path, tmp_path: Path) -> None:
    prefix = tmp_path / "pair"
    for suffix in (".bin", ".idx"):
        shutil.copy(f"{text_pair}{suffix}", f"{prefix}{suffix}")
    index = bytearray(Path(f"{prefix}.idx").read_bytes())
    index[34 + 4 * len(DOCUMENTS) + 8] ^= 2  # the pointer of the second sequence
    Path(f"{prefix}.idx").write_bytes(index)
    result = check(prefix, "--seq-length", 64)
    assert result.code == 1 and "pointer of sequence 1" in result.out


def test_every_line_about_synthetic_tokens_is_marked() -> None:
    result = check("synthetic:1000", "--seq-length", 64, "--vocab-size", 1024)
    assert result.code == 0
    assert [line.split()[0].rstrip(":") for line in result.out.splitlines()] == [
        "SYNTHETIC",
        "check",
        "SYNTHETIC",
        "SYNTHETIC",
        "SYNTHETIC",
    ]
    event = json.loads(check("synthetic:1000", "--seq-length", 64, "--vocab-size", 512, "--json").out)
    assert event["synthetic"] and event["differences"] == 1 and event["verdict"].startswith("SYNTHETIC: ")
    assert all(row["check"].startswith("SYNTHETIC ") for row in event["rows"])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--vocab-size", "9", "--model", "125m"], "use one of them"),
        (["--framework", "jax"], "unknown framework 'jax'; choose one of all, megatron-core, "),
        (["--framework", "automodel"], "nemo_automodel is not installed"),
        (["--model", "9z"], "unknown model '9z'"),
        (["--part", "dev"], "invalid part 'dev'"),
        (["--split", "1;2"], "invalid --split '1;2'"),
    ],
)
def test_invalid_options(text_pair: Path, options: list[str], message: str) -> None:
    result = check(text_pair, "--seq-length", 64, *options)
    assert result.code == 2 and message in " ".join(result.err.split()) and not result.out


def test_all_frameworks_are_refused_if_none_is_installed(text_pair: Path) -> None:
    if any(Path(place, "nemo_automodel").is_dir() for place in sys.path):
        pytest.skip("this Python has the frameworks")
    result = tokenmill("check-data", text_pair, "--seq-length", 64, "--framework", "all", "--count", 2)
    assert result.code == 2
    assert "no framework is installed in" in result.err and "run pip install '.[torch]'" in result.err


# -- an output of preprocess


@pytest.mark.slow
def test_an_output_of_preprocess(dataset: Path) -> None:
    result = rows(dataset, "--seq-length", 64, "--key", "text", "--samples", 2000)
    assert result["pairs"] == ("ok", "header, sizes, lengths and pointers of 2 pairs, 150 sequences")
    assert result["record"][0] == result["tokenizer"][0] == result["text"][0] == "ok"
    assert result["vocabulary"][1].endswith("is 256, of 384 (the tokenizer, 258 entries padded to a multiple of 128)")
    assert result["EOD"] == ("ok", "150 documents end with it")
    assert "for 2,000 requested; 2.13 epochs" in result["train"][1]
    # The pad is the EOD of the data: Megatron-LM would not train it.
    assert result["pad"][0] == "warning" and "set pad_token" in result["pad"][1] and "--pad 256" in result["pad"][1]


@pytest.mark.slow
def test_an_eod_that_is_missing_or_frequent(dataset: Path, tmp_path: Path) -> None:
    copied = tmp_path / "out"
    shutil.copytree(dataset, copied)
    path = copied / "a_text_document.bin"
    ids = np.fromfile(path, "<u2")
    ids[ids == np.bincount(ids).argmax()] = 256
    ids[-1] = 5
    ids.tofile(path)
    result = check(copied, "--seq-length", 64, "--key", "text")
    assert result.code == 1
    assert "1 of 150 documents do not end with the recorded EOD 256; run tokenmill verify" in result.out
    assert "texts contain it too" in result.out


# -- messages


def truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-2])


def set_dtype(code: int) -> Callable[[Path], None]:
    def change(path: Path) -> None:
        content = bytearray(path.read_bytes())
        content[17] = code
        path.write_bytes(content)

    return change


def refusal(path: Path | str, **arguments: Any) -> str:
    """Return the message with which `open` and check-data refuse data; it is the same and names a remedy."""
    with pytest.raises(RequestError) as raised:
        data.open(path, seq_length=32, **arguments)
    options = [item for name, value in arguments.items() for item in (f"--{name}", value)]
    result = check(path, "--seq-length", 32, *options)
    message = str(raised.value)
    assert result.code == 2 and not result.out
    assert REMEDY.search(result.err) and REMEDY.search(message)
    if not arguments:
        assert result.err == f"error: {message}\n"
    return message


@pytest.mark.parametrize(
    ("name", "command"),
    [
        ("nowhere", "run tokenmill preprocess to write the pair"),
        ("no/where", "run tokenmill preprocess to write it"),
        ("nowhere.json", "run tokenmill blend to write it"),
        ("empty", "run tokenmill preprocess first"),
        ("text", "run tokenmill preprocess {root}/text OUTPUT --tokenizer TOKENIZER"),
        ("text/a.jsonl", "run tokenmill preprocess on it"),
        ("pairs", "specify the prefix {root}/pairs/pair, or run tokenmill adopt"),
        ("settings.json", "run tokenmill blend to write one"),
    ],
)
def test_what_is_no_dataset_names_the_command_that_makes_it(
    name: str, command: str, text_pair: Path, tmp_path: Path
) -> None:
    for directory in ("empty", "text", "pairs"):
        (tmp_path / directory).mkdir()
    (tmp_path / "text/a.jsonl").write_text('{"text": "a"}\n')
    (tmp_path / "settings.json").write_text('{"model": 1}')
    for suffix in (".bin", ".idx"):
        shutil.copy(f"{text_pair}{suffix}", tmp_path / f"pairs/pair{suffix}")
    assert command.format(root=tmp_path) in refusal(tmp_path / name)


@pytest.mark.parametrize(
    ("suffix", "damage", "reason"),
    [
        (".bin", truncate, "it has 119,998 bytes, but pair.idx requires 120,000"),
        (".idx", truncate, "bytes, but 150 sequences and 151 document indices need"),
        (".idx", set_dtype(99), "unknown dtype code 99"),
        (".idx", set_dtype(4), "requires"),
        (".idx", Path.unlink, "pair.idx"),
        (".bin", Path.unlink, "pair.bin"),
    ],
)
def test_damaged_pairs(
    suffix: str, damage: Callable[[Path], None], reason: str, text_pair: Path, tmp_path: Path
) -> None:
    for name in (".bin", ".idx"):
        shutil.copy(f"{text_pair}{name}", tmp_path / f"pair{name}")
    damage(tmp_path / f"pair{suffix}")
    message = refusal(tmp_path / "pair")
    assert reason in message and "run" in message


def test_ids_that_are_no_integers(tmp_path: Path) -> None:
    prefix = write_pair(tmp_path / "pair", [[1, 2, 3]] * 50, "int32")
    set_dtype(7)(Path(f"{prefix}.idx"))
    assert "token ids must be integers; write the pair again" in refusal(prefix)


def forget_tokens(output: Path) -> None:
    """Write a receipt whose pairs have bytes and no tokens."""
    receipt = output / ".tokenmill/preprocess/receipts/a.json"
    receipt.write_text(re.sub(r'"tokens": ?[0-9]+', '"tokens": 0', receipt.read_text()))
    (output / ".tokenmill/preprocess/manifest.json").unlink()


@pytest.mark.slow
def test_damaged_outputs_name_the_command_that_repairs_them(dataset: Path, tmp_path: Path) -> None:
    damages: dict[str, tuple[Callable[[Path], None], str, str]] = {
        "bin": (
            lambda out: truncate(out / "a_text_document.bin"),
            "a_text_document.bin",
            "the same tokenmill preprocess",
        ),
        "idx": (
            lambda out: truncate(out / "a_text_document.idx"),
            "a_text_document.idx",
            "the same tokenmill preprocess",
        ),
        "missing": (
            lambda out: (out / "b_text_document.idx").unlink(),
            "b_text_document",
            "the same tokenmill preprocess",
        ),
        "dtype": (
            lambda out: set_dtype(3)(out / "a_text_document.idx"),
            "has the dtype int16, but its record uint16",
            "run the same tokenmill preprocess again with --verify-hashes",
        ),
        "record": (forget_tokens, "receipts/a.json is damaged", "lacks its key, documents, sequences, tokens or parts"),
        "tokenizer": (lambda out: (out / "tokenizer/tokenizer.json").unlink(), "tokenizer.json", "copy the original"),
    }
    for name, (damage, reason, command) in damages.items():
        shutil.copytree(dataset, tmp_path / name)
        damage(tmp_path / name)
        message = refusal(tmp_path / name, key="text")
        assert reason in message and command in message
    unfinished = tmp_path / "unfinished"
    shutil.copytree(dataset, unfinished)
    (unfinished / ".tokenmill/preprocess/manifest.json").unlink()
    next((unfinished / ".tokenmill/preprocess/receipts").iterdir()).unlink()
    message = refusal(unfinished, key="text")
    assert "is not finished: 1 of 2 units" in message and "preprocess again" in message
    assert "choose the key to train on" in refusal(dataset)
    assert "its keys are: text, title" in refusal(dataset, key="body")


@pytest.mark.slow
def test_conversations_and_packed_rows(tmp_path: Path) -> None:
    tokenizer = make_tokenizer(tmp_path / "tokenizer")
    (tmp_path / "in").mkdir()
    (tmp_path / "in/chat.jsonl").write_bytes(lines(conversations(0, 40)))
    chat = tokenmill(
        "chat",
        tmp_path / "in",
        tmp_path / "chat",
        "--tokenizer",
        tokenizer,
        "--chat-template",
        "chatml",
    )
    assert chat.code == 0, chat.err
    assert "run tokenmill pack on the output of chat" in refusal(tmp_path / "chat")
    pair = next((tmp_path / "chat").glob("*_document.bin"))
    assert "run tokenmill pack on the output of chat" in refusal(pair)
    pack = tokenmill("pack", tmp_path / "chat", tmp_path / "packed", "--pack-size", "1024")
    assert pack.code == 0, pack.err
    result = rows(tmp_path / "packed", "--seq-length", 1024)
    assert {name: shown for name, (shown, _) in result.items()} == dict.fromkeys(
        ("record", "vocabulary", "text", "train"), "ok"
    )
    assert "use seq_length 1024" in refusal(tmp_path / "packed")
    truncate(next((tmp_path / "packed").rglob("*.parquet")))
    assert "run the same tokenmill pack again to finish it" in refusal(tmp_path / "packed")


# -- frameworks


def test_the_first_sample_that_differs_is_named() -> None:
    reference = ["a", "b", "c", "d"]
    assert compare_digests(reference, reference) is None
    assert compare_digests(reference, ["a", "x", "c", "y"]) == (
        "sample 1 is the first that differs; 2 of 4 samples are equal"
    )
    assert compare_digests(reference, reference[:3]) == "it has 3 samples, not 4"


TOY = """
    import os, time
    import numpy as np
    import tokenmill.data

    def _read(request, part):
        samples = tokenmill.data.open(request.source, seq_length=request.seq_length)
        for start in range(0, part.count, 3):
            batch = samples.batch(np.arange(start, start + 3))
            yield batch.tokens, batch.masked_labels()

    def equal(request, part, directory):
        print("a framework prints")
        return _read(request, part)

    def one_token_differs(request, part, directory):
        for number, (tokens, labels) in enumerate(_read(request, part)):
            tokens[2, 5] += number == 2
            yield tokens, labels

    def crash(request, part, directory):
        yield next(_read(request, part))
        raise ValueError("no such kernel")

    def exits(request, part, directory):
        os._exit(0)

    def killed(request, part, directory):
        os.kill(os.getpid(), 9)

    def hangs(request, part, directory):
        print("waiting for rank 1", flush=True)
        time.sleep(60)
"""


@pytest.mark.slow
def test_frameworks_run_in_processes_of_their_own(
    text_pair: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import textwrap

    from tokenmill.loaders.check import frameworks

    (tmp_path / "toy_framework.py").write_text(textwrap.dedent(TOY))
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=os.pathsep)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("WORLD_SIZE", "8")
    import toy_framework  # type: ignore[import-not-found]

    samples = data.open(text_pair, seq_length=64)
    reference = [samples.digest(number, 1) for number in range(10)]
    request = FrameworkRequest(
        framework="toy",
        source=str(text_pair),
        split=None,
        key=None,
        seq_length=64,
        seed=1234,
        pad=None,
        eod=None,
        parts=(FrameworkPart(name="train", requested=None, count=10),),
    )

    def run(function: str) -> tuple[str, str]:
        framework = SampleReader(read=getattr(toy_framework, function), modules=(), distribution="toy", remedy="")
        (row,) = check_framework("toy", framework, request, "pairs", {"train": reference}, lambda _: None)
        return row.result, row.detail

    assert run("equal") == ("equal", "the first 10 samples")
    assert run("one_token_differs") == (
        "differs",
        "sample 8 is the first that differs; 9 of 10 samples are equal",
    )
    assert run("crash") == ("failed", "ValueError: no such kernel")
    assert run("exits") == ("failed", "it wrote no digests; its last line: none")
    assert run("killed") == ("failed", "signal 9: it printed nothing")
    monkeypatch.setattr(frameworks, "TIMEOUT_SECONDS", 3.0)
    started = time.monotonic()
    assert run("hangs") == ("failed", "it did not finish within 3 s; its last line: waiting for rank 1")
    assert time.monotonic() - started < 30
