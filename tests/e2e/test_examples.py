"""What examples/ does on a real cluster: deployed twice, stopped by a failed stage, finished after its repair.

What Argo CD does with the charts is done as it does it: `helm template`, then `kubectl apply`, and pruning by label.
"""

import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import yaml

from e2e.cluster import CONFINED, RESTRICTED, Namespace
from e2e.corpus import DATASET, MODEL, assert_same, content, done, receipts, serve
from support.hub import Hub
from support.rendering import argocd_sources

pytestmark = pytest.mark.e2e

SMALL = {"requests": {"cpu": "50m", "memory": "128Mi"}, "limits": {"cpu": "1", "memory": "1Gi"}}
JOBS = {"download": "slimpajama-download", "preprocess": "slimpajama-preprocess-preprocess"}


@pytest.fixture(scope="module")
def values(with_hub: Namespace) -> Path:
    """Return the clone's examples/values as somebody adapted them, with a tokenizer that does not exist."""
    directory = with_hub.user.directory / "examples/values"
    change(directory / "all.yaml", resources=SMALL)
    change(directory / "download.yaml", dataset={"sampleFiles": 4})
    change(directory / "preprocess.yaml", tokenizer={"name": "nobody/absent"}, dataset={"targetFiles": 2}, workers=1)
    return directory


def change(file: Path, **values: Any) -> None:
    """Put values into a file of them."""
    file.write_text(yaml.safe_dump((yaml.safe_load(file.read_text()) or {}) | values))


def identities(namespace: Namespace) -> dict[str, str]:
    """Return what tells each Job from another one of its name."""
    return {job["metadata"]["name"]: job["metadata"]["uid"] for job in namespace.user.get("jobs")["items"]}


def test_the_script_stops_at_a_failed_stage_and_finishes_after_its_repair(
    values: Path, with_hub: Namespace, hub_files: Path, tmp_path: Path
) -> None:
    stopped = with_hub.user.run("examples/deploy.sh", timeout=400)
    assert stopped.code == 1, stopped.out + stopped.err
    assert stopped.out.splitlines() == ["slimpajama-download is complete"]
    assert "slimpajama-preprocess has failed:" in stopped.err
    assert "nobody/absent" in stopped.err.partition("has failed:")[2]
    before = identities(with_hub)
    fetched = receipts(with_hub.data / "slimpajama", "download")

    # What an upgrade leaves behind that is interrupted while it asks whether the API server takes the Job.
    labels = {"app.kubernetes.io/instance": "slimpajama-preprocess"}
    container = {"name": "none", "image": "none", "securityContext": CONFINED}
    pod = {"restartPolicy": "Never", "securityContext": RESTRICTED, "containers": [container]}
    spec = {"completions": 0, "parallelism": 0, "completionMode": "Indexed", "template": {"spec": pod}}
    metadata = {"name": "slimpajama-preprocess-preprocess-trial-1", "labels": labels}
    with_hub.user.apply({"apiVersion": "batch/v1", "kind": "Job", "metadata": metadata, "spec": spec})
    with_hub.wait_for_job(metadata["name"])
    looked = with_hub.user.run("examples/wait.sh slimpajama-preprocess")
    assert looked.code == 1 and looked.err.startswith("slimpajama-preprocess has failed:"), looked
    with_hub.user.does(f"kubectl delete job {metadata['name']}")

    change(values / "preprocess.yaml", tokenizer={"name": MODEL})
    finished = with_hub.user.does("examples/deploy.sh", timeout=400)
    assert finished.splitlines() == [f"slimpajama-{stage} is complete" for stage in JOBS]
    after = identities(with_hub)
    assert after[JOBS["download"]] == before[JOBS["download"]]
    assert after[JOBS["preprocess"]] != before[JOBS["preprocess"]]
    assert receipts(with_hub.data / "slimpajama", "download") == fetched
    with serve(hub_files) as hub:
        assert_same(content(with_hub.data / "slimpajama"), alone(hub, tmp_path / "slimpajama"))


def alone(hub: Hub, root: Path) -> dict[str, bytes]:
    """Return what the same two stages make on this machine."""
    chosen = ("--sample", 4, "--include", "train/*", "--split", "train")
    done("download", f"hf://datasets/{DATASET}", root, *chosen, hub=hub)
    done("preprocess", root, "--tokenizer", MODEL, "--target-files", 2, hub=hub)
    return content(root)


def test_a_second_deployment_starts_nothing(values: Path, with_hub: Namespace) -> None:
    before = identities(with_hub)
    again = with_hub.user.does(f"env NAMESPACE={with_hub.name} examples/deploy.sh", timeout=400)
    assert again.splitlines() == [f"slimpajama-{stage} is complete" for stage in JOBS]
    assert identities(with_hub) == before


def test_a_file_that_is_gone_stops_it(values: Path, with_hub: Namespace) -> None:
    """What lies on the volume decides, not that the Job is complete."""
    lost = next((with_hub.data / "slimpajama").glob("*.zst"))
    lost.rename(with_hub.data / "lost")
    stopped = with_hub.user.run("examples/deploy.sh", timeout=400)
    shutil.move(with_hub.data / "lost", lost)
    assert stopped.code == 1 and stopped.out == ""
    assert "slimpajama-download is complete, but its output differs from its manifest:" in stopped.err
    assert lost.name in stopped.err


def test_a_release_without_a_job_is_not_waited_for(namespace: Namespace) -> None:
    stopped = namespace.user.run("examples/wait.sh nothing")
    assert (stopped.code, stopped.err) == (1, "nothing has no Job; run: kubectl get jobs\n")


@pytest.mark.skipif(not shutil.which("helmfile"), reason="helmfile is not on PATH")
def test_helmfile_does_the_same(values: Path, with_hub: Namespace) -> None:
    line = "helmfile --no-color -f examples/helmfile.yaml sync"
    change(values / "all.yaml", resources=SMALL, dataset={"root": "by-helmfile"})
    change(values / "preprocess.yaml", tokenizer={"name": "nobody/absent"}, dataset={"targetFiles": 2}, workers=1)
    with_hub.user.does("helm uninstall slimpajama-download slimpajama-preprocess --wait --ignore-not-found")
    stopped = with_hub.user.run(line, timeout=400)
    assert stopped.code != 0, stopped.out + stopped.err
    assert "slimpajama-download is complete" in stopped.out + stopped.err
    assert "slimpajama-preprocess has failed:" in stopped.out + stopped.err
    change(values / "preprocess.yaml", tokenizer={"name": MODEL})
    with_hub.user.does(line, timeout=400)
    assert len(list((with_hub.data / "by-helmfile/preprocessed").glob("*.bin"))) == 2
    before = identities(with_hub)
    with_hub.user.does(line, timeout=400)
    assert identities(with_hub) == before
    assert not list(with_hub.user.directory.glob("charts/*/charts/*.tgz"))

    # A first stage that fails keeps the next one from being installed.
    change(values / "download.yaml", dataset={"sampleFiles": 5})
    assert with_hub.user.run(line, timeout=400).code != 0
    assert identities(with_hub)[JOBS["preprocess"]] == before[JOBS["preprocess"]]
    change(values / "download.yaml", dataset={"sampleFiles": 4})


class ArgoCD:
    """Syncs an Application: renders its sources, applies a wave after the other, prunes what is no longer there."""

    def __init__(self, namespace: Namespace) -> None:
        self.namespace = namespace
        self.sources = argocd_sources(namespace.user.directory)

    def render(self, **more: Any) -> dict[str, list[dict[str, Any]]]:
        """Return what the sources render, hooks aside, by wave; `more` goes over the first source's values of `job`."""
        waves: dict[str, list[dict[str, Any]]] = {}
        for number, source in enumerate(self.sources):
            helm = source["helm"]
            job = helm["valuesObject"]["job"] | (more if number == 0 else {})
            files = " ".join(f"-f {source['path']}/{file}" for file in helm["valueFiles"])
            line = f"helm template {helm['releaseName']} {source['path']} --skip-tests {files}"
            rendered = self.namespace.user.does(f"{line} --set-json 'job={json.dumps(job)}'")
            for document in yaml.safe_load_all(rendered):
                annotations = document["metadata"]["annotations"]
                assert "helm.sh/hook" not in annotations
                # How Argo CD knows what is its own.
                document["metadata"]["labels"]["tracked-by"] = "slimpajama"
                waves.setdefault(annotations["argocd.argoproj.io/sync-wave"], []).append(document)
        return dict(sorted(waves.items()))

    def sync(self, **more: Any) -> list[str]:
        """Apply, wait for each wave to be Healthy, prune; return what kubectl says that it did."""
        said: list[str] = []
        waves = self.render(**more)
        for documents in waves.values():
            said += self.apply(documents)
            for document in documents:
                self.namespace.wait_for_job(document["metadata"]["name"], timeout=300)
        flags = "--prune --prune-allowlist=batch/v1/Job -l tracked-by=slimpajama"
        whole = [document for documents in waves.values() for document in documents]
        return said + [line for line in self.apply(whole, flags) if "pruned" in line]

    def apply(self, documents: list[dict[str, Any]], flags: str = "") -> list[str]:
        return self.namespace.user.does(f"kubectl apply {flags} -f -", yaml.safe_dump_all(documents)).splitlines()


@pytest.fixture(scope="module")
def argocd(values: Path, with_hub: Namespace) -> ArgoCD:
    """Return what Argo CD knows of examples/argocd.yaml; the same two stages into a directory of their own."""
    change(values / "all.yaml", resources=SMALL, dataset={"root": "by-argocd"})
    change(values / "preprocess.yaml", tokenizer={"name": MODEL}, dataset={"targetFiles": 2}, workers=1)
    with_hub.user.does("helm uninstall slimpajama-download slimpajama-preprocess --wait --ignore-not-found")
    return ArgoCD(with_hub)


def test_a_rendered_job_is_applied_once_and_pruned_when_its_content_changes(
    argocd: ArgoCD, with_hub: Namespace
) -> None:
    first = argocd.sync()
    assert [re.sub("-[0-9a-f]{8} ", "-HASH ", line) for line in first] == [
        "job.batch/slimpajama-download-HASH created",
        "job.batch/slimpajama-preprocess-preprocess-HASH created",
    ]
    assert len(list((with_hub.data / "by-argocd/preprocessed").glob("*.bin"))) == 2

    old_download, old_preprocess = (line.split()[0] for line in first)
    assert argocd.sync() == [f"{old_download} unchanged", f"{old_preprocess} unchanged"]

    changed = argocd.sync(backoffLimitPerIndex=3)
    new_download = changed[0].split()[0]
    assert new_download != old_download
    assert changed == [f"{new_download} created", f"{old_preprocess} unchanged", f"{old_download} pruned"]


def test_a_job_under_a_fixed_name_can_only_be_replaced_by_force(argocd: ArgoCD, with_hub: Namespace) -> None:
    """What the annotation Replace=true,Force=true asks Argo CD to do, and why plain apply is not enough."""
    ((one,), (two,)) = (argocd.render(naming="release", backoffLimitPerIndex=n)["1"] for n in (3, 4))
    argocd.apply([one])
    uid = with_hub.job("slimpajama-download")["metadata"]["uid"]
    refused = with_hub.user.run("kubectl apply -f -", yaml.safe_dump(two))
    assert refused.code != 0 and "field is immutable" in refused.err
    with_hub.user.does("kubectl replace --force -f -", yaml.safe_dump(two))
    job = with_hub.job("slimpajama-download")
    assert job["metadata"]["uid"] != uid and job["spec"]["backoffLimitPerIndex"] == 4
