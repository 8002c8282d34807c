"""Spot nodes: the overlays select them for all pods of a stage or run, and `master` places node 0 of a PyTorchJob.

Only training pods tolerate the taint of nodes with GPUs.
"""

import json
from typing import Any

import pytest
import yaml

from support.rendering import ROOT, helm

TOLERATIONS = [{"key": "pool", "operator": "Exists"}]
LABELS = {
    "aks-spot": [("kubernetes.azure.com/scalesetpriority", "spot")],
    "eks-spot": [("eks.amazonaws.com/capacityType", "SPOT"), ("karpenter.sh/capacity-type", "spot")],
}


def template(chart: str, *arguments: str) -> list[dict[str, Any]]:
    done = helm("template", "r", ROOT / "charts" / chart, "--set", "storage.pvcName=claim", *arguments)
    assert done.returncode == 0, done.stderr
    return [document for document in yaml.safe_load_all(done.stdout) if document]


def pods(documents: list[dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """Return the pod specs of the Job of a stage, or of the replicas of a PyTorchJob."""
    specs = {}
    for document in documents:
        if document["kind"] == "Job":
            specs["Job"] = document["spec"]["template"]["spec"]
        if document["kind"] == "PyTorchJob" and "name" in document["metadata"]:
            for name, replica in document["spec"]["pytorchReplicaSpecs"].items():
                specs[name] = replica["template"]["spec"]
    return specs


def selected(pod: dict[str, Any]) -> list[tuple[str, str]]:
    """Return the labels and values that the affinity of a pod accepts."""
    affinity = pod["affinity"]["nodeAffinity"]["requiredDuringSchedulingIgnoredDuringExecution"]
    expressions = [expression for term in affinity["nodeSelectorTerms"] for expression in term["matchExpressions"]]
    return [(expression["key"], *expression["values"]) for expression in expressions]


@pytest.mark.parametrize("overlay", LABELS)
@pytest.mark.parametrize(
    ("chart", "arguments", "names"),
    [
        ("dataset-extract", ["--set", "dataset.inputPath=corpus"], {"Job"}),
        ("megatron-training", ["--set", "training.nodes=2"], {"Master", "Worker"}),
    ],
    ids=["stage", "training"],
)
def test_an_overlay_selects_spot_nodes_and_tolerates_their_taint(
    overlay: str, chart: str, arguments: list[str], names: set[str]
) -> None:
    specs = pods(template(chart, *arguments, "-f", str(ROOT / f"values/clusters/{overlay}.yaml")))
    assert specs.keys() == names
    for pod in specs.values():
        assert selected(pod) == LABELS[overlay]
        tolerated = {(item["key"], item.get("value")) for item in pod["tolerations"]}
        assert tolerated >= set(LABELS[overlay])
        assert (("nvidia.com/gpu", None) in tolerated) == (chart == "megatron-training")


@pytest.mark.parametrize(
    ("values", "tolerations"),
    [
        ([], [{"key": "nvidia.com/gpu", "operator": "Exists", "effect": "NoSchedule"}]),
        (["gpu.resource=amd.com/gpu"], [{"key": "amd.com/gpu", "operator": "Exists", "effect": "NoSchedule"}]),
        (["gpu.resource="], None),
        (["tolerations[0].operator=Exists"], [{"operator": "Exists"}]),
        (["tolerations[0].key=nvidia.com/gpu"], [{"key": "nvidia.com/gpu"}]),
    ],
)
def test_training_pods_tolerate_the_taint_of_their_gpus(values: list[str], tolerations: list[Any] | None) -> None:
    arguments = [part for value in values for part in ("--set", value)]
    assert pods(template("megatron-training", *arguments))["Master"].get("tolerations") == tolerations


def test_master_places_node_0_alone() -> None:
    master = {"nodeSelector": {"agentpool": "gpu"}, "tolerations": TOLERATIONS, "affinity": {}}
    master["priorityClassName"] = "high"
    overlay = str(ROOT / "values/clusters/aks-spot.yaml")
    arguments = ["--set", "training.nodes=2,nodeSelector.zone=one", "-f", overlay]
    specs = pods(template("megatron-training", *arguments, "--set-json", f"master={json.dumps(master)}"))
    assert specs["Master"]["nodeSelector"] == {"agentpool": "gpu"}, "it replaces the values of all pods"
    assert specs["Master"]["tolerations"] == TOLERATIONS
    assert "affinity" not in specs["Master"] and specs["Master"]["priorityClassName"] == "high"
    assert specs["Worker"]["nodeSelector"] == {"zone": "one"} and selected(specs["Worker"]) == LABELS["aks-spot"]
    assert "priorityClassName" not in specs["Worker"]
    unchanged = pods(template("megatron-training", *arguments))
    assert unchanged["Master"] == unchanged["Worker"]


@pytest.mark.parametrize("engine", ["jobset", "trainjob"])
def test_master_is_refused_with_other_engines(engine: str) -> None:
    done = helm(
        *("template", "r", ROOT / "charts/megatron-training", "--set", f"storage.pvcName=claim,engine={engine}"),
        *("--set", "master.priorityClassName=high"),
    )
    assert done.returncode != 0
    assert f"master.priorityClassName works only with engine=pytorchjob, but engine={engine}" in done.stderr
