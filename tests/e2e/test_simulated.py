"""A thousand workers, on nodes that only pretend to run their pods."""

import os
import shlex
import subprocess
from collections.abc import Iterator

import pytest

from e2e.cluster import Namespace

pytestmark = pytest.mark.e2e

SIMULATE = os.environ.get("TOKENMILL_E2E_SIMULATE")
"""A command that adds so many kwok nodes to the cluster, labelled type=kwok, such as `cluster simulate`."""
CLAIM = "simulated"


@pytest.fixture
def simulated_nodes(namespace: Namespace) -> Iterator[str]:
    """Add nodes, and a claim that pods can have on any of them; name the claim."""
    if not SIMULATE:
        pytest.skip("TOKENMILL_E2E_SIMULATE names no command that adds simulated nodes to this cluster")
    subprocess.run([*shlex.split(SIMULATE), "20"], check=True, timeout=120)
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
    namespace.admin.does("kubectl delete node -l type=kwok")


def test_a_thousand_workers_come_to_an_end(namespace: Namespace, simulated_nodes: str) -> None:
    namespace.install(
        f"thousand charts/dataset-extract --set storage.pvcName={simulated_nodes} --set dataset.inputPath=slimpajama"
        ' --set workers=1000 --set nodeSelector.type=kwok --set-json \'tolerations=[{"operator":"Exists"}]\''
    )
    job = namespace.wait_for_job("thousand-extract", timeout=240)
    assert job["status"]["succeeded"] == 1000
    assert job["status"]["completedIndexes"] == "0-999"
