"""notify of the charts: the variables, token, Role and network policy of pods that announce their end."""

import json
from typing import Any

import pytest
import yaml

from support.rendering import ROOT, helm

CLAIM = {"storage.pvcName": "claim"}
WORKLOADS = {
    "dataset-extract": ({"dataset.inputPath": "corpus"}, "batch/v1/Job/$(TOKENMILL_OBJECT_NAME)"),
    "dataset-pipeline": (
        {"dataset.root": "corpus", "dataset.repo": "org/name", "preprocess.tokenizer.name": "gpt2"},
        "jobset.x-k8s.io/v1alpha2/JobSet/$(TOKENMILL_OBJECT_NAME)",
    ),
    "pytorchjob": ({"engine": "pytorchjob"}, "kubeflow.org/v1/PyTorchJob/r"),
    "jobset": ({"engine": "jobset"}, "jobset.x-k8s.io/v1alpha2/JobSet/r"),
    "trainjob": ({"engine": "trainjob"}, "trainer.kubeflow.org/v1alpha1/TrainJob/r"),
}
TRAINING = ("pytorchjob", "jobset", "trainjob")
RESOURCES = {
    "dataset-extract": ("batch", "jobs", "r-extract"),
    "dataset-pipeline": ("jobset.x-k8s.io", "jobsets", "r"),
    "pytorchjob": ("kubeflow.org", "pytorchjobs", "r"),
    "jobset": ("jobset.x-k8s.io", "jobsets", "r"),
    "trainjob": ("trainer.kubeflow.org", "trainjobs", "r"),
}


def template(name: str, **values: str) -> tuple[list[dict[str, Any]], str]:
    """Render a chart; return its documents and the message of an error."""
    chart = "megatron-training" if name in TRAINING else name
    all_values = CLAIM | WORKLOADS[name][0] | {key.replace("__", "."): value for key, value in values.items()}
    flags = [part for key, value in all_values.items() for part in ("--set", f"{key}={value}")]
    done = helm("template", "r", ROOT / "charts" / chart, "--namespace", "team", *flags)
    documents = list(filter(None, yaml.safe_load_all(done.stdout))) if done.returncode == 0 else []
    return documents, done.stderr


def of_kind(documents: list[dict[str, Any]], *kinds: str) -> list[dict[str, Any]]:
    return [document for document in documents if document["kind"] in kinds]


def containers(value: Any) -> list[dict[str, Any]]:
    """Return all pod specs in a value."""
    if isinstance(value, list):
        return [spec for item in value for spec in containers(item)]
    if not isinstance(value, dict):
        return []
    return ([value] if "containers" in value else []) + [spec for item in value.values() for spec in containers(item)]


def work_pods(documents: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the pod specs of stages and runs, without those of tests and TensorBoard."""
    kinds = ("Job", "JobSet", "PyTorchJob", "TrainingRuntime")
    return containers([document for document in of_kind(documents, *kinds) if "name" in document["metadata"]])


def variables(pod: dict[str, Any]) -> dict[str, Any]:
    return {entry["name"]: entry.get("value", entry.get("valueFrom")) for entry in pod["containers"][0]["env"]}


@pytest.mark.parametrize("name", WORKLOADS)
def test_an_address_from_a_secret(name: str) -> None:
    documents, error = template(name, notify__urlSecret__name="notify", notify__template="slack")
    assert documents, error
    pods = work_pods(documents)
    assert pods
    for pod in pods:
        env = variables(pod)
        reference = {"name": "notify", "key": "url", "optional": True}
        assert env["TOKENMILL_NOTIFY_URL"] == {"secretKeyRef": reference}
        assert env["TOKENMILL_NOTIFY_TEMPLATE"] == "slack"
        assert env["TOKENMILL_NOTIFY_OBJECT"] == WORKLOADS[name][1] and env["TOKENMILL_NAMESPACE"] == "team"
        assert ("TOKENMILL_MAX_FAILURES" in env) == (name not in TRAINING)
        assert "TOKENMILL_NOTIFY_API" not in env and "events" not in json.dumps(pod["volumes"])
    assert not of_kind(documents, "Role", "RoleBinding", "ServiceAccount")


@pytest.mark.parametrize("name", WORKLOADS)
def test_an_event_needs_a_token_and_a_role(name: str) -> None:
    documents, error = template(name, notify__event="true")
    assert documents, error
    for pod in work_pods(documents):
        assert variables(pod)["TOKENMILL_NOTIFY_API"] == "/var/run/secrets/tokenmill"
        assert "TOKENMILL_NOTIFY_URL" not in variables(pod)
        (volume,) = (volume for volume in pod["volumes"] if volume["name"] == "events")
        assert [*volume["projected"]["sources"][0]] == ["serviceAccountToken"]
        assert pod["automountServiceAccountToken"] is False and pod["serviceAccountName"] == "r"
    (role,) = of_kind(documents, "Role")
    group, resource, target = RESOURCES[name]
    assert role["rules"] == [
        {"apiGroups": [""], "resources": ["events"], "verbs": ["create"]},
        {"apiGroups": [group], "resources": [resource], "resourceNames": [target], "verbs": ["get"]},
    ]
    (binding,) = of_kind(documents, "RoleBinding")
    assert binding["subjects"] == [{"kind": "ServiceAccount", "name": "r", "namespace": "team"}]
    (account,) = of_kind(documents, "ServiceAccount")
    assert account["metadata"]["name"] == "r" and account["automountServiceAccountToken"] is False
    others = [pod for pod in containers(documents) if pod not in work_pods(documents)]
    assert others and all("events" not in [volume["name"] for volume in pod["volumes"]] for pod in others)


def test_an_account_of_the_user_gets_the_role_or_has_it() -> None:
    documents, _ = template("dataset-extract", notify__event="true", serviceAccount__name="mine")
    assert not of_kind(documents, "ServiceAccount")
    (binding,) = of_kind(documents, "RoleBinding")
    assert binding["subjects"][0]["name"] == "mine"
    documents, _ = template(
        "dataset-extract", notify__event="true", serviceAccount__name="mine", notify__createRole="false"
    )
    assert not of_kind(documents, "ServiceAccount", "Role", "RoleBinding")
    assert {pod["serviceAccountName"] for pod in work_pods(documents)} == {"mine"}


def test_without_notify_a_pod_has_no_trace_of_it() -> None:
    for name in WORKLOADS:
        documents, error = template(name)
        assert documents, error
        assert "TOKENMILL_NOTIFY" not in json.dumps(documents) and "events" not in json.dumps(documents), name


@pytest.mark.parametrize("name", ["dataset-extract", "pytorchjob"])
@pytest.mark.parametrize(
    ("values", "ports"),
    [
        ({"notify__url": "http://receiver.team:8080/x"}, [53, 53, 8080]),
        ({"notify__url": "http://receiver.team/x"}, [53, 53, 80]),
        ({"notify__url": "https://receiver.team/x"}, [53, 53, 443]),
        ({"notify__urlSecret__name": "notify"}, [53, 53, 443]),
        ({"notify__event": "true"}, [53, 53, 443, 6443]),
    ],
    ids=["port", "http", "https", "secret", "event"],
)
def test_the_network_policy_allows_the_receiver(name: str, values: dict[str, str], ports: list[int]) -> None:
    documents, error = template(name, networkPolicy__enabled="true", **values)
    assert documents, error
    policy = next(
        item for item in of_kind(documents, "NetworkPolicy") if item["metadata"]["name"] in ("r", "r-extract")
    )
    rules = [port for rule in policy["spec"]["egress"] for port in rule.get("ports", [])]
    assert [port["port"] for port in rules] == ports


@pytest.mark.parametrize(
    "url",
    [
        "https://hooks.slack.com/services/T0/B0/x",
        "https://team.webhook.office.com/webhookb2/x",
        "https://receiver.team/hook?sig=abc",
        "https://receiver.team/0123456789abcdefghijklmnop",
    ],
    ids=["slack", "teams", "signature", "random-path"],
)
def test_a_secret_address_must_be_in_a_secret(url: str) -> None:
    documents, error = template("dataset-extract", notify__url=url)
    assert (
        not documents
        and "notify.url contains the URL of a webhook" in error
        and "--set notify.urlSecret.name=notify" in error
    )
    assert url not in error


def test_two_addresses_are_refused() -> None:
    _, error = template("pytorchjob", notify__url="http://receiver.team/x", notify__urlSecret__name="notify")
    assert "notify.url and notify.urlSecret.name are both set" in error
