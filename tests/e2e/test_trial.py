"""A pod template that no pod can have is refused before anything runs or is deleted, for every kind of object."""

from pathlib import Path

import pytest

from e2e.cluster import CLAIM, Namespace, wait_for
from e2e.corpus import DATASET, MODEL
from e2e.training import Training, make_dataset

pytestmark = pytest.mark.e2e

REFUSED = {
    "schema": (
        "--set affinity.nodeAffinity.requiredDuringSchedulingIgnoredDuringExecution.nodeSelectorTerms[0]"
        ".matchExpressions[0].key=pool,affinity.nodeAffinity.requiredDuringSchedulingIgnoredDuringExecution"
        ".nodeSelectorTerms[0].matchExpressions[0].operator=in",
        "operator",
    ),
    "toleration": ("--set 'tolerations[0].key=a b'", "tolerations"),
    "priority class": ("--set priorityClassName=nowhere", 'there is no PriorityClass "nowhere"'),
    "API server": (
        "--set extraEnv[0].name=MORE,extraEnv[0].valueFrom.fieldRef.fieldPath=spec.nowhere",
        "spec.nowhere",
    ),
}
"""Values, and a part of the message. Only the API server refuses the last ones, in a pod template of a Job or a pod."""
ENGINES = ["pytorchjob", "jobset", "trainjob"]
SMALL = "--set resources.requests.cpu=50m,resources.requests.memory=128Mi"
SLOW = {"kind": "slow", "path": "*.zst", "where": "cdn", "rate": 3000, "times": None}


@pytest.fixture(scope="module")
def place(namespace: Namespace, tmp_path_factory: pytest.TempPathFactory) -> Namespace:
    """Return the module's namespace with a finished dataset on its volume."""
    make_dataset(namespace, tmp_path_factory.mktemp("dataset"))
    return namespace


@pytest.mark.every_change
@pytest.mark.parametrize("engine", ENGINES, indirect=True)
def test_an_upgrade_that_cannot_start_deletes_no_run(place: Namespace, engine: str) -> None:
    run = Training(place, f"kept-{engine}", engine)
    settings = "--set training.saveInterval=5"
    run.install(100_000, settings, step=0.1)
    run.wait_for_iteration(5)
    before = run.run()["metadata"]["uid"], {pod["metadata"]["uid"] for pod in run.pods()}
    tensorboard = REFUSED["API server"][0] + " --set tensorboard.enabled=true"
    for values, message in [*REFUSED.values(), (tensorboard, "spec.nowhere")]:
        line = run.command(90_000, settings, values, step=0.1)
        ended = run.account.run(f"helm upgrade {line} --atomic --timeout 60s")
        assert ended.code and message in ended.err, ended.err
        assert (run.run()["metadata"]["uid"], {pod["metadata"]["uid"] for pod in run.pods()}) == before, values
    reached = run.iteration()
    run.wait_for_iteration(reached + 10)
    run.account.check(f"helm upgrade {run.command(90_000, settings, step=0.1)}")
    assert run.run()["metadata"]["uid"] != before[0], "values that can start do start"
    run.account.check(f"helm uninstall {run.name}")


@pytest.mark.parametrize("engine", ENGINES, indirect=True)
def test_an_installation_that_cannot_start_creates_no_run(place: Namespace, engine: str) -> None:
    run = Training(place, f"never-{engine}", engine)
    for values, message in REFUSED.values():
        ended = run.account.run(f"helm install {run.command(10, values)} --atomic --timeout 60s")
        assert ended.code and message in ended.err, ended.err
        assert run.account.run(f"kubectl get {run.kind} {run.name}").code, "the run was created"
        assert run.account.run(f"helm status {run.name}").code, "a release was left"


def test_a_pipeline_that_cannot_start_deletes_nothing(namespace: Namespace, hub_files: Path) -> None:
    namespace.start_hub(hub_files, [SLOW])
    line = f"slow charts/dataset-pipeline --set storage.pvcName={CLAIM} {SMALL} -f values/datasets/slimpajama.yaml"
    line += f" --set dataset.repo={DATASET},download.dataset.sampleFiles=40,download.dataset.connections=1"
    line += f" --set job.onRollback=keep,preprocess.tokenizer.name={MODEL}"
    account = namespace.admin
    for values, message in REFUSED.values():
        ended = account.run(f"helm install {line} {values} --atomic --timeout 60s")
        assert ended.code and message in ended.err, ended.err
        assert account.run("kubectl get jobset slow").code, "the pipeline was created"
    account.check(f"helm install {line}")
    pods = "pods -l jobset.sigs.k8s.io/jobset-name=slow"

    def running() -> set[str]:
        return {p["metadata"]["uid"] for p in account.get(pods)["items"] if p["status"].get("phase") == "Running"}

    assert wait_for(running, 120), account.run("kubectl describe pods").out
    before = account.get("jobset slow")["metadata"]["uid"], running()
    stage = REFUSED["API server"][0].replace("extraEnv", "preprocess.extraEnv")
    for values, message in [*REFUSED.values(), (stage, "spec.nowhere")]:
        ended = account.run(f"helm upgrade {line} {values} --set download.workers=2 --atomic --timeout 60s")
        assert ended.code and message in ended.err, ended.err
        assert (account.get("jobset slow")["metadata"]["uid"], running()) == before, values
    account.check("helm uninstall slow")
