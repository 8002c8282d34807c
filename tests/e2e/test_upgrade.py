"""Upgrades, rollbacks and new installations of running, complete and failed Jobs: finished units are kept."""

import shutil
from collections.abc import Collection
from pathlib import Path
from typing import Any

import pytest

from e2e.cluster import CLAIM, Namespace, wait_for
from e2e.corpus import DATASET, assert_same, content, receipts, run_checked, serve

pytestmark = pytest.mark.e2e

SETTINGS = f"--set storage.pvcName={CLAIM} --set resources.requests.cpu=50m,resources.requests.memory=128Mi"
SLOW = {"kind": "slow", "path": "*.zst", "where": "cdn", "rate": 3000, "times": None}
FAILING = f"charts/dataset-extract {SETTINGS} --set dataset.inputPath=nowhere"
"""Values of a Job that fails at once."""


@pytest.fixture(scope="module")
def slow_hub(namespace: Namespace, hub_files: Path) -> Namespace:
    """Return the module's namespace with a slow Hub in it."""
    namespace.start_hub(hub_files, [SLOW])
    return namespace


@pytest.fixture(scope="module", params=["helm", "helm4"])
def helm(request: pytest.FixtureRequest) -> str:
    """Return each version of Helm."""
    program: str = request.param
    if not shutil.which(program):
        pytest.skip(f"{program} is not on PATH")
    return program


def identity(job: dict[str, Any]) -> str:
    """Return the uid of a Job, which a new Job of the same name does not have."""
    uid: str = job["metadata"]["uid"]
    return uid


def pods(namespace: Namespace, job: str) -> list[str]:
    """Return the names of a Job's pods."""
    return [pod["metadata"]["name"] for pod in namespace.pods(job)]


def download_locally(hub_files: Path, output: Path, sample: int) -> dict[str, bytes]:
    """Return the content of a local download of a sample."""
    with serve(hub_files) as hub:
        run_checked("download", f"hf://datasets/{DATASET}", output, "--sample", sample, hub=hub)
    return content(output)


def more_receipts(namespace: Namespace, output: Path, *, one_of: Collection[str] = ()) -> dict[str, tuple[str, str]]:
    """Wait until two more units are finished, and one of `one_of` is; return the receipts."""
    before = len(receipts(output, "download"))

    def enough() -> bool:
        now = receipts(output, "download").keys()
        return len(now) > before + 1 and (not one_of or not now.isdisjoint(one_of))

    assert wait_for(enough, 120), namespace.describe(output.name)
    return receipts(output, "download")


def test_unchanged_values_restart_nothing(slow_hub: Namespace, helm: str) -> None:
    name = f"same-{helm}"
    line = f"{helm} upgrade --install {name} charts/dataset-download {SETTINGS} --set dataset.outputPath={name}"
    line += f" --set dataset.repo={DATASET}"
    line += " --set dataset.sampleFiles=4 --set dataset.connections=1"
    slow_hub.user.check(line)
    before = wait_for(lambda: slow_hub.job(name)["status"].get("ready")) and pods(slow_hub, name)
    job = identity(slow_hub.job(name))
    slow_hub.user.check(line)
    slow_hub.wait_for_job(name)
    slow_hub.user.check(line)
    assert identity(slow_hub.job(name)) == job
    assert before and pods(slow_hub, name) == before


def test_a_failed_job_runs_again_under_its_name(namespace: Namespace, helm: str) -> None:
    name = f"failing-{helm}"
    uids = set()
    for _ in range(2):
        namespace.user.check(f"{helm} upgrade --install {name} {FAILING}")
        uids.add(identity(namespace.wait_for_job(f"{name}-extract", "Failed")))
    assert len(uids) == 2


def test_each_content_has_a_name(namespace: Namespace, helm: str) -> None:
    def names(workers: int) -> list[str]:
        namespace.user.check(
            f"{helm} upgrade --install hashed-{helm} {FAILING} --set job.naming=hash,workers={workers}"
        )
        jobs = namespace.user.get(f"jobs -l app.kubernetes.io/instance=hashed-{helm}")["items"]
        return [job["metadata"]["name"] for job in jobs if "deletionTimestamp" not in job["metadata"]]

    (first,), (second,), (again,) = names(1), names(2), names(1)
    assert first == again != second
    assert first.startswith(f"hashed-{helm}-extract-")


def test_an_existing_job_does_not_change_the_render(namespace: Namespace, helm: str) -> None:
    line = f"rendered-{helm} {FAILING}"
    template = f"{helm} template {line}"
    before = namespace.user.check(template), namespace.user.check(f"{template} --dry-run=server")
    namespace.user.check(f"{helm} install {line}")
    assert (namespace.user.check(template), namespace.user.check(f"{template} --dry-run=server")) == before


def test_a_job_is_changed_twice_and_rolled_back(namespace: Namespace, helm: str) -> None:
    name = f"changed-{helm}"
    uids = set()
    for line in (
        f"upgrade --install {name} {FAILING} --set workers=1",
        f"upgrade --install {name} {FAILING} --set workers=2",
        f"upgrade --install {name} {FAILING} --set workers=3",
        f"rollback {name} 2",
    ):
        namespace.user.check(f"{helm} {line}")
        job = namespace.job(f"{name}-extract")
        uids.add(identity(job))
    assert len(uids) == 4
    assert job["spec"]["completions"] == 2


@pytest.mark.every_change
def test_a_run_is_changed_rolled_back_and_installed_again(slow_hub: Namespace, hub_files: Path, tmp_path: Path) -> None:
    output = slow_hub.data / "moving"
    line = f"moving charts/dataset-download {SETTINGS} --set dataset.outputPath=moving --set dataset.connections=1"
    line += f" --set dataset.repo={DATASET} --set replace=true"
    fewer = download_locally(hub_files, tmp_path / "few", 12)
    of_fewer = receipts(tmp_path / "few", "download").keys()

    slow_hub.install(f"{line} --set dataset.sampleFiles=24 --set workers=2")
    first = more_receipts(slow_hub, output)
    slow_hub.user.check(f"helm upgrade {line} --set dataset.sampleFiles=24 --set workers=1")
    slow_hub.user.check(f"helm upgrade {line} --set dataset.sampleFiles=24 --set workers=3")
    more = more_receipts(slow_hub, output, one_of=of_fewer)
    assert more.items() > first.items()

    slow_hub.user.check(f"helm upgrade {line} --set dataset.sampleFiles=12 --set workers=3")
    slow_hub.wait_for_job("moving")
    assert_same(content(output), fewer)
    few = receipts(output, "download")
    common = few.keys() & more.keys()
    assert common
    assert {unit: few[unit] for unit in common} == {unit: more[unit] for unit in common}

    slow_hub.user.check("helm rollback moving 3")
    more = more_receipts(slow_hub, output)
    assert more.items() > few.items()
    slow_hub.user.check("helm uninstall moving")
    slow_hub.install(f"{line} --set dataset.sampleFiles=24 --set workers=2")
    slow_hub.wait_for_job("moving")
    assert_same(content(output), download_locally(hub_files, tmp_path / "many", 24))
    assert receipts(output, "download").items() > more.items()
