"""A rollback to the running values keeps the run: after a refused `helm upgrade`, and on a user's request."""

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from e2e.cluster import CLAIM, Namespace, node_name, wait_for
from e2e.corpus import DATASET
from e2e.training import Training, make_dataset, run_after_pause

pytestmark = pytest.mark.e2e

ATOMIC = {"helm": "--atomic --timeout 60s", "helm4": "--rollback-on-failure --timeout 60s"}
REFUSED = "--set extraVolumes[0].name=more,extraVolumes[0].emptyDir.sizeLimit=2GB"
"""Values that only the API server refuses: the charts do not check the source of a volume."""
SLOW = {"kind": "slow", "path": "*.zst", "where": "cdn", "rate": 3000, "times": None}


@pytest.fixture(scope="module", params=["helm", "helm4"])
def helm(request: pytest.FixtureRequest) -> str:
    """Return each version of Helm."""
    program: str = request.param
    if not shutil.which(program):
        pytest.skip(f"{program} is not on PATH")
    return program


@pytest.fixture(scope="module")
def place(namespace: Namespace, tmp_path_factory: pytest.TempPathFactory) -> Namespace:
    """Return the module's namespace with a finished dataset on its volume."""
    make_dataset(namespace, tmp_path_factory.mktemp("dataset"))
    return namespace


def identity(training: Training) -> tuple[str, set[str]]:
    """Return the uids of a run and its pods."""
    return training.run()["metadata"]["uid"], {pod["metadata"]["uid"] for pod in training.pods()}


@pytest.mark.every_change
def test_a_refused_upgrade_is_rolled_back_and_the_run_continues(place: Namespace, helm: str) -> None:
    run = Training(place, f"refused-{helm}")
    run.install(100_000, "--set training.saveInterval=5", step=0.1)
    run.wait_for_iteration(5)
    before = identity(run)
    line = run.command(90_000, "--set training.saveInterval=5", REFUSED, step=0.1)
    ended = run.account.run(f"{helm} upgrade {line} {ATOMIC[helm]}")
    assert ended.code and "rolled back" in ended.err, ended.err
    run_after_pause(run)
    assert identity(run) == before, run.describe()
    reached = run.iteration()
    run.wait_for_iteration(reached + 10)

    # An object that does not affect the run fails later, while Helm waits: TensorBoard never starts.
    line = run.command(100_000, "--set training.saveInterval=5", step=0.1)
    line += " --set tensorboard.enabled=true,tensorboard.image=nowhere.invalid/none"
    ended = run.account.run(f"{helm} upgrade {line} {ATOMIC[helm].replace('60s', '10s')}")
    assert ended.code and "rolled back" in ended.err, ended.err
    assert identity(run) == before, run.describe()

    run.account.check(f"{helm} rollback {run.name} 1")
    assert identity(run) == before, run.describe()
    run.account.check(f"{helm} uninstall {run.name}")


def test_a_rollback_to_another_run_replaces_the_pods(place: Namespace) -> None:
    run = Training(place, "back")
    run.install(100_000, "--set training.saveInterval=5", step=0.1)
    run.wait_for_iteration(5)
    run.account.check(f"helm upgrade {run.command(100_000, '--set training.saveInterval=7', step=0.1)}")
    reached = run.iteration()
    run.wait_for_iteration(reached + 14)
    changed, pods = identity(run)
    run.account.check("helm rollback back 1")
    settings = run.run()["spec"]["pytorchReplicaSpecs"]["Master"]["template"]["spec"]

    def replaced() -> bool:
        now = run.pods()
        return len(now) == 2 and pods.isdisjoint({p["metadata"]["uid"] for p in now})

    assert wait_for(replaced, 240), run.describe()
    assert run.run()["metadata"]["uid"] == changed, "the run is changed in place"
    (mounted,) = {v["configMap"]["name"] for p in run.pods() for v in p["spec"]["volumes"] if v["name"] == "settings"}
    assert mounted == next(v["configMap"]["name"] for v in settings["volumes"] if v["name"] == "settings")
    reached = run.iteration()
    run.wait_for_iteration(reached + 10)
    run.account.check("helm uninstall back")


def wait_for_run_of(run: Training, selector: dict[str, str] | None) -> None:
    """Wait until all pods run, have this node selector, and save a checkpoint."""

    def replaced() -> bool:
        pods = run.pods()
        running = [pod for pod in pods if pod["status"].get("phase") == "Running"]
        return len(running) == 2 and all(pod["spec"].get("nodeSelector") == selector for pod in pods)

    assert wait_for(replaced, 240), run.describe()
    reached = run.iteration()
    run.wait_for_iteration(reached + 6)


def wait_for_pending(run: Training, label: str) -> None:
    """Wait until the pods of a run wait for a node with a label."""

    def pending() -> bool:
        pods = run.pods()
        return len(pods) == 2 and all(
            pod["status"].get("phase") == "Pending" and label in pod["spec"].get("nodeSelector", {}) for pod in pods
        )

    assert wait_for(pending, 120), run.describe()


@pytest.fixture
def label(place: Namespace) -> Iterator[str]:
    """Return a label that no node has, and remove it from all nodes."""
    name = f"waits-{place.name}"
    yield name
    place.admin.run(f"kubectl label nodes --all {name}-")


EVERY_5 = "--set training.saveInterval=5"


@pytest.mark.every_change
def test_pods_that_start_after_a_rollback_are_replaced(place: Namespace, label: str) -> None:
    """The rollback deleted the settings of the pods, which get their node only then."""
    run = Training(place, "late")
    run.install(100_000, EVERY_5, step=0.1)
    run.wait_for_iteration(5)
    run.account.check(f"helm upgrade {run.command(90_000, EVERY_5, f'--set nodeSelector.{label}=yes', step=0.1)}")
    wait_for_pending(run, label)
    run.account.check("helm rollback late 1")
    wait_for_pending(run, label)
    run.account.check(f"kubectl label node {node_name(place.admin)} {label}=yes")
    wait_for_run_of(run, None)
    run.account.check("helm uninstall late")


def test_an_upgrade_replaces_pods_that_a_rollback_left(place: Namespace, label: str) -> None:
    run = Training(place, "left")
    run.install(100_000, EVERY_5, step=0.1)
    run.wait_for_iteration(5)
    run.account.check(f"helm upgrade {run.command(90_000, EVERY_5, f'--set nodeSelector.{label}=yes', step=0.1)}")
    wait_for_pending(run, label)
    run.account.check("helm rollback left 1")
    run.account.check("helm upgrade left charts/megatron-training --reset-then-reuse-values")
    wait_for_run_of(run, None)
    before = identity(run)
    run.account.check("helm upgrade left charts/megatron-training --reset-then-reuse-values")
    assert identity(run) == before, "the pods belong to the release now, and stay"
    run.account.check("helm uninstall left")


@pytest.mark.parametrize("engine", ["pytorchjob", "jobset", "trainjob"], indirect=True)
def test_a_rollback_replaces_pending_pods_on_request(place: Namespace, label: str, engine: str) -> None:
    run = Training(place, f"cleared-{engine}", engine)
    clear = f"{EVERY_5} --set job.onRollback=clear"
    run.install(100_000, clear, step=0.1)
    run.wait_for_iteration(5)
    run.account.check(f"helm upgrade {run.command(90_000, clear, f'--set nodeSelector.{label}=yes', step=0.1)}")
    wait_for_pending(run, label)
    run.account.check(f"helm rollback {run.name} 1")
    wait_for_run_of(run, None)
    run.account.check(f"helm uninstall {run.name}")


@pytest.mark.parametrize("engine", ["jobset", "trainjob"], indirect=True)
def test_a_rollback_of_an_immutable_run_fails_and_changes_nothing(place: Namespace, engine: str) -> None:
    run = Training(place, f"kept-{engine}", engine)
    run.install(100_000, EVERY_5, step=0.1)
    run.wait_for_iteration(5)
    run.account.check(f"helm upgrade {run.command(90_000, EVERY_5, step=0.1)}")
    reached = run.iteration()
    run.wait_for_iteration(reached + 6)
    before = identity(run)
    ended = run.account.run(f"helm rollback {run.name} 1")
    assert ended.code and "immutable" in ended.err, ended.err
    reached = run.iteration()
    run.wait_for_iteration(reached + 20)
    assert identity(run) == before, "the pods of the current run do not follow a rollback that failed"
    run.account.check(f"helm uninstall {run.name}")


def test_a_rollback_keeps_a_job_on_request(namespace: Namespace, hub_files: Path, helm: str) -> None:
    namespace.start_hub(hub_files, [SLOW])
    name = f"kept-{helm}"
    line = f"{name} charts/dataset-download --set storage.pvcName={CLAIM},dataset.outputPath={name}"
    line += f" --set dataset.repo={DATASET},dataset.sampleFiles=40,dataset.connections=1,job.onRollback=keep"
    line += " --set resources.requests.cpu=50m,resources.requests.memory=128Mi"
    namespace.user.check(f"{helm} upgrade --install {line}")
    assert wait_for(lambda: namespace.job(name)["status"].get("ready"), 90), namespace.describe(name)
    before = namespace.job(name)["metadata"]["uid"], [pod["metadata"]["uid"] for pod in namespace.pods(name)]
    ended = namespace.user.run(f"{helm} upgrade {line} {REFUSED} {ATOMIC[helm]}")
    assert ended.code and "rolled back" in ended.err, ended.err
    assert (namespace.job(name)["metadata"]["uid"], [p["metadata"]["uid"] for p in namespace.pods(name)]) == before
    namespace.user.check(f"{helm} upgrade {line} --set workers=2")
    other = namespace.job(name)["metadata"]["uid"]
    ended = namespace.user.run(f"{helm} rollback {name} 1")
    assert ended.code and "immutable" in ended.err, ended.err
    assert namespace.job(name)["metadata"]["uid"] == other, "the other Job is refused, and the running one continues"
    namespace.user.check(f"kubectl delete job {name}")
    namespace.user.check(f"{helm} rollback {name} 1")
    assert namespace.job(name)["spec"]["completions"] == 1
    namespace.user.check(f"{helm} uninstall {name}")
