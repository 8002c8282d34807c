"""A rollback to what runs leaves it alone: that of `helm upgrade` after a refusal, and one that somebody asks for."""

import shutil
from pathlib import Path

import pytest

from e2e.cluster import CLAIM, Namespace, wait_for
from e2e.corpus import DATASET
from e2e.training import Training, make_dataset, settled

pytestmark = pytest.mark.e2e

ATOMIC = {"helm": "--atomic --timeout 60s", "helm4": "--rollback-on-failure --timeout 60s"}
REFUSED = "--set extraVolumes[0].name=more,extraVolumes[0].emptyDir.sizeLimit=2GB"
"""By the API server alone: what a volume is made of, the charts leave to it."""
SLOW = {"kind": "slow", "path": "*.zst", "where": "cdn", "rate": 3000, "times": None}


@pytest.fixture(scope="module", params=["helm", "helm4"])
def helm(request: pytest.FixtureRequest) -> str:
    """Name each Helm."""
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
    """Return what tells a run and its pods from others."""
    return training.run()["metadata"]["uid"], {pod["metadata"]["uid"] for pod in training.pods()}


def test_a_refused_upgrade_is_rolled_back_and_the_run_goes_on(place: Namespace, helm: str) -> None:
    run = Training(place, f"refused-{helm}")
    run.install(100_000, "--set training.saveInterval=5", step=0.1)
    run.wait_for_iteration(5)
    before = identity(run)
    line = run.command(90_000, "--set training.saveInterval=5", REFUSED, step=0.1)
    ended = run.account.run(f"{helm} upgrade {line} {ATOMIC[helm]}")
    assert ended.code and "rolled back" in ended.err, ended.err
    settled(run)
    assert identity(run) == before, run.describe()
    reached = run.iteration()
    run.wait_for_iteration(reached + 10)

    # What has nothing to do with the run fails later, while Helm waits: TensorBoard never starts.
    line = run.command(100_000, "--set training.saveInterval=5", step=0.1)
    line += " --set tensorboard.enabled=true,tensorboard.image=nowhere.invalid/none"
    ended = run.account.run(f"{helm} upgrade {line} {ATOMIC[helm].replace('60s', '10s')}")
    assert ended.code and "rolled back" in ended.err, ended.err
    assert identity(run) == before, run.describe()

    run.account.does(f"{helm} rollback {run.name} 1")
    assert identity(run) == before, run.describe()
    run.account.does(f"{helm} uninstall {run.name}")


def test_a_rollback_to_another_run_ends_the_pods_and_starts_those_of_that_revision(place: Namespace) -> None:
    run = Training(place, "back")
    run.install(100_000, "--set training.saveInterval=5", step=0.1)
    run.wait_for_iteration(5)
    run.account.does(f"helm upgrade {run.command(100_000, '--set training.saveInterval=7', step=0.1)}")
    reached = run.iteration()
    run.wait_for_iteration(reached + 14)
    changed, pods = identity(run)
    run.account.does("helm rollback back 1")
    settings = run.run()["spec"]["pytorchReplicaSpecs"]["Master"]["template"]["spec"]

    def replaced() -> bool:
        now = run.pods()
        return len(now) == 2 and pods.isdisjoint({p["metadata"]["uid"] for p in now})

    assert wait_for(replaced, 240), run.describe()
    assert run.run()["metadata"]["uid"] == changed, "changed in place"
    (mounted,) = {v["configMap"]["name"] for p in run.pods() for v in p["spec"]["volumes"] if v["name"] == "settings"}
    assert mounted == next(v["configMap"]["name"] for v in settings["volumes"] if v["name"] == "settings")
    reached = run.iteration()
    run.wait_for_iteration(reached + 10)
    run.account.does("helm uninstall back")


def test_a_job_is_kept_through_a_rollback_where_that_is_asked_for(
    namespace: Namespace, hub_files: Path, helm: str
) -> None:
    namespace.start_hub(hub_files, [SLOW])
    name = f"kept-{helm}"
    line = f"{name} charts/dataset-download --set storage.pvcName={CLAIM},dataset.outputPath={name}"
    line += f" --set dataset.repo={DATASET},dataset.sampleFiles=40,dataset.connections=1,job.onRollback=keep"
    line += " --set resources.requests.cpu=50m,resources.requests.memory=128Mi"
    namespace.user.does(f"{helm} upgrade --install {line}")
    assert wait_for(lambda: namespace.job(name)["status"].get("ready"), 90), namespace.describe(name)
    before = namespace.job(name)["metadata"]["uid"], [pod["metadata"]["uid"] for pod in namespace.pods(name)]
    ended = namespace.user.run(f"{helm} upgrade {line} {REFUSED} {ATOMIC[helm]}")
    assert ended.code and "rolled back" in ended.err, ended.err
    assert (namespace.job(name)["metadata"]["uid"], [p["metadata"]["uid"] for p in namespace.pods(name)]) == before
    namespace.user.does(f"{helm} upgrade {line} --set workers=2")
    other = namespace.job(name)["metadata"]["uid"]
    ended = namespace.user.run(f"{helm} rollback {name} 1")
    assert ended.code and "immutable" in ended.err, ended.err
    assert namespace.job(name)["metadata"]["uid"] == other, "another Job is refused, and what runs goes on"
    namespace.user.does(f"kubectl delete job {name}")
    namespace.user.does(f"{helm} rollback {name} 1")
    assert namespace.job(name)["spec"]["completions"] == 1
    namespace.user.does(f"{helm} uninstall {name}")
