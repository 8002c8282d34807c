"""The security settings of all pods of all charts, and a scanner's findings."""

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from support.rendering import ROOT
from support.representative import DIGEST, EVERY_PART, WITHOUT_PODS, pod_specs, renders

CHECKOV = ROOT / ".venv-scan/bin/checkov"
EXCEPTIONS = yaml.safe_load((Path(__file__).parent / "checkov.yaml").read_text())
OWN_POD_KINDS = ("Pod", "Job", "Deployment")
"""Kinds whose pods checkov checks itself."""


@pytest.fixture(scope="module")
def rendered() -> dict[str, list[dict[str, Any]]]:
    return dict(renders())


def test_no_pod_of_any_chart_gets_a_token_of_the_api_server(rendered: dict[str, list[dict[str, Any]]]) -> None:
    for name, documents in rendered.items():
        specs = list(pod_specs(documents))
        accounts = [document for document in documents if document["kind"] == "ServiceAccount"]
        assert bool(specs) != name.startswith(WITHOUT_PODS)
        for thing in [*specs, *accounts]:
            assert thing["automountServiceAccountToken"] is False, name
    kinds = {document["kind"] for documents in rendered.values() for document in documents}
    assert kinds >= {"Pod", "Job", "Deployment", "PyTorchJob", "JobSet", "TrainingRuntime", "ServiceAccount"}


def test_the_hubs_token_goes_to_the_stage_and_not_to_helm_test(rendered: dict[str, list[dict[str, Any]]]) -> None:
    jobs_with_token = 0
    for name, documents in rendered.items():
        for document in documents:
            text = json.dumps(document)
            if document["kind"] in ("Job", "JobSet") and name.startswith("dataset-") and name.endswith("-every-part"):
                assert '{"secretKeyRef": {"name": "hub", "key": "token"}}' in text
                jobs_with_token += 1
            else:
                assert "secretKeyRef" not in text, f"{name}: {document['kind']}"
    assert jobs_with_token >= 5


def test_every_pod_of_every_chart_is_pinned_where_a_digest_is_given(rendered: dict[str, list[dict[str, Any]]]) -> None:
    for name, documents in rendered.items():
        for spec in pod_specs(documents):
            for container in spec["containers"]:
                assert container["image"].endswith(f"@{DIGEST}"), name


def test_every_pod_of_every_chart_has_its_network_policy(rendered: dict[str, list[dict[str, Any]]]) -> None:
    """Exactly one policy selects each pod template by its labels, and every policy selects a template."""
    checked = 0
    for name, documents in rendered.items():
        policies = [document for document in documents if document["kind"] == "NetworkPolicy"]
        if not policies:
            continue
        selectors = [policy["spec"]["podSelector"]["matchLabels"] for policy in policies]
        matched = set()
        for labels in _pod_labels(documents):
            (number,) = [i for i, selector in enumerate(selectors) if selector.items() <= labels.items()]
            matched.add(number)
        assert matched == set(range(len(selectors))), name
        checked += 1
    with_pods = {name for name, documents in rendered.items() if list(pod_specs(documents))}
    assert (
        checked == sum(name.endswith(("-every-part", "-pytorchjob", "-jobset", "-trainjob")) for name in with_pods) > 0
    )
    assert EVERY_PART["networkPolicy.enabled"] == "true"


def _pod_labels(documents: list[dict[str, Any]]) -> list[dict[str, str]]:
    all_labels: list[dict[str, str]] = []

    def walk(thing: Any) -> None:
        if isinstance(thing, list):
            for item in thing:
                walk(item)
        elif isinstance(thing, dict):
            if isinstance(thing.get("spec"), dict) and "containers" in thing["spec"]:
                all_labels.append(thing["metadata"]["labels"])
            for item in thing.values():
                walk(item)

    walk(documents)
    return all_labels


def test_a_scanner_finds_only_explained_exceptions(rendered: dict[str, list[dict[str, Any]]], tmp_path: Path) -> None:
    assert CHECKOV.exists(), "checkov is not installed: run make .venv/.installed-scan"
    for name, documents in rendered.items():
        # checkov supports only the usual kinds: the pods of other kinds are added as Pods.
        pods = [
            {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": f"{document['kind'].lower()}-{i}"}, "spec": spec}
            for document in documents
            if document["kind"] not in OWN_POD_KINDS
            for i, spec in enumerate(pod_specs(document))
        ]
        (tmp_path / f"{name}.yaml").write_text(yaml.safe_dump_all([*documents, *pods]))
    command = [CHECKOV, "--directory", tmp_path, "--framework", "kubernetes", "--skip-download", "--output", "json"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    report = json.loads(done.stdout)
    assert report["summary"]["parsing_errors"] == 0
    scanned = {Path(check["file_path"]).stem for check in report["results"]["passed_checks"]}
    assert scanned >= {name for name, documents in rendered.items() if list(pod_specs(documents))}
    allowed = {(entry["check"], kind): entry for entry in EXCEPTIONS for kind in entry["kinds"]}
    used, new = set(), []
    for finding in report["results"]["failed_checks"]:
        kind = finding["resource"].partition(".")[0]
        exception = allowed.get((finding["check_id"], kind))
        if exception and exception["name"] == finding["check_name"] and exception["why"]:
            used.add((finding["check_id"], kind))
        else:
            new.append(
                f"{finding['check_id']} {finding['check_name']}: {finding['resource']} of {finding['file_path']}"
            )
    assert not new, "\n".join(new)
    assert used == allowed.keys(), f"exceptions without a finding: {allowed.keys() - used}"
