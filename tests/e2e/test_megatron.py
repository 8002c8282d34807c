"""Megatron-LM itself on a cluster, on the CPU: two pods train to their target, although one of them is killed."""

import os
import re
import shutil
import subprocess
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from e2e.cluster import CLAIM, Namespace, wait_for
from e2e.training import Training, make_dataset
from support.commandline import tokenmill

pytestmark = pytest.mark.e2e

TESTS = Path(__file__).parents[1]
PYTHON = os.environ.get("TOKENMILL_MEGATRON_PYTHON", "")
MEGATRON = os.environ.get("TOKENMILL_MEGATRON_TRAINING", "")
IMAGE_PYTHON = (3, 11)
"""Version of python3 in the training image on the tests' base, Debian bookworm."""

ITERATIONS, BATCH, SAVE_INTERVAL = 160, 4, 40
SETTINGS = (
    "charts/megatron-training -f values/clusters/local.yaml -f tests/e2e/trainer/megatron-lm.yaml"
    f" --set storage.pvcName={CLAIM},training.globalBatchSize={BATCH},training.saveInterval={SAVE_INTERVAL}"
)
LOG_LINE = re.compile(r" iteration +(\d+)/ +\d+ \| consumed samples: +(\d+) \|.* lm loss: (\S+) \|")
PRINTED = 4e-6
"""Precision of a loss that was computed from two printed ones."""

START_SECONDS, REST_SECONDS = 600, 900
"""Timeouts for the first checkpoint, and from the kill to the target. Six processes import torch meanwhile."""


@pytest.fixture(scope="module")
def packages() -> Path:
    """Return the directory of the frameworks' packages, which the pods read under their own Python."""
    if not (PYTHON and MEGATRON):
        pytest.skip("Megatron-LM is not installed: make e2e-megatron")
    if "TOKENMILL_E2E_PATH" in os.environ:
        pytest.fail("the node of this cluster does not see the directories of this machine: unset TOKENMILL_E2E_PATH")
    program = "import sys, sysconfig; print(*sys.version_info[:2], sysconfig.get_path('purelib'))"
    major, minor, path = subprocess.check_output([PYTHON, "-c", program], text=True).strip().split(" ", 2)
    if (int(major), int(minor)) != IMAGE_PYTHON:
        pytest.fail(f"{PYTHON} is Python {major}.{minor}, the training image has 3.11: make PYTHON=python3.11")
    return Path(path)


@pytest.fixture(scope="module")
def place(namespace: Namespace, packages: Path, tmp_path_factory: pytest.TempPathFactory) -> Namespace:
    """Return the module's namespace with a dataset, Megatron-LM, and a claim for the packages that it imports."""
    make_dataset(namespace, tmp_path_factory.mktemp("dataset"))
    shutil.copytree(TESTS / "megatron_lm", namespace.data / "megatron")
    shutil.copytree(MEGATRON, namespace.data / "megatron-lm")
    namespace.admin.apply(*make_volume(namespace, packages))
    return namespace


def make_volume(namespace: Namespace, directory: Path) -> list[dict[str, Any]]:
    """Return a volume for a directory of the node, and its claim `frameworks`.

    The restricted standard refuses a hostPath in a pod, but not behind a claim. Kubernetes does not change the owner of
    its files, as it does on a local volume.
    """
    name, claim = f"{namespace.name}-frameworks", {"namespace": namespace.name, "name": "frameworks"}
    size, shared = {"storage": "8Gi"}, {"accessModes": ["ReadOnlyMany"], "storageClassName": ""}
    source = {"capacity": size, "claimRef": claim, "hostPath": {"path": str(directory), "type": "Directory"}}
    return [
        {
            "apiVersion": "v1",
            "kind": "PersistentVolume",
            "metadata": {"name": name},
            "spec": shared | source | {"persistentVolumeReclaimPolicy": "Retain"},
        },
        {
            "apiVersion": "v1",
            "kind": "PersistentVolumeClaim",
            "metadata": claim,
            "spec": shared | {"volumeName": name, "resources": {"requests": size}},
        },
    ]


def test_two_pods_reach_their_target_although_one_is_killed(place: Namespace, tmp_path: Path) -> None:
    """Both engines' runs train on each batch once: their losses are equal, though their pods end at different times."""
    deleted = Training(place, "real-pytorchjob", "pytorchjob", SETTINGS)
    killed = Training(place, "real-jobset", "jobset", SETTINGS)

    def delete_the_last_pod() -> None:
        # Its replacement does not wait for its end. The node still sends it SIGTERM, on which the run saves.
        place.kill(deleted.pods()[-1]["metadata"]["name"])

    def kill_the_processes_of_the_first_pod() -> None:
        assert killed.kill(killed.pods()[0]["metadata"]["name"])

    with ThreadPoolExecutor() as pool:
        losses = pool.map(
            train_through_a_kill,
            (deleted, killed),
            (delete_the_last_pod, kill_the_processes_of_the_first_pod),
            (tmp_path / "deleted.log", tmp_path / "killed.log"),
        )
        assert next(losses) == pytest.approx(next(losses), abs=PRINTED)


def train_through_a_kill(run: Training, kill: Callable[[], None], log: Path) -> dict[int, float]:
    """Train to the target, with `kill` after the first checkpoint; check the result, and return the losses."""
    run.install(ITERATIONS)
    run.wait_for_iteration(SAVE_INTERVAL, timeout=START_SECONDS)
    saved = run.iteration()
    copying = run.follow(run.pods()[-1]["metadata"]["name"], log)
    assert wait_for(lambda: max(read_losses(log.read_text()), default=0) > saved), run.describe()
    kill()
    copying.wait(60)
    run.succeed(timeout=REST_SECONDS)

    before = read_losses(log.read_text())
    after = read_losses(run.account.check(f"kubectl logs {run.pods()[-1]['metadata']['name']}"))
    resumed = min(after) - 1
    assert saved <= resumed <= max(before) < ITERATIONS
    assert resumed % SAVE_INTERVAL == 0 or resumed == max(before), "it saves at an interval, or when it ends"
    losses = before | after
    assert losses == pytest.approx(after | before, abs=PRINTED), "the repeated iterations have the same losses"
    assert sorted(losses) == list(range(1, ITERATIONS + 1))
    assert losses[ITERATIONS] < losses[1] - 1, "it learns"
    assert run.iteration() == ITERATIONS
    verified = tokenmill("checkpoint", "verify", run.checkpoints)
    assert verified.code == 0, verified.err
    return losses


def read_losses(log: str) -> dict[int, float]:
    """Return the loss of each iteration in the log of an attempt, which has each of its iterations once.

    The second line of an attempt has the mean of two iterations: Megatron-LM does not reset its sum after the first
    one (megatron/training/training.py, training_log: should_reset).
    """
    lines = [(int(iteration), int(samples), float(loss)) for iteration, samples, loss in LOG_LINE.findall(log)]
    first = lines[0][0] if lines else 0
    assert [(iteration, samples) for iteration, samples, _ in lines] == [
        (first + number, (first + number) * BATCH) for number in range(len(lines))
    ]
    losses = {iteration: loss for iteration, _, loss in lines}
    if len(lines) > 1:
        losses[first + 1] = 2 * losses[first + 1] - losses[first]
    return losses
