"""Queues of Kueue for the tests: a ClusterQueue of a namespace's own, and the state of its workloads."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from e2e.cluster import Namespace, conditions, node_name, wait_for

QUEUE = "team"
GPU = "tokenmill.example/gpu"
"""A resource that only these tests use, so that no other pod competes for it, and no device is needed."""

PRIORITIES = {"low": 10, "high": 20, "top": 30}
API = "kueue.x-k8s.io/v1beta2"


@contextmanager
def queue(namespace: Namespace, quota: dict[str, str]) -> Iterator[None]:
    """Make a queue of this namespace with a quota, and a priority class for each entry of PRIORITIES."""
    name = namespace.name
    advertise(namespace, quota[GPU])
    resources = [{"name": resource, "nominalQuota": amount} for resource, amount in quota.items()]
    spec = {
        "namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": name}},
        "preemption": {"withinClusterQueue": "LowerPriority"},
        "resourceGroups": [{"coveredResources": [*quota], "flavors": [{"name": name, "resources": resources}]}],
    }
    # As for a pool of nodes with a taint: Kueue adds both to the pods.
    flavor = {
        "nodeLabels": {"kubernetes.io/os": "linux"},
        "tolerations": [{"key": "spot", "operator": "Exists", "effect": "NoSchedule"}],
    }
    objects = [thing("ResourceFlavor", name, spec=flavor), thing("ClusterQueue", name, spec=spec)]
    objects += [thing("WorkloadPriorityClass", f"{name}-{key}", value=value) for key, value in PRIORITIES.items()]
    namespace.admin.apply(*objects, thing("LocalQueue", QUEUE, spec={"clusterQueue": name}))
    try:
        yield
    finally:
        for item in reversed(objects):  # the namespace and its workloads are deleted later
            namespace.admin.run(f"kubectl delete --wait=false {item['kind']} {item['metadata']['name']}")


def thing(kind: str, name: str, **content: Any) -> dict[str, Any]:
    """Return an object of Kueue."""
    return {"apiVersion": API, "kind": kind, "metadata": {"name": name}, **content}


def advertise(namespace: Namespace, amount: str) -> None:
    """Let the node offer GPU: the scheduler counts it, and no container gets a device."""
    node = node_name(namespace.admin)
    escaped = GPU.replace("/", "~1")
    patch = [
        {"op": "add", "path": f"/status/{section}/{escaped}", "value": amount}
        for section in ("capacity", "allocatable")
    ]
    patch_text = json.dumps(patch)
    namespace.admin.check(f"kubectl patch node {node} --subresource=status --type=json -p '{patch_text}'")


def settings(namespace: Namespace, priority: str) -> str:
    """Return values that put a release into the queue."""
    return f"--set kueue.queueName={QUEUE},kueue.priorityClass={namespace.name}-{priority}"


def workload(namespace: Namespace, owner: str) -> dict[str, Any] | None:
    """Return the workload of an object with this name, None before Kueue has made it."""
    for item in namespace.admin.get("workloads.kueue.x-k8s.io")["items"]:
        owners = item["metadata"].get("ownerReferences", [])
        if any(reference["name"] == owner for reference in owners):
            found: dict[str, Any] = item
            return found
    return None


def is_admitted(namespace: Namespace, owner: str) -> bool:
    """Return whether the workload of an object is admitted."""
    item = workload(namespace, owner)
    return item is not None and "Admitted" in conditions(item)


def wait_until_admitted(namespace: Namespace, owner: str, timeout: float = 120) -> None:
    """Wait until Kueue admits an object."""
    assert wait_for(lambda: is_admitted(namespace, owner), timeout), describe(namespace)


def wait_until_preempted(namespace: Namespace, owner: str, timeout: float = 120) -> None:
    """Wait until Kueue has preempted an object."""

    def is_preempted() -> bool:
        item = workload(namespace, owner)
        return item is not None and "Admitted" not in conditions(item) and "Evicted" in conditions(item)

    assert wait_for(is_preempted, timeout), describe(namespace)


def describe(namespace: Namespace) -> str:
    """Describe all workloads."""
    lines = []
    for item in namespace.admin.get("workloads.kueue.x-k8s.io")["items"]:
        lines.append(f"{item['metadata']['name']}: {json.dumps(item.get('status', {}))}")
    return "\n".join(lines)
