"""Fixtures of the runs with real Megatron-LM: its installation, a fork server, datasets, and an undisturbed run."""

import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from support.megatron_runs import (
    MegatronInstallation,
    MegatronJob,
    UndisturbedRun,
    find_megatron,
    megatron_settings,
    start_fork_server,
)

CONFORMANCE = Path(__file__).parents[1]


@pytest.fixture(scope="session")
def megatron() -> MegatronInstallation:
    """Return the installation that `make conformance` names."""
    return find_megatron()


@pytest.fixture(scope="session")
def fork_server(megatron: MegatronInstallation, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Return the socket of a process that has imported Megatron-LM."""
    with start_fork_server(megatron, tmp_path_factory.mktemp("server") / "socket") as socket:
        yield socket


@pytest.fixture(scope="session")
def dataset(tmp_path_factory: pytest.TempPathFactory, preprocess: Callable[..., None]) -> Path:
    """Return a finished dataset of half a million tokens."""
    return make_dataset(tmp_path_factory.mktemp("dataset"), "mixed", preprocess)


@pytest.fixture(scope="session")
def other_dataset(tmp_path_factory: pytest.TempPathFactory, preprocess: Callable[..., None]) -> Path:
    """Return a finished dataset of other text."""
    return make_dataset(tmp_path_factory.mktemp("other"), "escaped", preprocess)


def make_dataset(directory: Path, name: str, preprocess: Callable[..., None]) -> Path:
    (directory / "text").mkdir()
    (directory / "text" / f"{name}.jsonl").symlink_to(CONFORMANCE / "inputs" / f"{name}.jsonl")
    preprocess(directory / "text", directory / "tokens", CONFORMANCE / "tokenizers" / "tiny")
    return directory / "tokens"


@pytest.fixture
def job(
    megatron: MegatronInstallation, fork_server: Path, dataset: Path, tmp_path: Path
) -> Iterator[Callable[..., MegatronJob]]:
    """Return a function that makes a run; a keyword `section__name` replaces one setting."""
    jobs: list[MegatronJob] = []

    def make(*, torchrun: bool = False, **changed: Any) -> MegatronJob:
        directory = tmp_path / f"job{len(jobs)}"
        settings = megatron_settings(megatron, directory, dataset, torchrun=torchrun, **changed)
        jobs.append(MegatronJob(directory, settings))
        jobs[-1].variables |= megatron.variables | {"MEGATRON_FORK_SERVER": str(fork_server)}
        return jobs[-1]

    yield make
    for node in (node for run in jobs for node in run.started):
        node.kill()
        node.wait(30)


@pytest.fixture(scope="session")
def undisturbed(
    megatron: MegatronInstallation, fork_server: Path, dataset: Path, tmp_path_factory: pytest.TempPathFactory
) -> UndisturbedRun:
    """Return a finished run of two data-parallel ranks, whose sample index was built beforehand."""
    directory = tmp_path_factory.mktemp("undisturbed") / "job"
    settings = megatron_settings(megatron, directory, dataset, torchrun=False)
    settings["logs"] = {"path": str(directory / "events")}
    run = MegatronJob(directory, settings)
    run.variables |= megatron.variables | {"MEGATRON_FORK_SERVER": str(fork_server)}
    message = run.build_index()
    index = run.index_files()
    return UndisturbedRun(run, message, index, run.complete())


@pytest.fixture
def continued(job: Callable[..., MegatronJob], undisturbed: UndisturbedRun) -> Callable[..., MegatronJob]:
    """Return a function that makes a run with a copy of the undisturbed run's checkpoints and records."""

    def make(**changed: Any) -> MegatronJob:
        run = job(**changed)
        shutil.copytree(undisturbed.job.checkpoints, run.checkpoints)
        return run

    return make
