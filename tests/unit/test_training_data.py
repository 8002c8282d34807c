"""Training data from outputs of the command line: counts, flags, and errors with their remedies."""

import json
import os
import shutil
import sys
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from support.commandline import tokenmill
from support.corpus import TOKENIZER as TINY
from support.file_calls import read_log, start
from support.mill import Mill
from tokenmill.datasets.formats.indexed.reader import IndexedReader
from tokenmill.datasets.split import split_ranges
from tokenmill.datasets.training_data import TrainingData
from tokenmill.errors import MachineError, RequestError, TokenmillError
from tokenmill.models.model import Model
from tokenmill.train.data import blend
from tokenmill.train.data.blend import collect_datasets
from tokenmill.train.data.flags import cache_path, render_blend, write_data_arguments
from tokenmill.train.data.index import IndexCache, build_index, remove_truncated_files
from tokenmill.train.data.resolve import resolve as resolve_data
from tokenmill.train.data.summary import summarize
from tokenmill.train.preflight import check_run
from tokenmill.train.runtime.prepare import find_index_cache, list_starts
from tokenmill.train.settings import (
    Blend,
    BlendPart,
    CheckpointSettings,
    DatasetSettings,
    Settings,
    Training,
    derive_settings,
)

pytestmark = pytest.mark.slow


@pytest.fixture(scope="session")
def mill(tmp_path_factory: pytest.TempPathFactory) -> Mill:
    return Mill(tmp_path_factory.mktemp("mill"))


@pytest.fixture(scope="session")
def large(mill: Mill) -> Path:
    """Make three pairs of 600, 900 and 1,200 documents, and a pair without tokens."""
    return mill.make("large", {"a": 600, "b": 900, "c": 1200, "empty": 0})


@pytest.fixture(scope="session")
def small(mill: Mill) -> Path:
    """Make a pair of 50 documents."""
    return mill.make("small", {"few": 50}, seed=1)


@pytest.fixture(scope="session")
def many_keys(mill: Mill) -> Path:
    """Make a dataset with two keys."""
    return mill.make("keys", {"a": 600}, "--keys", "text,title", keys=("text", "title"))


@pytest.fixture(scope="session")
def half(mill: Mill) -> Path:
    """Make an unfinished dataset: one of two workers has run."""
    return mill.make("half", {"a": 600, "b": 600}, "--workers", "2", "--worker-index", "0")


def settings(path: Path | str | None = None, **changed: Any) -> Settings:
    """Return the derived settings of a small run."""
    sections: dict[str, dict[str, Any]] = {"model": {}, "training": {}, "dataset": {}, "checkpoint": {}}
    for name, value in changed.items():
        section, _, field = name.partition("__")
        sections[section][field] = value
    if path is not None:
        sections["dataset"]["path"] = str(path)
    model = {"num_layers": 2, "hidden_size": 64, "num_attention_heads": 4, "seq_length": 64} | sections["model"]
    training = {"gpus_per_node": 1, "iterations": 10, "global_batch_size": 4} | sections["training"]
    return derive_settings(
        Settings(
            release="run",
            model=Model(**model),
            training=Training(**training),
            checkpoint=CheckpointSettings(**{"path": "/checkpoints", **sections["checkpoint"]}),
            dataset=DatasetSettings(**sections["dataset"]),
        )
    )


def resolve(*args: Any, **changed: Any) -> TrainingData:
    return resolve_data(settings(*args, **changed), None)


def refusal(*args: Any, **changed: Any) -> str:
    with pytest.raises(RequestError) as caught:
        resolve(*args, **changed)
    assert caught.value.exit_code == 2
    return str(caught.value)


# -- resolved data


def test_counts_match_the_pairs(large: Path) -> None:
    corpus = resolve(large)
    (source,) = corpus.lists["all"]
    assert [Path(pair.prefix).name for pair in source.pairs] == [f"{name}_text_document" for name in "abc"]
    for pair in source.pairs:
        reader = IndexedReader(Path(pair.prefix))
        assert (pair.documents, pair.sequences) == (reader.documents, reader.sequences)
        assert pair.tokens == sum(len(reader.sequence(i)) for i in range(reader.sequences))
        assert pair.bytes == Path(f"{pair.prefix}.bin").stat().st_size == 2 * pair.tokens
    assert corpus.tokenizer == large / "tokenizer"
    assert (corpus.vocab_size, corpus.dtype, corpus.eod) == (4096, "uint16", 0)
    assert source.empty == 1 and "skipped 1 pairs without tokens" in corpus.notes


def test_a_relative_path_is_below_the_root(large: Path) -> None:
    corpus = resolve_data(settings(large.name), large.parent)
    assert corpus.train[0].pairs == resolve(large).train[0].pairs


def test_a_pair_can_be_named(large: Path) -> None:
    for name in ("b_text_document", "b_text_document.bin", "b_text_document.idx"):
        (pair,) = resolve(large / name).train[0].pairs
        assert (Path(pair.prefix).name, pair.documents) == ("b_text_document", 900)
    assert "has no pair d_text_document" in refusal(large / "d_text_document")


def test_a_key_selects_among_several(many_keys: Path) -> None:
    message = refusal(many_keys)
    assert "has the keys text, title" in message and "dataset.key" in message
    (source,) = resolve(many_keys, dataset__key="title").train
    assert [Path(pair.prefix).name for pair in source.pairs] == ["a_title_document"]
    assert "no key summary" in refusal(many_keys, dataset__key="summary")


# -- refused data


def test_no_dataset(tmp_path: Path) -> None:
    assert "no output of tokenmill preprocess in" in refusal(tmp_path)
    assert "no output of tokenmill preprocess in" in refusal(tmp_path / "nothing")
    assert "either dataset.path (an output" in refusal()


def test_an_unfinished_dataset(half: Path) -> None:
    message = refusal(half)
    assert (
        "is not finished: 1 of 2 units" in message
        and "first missing: " in message
        and f"tokenmill status {half}" in message
    )


def test_a_missing_file_and_one_of_another_size(large: Path, tmp_path: Path) -> None:
    copy = tmp_path / "copy"
    shutil.copytree(large, copy)
    (copy / "b_text_document.idx").unlink()
    with (copy / "c_text_document.bin").open("ab") as file:
        file.write(b"xx")
    message = refusal(copy)
    assert "was finished, but 2 of its 6 files are missing or have another size" in message
    assert "b_text_document.idx" in message and "c_text_document.bin" in message and "a_text" not in message


def test_a_tokenizer_of_other_data(large: Path, tmp_path: Path) -> None:
    copy = tmp_path / "copy"
    shutil.copytree(large, copy)
    (copy / "tokenizer/tokenizer.json").write_text("{}")
    assert "not the tokenizer that made this dataset" in refusal(copy)


@pytest.mark.parametrize(
    ("split", "message"),
    [
        ("990;9;1", "such as 990,9,1"),
        ("990,-9,1", "such as 990,9,1"),
        ("99e1,9,1", "such as 990,9,1"),
        ("980,10,5,5", "such as 990,9,1"),
        ("0,0,0", "such as 990,9,1"),
        ("nan,1,1", "such as 990,9,1"),
        ("", "such as 990,9,1"),
        ("1,9,990", "holds out 100%"),
        ("40,40,20", "holds out 60%"),
        ("0,99,1", "leaves no training data"),
    ],
)
def test_an_invalid_split(large: Path, split: str, message: str) -> None:
    assert message in refusal(large, dataset__split=split)


def test_a_part_of_the_split_without_documents(small: Path, large: Path) -> None:
    message = refusal(small)
    assert "leaves validation and test without any of the 50 documents" in message and "few_text_document" in message
    assert "use 98,1,1" not in message and "use 95,4,1" not in message and "use 90,8,2" in message
    assert resolve(small, dataset__split="90,8,2").split == "90,8,2"
    # The check also applies without evaluation, because Megatron-LM would count epochs of the empty part.
    assert "without any of the 50" in refusal(small, training__eval_iterations=0)
    assert resolve(small, dataset__split="1", training__eval_iterations=0).split == "1"
    # Megatron-LM splits every pair, so the smallest pair decides.
    blend = Blend(all=[BlendPart(path=str(large)), BlendPart(path=str(small))])
    assert "the smallest of 4 pairs" in refusal(dataset__blend=blend)


def test_no_evaluation_of_several_pairs(large: Path) -> None:
    run = settings(large, training__eval_iterations=0, dataset__split="90,5,5")
    with pytest.raises(RequestError, match=r"evalIterations is 0, but the validation split has parts of \d pairs"):
        check_run(run, resolve_data(run, None), machine=False)
    for accepted in ({"training__eval_iterations": 1}, {"training__eval_iterations": 0, "dataset__split": "1,0,0"}):
        run = settings(large, **({"dataset__split": "90,5,5"} | accepted))
        check_run(run, resolve_data(run, None), machine=False)


def test_no_validation_data(large: Path) -> None:
    assert "training.evalIterations is 10" in refusal(large, dataset__split="1,0,0")
    assert "dataset.blend.validation is empty" in refusal(dataset__blend=Blend(train=[BlendPart(path=str(large))]))
    assert resolve(large, dataset__split="99,1,0").split == "99,1,0"


def test_more_pairs_than_the_limit(large: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(blend, "MAX_PAIRS", 2)
    assert "has 3 pairs, but Megatron-LM accepts at most 2" in refusal(large)


@pytest.mark.parametrize("weight", [0.0, -1.0, float("inf"), float("nan")])
def test_weights_are_above_zero(large: Path, small: Path, weight: float) -> None:
    parts = [BlendPart(path=str(large), weight=1), BlendPart(path=str(small), weight=weight)]
    assert "it must be above 0" in refusal(dataset__blend=Blend(train=parts))


def test_a_weight_is_missing(large: Path, small: Path) -> None:
    parts = [BlendPart(path=str(large), weight=1), BlendPart(path=str(small))]
    assert f"dataset.blend.all[1] {small} has no weight" in refusal(dataset__blend=Blend(all=parts))
    assert "has no weight" in refusal(dataset__blend=Blend(all=parts[1:], by="given"))


def test_a_blend_has_one_or_three_lists(large: Path, small: Path) -> None:
    parts, other_parts = [BlendPart(path=str(large))], [BlendPart(path=str(small))]
    assert "set either all" in refusal(dataset__blend=Blend(all=parts, validation=other_parts))
    assert "has no training data" in refusal(dataset__blend=Blend(validation=other_parts))
    assert "either dataset.path (an output" in refusal(large, dataset__blend=Blend(all=parts))


def test_a_pair_is_only_once_in_all_splits(large: Path) -> None:
    parts = [BlendPart(path=str(large))]
    assert "is in dataset.blend.all[0] and in dataset.blend.all[1]" in refusal(dataset__blend=Blend(all=parts * 2))
    assert "dataset.blend.validation[0]" in refusal(dataset__blend=Blend(train=parts, validation=parts))


def test_a_held_out_pair_is_not_trained_on(large: Path) -> None:
    held_out = BlendPart(path=str(large / "a_text_document"))
    corpus = resolve(dataset__blend=Blend(train=[BlendPart(path=str(large))], validation=[held_out]))
    assert [Path(pair.prefix).name[0] for pair in corpus.lists["train"][0].pairs] == ["b", "c"]
    assert [Path(pair.prefix).name[0] for pair in corpus.lists["validation"][0].pairs] == ["a"]
    rest = [BlendPart(path=str(large / f"{name}_text_document")) for name in "bc"]
    assert "all of its pairs are in other splits" in refusal(
        dataset__blend=Blend(train=[BlendPart(path=str(large))], validation=[held_out, *rest])
    )


@pytest.fixture(scope="session")
def other_tokenizer(mill: Mill) -> Callable[[str, int], Path]:
    """Return a function that makes a dataset with a tokenizer in which one token has another id."""

    def make(name: str, number: int) -> Path:
        directory = mill.root / f"tokenizer-{name}"
        shutil.copytree(TINY, directory)
        path = directory / "tokenizer.json"
        content = json.loads(path.read_text())
        vocabulary = content["model"]["vocab"]
        last = max(vocabulary, key=vocabulary.__getitem__)
        vocabulary[last] = number
        path.write_text(json.dumps(content))
        return mill.make(name, {"a": 600}, "--encoder", "hf", tokenizer=directory)

    return make


def test_token_ids_outside_the_embedding_and_mixed_tokenizers(
    other_tokenizer: Callable[[str, int], Path], large: Path
) -> None:
    gap = other_tokenizer("gap", 4100)
    message = refusal(gap)
    assert "token ids up to 4100" in message and "4096 rows" in message
    message = refusal(dataset__blend=Blend(all=[BlendPart(path=str(large)), BlendPart(path=str(gap))]))
    assert f"{large} has tiny" in message and f"{gap} has tokenizer-gap" in message


def test_documents_that_end_differently(mill: Mill, large: Path) -> None:
    bare = mill.make("bare", {"a": 600}, "--no-append-eod")
    message = refusal(dataset__blend=Blend(all=[BlendPart(path=str(large)), BlendPart(path=str(bare))]))
    assert f"{large} has 0" in message and "--eod-token" in message
    assert "end with no token" in refusal(bare, training__reset_position_ids=True, training__eod_mask_loss=True)
    assert resolve(bare).eod is None
    assert resolve(large, training__eod_mask_loss=True).eod == 0


def test_a_blend_with_too_few_samples(mill: Mill) -> None:
    """Twenty small pairs give one sample each although their shares are smaller; the large pair has too few samples."""
    uneven = mill.make("uneven", {"large": 600, **{f"small{i}": 110 for i in range(20)}})
    options = {"dataset__split": "98,1,1", "model__seq_length": 128, "training__eval_iterations": 1}
    message = refusal(uneven, **options, training__global_batch_size=1)
    assert "Megatron-LM would draw" in message and "large_text_document" in message and "a larger share" in message
    assert resolve(uneven, **options, training__global_batch_size=64)
    assert resolve(uneven, **options | {"dataset__split": "60,20,20"}, training__global_batch_size=1)


# -- the arguments of Megatron-LM


def parse_blend_list(entries: list[str]) -> dict[str, float]:
    """Read a list like Megatron-LM's get_blend_from_list: weight, path, weight, path."""
    assert len(entries) % 2 == 0
    return {Path(path).name: float(weight) for weight, path in zip(entries[::2], entries[1::2], strict=True)}


def test_one_pair_is_a_data_path(small: Path, tmp_path: Path) -> None:
    run_settings = settings(small, dataset__split="90, 8, 2")
    arguments = write_data_arguments(resolve_data(run_settings, None), run_settings, tmp_path)
    assert arguments.flags == ["--data-path", str(small / "few_text_document"), "--split", "90,8,2"]
    assert arguments.tokenizer == small / "tokenizer" and not list(tmp_path.iterdir())


def test_weights_of_pairs_are_token_counts(large: Path, tmp_path: Path) -> None:
    run_settings = settings(large)
    corpus = resolve_data(run_settings, None)
    flag, path, *split = write_data_arguments(corpus, run_settings, tmp_path).flags
    assert (flag, split) == ("--data-args-path", ["--split", "990,9,1"])
    weights = parse_blend_list(Path(path).read_text().split())
    tokens = {Path(pair.prefix).name: pair.tokens for pair in corpus.train[0].pairs}
    assert weights == pytest.approx({name: count / sum(tokens.values()) for name, count in tokens.items()})
    assert (
        write_data_arguments(corpus, run_settings, tmp_path).flags[1] == path
    )  # the name depends on the content, and the file is written once


def test_lists_for_each_split_have_all_three_keys(large: Path, small: Path, tmp_path: Path) -> None:
    blend = Blend(train=[BlendPart(path=str(large), weight=3)], validation=[BlendPart(path=str(small))])
    run_settings = settings(dataset__blend=blend)
    flag, path = write_data_arguments(resolve_data(run_settings, None), run_settings, tmp_path).flags
    assert flag == "--per-split-data-args-path"
    lists = json.loads(Path(path).read_text())
    assert list(lists) == ["train", "valid", "test"] and lists["test"] is None
    assert sum(parse_blend_list(lists["train"]).values()) == pytest.approx(1) and list(
        parse_blend_list(lists["valid"])
    ) == ["few_text_document"]


def test_shares_of_a_blend(large: Path, small: Path) -> None:
    def shares(**options: Any) -> list[float]:
        parts = [
            BlendPart(path=str(large), weight=options.pop("one", None)),
            BlendPart(path=str(small), weight=options.pop("two", None)),
        ]
        return [source.share for source in resolve(dataset__blend=Blend(train=parts, validation=parts[:0], **options),
                                                   training__eval_iterations=0).train]  # fmt: skip

    sources = [resolve(path, dataset__split="1", training__eval_iterations=0).train[0] for path in (large, small)]
    for by in ("tokens", "documents", "bytes"):
        sizes = [getattr(source, by) for source in sources]
        assert shares(by=by) == pytest.approx([size / sum(sizes) for size in sizes])
    assert shares(by="given", one=3.0, two=1.0) == shares(one=3.0, two=1.0) == [0.75, 0.25]


def test_white_space_in_a_path_of_a_list_is_refused(large: Path, tmp_path: Path) -> None:
    (tmp_path / "my data").symlink_to(large)
    run_settings = settings(tmp_path / "my data")
    corpus = resolve_data(run_settings, None)
    with pytest.raises(RequestError, match="white space"):
        write_data_arguments(corpus, run_settings, tmp_path)
    pair_data = resolve_data(settings(tmp_path / "my data" / "a_text_document"), None)
    assert write_data_arguments(pair_data, run_settings, tmp_path).flags[:2] == [
        "--data-path",
        f"{tmp_path}/my data/a_text_document",
    ]


def test_the_content_selects_the_cache(mill: Mill, small: Path) -> None:
    run_settings = settings(small, dataset__split="1", training__eval_iterations=0)
    before = cache_path(resolve_data(run_settings, None), run_settings)
    assert before.parent == Path("/checkpoints/.tokenmill/index")
    other = mill.make("again", {"few": 50}, seed=2)
    dataset = msgspec.structs.replace(run_settings.dataset, path=str(other), cache_path="/cache")
    run_settings = msgspec.structs.replace(run_settings, dataset=dataset)
    after = cache_path(resolve_data(run_settings, None), run_settings)
    assert after.parent == Path("/cache") and after.name != before.name


# -- the summary before the start


def test_the_summary_has_tokens_and_epochs(large: Path) -> None:
    run_settings = settings(large, training__iterations=100)
    corpus = resolve_data(run_settings, None)
    lines = summarize(corpus, run_settings)
    assert lines[0] == "100 iterations of 4 sequences of 64 tokens: 256 tokens per iteration, 25,600 in total"
    source = corpus.train[0]
    trained = sum(split_ranges("990,9,1", pair.sequences)[0][1] for pair in source.pairs) / source.sequences  # type: ignore[index]
    assert f"100.00% of the samples, {25_600 / (source.tokens * trained):.2f} epochs" in lines[-3]
    assert lines[-2:] == ["validation: 24 sequences", "test: 3 sequences"]
    assert not any(line.startswith("warning:") for line in lines)


def test_the_summary_warns_of_many_epochs(small: Path) -> None:
    run_settings = settings(small, dataset__split="90,8,2", training__iterations=1000)
    (warning,) = [
        line for line in summarize(resolve_data(run_settings, None), run_settings) if line.startswith("warning:")
    ]
    assert str(small) in warning and "reduce the iterations" in warning


# -- the split


@given(st.lists(st.integers(0, 999), min_size=1, max_size=3), st.integers(1, 10**6))
def test_a_split_is_complete_and_disjoint(shares: list[int], sequences: int) -> None:
    if shares[0] * 2 < sum(shares) or not shares[0]:
        return
    parts = [part for part in split_ranges(",".join(map(str, shares)), sequences) if part is not None]
    assert parts[0][0] == 0 and parts[-1][1] == sequences
    assert all(first[1] == second[0] for first, second in pairwise(parts))


# -- the sample index, without Megatron-LM (tests/conformance/test_sample_index.py has the other tests)


def test_an_index_that_cannot_be_built(large: Path, tmp_path: Path) -> None:
    run_settings = settings(large, checkpoint__path=str(tmp_path))
    corpus = resolve_data(run_settings)
    for python, extra, kind, message in (
        (["/nowhere/python"], "", RequestError, "there is no /nowhere/python"),
        ([sys.executable], "--tokenizer-metadata=x.json", RequestError, "run the command in the training image"),
        ([sys.executable], "--full-validation", RequestError, "run with --full-validation"),
        (["/bin/sh", "-c", "echo it went wrong; exit 3"], "", TokenmillError, "code 3; see its output:\nit went wrong"),
        (["/bin/sh", "-c", "kill -9 $$"], "", MachineError, "ran out of memory"),
    ):
        own = msgspec.structs.replace(run_settings, extra_args=[extra] if extra else [])
        cache, start = find_index_cache(corpus, own), list_starts(own, corpus, None, tmp_path)
        with pytest.raises(kind) as caught:
            build_index(start, cache, script="/nowhere/pretrain_gpt.py", python=python)
        assert type(caught.value) is kind and message in str(caught.value)
        assert not cache.path.exists() or not list(cache.path.iterdir())


def test_truncated_indexes_are_removed(tmp_path: Path) -> None:
    np.save(tmp_path / "whole.npy", np.arange(1000))
    content = (tmp_path / "whole.npy").read_bytes()
    for name, length in (("half", 4000), ("header", 100), ("started", 5), ("none", 0)):
        (tmp_path / f"{name}.npy").write_bytes(content[:length])
    own, shared = (IndexCache(tmp_path, shared=shared) for shared in (False, True))
    assert remove_truncated_files(shared) == []  # another process may be writing these files
    os.utime(tmp_path / "half.npy", (0, 0))
    assert [path.stem for path in remove_truncated_files(shared)] == ["half"]
    assert [path.stem for path in remove_truncated_files(own)] == ["header", "none", "started"]
    assert (tmp_path / "whole.npy").read_bytes() == content
    assert remove_truncated_files(IndexCache(tmp_path / "nothing", shared=False)) == []


# -- tokenmill blend


def test_blend_writes_a_flat_list(large: Path, small: Path, tmp_path: Path) -> None:
    out = tmp_path / "blend.txt"
    result = tokenmill("blend", out, f"{large}=3", f"{small}=1", "--split", "90,8,2", "--tokens", "1e6")
    assert result.code == 0, result.err
    weights = parse_blend_list(out.read_text().split())
    assert weights["few_text_document"] == pytest.approx(0.25) and sum(weights.values()) == pytest.approx(1)
    assert f"--data-args-path {out} --split 90,8,2" in result.out
    assert "75.00%" in result.out and "epochs" in result.out


def test_blend_writes_lists_for_each_split(large: Path, small: Path, tmp_path: Path) -> None:
    out = tmp_path / "blend.json"
    result = tokenmill("blend", out, large, "--by", "documents", "--validation", small)
    assert result.code == 0, result.err
    assert {name: len(entries or []) for name, entries in json.loads(out.read_text()).items()} == {
        "train": 6,
        "valid": 2,
        "test": 0,
    }


def test_a_blend_of_another_tool_is_converted(tmp_path: Path, large: Path, small: Path) -> None:
    out, blend, expected = tmp_path / "out.json", tmp_path / "nemo.yaml", tmp_path / "expected.json"
    entries = [(large, 3, "train"), (small, 1, "validation")]
    blend.write_text(
        "".join(f"- {{dataset_prefix: {p}, dataset_weight: {w}, dataset_split: {s}}}\n" for p, w, s in entries)
    )
    assert tokenmill("blend", out, blend).code == 0
    assert tokenmill("blend", expected, f"{large}=3", "--validation", f"{small}=1").code == 0
    assert out.read_bytes() == expected.read_bytes()
    ended = tokenmill("blend", out, blend, "--split", "9,1,0")
    assert ended.code == 2 and "has a list for each split" in ended.err


def test_blend_writes_valid_values(large: Path, small: Path, tmp_path: Path) -> None:
    out = tmp_path / "values.yaml"
    result = tokenmill("blend", out, large, small.name, "--split", "90,8,2", "--values", "--root", large.parent)
    assert result.code == 0, result.err
    dataset = msgspec.convert(yaml.safe_load(out.read_text())["dataset"], DatasetSettings)
    assert dataset.blend is not None and [part.path for part in dataset.blend.all] == ["large", "small"]
    corpus, direct = collect_datasets(dataset, large.parent), resolve(
        dataset__blend=Blend(all=[BlendPart(path=str(large)), BlendPart(path=str(small))]), dataset__split="90,8,2"
    )  # fmt: skip
    assert render_blend(corpus) == render_blend(direct)


def test_blend_of_one_pair_is_a_list(large: Path, tmp_path: Path) -> None:
    out = tmp_path / "blend.txt"
    result = tokenmill("blend", out, large / "a_text_document")
    assert result.code == 0, result.err
    assert out.read_text() == f"1.0 {large}/a_text_document\n" and "--data-args-path" in result.out
    (tmp_path / "my data").symlink_to(large)
    result = tokenmill("blend", tmp_path / "other", tmp_path / "my data" / "a_text_document")
    assert result.code == 2 and "white space" in result.err


OPEN = "import sys, tokenmill.data as data; data.open(sys.argv[1], seq_length=8, samples=50)"


def test_an_output_is_read_once_for_all_of_its_named_pairs(mill: Mill, tmp_path: Path) -> None:
    """A list of a thousand pairs of one output would otherwise read its thousand receipts a thousand times."""
    names = [f"{number:02d}" for number in range(16)]
    output, blend_file = mill.make("named", dict.fromkeys(names, 3)), tmp_path / "blend.txt"
    pairs = [output / f"{name}_text_document" for name in names]
    programs: list[tuple[int, tuple[str, ...], list[Any]]] = [
        (1, ("-m", "tokenmill"), ["blend", blend_file, *pairs, "--split", "1,0,0"]),
        (1, ("-c", OPEN), [blend_file]),
        (2, ("-m", "tokenmill"), ["check-data", blend_file, "--seq-length", 8]),  # to check the files, and the samples
    ]
    for times, program, arguments in programs:
        process = start(output, tmp_path / "calls", *arguments, program=program)
        _, errors = process.communicate()
        opened = [call.path for call in read_log(tmp_path / "calls") if call.name == "open"]
        assert 0 < sum("/receipts/" in path for path in opened) <= times * len(names), errors
        assert sum(path.endswith("/plan.json") for path in opened) <= 4


def test_blend_overwrites_no_dataset(large: Path, small: Path, tmp_path: Path) -> None:
    copy = tmp_path / "copy"
    shutil.copytree(large, copy)
    before = (copy / "a_text_document.bin").read_bytes()
    for out in (copy, copy / "a_text_document.bin", copy / "new.idx"):
        result = tokenmill("blend", out, large)
        assert result.code == 2 and f"cannot write to {out}: specify a regular file first" in result.err
    assert (copy / "a_text_document.bin").read_bytes() == before


def test_blend_refuses(large: Path, small: Path, half: Path, tmp_path: Path) -> None:
    out = tmp_path / "blend"
    for arguments, message in (
        ((half,), "is not finished: 1 of 2 units"),
        ((f"{large}=0",), "must be above 0"),
        ((f"{large}=much",), "invalid weight 'much'"),
        ((f"{large}=1e308", f"{small}=1e308", "--split", "90,8,2"), "its weight is so small"),
        ((f"{large}=1e-320", f"{small}=1e308", "--split", "90,8,2"), "its weight is so small"),
        (("x" * 300 + "=1",), "File name too long"),
        ((large, "--values", "--root", small), "is not below"),
        ((large, "--values", "--root", large), "is not below"),
        ((large, small), "without any of the 50 documents"),
        ((large, "--split", "1", "--test", small), "use one or the other"),
        ((tmp_path,), f"PART 1 {tmp_path}: "),
        ((tmp_path,), "no output of tokenmill preprocess"),
        ((large, "--validation", tmp_path), f"--validation 1 {tmp_path}: "),
        ((large, large), "is in PART 1 and in PART 2; remove it"),
        ((large, f"{small}=2", "--split", "90,8,2"), f"PART 1 {large} has no weight"),
        ((large, "--key", "title"), f"PART 1 {large} has no key title (--key); its keys are: text"),
        ((large, "--split", "much"), "invalid --split 'much': specify the shares"),
        ((large, "--split", "1,1,1"), "specify the datasets of each split with --validation and --test"),
        ((large, small), "--split 990,9,1 leaves "),
    ):
        result = tokenmill("blend", out, *arguments)
        assert (result.code, message in result.err) == (2, True), result.err
    assert not out.exists()
