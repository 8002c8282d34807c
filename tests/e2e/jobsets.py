"""The JobSets of pipelines: their ends, their pods, and a description of their state."""

from typing import Any

from e2e.cluster import Namespace, describe_pod, wait_for


def jobset(namespace: Namespace, name: str) -> dict[str, Any]:
    result: dict[str, Any] = namespace.user.get(f"jobset {name}")
    return result


def wait_for_end(namespace: Namespace, name: str, timeout: float = 300) -> dict[str, Any]:
    """Wait until a JobSet has ended, and return it."""

    def find_ended() -> dict[str, Any] | None:
        current = jobset(namespace, name)
        return current if current.get("status", {}).get("terminalState") else None

    result: dict[str, Any] | None = wait_for(find_ended, timeout)
    assert result, describe(namespace, name)
    return result


def describe(namespace: Namespace, name: str) -> str:
    """Describe the state of a JobSet and its pods."""
    lines = [f"jobset {name}: {jobset(namespace, name).get('status')}"]
    for pod in pods_of(namespace, name):
        lines += [describe_pod(pod), namespace.logs(pod["metadata"]["name"])[-1500:]]
    return "\n".join(lines)


def pods_of(namespace: Namespace, name: str) -> list[dict[str, Any]]:
    items: list[dict[str, Any]] = namespace.user.get(f"pods -l jobset.sigs.k8s.io/jobset-name={name}")["items"]
    return items


def stage_of(pod: dict[str, Any]) -> str:
    stage: str = pod["metadata"]["labels"]["app.kubernetes.io/component"]
    return stage
