"""Runs and stages in a queue of Kueue: they preempt each other, end at their targets, and change while they wait."""

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from e2e import kueue
from e2e.cluster import CLAIM, Namespace, wait_for
from e2e.corpus import DATASET, assert_same, content, receipts, run_checked, serve
from e2e.training import Training, make_dataset
from tokenmill.core.files.codec import read_json

pytestmark = pytest.mark.e2e

QUOTA = {kueue.GPU: "8", "cpu": "250m", "memory": "4Gi", "ephemeral-storage": "100Gi"}
FOUR_GPUS = (
    f'--set-json \'resources={{"requests":{{"cpu":"50m","memory":"200Mi","{kueue.GPU}":"4"}},'
    f'"limits":{{"memory":"2Gi","{kueue.GPU}":"4"}}}}\''
)
"""Resources of a pod. Two pods take all GPUs of the queue."""

SMALL = "--set resources.requests.cpu=50m,resources.requests.memory=128Mi"
SLOW = {"kind": "slow", "path": "*.zst", "where": "cdn", "rate": 3000, "times": None}
FILES = 60


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
    """Each run preempts the other one, which saves, waits, and continues. The first one changes while it waits."""
    low, high = Training(place, "low"), Training(place, "high", "jobset")

    def command(priority: str, *more: str) -> str:
        values = (FOUR_GPUS, "--set training.saveInterval=199", kueue.settings(place, priority), *more)
        return low.command(200, *values, step=0.1)

    place.admin.check(f"helm install {command('low')}")
    place.start_hub(hub_files, [SLOW])
    kueue.wait_until_admitted(place, "low")

    # The low run leaves CPUs for three of four workers. The preemption of a worker must not count as its failure.
    stage = f"fetch charts/dataset-download --set storage.pvcName={CLAIM},dataset.repo={DATASET} {SMALL}"
    stage += f" --set dataset.outputPath=fetch,dataset.sampleFiles={FILES},dataset.connections=1"
    stage += f" --set workers=4,kueue.minWorkers=1,job.backoffLimitPerIndex=0 {kueue.settings(place, 'low')}"
    place.install(stage)
    kueue.wait_until_admitted(place, "fetch")
    job = wait_for(lambda: not place.job("fetch")["spec"]["suspend"] and place.job("fetch"))
    assert (job["spec"]["parallelism"], job["spec"]["completions"]) == (3, 4)

    # The high run needs all GPUs and CPUs of the queue.
    assert wait_for(lambda: low.logged() > 10, 120), low.describe()
    assert low.iteration() == 0
    more_cpu = FOUR_GPUS.replace('"50m"', '"125m"')
    high.install(200, more_cpu, "--set training.saveInterval=199", kueue.settings(place, "high"), step=0.1)
    kueue.wait_until_preempted(place, "low")
    kueue.wait_until_preempted(place, "fetch")
    assert wait_for(low.iteration, 60), "a preempted run saves"
    assert low.iteration() < 199
    fetched = receipts(place.data / "fetch", "download")
    before = uid_of(low)
    place.admin.check(f"helm upgrade {command('low', '--set training.logInterval=2')}")
    assert uid_of(low) != before
    place.admin.check("helm rollback low 1")
    changed = uid_of(low)

    assert wait_for(lambda: high.logged() > 5, 120), high.describe()
    assert high.iteration() == 0 and not low.pods()
    place.admin.check(f"helm upgrade {command('top')}")
    assert uid_of(low) == changed, "another priority class restarts nothing"
    kueue.wait_until_preempted(place, "high")
    low.succeed()
    low.assert_exact(200)
    assert 0 < high.iteration() < 199
    high.succeed()
    high.assert_exact(200)
    for run in (low, high):
        assert_nothing_failed(run)
    assert high.run()["status"].get("restarts", 0) == 0, "a preemption is no restart"
    place.wait_for_job("fetch")
    assert receipts(place.data / "fetch", "download").items() >= fetched.items()
    with serve(hub_files) as hub:
        run_checked("download", f"hf://datasets/{DATASET}", tmp_path / "local", "--sample", FILES, hub=hub)
    assert_same(content(place.data / "fetch"), content(tmp_path / "local"))


INDEX = (
    "--set dataset.buildIndex.enabled=true --set-json 'dataset.buildIndex.resources="
    '{"requests":{"cpu":"50m","memory":"200Mi"},"limits":{"memory":"1Gi"}}\''
)
PENDING = {
    "stage": (
        f"charts/dataset-extract {SMALL} --set dataset.inputPath=nowhere",
        "--set workers=2",
        "job waits-stage-extract",
    ),
    "pipeline": (
        f"charts/dataset-pipeline {SMALL} --set dataset.root=nowhere,dataset.repo={DATASET}"
        " --set preprocess.tokenizer.name=org/model",
        "--set download.workers=2",
        "jobset waits-pipeline",
    ),
    "jobset": (INDEX, "--set training.saveInterval=4", "jobset waits-jobset"),
    "pytorchjob": (INDEX, "--set training.saveInterval=4", "pytorchjob waits-pytorchjob"),
}
"""For each kind: its chart and values, a change, and its object."""


def test_a_release_changes_while_it_waits(place: Namespace) -> None:
    """Upgrade, roll back and uninstall releases whose queue admits nothing: no pod starts, and nothing is left."""
    place.admin.apply(kueue.thing("LocalQueue", "held", spec={"clusterQueue": place.name, "stopPolicy": "Hold"}))
    with ThreadPoolExecutor(len(PENDING)) as pool:
        list(pool.map(lambda kind: change_while_waiting(place, kind), PENDING))


def change_while_waiting(place: Namespace, kind: str) -> None:
    """Install a release of this kind, change it in each way, and uninstall it."""
    chart, change, item = PENDING[kind]
    name = f"waits-{kind}"
    owners = [item.split()[1]]
    line = f"{name} {chart}"
    if chart == INDEX:
        line = Training(place, name, kind).command(10, FOUR_GPUS, INDEX)
        owners.append(f"{name}-index")
    line += f" --set storage.pvcName={CLAIM},kueue.queueName=held --set job.onRollback=clear"

    def state() -> tuple[str, str]:
        """Return the uid and the hash of the object, which waits."""
        found = place.admin.get(item)
        run_policy = found["spec"].get("runPolicy", found["spec"])
        assert run_policy["suspend"] is True
        assert not place.admin.get(f"pods -l app.kubernetes.io/instance={name}")["items"]
        return found["metadata"]["uid"], found["metadata"]["annotations"]["tokenmill/spec"]

    place.admin.check(f"helm install {line}")
    for owner in owners:
        assert wait_for(lambda owner=owner: kueue.workload(place, owner)), kueue.describe(place)
    uid, digest = state()
    place.admin.check(f"helm upgrade {line}")
    assert state() == (uid, digest), "an upgrade with the same values changes nothing"
    place.admin.check(f"helm upgrade {line} {change}")
    changed, other = state()
    assert changed != uid and other != digest
    place.admin.check(f"helm rollback {name} 1")
    assert state()[1] == digest
    place.admin.check(f"helm uninstall {name}")
    for owner in owners:
        assert wait_for(lambda owner=owner: kueue.workload(place, owner) is None), kueue.describe(place)
    assert not place.admin.get(f"pods -l app.kubernetes.io/instance={name}")["items"]
