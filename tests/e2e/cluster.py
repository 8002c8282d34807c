"""A real cluster as users see it: kubectl and helm commands, run in a clone of this repository."""

import json
import os
import shlex
import shutil
import subprocess
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from support.commandline import CommandResult
from tokenmill import __version__

ROOT = Path(__file__).parents[2]
IMAGE = f"localhost/tokenmill-jobs:{__version__}"
CLAIM = "shared-storage-pvc"
HUB_FILES = ".hub"
"""Directory on the volume with the test Hub's files."""

HUB_PROGRAM = ROOT / "tests" / "support" / "hub"
"""The test Hub. The image does not contain it: its pod runs it from a ConfigMap."""

RESTRICTED = {
    "runAsNonRoot": True,
    "runAsUser": 1000,
    "runAsGroup": 1000,
    "fsGroup": 1000,
    "fsGroupChangePolicy": "OnRootMismatch",
    "seccompProfile": {"type": "RuntimeDefault"},
}
CONFINED = {"allowPrivilegeEscalation": False, "readOnlyRootFilesystem": True, "capabilities": {"drop": ["ALL"]}}


@dataclass(frozen=True)
class Account:
    """An account that runs commands: a kubeconfig with a namespace, and a working directory."""

    kubeconfig: Path
    directory: Path

    def run(self, line: str, text: str | None = None, timeout: float = 180) -> CommandResult:
        """Run a command line without a shell; `text` is its standard input."""
        done = subprocess.run(
            shlex.split(line),
            cwd=self.directory,
            env=os.environ | {"KUBECONFIG": str(self.kubeconfig)},
            input=text,
            capture_output=True,
            text=True,
            timeout=timeout,
            check=False,
        )
        return CommandResult(done.returncode, done.stdout, done.stderr)

    def check(self, line: str, text: str | None = None, timeout: float = 180) -> str:
        """Run a command line that must succeed, and return its standard output."""
        ended = self.run(line, text, timeout)
        assert ended.code == 0, f"{line}\nexit code {ended.code}\n{ended.out}{ended.err}"
        return ended.out

    def get(self, resource: str) -> Any:
        """Return the JSON output of `kubectl get`."""
        return json.loads(self.check(f"kubectl get {resource} -o json"))

    def apply(self, *objects: dict[str, Any]) -> None:
        """Create or change objects with `kubectl apply`."""
        self.check("kubectl apply -f -", json.dumps({"apiVersion": "v1", "kind": "List", "items": objects}))


@dataclass(frozen=True)
class Namespace:
    """A namespace that enforces the restricted standard; `user` has the role edit in it, and `admin` every right.

    `data` is this machine's path of the node's directory that the PVC shared-storage-pvc provides.
    """

    name: str
    user: Account
    admin: Account
    data: Path

    def make_storage(self) -> None:
        """Install the shared storage as admin, because a PersistentVolume belongs to the whole cluster."""
        self.admin.check(
            f"helm install shared-storage charts/shared-storage --set backend=local --set pvc.name={CLAIM} "
            f"--set local.path={shlex.quote(str(self.data))} --set local.nodeName={node_name(self.admin)}"
        )

    def install(self, line: str) -> str:
        """Install a chart as the user; `line` contains the arguments of `helm install`."""
        return self.user.check(f"helm install {line}")

    def job(self, name: str) -> dict[str, Any]:
        """Return a Job."""
        job: dict[str, Any] = self.user.get(f"job {name}")
        return job

    def pods(self, job: str) -> list[dict[str, Any]]:
        """Return a Job's pods, the oldest first."""
        listed = self.user.get(f"pods -l batch.kubernetes.io/job-name={job} --sort-by=.metadata.creationTimestamp")
        items: list[dict[str, Any]] = listed["items"]
        return items

    def logs(self, pod: str) -> str:
        """Return the logs of a pod."""
        ended = self.user.run(f"kubectl logs {pod} --all-containers")
        return ended.out or ended.err

    def kill(self, pod: str) -> None:
        """Delete a pod without a grace period."""
        self.user.check(f"kubectl delete pod {pod} --grace-period=0 --force --wait=false")

    def wait_for_job(self, name: str, end: str = "Complete", timeout: float = 120) -> dict[str, Any]:
        """Wait until a Job is Complete or Failed, and return it; raise AssertionError unless `end` is true."""

        def ended() -> dict[str, Any] | None:
            job = self.job(name)
            return job if conditions(job).keys() & {"Complete", "Failed"} else None

        job: dict[str, Any] = wait_for(ended, timeout) or {}
        assert end in conditions(job), f"{name} is not {end} after {timeout} s at most\n{self.describe(name)}"
        return job

    def describe(self, job: str) -> str:
        """Describe the state of a Job and its pods, with events and the last log lines."""
        lines = [f"job {job}: {json.dumps(self.job(job).get('status', {}))}"]
        for pod in self.pods(job):
            lines.append(describe_pod(pod))
            lines += [f"    {line}" for line in self.logs(pod["metadata"]["name"]).splitlines()[-15:]]
        events = self.user.run("kubectl get events --sort-by=.lastTimestamp --field-selector=type!=Normal")
        return "\n".join([*lines, *events.out.splitlines()[-20:]])

    def start_hub(
        self,
        files: Path,
        faults: list[dict[str, Any]] | None = None,
        claim: str = CLAIM,
        token_secret: str | None = None,
    ) -> None:
        """Serve a directory as the Hub of this namespace's stages; `faults` are those of support.hub.faults.

        The files are on the volume of a claim. With `token_secret`, the Hub requires the token in that Secret.
        """
        shutil.copytree(files, self.data / HUB_FILES, dirs_exist_ok=True)
        (self.data / HUB_FILES).chmod(0o755)  # only the first pod of a volume opens its files to the group
        (self.data / HUB_FILES / "faults.json").write_text(json.dumps(faults or []))
        self.user.apply(*hub_objects(claim, token_secret))
        ended = self.user.run("kubectl rollout status deployment/hub --timeout=90s")
        if ended.code:
            pods = [describe_pod(pod) + self.logs(pod["metadata"]["name"]) for pod in self.user.get("pods")["items"]]
            raise AssertionError("\n".join([f"the test Hub does not start; has the node {IMAGE}?", ended.err, *pods]))


def conditions(thing: dict[str, Any]) -> dict[str, str]:
    """Return the conditions of an object that are true, with their messages."""
    listed = thing.get("status", {}).get("conditions", [])
    return {c["type"]: c.get("message", "") for c in listed if c["status"] == "True"}


def has_api(account: Account, group: str) -> bool:
    """Return whether the cluster has objects of an API group."""
    return bool(account.check(f"kubectl api-resources --api-group={group} -o name").strip())


def describe_pod(pod: dict[str, Any]) -> str:
    """Describe the state of a pod in a few lines."""
    status = pod["status"]
    states = [json.dumps(container["state"]) for container in status.get("containerStatuses", [])]
    messages = [c.get("message", "") for c in status.get("conditions", []) if c["status"] == "False"]
    return (
        "\n    ".join([f"  pod {pod['metadata']['name']}: {status.get('phase')}", *states, *filter(None, messages)])
        + "\n"
    )


def exit_code(pod: dict[str, Any]) -> int | None:
    """Return the exit code of a pod's container, or None before its end."""
    (container,) = pod["status"].get("containerStatuses") or [{"state": {}}]
    code: int | None = container["state"].get("terminated", {}).get("exitCode")
    return code


def wait_for(poll: Callable[[], Any], timeout: float = 60) -> Any:
    """Poll until the result is true, and return it; after the timeout, return the last result."""
    deadline = time.monotonic() + timeout
    while not (result := poll()) and time.monotonic() < deadline:
        time.sleep(0.3)
    return result


def hub_objects(claim: str, token_secret: str | None) -> list[dict[str, Any]]:
    """Return the test Hub's Deployment, its Service, and the ConfigMap with its endpoint for the stages."""
    labels = {"app": "hub"}
    command = ["python", "-m", "hub", "/hub", "--host", "0.0.0.0", "--port", "8000"]
    container: dict[str, Any] = {
        "name": "hub",
        "image": IMAGE,
        "command": [*command, "--cdn-port", "8001", "--public-host", "hub", "--faults", "/hub/faults.json"],
        "securityContext": CONFINED,
        "resources": {"requests": {"cpu": "50m", "memory": "64Mi"}, "limits": {"memory": "512Mi"}},
        "readinessProbe": {"tcpSocket": {"port": 8000}, "periodSeconds": 1},
        "env": [{"name": "PYTHONPATH", "value": "/program"}],
        "volumeMounts": [
            {"name": "data", "mountPath": "/hub", "subPath": HUB_FILES, "readOnly": True},
            {"name": "program", "mountPath": "/program/hub", "readOnly": True},
        ],
    }
    if token_secret:
        reference = {"secretKeyRef": {"name": token_secret, "key": "token"}}
        container["env"].append({"name": "TOKEN", "valueFrom": reference})
        container["command"] += ["--token=$(TOKEN)"]  # Kubernetes replaces it only in the pod
    pod = {
        "automountServiceAccountToken": False,
        "securityContext": RESTRICTED,
        "terminationGracePeriodSeconds": 2,
        "containers": [container],
        "volumes": [
            {"name": "data", "persistentVolumeClaim": {"claimName": claim}},
            {"name": "program", "configMap": {"name": "hub-program"}},
        ],
    }
    template = {"metadata": {"labels": labels}, "spec": pod}
    deployment = {"selector": {"matchLabels": labels}, "strategy": {"type": "Recreate"}, "template": template}
    return [
        {
            "apiVersion": "v1",
            "kind": "ConfigMap",
            "metadata": {"name": "hub-program"},
            "data": {path.name: path.read_text() for path in sorted(HUB_PROGRAM.glob("*.py"))},
        },
        {"apiVersion": "apps/v1", "kind": "Deployment", "metadata": {"name": "hub"}, "spec": deployment},
        # A headless Service: its name resolves to the pod, in every cluster.
        {
            "apiVersion": "v1",
            "kind": "Service",
            "metadata": {"name": "hub"},
            "spec": {"clusterIP": "None", "selector": labels, "ports": [{"port": 8000}]},
        },
        {
            "apiVersion": "v1",
            "kind": "ConfigMap",
            "metadata": {"name": "tokenmill-environment"},
            "data": {"HF_ENDPOINT": "http://hub:8000"},
        },
    ]


def clone(directory: Path) -> Path:
    """Copy the files that git would track, links as links: the result of `git clone`."""
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT,
        capture_output=True,
        check=True,
    )
    for name in set(listed.stdout.decode().split("\0")) - {""}:
        if os.path.lexists(ROOT / name):
            (directory / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, directory / name, follow_symlinks=False)
    return directory


def node_name(admin: Account) -> str:
    """Return a node that runs pods, not a simulated one; wait for nodes that are briefly not ready."""

    def usable() -> list[str]:
        nodes = [node for node in admin.get("nodes")["items"] if "Ready" in conditions(node)]
        return [
            n["metadata"]["name"] for n in nodes if not n["spec"].get("taints") and not n["spec"].get("unschedulable")
        ]

    names: list[str] = wait_for(usable)
    assert names, "no node of this cluster is ready without a taint:\n" + admin.check("kubectl describe nodes")
    return names[0]


def kubeconfig_for(admin: Account, namespace: str, token: str | None, path: Path) -> Path:
    """Write a kubeconfig for a namespace of the current cluster, with the token or with the caller's credentials."""
    config = json.loads(admin.check("kubectl config view --raw --minify --flatten -o json"))
    context = config["contexts"][0]["context"]
    context["namespace"] = namespace
    if token is not None:
        config["users"] = [{"name": "editor", "user": {"token": token}}]
        context["user"] = "editor"
    path.write_text(json.dumps(config))
    path.chmod(0o600)
    return path


def make_namespace(name: str, caller: Account, data: Path, scratch: Path) -> Namespace:
    """Create a namespace, a user of it, and a directory for its shared storage."""
    labels = {f"pod-security.kubernetes.io/{mode}": "restricted" for mode in ("enforce", "warn")}
    caller.apply({"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": name, "labels": labels}})
    admin = Account(kubeconfig_for(caller, name, None, scratch / f"{name}-admin.json"), caller.directory)
    admin.check("kubectl create serviceaccount editor")
    admin.check(f"kubectl create rolebinding editor --clusterrole=edit --serviceaccount={name}:editor")
    token = admin.check("kubectl create token editor --duration=4h").strip()
    user = Account(kubeconfig_for(caller, name, token, scratch / f"{name}-user.json"), caller.directory)
    data.mkdir(parents=True)
    data.chmod(0o777)  # the pods' user is not this machine's user
    return Namespace(name, user, admin, data)


def begin_removal(namespace: Namespace) -> None:
    """Start the removal of a namespace, without a wait for its end.

    Jobs are deleted first. A Job keeps its failed pod until it has created the next one, which a terminating namespace
    refuses: such a namespace would stay `Terminating`.
    """
    namespace.admin.run("kubectl delete jobs --all --wait=false")
    namespace.admin.run(f"kubectl delete namespace {namespace.name} --wait=false")


def end_removal(namespace: Namespace) -> None:
    """Wait until a namespace is gone, then remove its volumes and its directory."""
    namespace.admin.run(f"kubectl wait --for=delete namespace/{namespace.name} --timeout=120s")
    for volume in namespace.admin.get("persistentvolumes")["items"]:
        if volume["spec"].get("claimRef", {}).get("namespace") == namespace.name:
            namespace.admin.run(f"kubectl delete persistentvolume {volume['metadata']['name']} --timeout=30s")
    shutil.rmtree(namespace.data, ignore_errors=True)


def index_of(pod: dict[str, Any]) -> int:
    """Return the index of a pod in its Job."""
    return int(pod["metadata"]["annotations"]["batch.kubernetes.io/job-completion-index"])


def running(namespace: Namespace, job: str) -> dict[int, str]:
    """Return the running pods of a Job by index."""
    pods = [pod for pod in namespace.pods(job) if "deletionTimestamp" not in pod["metadata"]]
    return {index_of(pod): pod["metadata"]["name"] for pod in pods if pod["status"].get("phase") == "Running"}
