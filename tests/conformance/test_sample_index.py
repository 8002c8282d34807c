"""`tokenmill train --build-index` makes the sample index that Megatron-LM looks up: Megatron-LM adds no file.

Needs the Python that TOKENMILL_MEGATRON_PYTHON specifies (`make conformance` sets it). With TOKENMILL_MEGATRON_LM, a
checkout of Megatron-LM, its own parser and provider of datasets look up the index; otherwise megatron-core does.
"""

import json
import os
import re
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tokenmill.datasets.training_data import TrainingData
from tokenmill.errors import RequestError
from tokenmill.models.model import Model
from tokenmill.train.arguments import megatron_arguments
from tokenmill.train.data.blend import collect_datasets
from tokenmill.train.data.flags import cache_path, write_data_arguments
from tokenmill.train.data.index import build_index, remove_truncated_files
from tokenmill.train.data.resolve import resolve
from tokenmill.train.settings import (
    Blend,
    BlendPart,
    CheckpointSettings,
    DatasetSettings,
    Settings,
    Trainer,
    Training,
    derive_settings,
)

HERE = Path(__file__).parent
LM = os.environ.get("TOKENMILL_MEGATRON_LM")

pytestmark = pytest.mark.conformance


@pytest.fixture(scope="module")
def dataset(tmp_path_factory: pytest.TempPathFactory, preprocess: Callable[..., None]) -> Path:
    """Return two pairs of more than a thousand documents each, and a short pair."""
    directory = tmp_path_factory.mktemp("pairs")
    (directory / "in").mkdir()
    for name in ("escaped", "mixed"):
        (directory / "in" / f"{name}.jsonl").symlink_to(HERE / "inputs" / f"{name}.jsonl")
    preprocess(directory / "in", directory / "out", HERE / "tokenizers/tiny")
    return directory / "out"


def run(directory: Path, dataset: DatasetSettings, *extra: str, **training: Any) -> Settings:
    defaults = {"gpus_per_node": 1, "iterations": 40, "global_batch_size": 8, "eval_interval": 20, "eval_iterations": 2}
    return derive_settings(
        Settings(
            release="run",
            model=Model(num_layers=2, hidden_size=64, num_attention_heads=4, seq_length=128),
            training=Training(**{**defaults, **training}),
            checkpoint=CheckpointSettings(path=str(directory / "checkpoints")),
            dataset=dataset,
            trainer=Trainer(script=f"{LM or '/nowhere'}/pretrain_gpt.py", backend="gloo"),
            extra_args=list(extra),
        )
    )


def listing(cache: Path) -> dict[str, tuple[int, int]]:
    return {path.name: (path.stat().st_size, path.stat().st_mtime_ns) for path in cache.rglob("*") if path.is_file()}


def look_up(settings: Settings, corpus: TrainingData, directory: Path, python: list[str]) -> Any:
    """Build the datasets as a run does at its start, and return their samples."""
    arguments = megatron_arguments(settings, write_data_arguments(corpus, settings, directory))
    script, response = settings.trainer.script if LM else None, directory / "response"
    request = {"arguments": arguments, "script": script, "response": str(response)}
    done = subprocess.run(
        [*python, HERE / "look_up_with_megatron.py"],
        input=json.dumps(request),
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
        env={**os.environ, "CUDA_VISIBLE_DEVICES": ""},
    )
    assert done.returncode == 0, done.stderr
    return json.loads(response.read_text())


CASES: dict[str, tuple[Callable[[Path], DatasetSettings], dict[str, Any], list[str]]] = {
    "one pair": (lambda directory: DatasetSettings(path=f"{directory}/mixed_text_document", split="90,8,2"), {}, []),
    "weighted": (lambda directory: DatasetSettings(path=str(directory), split="90,8,2"), {}, []),
    "several epochs, another seed": (
        lambda directory: DatasetSettings(path=str(directory), split="90, 10"),
        {"iterations": 900, "seed": 7},
        [],
    ),
    "a list for each split": (
        lambda directory: DatasetSettings(
            blend=Blend(
                train=[BlendPart(path=f"{directory}/mixed_text_document")],
                validation=[BlendPart(path=f"{directory}/escaped_text_document")],
            )
        ),
        {},
        [],
    ),
    "arguments of its own": (
        lambda directory: DatasetSettings(path=str(directory), split="90,8,2"),
        {},
        ["--mid-level-dataset-surplus", "0.02"],
    ),
}


@pytest.mark.parametrize("name", [name for name in CASES if LM or not CASES[name][2]])
def test_megatron_finds_the_index(name: str, dataset: Path, megatron_fork: list[str], tmp_path: Path) -> None:
    make_dataset, training, extra = CASES[name]
    settings = run(tmp_path, make_dataset(dataset), *extra, **training)
    corpus = resolve(settings, None)
    assert build_index(settings, corpus, python=megatron_fork).startswith("sample index built")
    cache = cache_path(corpus, settings)
    before = listing(cache)
    assert any(path.endswith("-GPTDataset-train-shuffle_index.npy") for path in before)
    samples = look_up(settings, corpus, tmp_path, megatron_fork)
    assert listing(cache) == before
    assert samples[0]["samples"] >= settings.training.iterations * 8

    # The samples are the same without the index.
    elsewhere = run(tmp_path / "other", make_dataset(dataset), *extra, **training)
    assert look_up(elsewhere, corpus, tmp_path, megatron_fork) == samples
    assert len(list(cache_path(corpus, elsewhere).glob("*.npy"))) == len(list(cache.glob("*.npy")))

    assert build_index(settings, corpus, python=megatron_fork).startswith("the sample index exists")
    assert listing(cache) == before


def test_a_killed_build_is_repeated(dataset: Path, megatron_python: str, tmp_path: Path) -> None:
    """A build killed with a truncated file in its directory: none of its files are used, and all are removed.

    All of its processes import Megatron-LM, as those of users do.
    """
    settings = run(tmp_path, DatasetSettings(path=str(dataset), split="90,8,2"))
    corpus = resolve(settings, None)
    cache = cache_path(corpus, settings)
    builder = os.fork()
    if builder == 0:
        os.setpgid(0, 0)
        build_index(settings, corpus, python=[megatron_python])
        os._exit(0)
    while not list(cache.glob(".index.*.tmp/made/*.npy")):
        assert os.waitpid(builder, os.WNOHANG) == (0, 0), "the build ended before the test could kill it"
        time.sleep(0.005)
    os.killpg(builder, signal.SIGKILL)
    os.waitpid(builder, 0)
    assert list(cache.glob(".index.*.tmp")) and not list(cache.glob("*.npy"))
    assert build_index(settings, corpus, python=[megatron_python]).startswith("sample index built")
    assert not list(cache.glob(".index.*.tmp"))
    before = listing(cache)
    look_up(settings, corpus, tmp_path, [megatron_python])
    assert listing(cache) == before


def test_a_truncated_index_of_a_killed_run_is_removed(dataset: Path, megatron_fork: list[str], tmp_path: Path) -> None:
    settings = run(tmp_path, DatasetSettings(path=f"{dataset}/mixed_text_document", split="90,8,2"))
    corpus = resolve(settings, None)
    build_index(settings, corpus, python=megatron_fork)
    cache = cache_path(corpus, settings)
    (truncated,) = cache.glob("*-train-sample_index.npy")
    content = truncated.read_bytes()
    truncated.write_bytes(content[: len(content) // 2])
    assert remove_truncated_files(cache, shared=True) == [] and remove_truncated_files(cache, shared=False) == [
        truncated
    ]
    assert remove_truncated_files(cache, shared=False) == []
    look_up(settings, corpus, tmp_path, megatron_fork)
    assert truncated.read_bytes() == content


@pytest.mark.parametrize(("documents", "batch"), [(300, 1), (600, 2), (600, 16), (1200, 16), (4800, 16)])
def test_a_blend_that_megatron_cannot_draw_from(
    documents: int, batch: int, preprocess: Callable[..., None], megatron_fork: list[str], tmp_path: Path
) -> None:
    """Each of twenty small pairs gives at least one sample, so the large pair must give more than requested.

    tokenmill refuses exactly the blends that Megatron-LM refuses, with the same numbers.
    """
    (tmp_path / "in").mkdir()
    for name, count in (("large", documents), *((f"small{i}", 110) for i in range(20))):
        (tmp_path / "in" / f"{name}.jsonl").write_text('{"text": "some words of text"}\n' * count)
    preprocess(tmp_path / "in", tmp_path / "out", HERE / "tokenizers/tiny")
    settings = run(
        tmp_path, DatasetSettings(path=f"{tmp_path}/out", split="98,1,1"), global_batch_size=batch, eval_iterations=1
    )
    corpus = collect_datasets(settings.dataset, None)

    def error_of(check: Callable[[], object]) -> str:
        try:
            check()
        except RequestError as error:
            return str(error)
        return ""

    own = error_of(lambda: resolve(settings))
    megatron = error_of(lambda: build_index(settings, corpus, python=megatron_fork))
    assert bool(own) == bool(megatron)
    if own:
        assert "oversamples" in megatron
        requests, builds = re.search(r"requests (\d+) samples .* in excess of its size (\d+)", megatron).groups()
        assert f"would draw {requests} " in own and f"builds {builds}:" in own and "large_text_document" in own
