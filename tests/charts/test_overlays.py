"""Overlays: their charts, their combinations, their copies in packages, and their tables."""

import shutil
import subprocess
import sys
from itertools import combinations
from pathlib import Path
from typing import Any

import pytest
import yaml

from support.rendering import (
    HELMS,
    NEEDED,
    ROOT,
    STAGES,
    applicable_overlays,
    arguments,
    helm,
    overlays,
    parse,
    render,
    render_text,
    validate_manifests,
)
from tokenmill.engine.contract import RemoteFile
from tokenmill.engine.selection import Selection
from tokenmill.sources.listing import output_names, select
from tokenmill.sources.source import Listing

KINDS = ("clusters", "datasets", "models", "parallelism", "storage")
OVERLAY_KINDS = {
    **{f"dataset-{name}": {"clusters", "datasets"} for name in (*STAGES, "pipeline")},
    "megatron-training": {"clusters", "models", "parallelism"},
    "monitoring": set(),
    "shared-storage": {"storage"},
}


def keys(values: Any, prefix: str = "") -> set[str]:
    """Return the keys of values, joined with dots."""
    if not isinstance(values, dict):
        return {prefix}
    return {key for name, value in values.items() for key in keys(value, f"{prefix}.{name}" if prefix else name)}


def test_overlays_of_two_kinds_set_different_keys() -> None:
    """Their order therefore does not matter, and a test of one combination covers all combinations."""
    kind_keys = {
        kind: {key for file in overlays(kind) for key in keys(yaml.safe_load(file.read_text()))} for kind in KINDS[:-1]
    }
    for first, second in combinations(kind_keys, 2):
        assert kind_keys[first] & kind_keys[second] == set(), (first, second)


def test_a_chart_has_the_kinds_of_overlays_that_it_declares() -> None:
    for chart, kinds in OVERLAY_KINDS.items():
        assert {kind for kind in KINDS if applicable_overlays(chart, kind)} == kinds, chart
    training = {file.stem for file in applicable_overlays("megatron-training", "clusters")}
    assert training == {file.stem for file in overlays("clusters") if not file.stem.startswith("cpu-")}
    assert applicable_overlays("dataset-extract", "clusters") == overlays("clusters")


LISTED = {
    "c4": {
        "en/c4-train.00000-of-01024.json.gz": True,
        "en/c4-validation.00000-of-00008.json.gz": False,
        "en.noclean/c4-train.00000-of-07168.json.gz": False,
        "multilingual/c4-af.tfrecord-00000-of-00064.json.gz": False,
    },
    "dclm-baseline": {
        "global-shard_01_of_10/local-shard_0_of_10/shard_00000000_processed.jsonl.zst": True,
        "global-shard_02_of_10/local-shard_9_of_10/shard_00000000_processed.jsonl.zst": True,
        "README.md": False,
    },
    "finemath": {
        "finemath-4plus/train-00000-of-00064.parquet": True,
        "finemath-3plus/train-00000-of-00128.parquet": False,
        "infiwebmath-4plus/train-00000-of-00040.parquet": False,
    },
    "finetome-100k": {"data/train-00000-of-00001.parquet": True, "README.md": False},
    "fineweb": {
        "sample/10BT/000_00000.parquet": True,
        "sample/100BT/000_00000.parquet": False,
        "data/CC-MAIN-2024-10/000_00000.parquet": False,
    },
    "fineweb-2": {
        "data/fra_Latn/train/000_00000.parquet": True,
        "data/fra_Latn/test/000_00000.parquet": False,
        "data/fra_Latn_removed/train/000_00000.parquet": False,
    },
    "fineweb-edu": {
        "sample/10BT/000_00000.parquet": True,
        "data/CC-MAIN-2024-10/train-00000-of-00020.parquet": False,
    },
    "openthoughts-114k": {
        "data/train-00000-of-00006.parquet": True,
        "metadata/train-00000-of-00012.parquet": False,
    },
    "pile-uncopyrighted": {"train/00.jsonl.zst": True, "test.jsonl.zst": False, "val.jsonl.zst": False},
    "sample": {
        "wikitext-2-raw-v1/train-00000-of-00001.parquet": True,
        "wikitext-2-raw-v1/test-00000-of-00001.parquet": False,
        "wikitext-103-raw-v1/train-00000-of-00002.parquet": False,
    },
    "slimpajama": {
        "train/chunk1/example_train_0.jsonl.zst": True,
        "validation/chunk1/example_holdout_0.jsonl.zst": False,
    },
    "slimpajama-test": {
        "test/chunk1/example_holdout_0.jsonl.zst": True,
        "test/chunk2/example_holdout_0.jsonl.zst": True,
        "train/chunk1/example_train_0.jsonl.zst": False,
    },
    "slimpajama-validation": {
        "validation/chunk1/example_holdout_0.jsonl.zst": True,
        "train/chunk1/example_train_0.jsonl.zst": False,
    },
    "the-stack-dedup": {"data/python/data-00000-of-00144.parquet": True, "data/c/data-00028-of-00126.parquet": False},
    "tulu-3": {"data/train-00000-of-00006.parquet": True, "README.md": False},
    "ultrachat-200k": {
        "data/train_sft-00000-of-00003-a3ecf92756993583.parquet": True,
        "data/test_sft-00000-of-00001-f7dfac4afe5b93f4.parquet": False,
        "data/train_gen-00000-of-00003-a6c9fb894be3e50b.parquet": False,
    },
    "wikipedia": {
        "20231101.en/train-00000-of-00041.parquet": True,
        "20231101.simple/train-00000-of-00001.parquet": False,
    },
}
"""Files of each repository, with their names there, and whether they belong to the corpus."""


@pytest.mark.parametrize("file", overlays("datasets"), ids=lambda file: file.stem)
def test_a_corpus_selects_its_files(file: Path) -> None:
    files = [RemoteFile(path, 1) for path in (*LISTED[file.stem], ".gitattributes")]
    (job,) = (document for document in render("download", file) if document["kind"] == "Job")
    parsed = parse(arguments(job))
    selection = Selection(parsed["include"], parsed["exclude"], parsed["split"], parsed["sample"], parsed["layout"])
    selected, _ = select(Listing(str(parsed["uri"]), None, files), selection)
    assert [item.path for item in selected] == sorted(path for path, is_part in LISTED[file.stem].items() if is_part)
    assert len(set(output_names(selected, parsed["layout"]))) == len(selected)


@pytest.mark.parametrize("program", HELMS)
@pytest.mark.parametrize("chart", [chart for chart, kinds in OVERLAY_KINDS.items() if kinds])
def test_a_package_has_the_overlays_of_its_chart(chart: str, program: str, tmp_path: Path) -> None:
    done = helm("package", ROOT / "charts" / chart, "-d", tmp_path, program=program)
    assert done.returncode == 0, done.stderr
    (package,) = tmp_path.glob("*.tgz")
    shutil.unpack_archive(package, tmp_path)
    packed = {file.relative_to(tmp_path / chart): file.read_bytes() for file in tmp_path.glob(f"{chart}/values/*/*")}
    expected = [file for kind in KINDS for file in applicable_overlays(chart, kind)]
    assert packed == {file.relative_to(ROOT): file.read_bytes() for file in expected} != {}


@pytest.mark.parametrize("program", HELMS)
@pytest.mark.parametrize("chart", [chart for chart, kinds in OVERLAY_KINDS.items() if kinds])
def test_a_package_installs_the_same_as_the_clone(chart: str, program: str, tmp_path: Path) -> None:
    assert helm("package", ROOT / "charts" / chart, "-d", tmp_path, program=program).returncode == 0
    shutil.unpack_archive(next(tmp_path.glob("*.tgz")), tmp_path)
    needed = (
        ["--set", "storage.pvcName=claim"] if chart != "shared-storage" else ["--set", "local.path=/a,local.nodeName=b"]
    )
    values = NEEDED.get(chart.removeprefix("dataset-"), ())
    if chart == "dataset-pipeline":
        values = [f"preprocess.{value}" for value in NEEDED["preprocess"]]
    needed += [part for value in values for part in ("--set", value)]
    files = {
        "clusters": "local",
        "datasets": "c4",
        "models": "llama3-8b",
        "parallelism": "context-2",
        "storage": "local",
    }

    def render_text(directory: Path, overlays: Path) -> str:
        flags = [f"-f={overlays}/{kind}/{files[kind]}.yaml" for kind in sorted(OVERLAY_KINDS[chart], reverse=True)]
        more = ["--set", "training.nodes=32"] if chart == "megatron-training" else []
        done = helm("template", "release", directory, *flags, *needed, *more, program=program)
        assert done.returncode == 0, done.stderr
        return done.stdout

    cloned = render_text(ROOT / "charts" / chart, ROOT / "values")
    assert render_text(tmp_path / chart, tmp_path / chart / "values") == cloned
    validate_manifests(cloned)


@pytest.mark.parametrize(
    ("was", "wrong", "message"),
    [
        ("backoffLimitPerIndex:", "backoffLimitPerIndx:", "'backoffLimitPerIndx' not allowed"),
        ("parallelism: 1", "parallelism: one", "/spec/parallelism"),
        ("kind: Job", "kind: Jobs", "could not find schema for Jobs"),
    ],
)
def test_manifests_that_the_api_server_would_refuse_fail(was: str, wrong: str, message: str) -> None:
    text = render_text("extract")
    validate_manifests(text)
    assert was in text
    with pytest.raises(AssertionError, match=message):
        validate_manifests(text.replace(was, wrong))


def test_tables_and_references_are_fresh() -> None:
    check = [sys.executable, ROOT / "tools/reference.py", "--check"]
    done = subprocess.run(check, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
