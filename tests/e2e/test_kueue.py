"""Runs and stages in a queue of Kueue: they preempt each other, end at their targets, and change while they wait."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from e2e import kueue
from e2e.cluster import CLAIM, Namespace, wait_for
from e2e.corpus import DATASET, assert_same, content, run_checked, serve
from e2e.training import Training, make_dataset
from tokenmill.files.codec import read_json

pytestmark = pytest.mark.e2e

QUOTA = {kueue.GPU: "8", "cpu": "250m", "memory": "4Gi", "ephemeral-storage": "100Gi"}
FOUR_GPUS = (
    f'--set-json \'resources={{"requests":{{"cpu":"50m","memory":"200Mi","{kueue.GPU}":"4"}},'
    f'"limits":{{"memory":"2Gi","{kueue.GPU}":"4"}}}}\''
)
"""Resources of a pod. Two pods take all GPUs of the queue."""

SMALL = "--set resources.requests.cpu=50m,resources.requests.memory=128Mi"
SLOW = {"kind": "slow", "path": "*.zst", "where": "cdn", "rate": 3000, "times": None}
FILES = 40


@pytest.fixture(scope="module")
def place(
    require_api: Callable[[str], None], namespace: Namespace, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Namespace]:
    """Return the module's namespace with a finished dataset and a queue of 8 GPUs."""
    require_api("kueue.x-k8s.io")
    make_dataset(namespace, tmp_path_factory.mktemp("dataset"))
    with kueue.queue(namespace, QUOTA):
        yield namespace


def uid_of(run: Training) -> str:
    uid: str = run.run()["metadata"]["uid"]
    return uid


def assert_nothing_failed(run: Training) -> None:
    """Check that a run's attempts ended by a signal or at the target, so that none counts as a failure."""
    attempts = read_json(run.checkpoints / ".tokenmill/train/attempts.json")
    assert len(attempts) > 1, attempts
    assert all(attempt["stopped"] for attempt in attempts[:-1]), attempts


def test_two_runs_and_a_stage_share_a_queue(place: Namespace, hub_files: Path, tmp_path: Path) -> None:
    """A run with a higher priority preempts another one, which saves, waits, changes meanwhile, and continues."""
    low, high = Training(place, "low"), Training(place, "high", "jobset")
    low_values = [FOUR_GPUS, "--set training.saveInterval=299", kueue.settings(place, "low")]
    low.install(300, *low_values, step=0.2)
    place.start_hub(hub_files, [SLOW])
    kueue.wait_until_admitted(place, "low")

    # The low run leaves CPUs for three of four workers. A preemption of a worker must not count as its failure.
    stage = f"fetch charts/dataset-download --set storage.pvcName={CLAIM},dataset.repo={DATASET} {SMALL}"
    stage += f" --set dataset.outputPath=fetch,dataset.sampleFiles={FILES},dataset.connections=1"
    stage += f" --set workers=4,kueue.minWorkers=1,job.backoffLimitPerIndex=0 {kueue.settings(place, 'low')}"
    place.install(stage)
    kueue.wait_until_admitted(place, "fetch")
    job = wait_for(lambda: not place.job("fetch")["spec"]["suspend"] and place.job("fetch"))
    assert (job["spec"]["parallelism"], job["spec"]["completions"]) == (3, 4)

    assert wait_for(lambda: low.logged() > 10, 120), low.describe()
    assert low.iteration() == 0
    high.install(60, FOUR_GPUS, "--set training.saveInterval=59", kueue.settings(place, "high"), step=0.2)
    kueue.wait_until_preempted(place, "low")
    assert wait_for(low.iteration, 60), "a preempted run saves"
    assert low.iteration() < 299
    before = uid_of(low)
    middle = [FOUR_GPUS, "--set training.saveInterval=299", kueue.settings(place, "middle")]
    place.admin.check(f"helm upgrade {low.command(300, *middle, step=0.2)}")
    assert uid_of(low) == before, "another priority class changes no run"
    place.admin.check(f"helm upgrade {low.command(300, *middle, '--set training.logInterval=2', step=0.2)}")
    assert uid_of(low) != before
    place.admin.check("helm rollback low 2")
    assert wait_for(lambda: workload_priority(place, "low") == kueue.PRIORITIES["middle"]), kueue.describe(place)
    assert not low.pods()

    high.succeed()
    high.assert_exact(60)
    low.succeed()
    low.assert_exact(300)
    assert_nothing_failed(low)
    place.wait_for_job("fetch")
    with serve(hub_files) as hub:
        run_checked("download", f"hf://datasets/{DATASET}", tmp_path / "local", "--sample", FILES, hub=hub)
    assert_same(content(place.data / "fetch"), content(tmp_path / "local"))


def workload_priority(place: Namespace, owner: str) -> int | None:
    """Return the priority of a workload."""
    item = kueue.workload(place, owner)
    return item and item["spec"].get("priority")


PENDING = {
    "stage": (
        f"charts/dataset-extract {SMALL} --set dataset.inputPath=nowhere",
        "--set workers=2",
        "job waits-stage-extract",
    ),
    "pipeline": (
        f"charts/dataset-pipeline {SMALL} --set dataset.root=nowhere,dataset.repo={DATASET}",
        "--set download.workers=2",
        "jobset waits-pipeline",
    ),
    "jobset": ("", "--set training.saveInterval=4", "jobset waits-jobset"),
    "pytorchjob": ("", "--set training.saveInterval=4", "pytorchjob waits-pytorchjob"),
}
"""For each kind: its chart and values, a change, and its object."""


@pytest.mark.parametrize("kind", PENDING)
def test_a_release_changes_while_it_waits(place: Namespace, kind: str) -> None:
    """Upgrade, roll back and uninstall a release whose queue admits nothing: no pod starts, and nothing is left."""
    held = kueue.thing("LocalQueue", "held", spec={"clusterQueue": place.name, "stopPolicy": "Hold"})
    place.admin.apply(held)
    chart, change, item = PENDING[kind]
    name = f"waits-{kind}"
    queued = f"--set storage.pvcName={CLAIM},kueue.queueName=held --set job.onRollback=clear"
    line = f"{name} {chart} {queued}"
    if not chart:
        line = f"{Training(place, name, kind).command(10, FOUR_GPUS)} {queued}"

    def state() -> tuple[str, dict[str, Any]]:
        found = place.admin.get(item)
        run_policy = found["spec"].get("runPolicy", found["spec"])
        assert run_policy["suspend"] is True
        assert not place.admin.get(f"pods -l app.kubernetes.io/instance={name}")["items"]
        return found["metadata"]["uid"], found["spec"]

    place.admin.check(f"helm install {line}")
    assert wait_for(lambda: kueue.workload(place, item.split()[1])), kueue.describe(place)
    uid, spec = state()
    place.admin.check(f"helm upgrade {line}")
    assert state() == (uid, spec), "an upgrade with the same values changes nothing"
    place.admin.check(f"helm upgrade {line} {change}")
    changed, other = state()
    assert changed != uid and other != spec
    place.admin.check(f"helm rollback {name} 1")
    assert state()[1] == spec
    place.admin.check(f"helm uninstall {name}")
    assert wait_for(lambda: kueue.workload(place, item.split()[1]) is None), kueue.describe(place)
    assert not place.admin.get(f"pods -l app.kubernetes.io/instance={name}")["items"]
