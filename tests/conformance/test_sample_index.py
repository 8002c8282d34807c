"""`tokenmill train --build-index` writes the files that Megatron-LM would write: the same names and bytes.

Needs the Python that TOKENMILL_MEGATRON_PYTHON specifies (`make conformance` sets it). With TOKENMILL_MEGATRON_LM, a
checkout of Megatron-LM, its own parser and provider of datasets look up the index; otherwise megatron-core does.
"""

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any

import msgspec
import pytest

from support.sweep import drawn
from tokenmill.datasets.training_data import TrainingData
from tokenmill.errors import RequestError
from tokenmill.models.model import Model
from tokenmill.samples.phases.plan_file import PhaseEntry
from tokenmill.train.arguments import megatron_arguments
from tokenmill.train.data.blend import collect_datasets
from tokenmill.train.data.flags import cache_path, write_data_arguments
from tokenmill.train.data.index import IndexCache, Start, build_index, find_index_flags, remove_truncated_files
from tokenmill.train.data.phases import DIRECTORY
from tokenmill.train.data.resolve import resolve
from tokenmill.train.runtime.prepare import find_index_cache, list_starts, prepare_data
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
RANDOM_SETTINGS = 200
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


def run(directory: Path, dataset: DatasetSettings, *extra: str, seq_length: int = 128, **training: Any) -> Settings:
    defaults = {"gpus_per_node": 1, "iterations": 40, "global_batch_size": 8, "eval_interval": 20, "eval_iterations": 2}
    return derive_settings(
        Settings(
            release="run",
            model=Model(num_layers=2, hidden_size=64, num_attention_heads=4, seq_length=seq_length),
            training=Training(**{**defaults, **training}),
            checkpoint=CheckpointSettings(path=str(directory / "checkpoints")),
            dataset=dataset,
            trainer=Trainer(script=f"{LM or '/nowhere'}/pretrain_gpt.py", backend="gloo"),
            extra_args=list(extra),
        )
    )


def listing(cache: Path) -> dict[str, tuple[int, int]]:
    return {path.name: (path.stat().st_size, path.stat().st_mtime_ns) for path in cache.rglob("*") if path.is_file()}


def random_settings(directory: Path, pairs: list[str], number: int) -> Settings:
    """Return settings that a number draws: pairs, weights, splits, lengths, seeds, iterations."""
    random = Random(number)
    chosen = [BlendPart(path=path, weight=random.choice([1.0, random.random() + 0.01])) for path in pairs]
    lists: dict[str, Any] = {"split": random.choice(["90,5,5", "98,1,1", "70,30", "0.5,0.3,0.2"])}
    if random.random() < 0.5:
        lists = {"blend": Blend(train=random.sample(chosen, random.randint(1, len(chosen))), validation=chosen[:2])}
    elif random.random() < 0.7:
        lists["blend"] = Blend(all=random.sample(chosen, random.randint(1, len(chosen))))
    else:
        lists["path"] = random.choice(pairs)
    extra = ["--mid-level-dataset-surplus", str(random.choice([0.005, 0.05, 0.5]))]
    return run(
        directory,
        DatasetSettings(**lists),
        *(extra if random.random() < 0.5 else []),
        seq_length=random.choice([16, 64, 200]),
        iterations=random.randint(1, 300),
        global_batch_size=random.choice([1, 4, 12]),
        eval_interval=random.randint(5, 60),
        eval_iterations=random.randint(1, 3),
        seed=random.choice([1234, 7, 2**31 - 1]),
        max_epochs=1e9,
    )


def start_of(settings: Settings, corpus: TrainingData, directory: Path) -> Start:
    return Start(megatron_arguments(settings, write_data_arguments(corpus, settings, directory)))


def build(settings: Settings, corpus: TrainingData, directory: Path, python: list[str]) -> str:
    """Build the index as `tokenmill train --build-index` does."""
    return build_index(
        [start_of(settings, corpus, directory)],
        IndexCache(cache_path(corpus, settings), shared=False),
        script=settings.trainer.script,
        python=python,
    )


def look_up(settings: Settings, corpus: TrainingData, directory: Path, python: list[str], *flags: str) -> Any:
    """Build the datasets as a run does at its start, and return their samples, or the end of Megatron-LM's error."""
    arguments = [*start_of(settings, corpus, directory).arguments, *flags]
    return ask_megatron(arguments, settings, directory, python)


def ask_megatron(
    arguments: list[str], settings: Settings, directory: Path, python: list[str], iteration: int = 0
) -> Any:
    script, response = settings.trainer.script if LM else None, directory / "response"
    request = {"arguments": arguments, "iteration": iteration, "script": script, "response": str(response)}
    done = subprocess.run(
        [*python, HERE / "look_up_with_megatron.py"],
        input=json.dumps(request),
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
        env={**os.environ, "CUDA_VISIBLE_DEVICES": ""},
    )
    return json.loads(response.read_text()) if done.returncode == 0 else done.stderr


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


@pytest.mark.parametrize("name", CASES)
def test_megatron_finds_the_index(name: str, dataset: Path, megatron_fork: list[str], tmp_path: Path) -> None:
    make_dataset, training, extra = CASES[name]
    settings = run(tmp_path, make_dataset(dataset), *extra, **training)
    corpus = resolve(settings, None)
    assert build(settings, corpus, tmp_path, megatron_fork).startswith("sample index built")
    cache = cache_path(corpus, settings)
    before = listing(cache)

    # Megatron-LM writes the same files.
    elsewhere = run(tmp_path / "other", make_dataset(dataset), *extra, **training)
    samples = look_up(elsewhere, corpus, tmp_path, megatron_fork)
    assert samples[0]["samples"] >= settings.training.iterations * 8
    written = [path for path in cache_path(corpus, elsewhere).iterdir() if path.is_file()]
    assert {path.name for path in written} == {name for name in before if not name.startswith(("built-", "sequences-"))}
    for path in written:
        assert path.read_bytes() == (cache / path.name).read_bytes(), path

    # It finds them, and reads the same samples with the flags for an existing index.
    flags = find_index_flags(start_of(settings, corpus, tmp_path).arguments, IndexCache(cache, shared=False))
    assert flags and ("--dataloader-fast-cache-load" in flags) == (corpus.split is None)
    assert look_up(settings, corpus, tmp_path, megatron_fork) == samples
    assert look_up(settings, corpus, tmp_path, megatron_fork, *flags) == samples
    assert listing(cache) == before

    assert build(settings, corpus, tmp_path, megatron_fork).startswith("the sample index exists")
    assert listing(cache) == before


def test_random_settings(preprocess: Callable[..., None], megatron_fork: list[str], tmp_path: Path) -> None:
    """All files of random settings are those of Megatron-LM; a failure names the number of the settings."""
    random = Random(52)
    (tmp_path / "in").mkdir()
    for number in range(7):
        texts = ("a few words " * random.randint(0, 40) for _ in range(400 + 90 * number))
        (tmp_path / "in" / f"{number}.jsonl").write_text("".join(f'{{"text": "{text}"}}\n' for text in texts))
    preprocess(tmp_path / "in", tmp_path / "out", HERE / "tokenizers/tiny")
    pairs = [f"{tmp_path}/out/{number}_text_document" for number in range(7)]
    compared = 0
    numbers = drawn(drawn(range(RANDOM_SETTINGS)))
    for number in numbers:
        settings, elsewhere = (
            random_settings(tmp_path / name / str(number), pairs, number) for name in ("own", "megatron")
        )
        try:
            corpus = resolve(settings, None)
        except RequestError:  # too little text for a split
            continue
        build(settings, corpus, tmp_path, megatron_fork)
        samples = look_up(elsewhere, corpus, tmp_path, megatron_fork)
        assert not isinstance(samples, str), (number, samples[-2000:])
        cache, written = cache_path(corpus, settings), cache_path(corpus, elsewhere)
        for path in written.iterdir():
            assert path.read_bytes() == (cache / path.name).read_bytes(), (number, path)
        compared += 1
    assert compared > len(numbers) / 2


def test_each_phase_has_its_index(dataset: Path, megatron_fork: list[str], tmp_path: Path) -> None:
    names = ("mixed_text_document", "escaped_text_document")
    first, second = (
        [{"path": f"{dataset}/{name}", "weight": weight} for name, weight in zip(names, weights, strict=True)]
        for weights in ((0.7, 0.3), (0.2, 0.8))
    )
    phases = [{"blend": first, "samples": 160}, {"blend": second, "samples": 160}]
    planned = msgspec.convert(phases, list[PhaseEntry], strict=False)
    settings, elsewhere = (
        run(tmp_path / name, DatasetSettings(split="90,8,2"), phases=planned) for name in ("own", "megatron")
    )
    views = tmp_path / "own" / "checkpoints" / DIRECTORY
    named, run_phases, corpus = prepare_data(settings, views)
    starts = list_starts(named, corpus, run_phases, tmp_path)
    assert [start.iteration for start in starts] == [0, 20]
    cache = cache_path(corpus, named)
    index_cache = find_index_cache(corpus, named)
    build_index(starts, index_cache, script=settings.trainer.script, python=megatron_fork)
    for start in starts:
        flags = find_index_flags(start.arguments, index_cache)
        assert flags and "--dataloader-fast-cache-load" in flags
        arguments = [str(cache_path(corpus, elsewhere)) if word == str(cache) else word for word in start.arguments]
        expected = ask_megatron(arguments, settings, tmp_path, megatron_fork, start.iteration)
        assert ask_megatron([*start.arguments, *flags], settings, tmp_path, megatron_fork, start.iteration) == expected
    for path in cache_path(corpus, elsewhere).iterdir():
        assert path.read_bytes() == (cache / path.name).read_bytes(), path


def test_without_megatron_the_names_are_those_of_the_pinned_version(dataset: Path, tmp_path: Path) -> None:
    settings = run(tmp_path, DatasetSettings(path=str(dataset), split="90,8,2"))
    corpus = resolve(settings, None)
    assert build(settings, corpus, tmp_path, [sys.executable]).startswith("sample index built")
    cache = cache_path(corpus, settings)
    assert find_index_flags(start_of(settings, corpus, tmp_path).arguments, IndexCache(cache, shared=False)) == []
    rest = ("use_fast", "trust_remote_code", "include_special_tokens", "use_gigatoken")
    descriptions = [json.loads(path.read_text()) for path in cache.glob("*-GPTDataset-*-description.txt")]
    names = (
        "class",
        "tokenizer_path",
        "chat_template",
        "vocab_file",
        "merges_file",
        "additional_special_tokens",
        *rest,
    )
    assert {tuple(description["tokenizer"]) for description in descriptions} == {names}


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
        build(settings, corpus, tmp_path, [megatron_python])
        os._exit(0)
    while not list(cache.glob(".index.*.tmp/*.npy")):
        assert os.waitpid(builder, os.WNOHANG) == (0, 0), "the build ended before the test could kill it"
        time.sleep(0.001)
    os.killpg(builder, signal.SIGKILL)
    os.waitpid(builder, 0)
    assert list(cache.glob(".index.*.tmp")) and not list(cache.glob("built-*"))
    assert build(settings, corpus, tmp_path, [megatron_python]).startswith("sample index built")
    assert not list(cache.glob(".index.*.tmp"))
    before = listing(cache)
    look_up(settings, corpus, tmp_path, [megatron_python])
    assert listing(cache) == before


def test_a_truncated_index_of_a_killed_run_is_removed(dataset: Path, megatron_fork: list[str], tmp_path: Path) -> None:
    settings = run(tmp_path, DatasetSettings(path=f"{dataset}/mixed_text_document", split="90,8,2"))
    corpus = resolve(settings, None)
    build(settings, corpus, tmp_path, megatron_fork)
    cache = cache_path(corpus, settings)
    (truncated,) = cache.glob("*-train-sample_index.npy")
    content = truncated.read_bytes()
    truncated.write_bytes(content[: len(content) // 2])
    own = IndexCache(cache, shared=False)
    assert remove_truncated_files(IndexCache(cache, shared=True)) == [] and remove_truncated_files(own) == [truncated]
    assert remove_truncated_files(own) == []
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
    small = DatasetSettings(path=f"{tmp_path}/out", split="98,1,1")
    settings, elsewhere = (
        run(directory, small, global_batch_size=batch, eval_iterations=1)
        for directory in (tmp_path, tmp_path / "other")
    )
    corpus = collect_datasets(settings.dataset, None)

    def error_of(check: Callable[[], object]) -> str:
        try:
            check()
        except RequestError as error:
            return str(error)
        return ""

    own = error_of(lambda: resolve(settings))
    built = error_of(lambda: build(settings, corpus, tmp_path, megatron_fork))
    megatron = look_up(elsewhere, corpus, tmp_path, megatron_fork)
    assert bool(own) == bool(built) == isinstance(megatron, str)
    if own:
        requests, builds = re.search(r"requests (\d+) samples .* in excess of its size (\d+)", megatron).groups()
        assert f"would draw {requests} " in own and f"builds {builds}:" in own and "large_text_document" in own
        assert f"cannot draw {requests} " in built and f"builds {builds}," in built and "large_text_document" in built
