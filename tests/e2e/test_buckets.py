"""The pipeline and a training from and to a bucket: no pod mounts a volume, and killed pods lose nothing.

moto serves the bucket on this machine, at the address that TOKENMILL_E2E_RELAY names.
"""

import json
import os
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from e2e.cluster import Namespace, wait_for
from e2e.corpus import MODEL, run_checked, serve, shard
from e2e.jobsets import describe, pods_of, stage_of, wait_for_end
from e2e.training import SETTINGS, Training
from support.buckets import Store, open_s3

pytestmark = pytest.mark.e2e

FILES = 24
SECRET = "bucket"
STAGES = ("download", "extract", "concatenate", "preprocess")


@pytest.fixture(scope="module")
def store() -> Iterator[Store]:
    """Return a bucket with a corpus, which this machine serves to the pods."""
    host = os.environ.get("TOKENMILL_E2E_RELAY")
    if not host:
        pytest.skip("TOKENMILL_E2E_RELAY names no address of this machine for the pods")
    from moto.server import ThreadedMotoServer

    server = ThreadedMotoServer(ip_address="0.0.0.0", port=0, verbose=False)
    server.start()
    _, port = server.get_host_and_port()
    store = open_s3(f"http://{host}:{port}", "tokens")
    for number in range(FILES):
        store.put(f"raw/{number:02d}.jsonl", shard(number, 400))
    yield store
    server.stop()


@pytest.fixture(scope="module")
def settings(store: Store, with_hub: Namespace) -> str:
    """Return the arguments of Helm with which pods use the bucket; its keys are in a Secret."""
    keys = ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY")
    literals = " ".join(f"--from-literal={name}={store.environment[name]}" for name in keys)
    with_hub.admin.check(f"kubectl create secret generic {SECRET} {literals}")
    lines = [f"--set extraEnv[{n}].name={name}" for n, name in enumerate(store.environment)]
    for number, (name, value) in enumerate(store.environment.items()):
        if name in keys:
            reference = f"extraEnv[{number}].valueFrom.secretKeyRef"
            lines.append(f"--set {reference}.name={SECRET},{reference}.key={name}")
        else:
            lines.append(f"--set extraEnv[{number}].value={value}")
    return " ".join(lines)


@pytest.mark.every_change
def test_a_pipeline_without_a_volume(
    with_hub: Namespace, store: Store, settings: str, hub_files: Path, tmp_path: Path
) -> None:
    with_hub.admin.check("kubectl create role jobsets --verb=* --resource=jobsets.jobset.x-k8s.io")
    with_hub.admin.check(f"kubectl create rolebinding jobsets --role=jobsets --serviceaccount={with_hub.name}:editor")
    small = "--set resources.requests.cpu=50m,resources.requests.memory=128Mi"
    line = f"bucket charts/dataset-pipeline {small} {settings} --set dataset.root={store.uri}/slimpajama"
    line += f" --set dataset.source={store.uri}/raw,preprocess.tokenizer.name={MODEL}"
    line += " --set extract.enabled=true,concatenate.enabled=true,concatenate.dataset.targetFiles=8"
    line += " --set download.workers=2,preprocess.workers=2"
    with_hub.install(line)
    killed = set[str]()
    for stage in ("download", "preprocess"):
        found = wait_for(lambda stage=stage: find_running(with_hub, stage), 180)
        assert found, describe(with_hub, "bucket")
        with_hub.kill(found)
        killed.add(found)
    ended = wait_for_end(with_hub, "bucket")
    assert ended["status"]["terminalState"] == "Completed", describe(with_hub, "bucket")
    pods = pods_of(with_hub, "bucket")
    assert {stage_of(pod) for pod in pods} == set(STAGES)
    for pod in pods:
        assert not [volume for volume in pod["spec"]["volumes"] if "persistentVolumeClaim" in volume]
    root = tmp_path / "slimpajama"
    (tmp_path / "raw").mkdir()
    for number in range(FILES):
        (tmp_path / f"raw/{number:02d}.jsonl").write_bytes(shard(number, 400))
    with serve(hub_files) as hub:
        run_checked("download", tmp_path / "raw", root, hub=hub)
        run_checked("extract", root)
        run_checked("concatenate", root, "--target-files", 8)
        run_checked("preprocess", root, "--tokenizer", MODEL, hub=hub)
    objects = store.read_all("slimpajama")
    files = {path.relative_to(root).as_posix(): path for path in root.rglob("*") if path.is_file()}
    data = {name for name in files if ".tokenmill" not in name}
    assert data == {name for name in objects if ".tokenmill" not in name}
    assert not [name for name in data if files[name].read_bytes() != objects[name]]
    assert not store.uploads() and not [name for name in objects if "/attempts/" in name]
    with_hub.user.check("helm test bucket --timeout 180s")


def find_running(namespace: Namespace, stage: str) -> str | None:
    """Return a running pod of a stage."""
    for pod in pods_of(namespace, "bucket"):
        if stage_of(pod) == stage and pod["status"].get("phase") == "Running":
            name: str = pod["metadata"]["name"]
            return name
    return None


class BucketTraining(Training):
    """A training whose checkpoints are in the bucket."""

    store: Store
    prefix = "run"

    def iteration(self) -> int:
        """Return the iteration of the last checkpoint that the log of node 0 names, since the start of its pod."""
        pods = self.pods()
        if not pods:
            return 0
        log = self.account.run(f"kubectl logs {pods[0]['metadata']['name']}").out
        return max(map(int, re.findall(r"the checkpoint of iteration (\d+) is complete", log)), default=0)

    def assert_exact(self, target: int) -> None:
        """Check that the result includes every iteration exactly once."""
        objects = self.store.read_all(self.prefix)
        assert int(objects["latest_checkpointed_iteration.txt"]) == target
        value = json.loads(objects[f"iter_{target:07d}/__0_0.distcp"])
        assert (value["iteration"], value["sum"]) == (target, target * (target + 1) // 2)


@pytest.mark.every_change
def test_a_training_from_and_to_a_bucket(with_hub: Namespace, store: Store, settings: str) -> None:
    """Two pods without a volume: each copies the pairs, builds the index and uploads its files of the checkpoints."""
    values = f"{SETTINGS} {settings} --set storage.pvcName="
    run = BucketTraining(with_hub, "tobucket", "jobset", values)
    run.store = store
    run.install(
        60,
        "--set training.saveInterval=5",
        f"--set storage.datasetPath={store.uri}/slimpajama/preprocessed",
        f"--set storage.checkpointPath={store.uri}/{run.prefix}",
        step=0.5,
    )
    run.wait_for_iteration(5)
    for pod in run.pods():
        assert not [volume for volume in pod["spec"]["volumes"] if "persistentVolumeClaim" in volume]
    assert run.kill(run.pods()[-1]["metadata"]["name"])
    assert wait_for(lambda: run.iteration() == 0, 180), run.describe()  # new pods, with empty disks
    run.wait_for_iteration(20)
    run.evict(run.pods()[0]["metadata"]["name"])
    run.succeed(timeout=400)
    run.assert_exact(60)
    attempts = json.loads(store.read_all(run.prefix)[".tokenmill/train/attempts.json"])
    assert len(attempts) >= 3 and attempts[-1]["began_at"] >= 20
