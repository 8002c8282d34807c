"""The configuration with which Megatron-LM and the frameworks based on it read the same data."""

import json
from pathlib import Path
from typing import Any

import pytest

from support.pairs import random_sequences, write_pair
from tokenmill.errors import RequestError
from tokenmill.loaders.megatron import MegatronData, describe_data


@pytest.fixture
def pairs(tmp_path: Path) -> list[str]:
    return [
        str(write_pair(tmp_path / f"data/{name}", random_sequences(number, 20, 30))) for number, name in enumerate("ab")
    ]


def describe(source: Any, **arguments: Any) -> MegatronData:
    return describe_data(source, **{"seq_length": 16, "cache": "/cache", "samples": 100, **arguments})


def option(flags: list[str], name: str) -> str:
    return flags[flags.index(name) + 1]


def test_a_single_pair_is_named_on_the_command_line(pairs: list[str], tmp_path: Path) -> None:
    data = describe(pairs[0], split="9,1,0", seed=7, mask_eod=True, surplus=0.01)
    flags = data.flags(tmp_path)
    assert flags == [
        *("--seq-length", "16", "--seed", "7", "--data-cache-path", data.cache, "--dataloader-type", "single"),
        *("--mid-level-dataset-surplus", "0.01", "--eod-mask-loss", "--data-path", pairs[0], "--split", "9,1,0"),
    ]


def test_megatron_has_the_flags(pairs: list[str], tmp_path: Path) -> None:
    known = json.loads((Path(__file__).parents[1] / "conformance/megatron-arguments.json").read_text())["arguments"]
    sources = (pairs[0], pairs, {"train": pairs[0]})
    flags = [flag for source in sources for flag in describe(source, mask_eod=True, surplus=0.01).flags(tmp_path)]
    assert {flag for flag in flags if flag.startswith("--")} <= known.keys()


def test_the_cache_is_named_by_the_content(pairs: list[str]) -> None:
    before = describe(pairs[0]).cache
    assert before.startswith("/cache/")
    assert describe(pairs[0]).cache == before
    write_pair(Path(pairs[0]), random_sequences(5, 20, 30))
    assert describe(pairs[0]).cache != before


def test_a_blend_is_written_to_a_file(pairs: list[str], tmp_path: Path) -> None:
    data = describe([(0.25, pairs[0]), (0.75, pairs[1])])
    path = Path(option(data.flags(tmp_path), "--data-args-path"))
    assert path.read_text() == f"0.25 {pairs[0]}\n0.75 {pairs[1]}\n"
    assert data.bridge()["blend"] == (pairs, [0.25, 0.75])
    assert data.automodel()["paths"] == ["0.25", pairs[0], "0.75", pairs[1]]
    assert data.nemo()["paths"] == ["0.25", pairs[0], "0.75", pairs[1]]


def test_pairs_without_weights_are_read_once(pairs: list[str], tmp_path: Path) -> None:
    data = describe(pairs)
    assert Path(option(data.flags(tmp_path), "--data-args-path")).read_text().split() == pairs
    assert data.core()["blend"] == (pairs, None)


def test_lists_of_each_split(pairs: list[str], tmp_path: Path) -> None:
    data = describe({"train": [(1, pairs[0]), (2, pairs[1])], "valid": pairs[1]})
    lists = json.loads(Path(option(data.flags(tmp_path), "--per-split-data-args-path")).read_text())
    assert lists == {"train": ["1.0", pairs[0], "2.0", pairs[1]], "valid": [pairs[1]], "test": None}
    assert data.core()["blend_per_split"] == [(pairs, [1.0, 2.0]), ([pairs[1]], None), None]
    assert "split" not in data.core()
    assert data.automodel("validation")["paths"] == {"train": lists["train"], "validation": [pairs[1]]}
    assert data.automodel("validation")["num_val_samples"] == 100
    assert data.nemo()["paths"] == {"train": lists["train"], "validation": [pairs[1]], "test": None}


def test_nemo_ignores_the_weight_of_a_single_pair(pairs: list[str]) -> None:
    data = describe([(1, pairs[0])])
    assert data.core()["blend"] == ([pairs[0]], [1.0])
    for configure in (data.automodel, data.nemo):
        with pytest.raises(RequestError, match="is the only pair and has a weight"):
            configure()


def test_arguments_that_a_framework_lacks_are_refused(pairs: list[str]) -> None:
    with pytest.raises(RequestError, match=r"NeMo Automodel has only 0\.005 and False"):
        describe(pairs[0], mask_eod=True).automodel()
    with pytest.raises(RequestError, match=r"NeMo 2 has only 0\.005"):
        describe(pairs[0], surplus=0.1).nemo()


def test_sources_that_megatron_does_not_read_are_refused(pairs: list[str], tmp_path: Path) -> None:
    with pytest.raises(RequestError, match="SYNTHETIC: synthetic:50 has no pairs"):
        describe("synthetic:50")
    with pytest.raises(RequestError, match="remove split"):
        describe({"train": pairs[0]}, split="9,1,0")
    spaced = [str(write_pair(tmp_path / f"a b/{name}", random_sequences(1, 20, 30))) for name in "ab"]
    with pytest.raises(RequestError, match="contains white space"):
        describe(spaced).flags(tmp_path)
