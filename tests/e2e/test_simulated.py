"""Jobs of a size that no test machine can run, on simulated nodes whose pods do not run."""

import os
import shlex
import subprocess
from collections.abc import Iterator

import pytest

from e2e.cluster import Namespace, wait_for

pytestmark = pytest.mark.e2e

SIMULATE = os.environ.get("TOKENMILL_E2E_SIMULATE")
"""A command that adds this many kwok nodes to the cluster, labelled type=kwok, such as `cluster simulate`."""
CLAIM = "simulated"


ANYWHERE = ' --set nodeSelector.type=kwok --set-json \'tolerations=[{"operator":"Exists"}]\''


@pytest.fixture(scope="module")
def simulated_nodes(namespace: Namespace) -> Iterator[str]:
    """Add 64 nodes of 8 GPUs, and a claim that pods can use on any of them; return the name of the claim."""
    if not SIMULATE:
        pytest.skip("set TOKENMILL_E2E_SIMULATE to a command that adds simulated nodes to this cluster")
    subprocess.run([*shlex.split(SIMULATE), "64", "8"], check=True, timeout=120)
    volume = f"{namespace.name}-{CLAIM}"
    spec = {
        "capacity": {"storage": "100Gi"},
        "accessModes": ["ReadWriteMany"],
        "storageClassName": "",
        "claimRef": {"namespace": namespace.name, "name": CLAIM},
        "nfs": {"server": "nowhere.invalid", "path": "/"},
    }
    namespace.admin.apply({"apiVersion": "v1", "kind": "PersistentVolume", "metadata": {"name": volume}, "spec": spec})
    namespace.install(
        f"simulated-storage charts/shared-storage --set backend=existing --set pvc.name={CLAIM}"
        f" --set existing.volumeName={volume}"
    )
    yield CLAIM
    namespace.admin.check("kubectl delete node -l type=kwok")


def test_175b_on_64_nodes(namespace: Namespace, simulated_nodes: str) -> None:
    namespace.admin.check(
        f"helm install gang charts/megatron-training --set storage.pvcName={simulated_nodes} --set model.size=175b"
        " --set training.nodes=64 --set training.iterations=10000 --set training.globalBatchSize=8192"
        f" --set gang.minAvailable=64 --set tensorboard.enabled=false {ANYWHERE}"
    )

    def running() -> tuple[int, int]:
        pods = [p for p in namespace.admin.get("pods -l job-name=gang")["items"] if p["status"]["phase"] == "Running"]
        return len(pods), sum(int(p["spec"]["containers"][0]["resources"]["limits"]["nvidia.com/gpu"]) for p in pods)

    assert wait_for(lambda: running() == (64, 512), 120), running()
    run = namespace.admin.get("pytorchjob gang")
    assert run["spec"]["runPolicy"]["schedulingPolicy"]["minAvailable"] == 64
    namespace.admin.check("helm uninstall gang")


def test_a_thousand_workers_end(namespace: Namespace, simulated_nodes: str) -> None:
    namespace.install(
        f"thousand charts/dataset-extract --set storage.pvcName={simulated_nodes} --set dataset.inputPath=slimpajama"
        f" --set workers=1000 {ANYWHERE}"
    )
    job = namespace.wait_for_job("thousand-extract", timeout=240)
    assert job["status"]["succeeded"] == 1000
    assert job["status"]["completedIndexes"] == "0-999"
