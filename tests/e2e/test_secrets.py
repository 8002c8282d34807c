"""A planted token of the Hub is only in its Secret, after runs that succeed and fail, and not in their outputs."""

import base64
import gzip
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from e2e.cluster import CLAIM, Namespace, exit_code
from e2e.corpus import DATASET, MODEL

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
CORPUS = f"dataset.repo={DATASET}"
RUNS = {
    "good": (
        "download",
        "Complete",
        "hub",
        f"{CORPUS},dataset.outputPath=slimpajama,dataset.sampleFiles=12",
    ),
    "pairs": ("preprocess", "Complete", "hub", f"dataset.inputPath=slimpajama,tokenizer.name={MODEL}"),
    "stream": (
        "preprocess",
        "Complete",
        "hub",
        f"dataset.stream=true,{CORPUS},dataset.sampleFiles=4,dataset.root=streamed,tokenizer.name={MODEL}",
    ),
    "refused": (
        "download",
        "Failed",
        "hub",
        f"{CORPUS},dataset.outputPath=refused,dataset.split=validation",
    ),
    "wrong": ("download", "Failed", "wrong", f"{CORPUS},dataset.outputPath=wrong,dataset.sampleFiles=3"),
}
"""Releases: the stage, the expected end, the name of the Secret, and the settings."""


def job(release: str) -> str:
    stage = RUNS[release][0]
    return release if stage == "download" else f"{release}-{stage}"


@pytest.fixture(scope="module")
def helm_outputs(namespace: Namespace, hub_files: Path) -> dict[str, str]:
    """Run every release to its end; return the output of Helm."""
    for name, token in (("hub", TOKEN), ("wrong", WRONG)):
        namespace.user.check("kubectl apply -f -", json.dumps(secret(name, token)))
    namespace.start_hub(hub_files, SLOW_AND_BROKEN, token_secret="hub")
    outputs = {}
    for release, (stage, end, name, settings) in RUNS.items():
        line = f"{release} charts/dataset-{stage} {SETTINGS} --set hub.tokenSecret.name={name} --set {settings}"
        outputs[release] = namespace.install(line)
        namespace.wait_for_job(job(release), end)
        outputs[release] += namespace.user.check(f"helm upgrade {line} --dry-run=server")
    outputs["test"] = namespace.user.check("helm test pairs --timeout 120s --logs")
    return outputs


def secret(name: str, token: str) -> dict[str, Any]:
    return {"apiVersion": "v1", "kind": "Secret", "metadata": {"name": name}, "stringData": {"token": token}}


def places(namespace: Namespace, outputs: dict[str, str]) -> Iterator[tuple[str, bytes]]:
    """Yield everything that the releases left: Helm's output, all objects, logs, releases, and the volume."""
    user = namespace.user
    for release in RUNS:
        yield f"Helm's output for {release}", outputs[release].encode()
        yield f"helm get all {release}", user.check(f"helm get all {release}").encode()
        yield f"helm history {release}", user.check(f"helm history {release} -o yaml").encode()
    yield "output of helm test", outputs["test"].encode()
    kinds = user.check("kubectl api-resources --namespaced --verbs=list -o name").split()
    for kind in kinds:
        if kind != "secrets":
            # The role edit cannot read every kind; admin can.
            yield kind, namespace.admin.check(f"kubectl get {kind} -o yaml --show-managed-fields").encode()
    for kind in ("pods", "jobs", "events"):
        yield f"describe {kind}", namespace.admin.check(f"kubectl describe {kind}").encode()
    for pod in user.get("pods")["items"]:
        name = pod["metadata"]["name"]
        yield f"log of {name}", user.run(f"kubectl logs {name} --all-containers").out.encode()
    for item in user.get("secrets")["items"]:
        if item["metadata"]["name"] not in ("hub", "wrong"):
            for key, value in item["data"].items():
                yield f"secret {item['metadata']['name']} {key}", decode(base64.b64decode(value))
    for path in namespace.data.rglob("*"):
        yield str(path), path.read_bytes() if path.is_file() else b""


def decode(value: bytes) -> bytes:
    """Return a Secret's value; the value of a Helm release is compressed and encoded with base64 again."""
    try:
        return gzip.decompress(base64.b64decode(value, validate=True))
    except (ValueError, OSError):
        return value


@pytest.mark.every_change
def test_a_planted_token_is_only_in_its_secret(helm_outputs: dict[str, str], namespace: Namespace) -> None:
    forms = [
        form for token in (TOKEN, WRONG) for form in (token.encode(), base64.b64encode(token.encode()).rstrip(b"="))
    ]
    contents = dict(places(namespace, helm_outputs))
    leaks = [
        place for place, content in contents.items() if any(form in content or form in place.encode() for form in forms)
    ]
    assert leaks == []
    # Each place was searched: it has the content that it must have.
    assert b"secretKeyRef" in contents["jobs.batch"] and b"HF_TOKEN" in contents["pods"]
    assert b"exitCode: 2" in contents["pods"] and b"check that HF_TOKEN has read access" in contents["pods"], (
        "the termination messages"
    )
    assert b"Created pod" in contents["describe events"]
    for release in RUNS:
        assert b"tokenSecret" in contents[f"helm get all {release}"]
        assert b'"tokenSecret"' in contents[f"secret sh.helm.release.v1.{release}.v1 release"]
    logs = {place: content for place, content in contents.items() if place.startswith("log of ")}
    assert all(logs.values()) and len(logs) >= len(RUNS) + 2
    for part in ("plan.json", "manifest.json", "receipts"):
        assert [place for place in contents if "/.tokenmill/" in place and part in place]


def test_the_runs_ended_as_expected(helm_outputs: dict[str, str], namespace: Namespace) -> None:
    """The Hub required the token, and the errors of the failed runs contain the remedy."""
    outputs = {}
    for release, (_, end, _, _) in RUNS.items():
        (pod,) = namespace.pods(job(release))
        assert exit_code(pod) == (0 if end == "Complete" else 2)
        outputs[release] = namespace.logs(pod["metadata"]["name"])
    assert "refused the dataset" in outputs["wrong"] and "check that HF_TOKEN has read access" in outputs["wrong"]
    assert "5 times in a row; check that the file still exists in this revision of the source" in outputs["refused"]


def test_the_secret_contains_it(namespace: Namespace, helm_outputs: dict[str, str]) -> None:
    """The search can find the token: in the only place that has it, the same means find it."""
    value = namespace.user.get("secret hub")["data"]["token"]
    assert decode(base64.b64decode(value)) == TOKEN.encode()
