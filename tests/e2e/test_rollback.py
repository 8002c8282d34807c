"""A rollback to the running values keeps the run: after a refused `helm upgrade`, and on a user's request."""

import shutil
from pathlib import Path

import pytest

from e2e.cluster import CLAIM, Namespace, wait_for
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
