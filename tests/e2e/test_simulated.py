"""Jobs of a size that no test machine can run, on simulated nodes, and the load that they cause on the API server.

TOKENMILL_E2E_NODES and TOKENMILL_E2E_WORKERS set the sizes. docs/internals/scale.md has the numbers for 512 nodes and
10,000 workers, which take minutes.
"""

import json
import os
import re
import shlex
import subprocess
from collections import Counter
from collections.abc import Iterator

import pytest

from e2e.cluster import Account, Namespace, wait_for

pytestmark = pytest.mark.e2e

SIMULATE = os.environ.get("TOKENMILL_E2E_SIMULATE")
"""A command that adds this many kwok nodes to the cluster, labelled type=kwok, such as `cluster simulate`."""
CLAIM = "simulated"
NODES = int(os.environ.get("TOKENMILL_E2E_NODES", "64"))
"""Nodes of the training; each has 8 GPUs."""
WORKERS = int(os.environ.get("TOKENMILL_E2E_WORKERS", "1000"))

REQUESTS_PER_POD = 10
"""Requests that the API server receives for a pod of a Job until its end, or for one of a training until its start."""
JOB_BYTES = 20_000
"""Size of a Job, whatever its number of workers: ranges of finished indexes are short while few pods fail."""

COUNTED = {"pods", "jobs", "pytorchjobs", "events"}
ANYWHERE = ' --set nodeSelector.type=kwok --set-json \'tolerations=[{"operator":"Exists"}]\''
REQUEST = re.compile(r"^apiserver_request_total\{(.*)\} ([0-9.e+]+)$", re.MULTILINE)


def count_requests(admin: Account) -> Counter[str]:
    """Return the requests so far that changed pods, Jobs and events, by verb and resource."""
    counts: Counter[str] = Counter()
    for labels, value in REQUEST.findall(admin.check("kubectl get --raw /metrics")):
        label = dict(re.findall(r'(\w+)="([^"]*)"', labels))
        resource = "/".join(filter(None, (label["resource"], label["subresource"])))
        # The tests themselves list and read: the controllers have watches.
        if label["verb"] not in ("WATCH", "LIST", "GET") and label["resource"] in COUNTED:
            counts[f"{label['verb']} {resource}"] += int(float(value))
    return counts


def assert_load(before: Counter[str], after: Counter[str], pods: int) -> None:
    """Print the requests since `before`, and compare them with what docs/internals/scale.md states."""
    added = after - before
    print(json.dumps({"pods": pods, "per_pod": round(added.total() / pods, 1), **dict(added.most_common())}))
    assert added.total() <= REQUESTS_PER_POD * pods + 2000, added  # other tests use the cluster at the same time


@pytest.fixture(scope="module")
def simulated_nodes(namespace: Namespace) -> Iterator[str]:
    """Add nodes of 8 GPUs, and a claim that pods can use on any of them; return the name of the PVC."""
    if not SIMULATE:
        pytest.skip("set TOKENMILL_E2E_SIMULATE to a command that adds simulated nodes to this cluster")
    nodes = max(NODES, -(-WORKERS // 100))
    subprocess.run([*shlex.split(SIMULATE), str(nodes), "8"], check=True, timeout=600)
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
    namespace.admin.check("kubectl delete node -l type=kwok --wait=false", timeout=600)


def test_175b_on_many_nodes(namespace: Namespace, simulated_nodes: str) -> None:
    before = count_requests(namespace.admin)
    namespace.admin.check(
        f"helm install gang charts/megatron-training --set storage.pvcName={simulated_nodes} --set model.size=175b"
        f" --set training.nodes={NODES} --set training.iterations=10000 --set training.globalBatchSize=8192"
        f" --set gang.minAvailable={NODES} --set tensorboard.enabled=false {ANYWHERE}"
    )

    def running() -> tuple[int, int]:
        pods = [p for p in namespace.admin.get("pods -l job-name=gang")["items"] if p["status"]["phase"] == "Running"]
        return len(pods), sum(int(p["spec"]["containers"][0]["resources"]["limits"]["nvidia.com/gpu"]) for p in pods)

    assert wait_for(lambda: running() == (NODES, 8 * NODES), 120 + NODES), running()
    run = namespace.admin.get("pytorchjob gang")
    assert run["spec"]["runPolicy"]["schedulingPolicy"]["minAvailable"] == NODES
    assert len(json.dumps(run)) < JOB_BYTES
    assert_load(before, count_requests(namespace.admin), NODES)
    namespace.admin.check("helm uninstall gang")


def test_many_workers_end(namespace: Namespace, simulated_nodes: str) -> None:
    before = count_requests(namespace.admin)
    namespace.install(
        f"many charts/dataset-extract --set storage.pvcName={simulated_nodes} --set dataset.inputPath=slimpajama"
        f" --set workers={WORKERS} {ANYWHERE}"
    )
    job = namespace.wait_for_job("many-extract", timeout=240 * max(1, WORKERS // 1000))
    assert job["status"]["succeeded"] == WORKERS
    assert job["status"]["completedIndexes"] == f"0-{WORKERS - 1}"
    assert len(json.dumps(job)) < JOB_BYTES
    assert_load(before, count_requests(namespace.admin), WORKERS)
    assert job["spec"]["template"]["spec"]["automountServiceAccountToken"] is False, "a pod must not use the API"
