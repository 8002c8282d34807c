"""A token of the Hub, planted in a Secret, is nowhere else: runs that end well and badly, and all that they leave."""

import base64
import gzip
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from e2e.cluster import CLAIM, Namespace, exit_code
from e2e.corpus import DATASET

pytestmark = pytest.mark.e2e

TOKEN = "hf_PlantedInTheClusterAndNowhereElse0"
WRONG = "hf_PlantedAsWellAndRefusedByTheHub000"
SETTINGS = f"--set storage.pvcName={CLAIM} --set job.backoffLimitPerIndex=1"
SLOW_AND_BROKEN = [
    {"kind": "403", "path": "*_7.jsonl.zst", "where": "cdn"},
    {"kind": "drop", "path": "*_8.jsonl.zst", "where": "cdn"},
    {"kind": "429", "path": "*_9.jsonl.zst", "where": "resolve", "retry": "seconds"},
    {"kind": "401", "path": "validation/*", "where": "resolve", "times": None},
]
RUNS = {
    "good": ("download", "Complete", "hub", "dataset.outputPath=slimpajama,dataset.sampleFiles=12"),
    "pairs": ("preprocess", "Complete", "hub", "dataset.inputPath=slimpajama"),
    "stream": (
        "preprocess",
        "Complete",
        "hub",
        f"dataset.stream=true,dataset.repo={DATASET},dataset.sampleFiles=4,dataset.root=streamed",
    ),
    "refused": ("download", "Failed", "hub", "dataset.outputPath=refused,dataset.split=validation"),
    "wrong": ("download", "Failed", "wrong", "dataset.outputPath=wrong,dataset.sampleFiles=3"),
}
"""Releases: their stage, how they end, the Secret they name, and their settings."""


def job(release: str) -> str:
    stage = RUNS[release][0]
    return release if stage == "download" else f"{release}-{stage}"


@pytest.fixture(scope="module")
def ran(namespace: Namespace, hub_files: Path) -> dict[str, str]:
    """Let every release come to its end; return what Helm said meanwhile."""
    for name, token in (("hub", TOKEN), ("wrong", WRONG)):
        namespace.user.does("kubectl apply -f -", json.dumps(secret(name, token)))
    namespace.start_hub(hub_files, SLOW_AND_BROKEN, token_secret="hub")
    said = {}
    for release, (stage, end, name, settings) in RUNS.items():
        line = f"{release} charts/dataset-{stage} {SETTINGS} --set hub.tokenSecret.name={name} --set {settings}"
        said[release] = namespace.install(line)
        namespace.wait_for_job(job(release), end)
        said[release] += namespace.user.does(f"helm upgrade {line} --dry-run=server")
    said["test"] = namespace.user.does("helm test pairs --timeout 120s --logs")
    return said


def secret(name: str, token: str) -> dict[str, Any]:
    return {"apiVersion": "v1", "kind": "Secret", "metadata": {"name": name}, "stringData": {"token": token}}


def places(namespace: Namespace, said: dict[str, str]) -> Iterator[tuple[str, bytes]]:
    """Yield all that the releases left: what was said, every object, logs, releases, and the whole volume."""
    user = namespace.user
    for release in RUNS:
        yield f"what Helm said of {release}", said[release].encode()
        yield f"helm get all {release}", user.does(f"helm get all {release}").encode()
        yield f"helm history {release}", user.does(f"helm history {release} -o yaml").encode()
    yield "what helm test said", said["test"].encode()
    kinds = user.does("kubectl api-resources --namespaced --verbs=list -o name").split()
    for kind in kinds:
        if kind != "secrets":
            # The role edit may not see every kind; admin may.
            yield kind, namespace.admin.does(f"kubectl get {kind} -o yaml --show-managed-fields").encode()
    for kind in ("pods", "jobs", "events"):
        yield f"describe {kind}", namespace.admin.does(f"kubectl describe {kind}").encode()
    for pod in user.get("pods")["items"]:
        name = pod["metadata"]["name"]
        yield f"log of {name}", user.run(f"kubectl logs {name} --all-containers").out.encode()
    for found in user.get("secrets")["items"]:
        if found["metadata"]["name"] not in ("hub", "wrong"):
            for key, value in found["data"].items():
                yield f"secret {found['metadata']['name']} {key}", decoded(base64.b64decode(value))
    for path in namespace.data.rglob("*"):
        yield str(path), path.read_bytes() if path.is_file() else b""


def decoded(value: bytes) -> bytes:
    """Return a Secret's value; a release of Helm's is compressed and in base64 once more."""
    try:
        return gzip.decompress(base64.b64decode(value, validate=True))
    except (ValueError, OSError):
        return value


def test_a_planted_token_is_nowhere_but_in_its_secret(ran: dict[str, str], namespace: Namespace) -> None:
    forms = [
        form for token in (TOKEN, WRONG) for form in (token.encode(), base64.b64encode(token.encode()).rstrip(b"="))
    ]
    seen = dict(places(namespace, ran))
    told = [
        place for place, content in seen.items() if any(form in content or form in place.encode() for form in forms)
    ]
    assert told == []
    # That each place was looked into: what must be there is.
    assert b"secretKeyRef" in seen["jobs.batch"] and b"HF_TOKEN" in seen["pods"]
    assert b"exitCode: 2" in seen["pods"] and b"check that HF_TOKEN has read access" in seen["pods"], "the termination messages"
    assert b"Created pod" in seen["describe events"]
    for release in RUNS:
        assert b"tokenSecret" in seen[f"helm get all {release}"]
        assert b'"tokenSecret"' in seen[f"secret sh.helm.release.v1.{release}.v1 release"]
    logs = {place: content for place, content in seen.items() if place.startswith("log of ")}
    assert all(logs.values()) and len(logs) >= len(RUNS) + 2
    for part in ("plan.json", "manifest.json", "receipts"):
        assert [place for place in seen if "/.tokenmill/" in place and part in place]


def test_the_runs_ended_as_they_were_meant_to(ran: dict[str, str], namespace: Namespace) -> None:
    """The token was needed, and what the failed ones say names the remedy."""
    said = {}
    for release, (_, end, _, _) in RUNS.items():
        (pod,) = namespace.pods(job(release))
        assert exit_code(pod) == (0 if end == "Complete" else 2)
        said[release] = namespace.logs(pod["metadata"]["name"])
    assert "refused the dataset" in said["wrong"] and "check that HF_TOKEN has read access" in said["wrong"]
    assert "5 times in a row; check that the file still exists in this revision of the source" in said["refused"]


def test_a_secret_holds_it(namespace: Namespace, ran: dict[str, str]) -> None:
    """The search would find it: the one place where it is, is found by the same means."""
    value = namespace.user.get("secret hub")["data"]["token"]
    assert decoded(base64.b64decode(value)) == TOKEN.encode()
