"""Network policies and disruption budgets: a real API server accepts them, and a budget refuses an eviction.

The cluster's network plugin enforces the policies; other tests check the rendered rules.
"""

import json

import pytest

from e2e.cluster import CLAIM, Namespace
from e2e.training import Training, make_dataset

pytestmark = pytest.mark.e2e

ENABLED = "--set networkPolicy.enabled=true,podDisruptionBudget.enabled=true"


@pytest.mark.parametrize("engine", ["pytorchjob", "jobset"])
def test_the_server_accepts_the_policies_of_a_run(namespace: Namespace, engine: str) -> None:
    line = f"helm template run charts/megatron-training --set storage.pvcName={CLAIM} --set engine={engine} {ENABLED}"
    line += " --set training.nodes=2 --set dataset.buildIndex.enabled=true"
    line += """ --set-json 'networkPolicy.egress=[{"to":[{"ipBlock":{"cidr":"10.0.0.0/8"}}],"ports":[{"port":443}]}]'"""
    line += """ --set-json 'tensorboard.allowFrom=[{"namespaceSelector":{"matchLabels":{"team":"a"}}}]'"""
    applied = namespace.admin.run("kubectl apply --dry-run=server -f -", namespace.admin.check(line))
    assert applied.code == 0, applied.err
    assert "unknown field" not in applied.err
    assert applied.out.count("networkpolicy.networking.k8s.io/") == 4
    assert applied.out.count("poddisruptionbudget.policy/") == 1


def test_a_budget_keeps_every_pod_of_a_run(namespace: Namespace, tmp_path_factory: pytest.TempPathFactory) -> None:
    make_dataset(namespace, tmp_path_factory.mktemp("dataset"))
    run = Training(namespace, "kept")
    run.install(100_000, ENABLED, "--set training.saveInterval=5", step=0.2)
    run.wait_for_iteration(5)
    budget = namespace.admin.get("poddisruptionbudget kept")
    assert budget["status"]["currentHealthy"] == budget["status"]["desiredHealthy"] == 2, budget
    before = {pod["metadata"]["uid"] for pod in run.pods()}
    for name in ("kept-master-0", "kept-worker-0"):
        eviction = {
            "apiVersion": "policy/v1",
            "kind": "Eviction",
            "metadata": {"name": name, "namespace": namespace.name},
        }
        path = f"/api/v1/namespaces/{namespace.name}/pods/{name}/eviction"
        refused = namespace.admin.run(f"kubectl create --raw {path} -f -", json.dumps(eviction))
        assert refused.code != 0 and "violate the pod's disruption budget" in refused.err, refused
    assert {pod["metadata"]["uid"] for pod in run.pods()} == before
    namespace.admin.check("kubectl delete poddisruptionbudget kept")
    run.evict("kept-worker-0")
    namespace.admin.check("helm uninstall kept")
