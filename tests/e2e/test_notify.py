"""Announcements on a cluster: an Event that `kubectl describe` shows, and a request to a webhook in a pod."""

import json
from collections.abc import Iterator
from typing import Any

import pytest

from e2e.cluster import CLAIM, CONFINED, IMAGE, RESTRICTED, Namespace, wait_for
from e2e.corpus import shard
from e2e.relay import relaying

pytestmark = pytest.mark.e2e

PROGRAM = """
import http.server
class Handler(http.server.BaseHTTPRequestHandler):
    def do_POST(self):
        body = self.rfile.read(int(self.headers["Content-Length"]))
        print("received", self.path, body.decode(), flush=True)
        self.send_response(200)
        self.send_header("Content-Length", "0")
        self.end_headers()
    def log_message(self, *arguments):
        pass
http.server.HTTPServer(("", 8080), Handler).serve_forever()
"""
SMALL = "--set resources.requests.cpu=50m,resources.requests.memory=128Mi"


@pytest.fixture(scope="module")
def relay(namespace: Namespace, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Return the arguments of Helm with which the pods reach the API server."""
    with relaying(namespace, tmp_path_factory.mktemp("relay")) as arguments:
        yield arguments


@pytest.fixture(scope="module")
def receiver(namespace: Namespace) -> str:
    """Run a receiver in a pod, and put its address into a Secret; return the name of the pod."""
    container = {
        "name": "receiver",
        "image": IMAGE,
        "command": ["python", "-c", PROGRAM],
        "securityContext": CONFINED,
        "readinessProbe": {"tcpSocket": {"port": 8080}, "periodSeconds": 1},
    }
    spec = {
        "containers": [container],
        "securityContext": RESTRICTED,
        "automountServiceAccountToken": False,
        "terminationGracePeriodSeconds": 2,
    }
    metadata = {"name": "receiver", "labels": {"app": "receiver"}}
    service = {"clusterIP": "None", "selector": {"app": "receiver"}, "ports": [{"port": 8080}]}
    namespace.user.apply(
        {"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": spec},
        {"apiVersion": "v1", "kind": "Service", "metadata": {"name": "receiver"}, "spec": service},
    )
    namespace.user.check("kubectl wait --for=condition=Ready pod/receiver --timeout=60s")
    url = "http://receiver:8080/services/planted-secret"
    namespace.user.check("kubectl create secret generic notify --from-file=url=/dev/stdin", url)
    return "receiver"


def received(namespace: Namespace, subject: str) -> list[dict[str, Any]]:
    """Return the messages that the receiver got about a subject."""
    lines = [line for line in namespace.logs("receiver").splitlines() if line.startswith("received ")]
    messages = [json.loads(line.split(" ", 2)[2]) for line in lines]
    return [message for message in messages if message["object"].endswith(f"/{subject}")]


def test_a_success_is_announced_to_both_receivers(namespace: Namespace, receiver: str, relay: str) -> None:
    write_corpus(namespace, "corpus")
    # The admin installs: the role edit may not create Roles.
    namespace.admin.check(
        f"helm install good charts/dataset-concatenate --set storage.pvcName={CLAIM} --set dataset.inputPath=corpus"
        f" --set workers=2,dataset.targetFiles=2 {SMALL}"
        f" --set notify.urlSecret.name=notify,notify.event=true{relay}"
    )
    namespace.wait_for_job("good-concatenate")
    (message,) = wait_for(lambda: received(namespace, "good-concatenate")) or [None]
    assert message, namespace.describe("good-concatenate")
    assert (message["outcome"], message["subject"]) == ("succeeded", "concatenate")
    assert message["namespace"] == namespace.name and message["object"] == "batch/v1/Job/good-concatenate"
    described = namespace.user.check("kubectl describe job good-concatenate")
    logs = [namespace.logs(pod["metadata"]["name"]) for pod in namespace.pods("good-concatenate")]
    assert "concatenate succeeded: concatenate: complete, 2 files" in described, [described, *logs]
    text = namespace.user.check("kubectl get jobs,pods,configmaps,events -o json") + namespace.describe(
        "good-concatenate"
    )
    assert "planted-secret" not in text


def test_the_failure_of_all_workers_is_announced_once(namespace: Namespace, receiver: str, relay: str) -> None:
    namespace.admin.check(
        f"helm install bad charts/dataset-concatenate --set storage.pvcName={CLAIM} --set dataset.inputPath=missing"
        f" --set dataset.outputPath=bad --set workers=4 {SMALL}"
        f" --set notify.urlSecret.name=notify,notify.event=true{relay}"
    )
    namespace.wait_for_job("bad-concatenate", "Failed")
    assert [message["outcome"] for message in received(namespace, "bad-concatenate")] == ["failed"]
    events = namespace.user.get("events --field-selector source=tokenmill,involvedObject.name=bad-concatenate")["items"]
    assert [(event["type"], event["reason"]) for event in events] == [("Warning", "Failed")]
    assert events[0]["involvedObject"]["uid"] == namespace.job("bad-concatenate")["metadata"]["uid"]


def test_a_missing_secret_does_not_stop_a_stage(namespace: Namespace) -> None:
    write_corpus(namespace, "other")
    namespace.install(
        f"unheard charts/dataset-concatenate --set storage.pvcName={CLAIM} --set dataset.inputPath=other"
        f" --set dataset.targetFiles=1 {SMALL} --set notify.urlSecret.name=missing,checkCluster=false"
    )
    namespace.wait_for_job("unheard-concatenate")
    (pod,) = namespace.pods("unheard-concatenate")
    assert "the end will not be announced" in namespace.logs(pod["metadata"]["name"])


def write_corpus(namespace: Namespace, name: str) -> None:
    directory = namespace.data / name
    directory.mkdir(mode=0o777)
    directory.chmod(0o777)
    for number in range(2):
        (directory / f"{number}.jsonl").write_bytes(shard(number, 20))
