"""Training on a cluster, with a small trainer instead of Megatron-LM: starts, disruptions, and final states."""

import json
import os
import random
import shlex
import subprocess
import time
import urllib.request

import pytest

from e2e.cluster import Namespace, wait_for
from e2e.training import RUN, SETTINGS, Training, make_dataset

pytestmark = pytest.mark.e2e

EVERY_5 = "--set training.saveInterval=5"
KILLS = 20


@pytest.fixture(scope="module")
def place(namespace: Namespace, tmp_path_factory: pytest.TempPathFactory) -> Namespace:
    """Return the module's namespace with a finished dataset on its volume."""
    make_dataset(namespace, tmp_path_factory.mktemp("dataset"))
    return namespace


@pytest.mark.every_change
@pytest.mark.parametrize("engine", ["pytorchjob", "jobset"], indirect=True)
def test_two_pods_meet_and_reach_the_target(place: Namespace, engine: str) -> None:
    run = Training(place, f"meet-{engine}", engine)
    run.install(20, EVERY_5)
    assert wait_for(lambda: len(run.pods()) == 2), run.describe()
    if engine == "pytorchjob":
        assert [pod["metadata"]["name"] for pod in run.pods()] == [
            "meet-pytorchjob-master-0",
            "meet-pytorchjob-worker-0",
        ]
    run.succeed()
    run.assert_exact(20)


@pytest.mark.every_change
def test_one_fault_after_another(place: Namespace) -> None:
    """A damaged tracker, an interrupted save, an early exit with 0, an exception: only unsaved iterations are lost."""
    run = Training(place, "faults")
    run.install(60, EVERY_5, step=0.2)
    saved = 0
    for name in ("torn-tracker", "die-in-save", "exit-0", "raise"):
        run.wait_for_iteration(saved + 5)
        saved = run.iteration()
        (run.faults / name).touch()
        assert wait_for(lambda name=name: not (run.faults / name).exists(), 90), run.describe()
        before = {pod["metadata"]["uid"] for pod in run.pods()}
        assert wait_for(lambda before=before: {p["metadata"]["uid"] for p in run.pods()} != before, 90), run.describe()
    run.succeed()
    run.assert_exact(60)


@pytest.mark.parametrize("engine", ["pytorchjob", "jobset"], indirect=True)
def test_three_phases_with_a_killed_pod_in_each(place: Namespace, engine: str) -> None:
    run = Training(place, f"phases-{engine}", engine)
    blend = [{"path": "slimpajama/preprocessed", "weight": 1}]
    phases = [{"iterations": count, "blend": blend, "seed": count} for count in (22, 33, 25)]
    run.install(80, EVERY_5, f"--set-json 'training.phases={json.dumps(phases)}'", step=0.3)
    for iteration in (5, 27, 60):
        run.wait_for_iteration(iteration)
        assert run.kill(run.pods()[-1]["metadata"]["name"])
    run.succeed()
    run.assert_exact(80)
    ends = [event["identity"]["phases"] for event in run.read_identities()]
    assert [[phase["end"] for phase in phases] for phases in ends] == [[22, 55, 80]]


def test_evictions_save_first(place: Namespace) -> None:
    run = Training(place, "evicted")
    run.install(150, "--set training.saveInterval=149", step=0.2)
    for name in ("evicted-master-0", "evicted-worker-0"):
        before = run.iteration()
        assert wait_for(lambda before=before: run.logged() > before + 5, 120), run.describe()
        run.evict(name)
        assert wait_for(lambda before=before: run.iteration() > before, 60), run.describe()
        assert run.iteration() < 149, "the eviction causes a save"
    run.succeed()
    run.assert_exact(150)


@pytest.mark.parametrize("engine", ["pytorchjob", "jobset", "trainjob"], indirect=True)
def test_a_bad_argument_fails_at_once_with_its_reason(place: Namespace, engine: str) -> None:
    run = Training(place, f"bad-{engine}", engine)
    run.install(20, "--set extraArgs={--no-such-flag}")
    run.wait("Failed", timeout=90)
    assert any("unrecognized arguments: --no-such-flag" in message for message in run.messages()), run.describe()


def test_an_unfinished_dataset_is_refused_in_preflight(place: Namespace) -> None:
    run = Training(place, "early")
    run.install(20, "--set storage.datasetPath=nothing")
    run.wait("Failed", timeout=60)
    assert any("/data/nothing" in message for message in run.messages()), run.describe()
    (pod,) = [pod for pod in run.pods() if "master" in pod["metadata"]["name"]]
    state = pod["status"]["containerStatuses"][0]["state"]["terminated"]
    started, ended = (
        time.mktime(time.strptime(state[key], "%Y-%m-%dT%H:%M:%SZ")) for key in ("startedAt", "finishedAt")
    )
    assert ended - started <= 10 and state["exitCode"] == 2


def test_refusals_before_a_pod_is_made(place: Namespace) -> None:
    def refuse(*settings: str) -> str:
        ended = place.admin.run(f"helm install refused {SETTINGS} {' '.join(settings)}")
        assert ended.code, "the installation is not refused"
        return ended.err

    assert "llama3-8b" in refuse("--set model.size=376m")
    assert "no-such-claim" in refuse("--set storage.pvcName=no-such-claim")
    assert "leaves a remainder of 1" in refuse("--set training.nodes=3 --set parallelism.tensorModelParallelSize=2")
    assert "not divisible" in refuse("--set training.nodes=3")
    assert "saveInterval" in refuse("--set training.iterations=10 --set training.saveInterval=11")


def test_an_upgrade_never_mixes_and_a_no_op_changes_nothing(place: Namespace) -> None:
    run = Training(place, "upgraded")
    run.install(400, EVERY_5, step=0.1)
    run.wait_for_iteration(5)
    before, pods = run.run(), {pod["metadata"]["uid"] for pod in run.pods()}
    run.account.check(f"helm upgrade {run.command(400, EVERY_5, step=0.1)}")
    assert run.run()["metadata"]["uid"] == before["metadata"]["uid"]
    assert {pod["metadata"]["uid"] for pod in run.pods()} == pods
    run.account.check(f"helm upgrade {run.command(60, EVERY_5, nodes=4, step=0.1)}")
    assert run.run()["metadata"]["uid"] != before["metadata"]["uid"]
    assert wait_for(lambda: len(run.pods()) == 4, 90), run.describe()
    assert pods.isdisjoint({pod["metadata"]["uid"] for pod in run.pods()})
    volumes = [volume for pod in run.pods() for volume in pod["spec"]["volumes"]]
    assert len({volume["configMap"]["name"] for volume in volumes if volume["name"] == "settings"}) == 1
    run.succeed()
    run.assert_exact(run.iteration())
    assert run.iteration() >= 60


def test_a_second_release_and_tensorboard(place: Namespace) -> None:
    place.admin.check(f"helm install megatron-training {RUN} --set training.iterations=10 --set training.nodes=1")
    place.admin.check(f"helm install other {RUN} --set training.iterations=10 --set training.nodes=1")
    services = {s["metadata"]["name"] for s in place.admin.get("services")["items"]}
    assert {"tensorboard", "other-tensorboard"} <= services
    place.admin.check("kubectl rollout status deployment/tensorboard --timeout=120s", timeout=150)
    place.admin.check("helm test other --timeout 2m")
    command = shlex.split("kubectl port-forward service/tensorboard 6006:6006")
    environment = {"KUBECONFIG": str(place.admin.kubeconfig)}
    forward = subprocess.Popen(command, env=os.environ | environment, stdout=subprocess.PIPE, text=True)
    try:
        assert forward.stdout and "Forwarding" in forward.stdout.readline()
        with urllib.request.urlopen("http://localhost:6006/data/environment", timeout=30) as response:
            assert json.load(response)["version"]
    finally:
        forward.terminate()
        forward.wait(10)
    for name in ("megatron-training", "other"):
        Training(place, name).succeed()
    assert "iteration" in place.admin.check("kubectl logs -l job-name=megatron-training --tail=100")


def test_twenty_random_kills(place: Namespace) -> None:
    """Kill everything in a random pod, again and again: the run loses only iterations after its last save."""
    dice = random.Random(20261122)
    run = Training(place, "killed")
    run.install(2000, "--set training.saveInterval=5", step=0.1)
    kills = 0
    deadline = time.monotonic() + 600
    while kills < KILLS:
        assert time.monotonic() < deadline, run.describe()
        time.sleep(dice.uniform(1, 5))
        running = [p["metadata"]["name"] for p in run.pods() if p["status"].get("phase") == "Running"]
        if running:
            kills += run.kill(dice.choice(running))
    run.account.check(f"helm upgrade {run.command(run.iteration() + 100, EVERY_5, step=0.02)}")
    run.succeed()
    run.assert_exact(run.iteration())
