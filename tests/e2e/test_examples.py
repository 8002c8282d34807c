"""examples/ on a real cluster: a deployment fails at a stage, finishes after the repair, and changes nothing again.

The tests of Argo CD run its steps: `helm template`, `kubectl apply`, and `--prune` by label. The test of Flux runs the
steps of its helm-controller: an upgrade that waits, with Helm 4, and `helm test`. Both get the charts from a registry.
"""

import json
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from e2e.cluster import CONFINED, RESTRICTED, Namespace
from e2e.corpus import DATASET, MODEL, assert_same, content, receipts, run_checked, serve
from support.hub import Hub
from support.registry import serve_registry
from support.rendering import ReleaseOfChart, argocd_releases, flux_releases

pytestmark = pytest.mark.e2e

SMALL = {"requests": {"cpu": "50m", "memory": "128Mi"}, "limits": {"cpu": "1", "memory": "1Gi"}}
JOBS = {"download": "slimpajama-download", "preprocess": "slimpajama-preprocess-preprocess"}


@pytest.fixture(scope="module")
def values(with_hub: Namespace) -> Path:
    """Return the clone's examples/values after a user's changes, with a tokenizer that does not exist."""
    directory = with_hub.user.directory / "examples/values"
    change(directory / "all.yaml", resources=SMALL)
    change(directory / "download.yaml", dataset={"sampleFiles": 4})
    change(directory / "preprocess.yaml", tokenizer={"name": "nobody/absent"}, dataset={"targetFiles": 2}, workers=1)
    return directory


def change(file: Path, **values: Any) -> None:
    """Replace top-level values in a values file."""
    file.write_text(yaml.safe_dump((yaml.safe_load(file.read_text()) or {}) | values))


def identities(namespace: Namespace) -> dict[str, str]:
    """Return the uid of each Job, which a new Job of the same name does not have."""
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

    # An upgrade leaves this Job behind if it is interrupted while it checks that the API server accepts the Job.
    labels = {"app.kubernetes.io/instance": "slimpajama-preprocess"}
    container = {"name": "none", "image": "none", "securityContext": CONFINED}
    pod = {"restartPolicy": "Never", "securityContext": RESTRICTED, "containers": [container]}
    spec = {"completions": 0, "parallelism": 0, "completionMode": "Indexed", "template": {"spec": pod}}
    metadata = {"name": "slimpajama-preprocess-preprocess-trial-1", "labels": labels}
    with_hub.user.apply({"apiVersion": "batch/v1", "kind": "Job", "metadata": metadata, "spec": spec})
    with_hub.wait_for_job(metadata["name"])
    waited = with_hub.user.run("examples/wait.sh slimpajama-preprocess")
    assert waited.code == 1 and waited.err.startswith("slimpajama-preprocess has failed:"), waited
    with_hub.user.check(f"kubectl delete job {metadata['name']}")

    change(values / "preprocess.yaml", tokenizer={"name": MODEL})
    finished = with_hub.user.check("examples/deploy.sh", timeout=400)
    assert finished.splitlines() == [f"slimpajama-{stage} is complete" for stage in JOBS]
    after = identities(with_hub)
    assert after[JOBS["download"]] == before[JOBS["download"]]
    assert after[JOBS["preprocess"]] != before[JOBS["preprocess"]]
    assert receipts(with_hub.data / "slimpajama", "download") == fetched
    with serve(hub_files) as hub:
        assert_same(content(with_hub.data / "slimpajama"), run_locally(hub, tmp_path / "slimpajama"))


def run_locally(hub: Hub, root: Path) -> dict[str, bytes]:
    """Return the content of a local run of the same two stages."""
    chosen = ("--sample", 4, "--include", "train/*", "--split", "train")
    run_checked("download", f"hf://datasets/{DATASET}", root, *chosen, hub=hub)
    run_checked("preprocess", root, "--tokenizer", MODEL, "--target-files", 2, hub=hub)
    return content(root)


def test_a_second_deployment_starts_nothing(values: Path, with_hub: Namespace) -> None:
    before = identities(with_hub)
    again = with_hub.user.check(f"env NAMESPACE={with_hub.name} examples/deploy.sh", timeout=400)
    assert again.splitlines() == [f"slimpajama-{stage} is complete" for stage in JOBS]
    assert identities(with_hub) == before


def test_a_missing_file_stops_it(values: Path, with_hub: Namespace) -> None:
    """The files on the volume decide, not the condition of the Job."""
    lost = next((with_hub.data / "slimpajama").glob("*.zst"))
    lost.rename(with_hub.data / "lost")
    stopped = with_hub.user.run("examples/deploy.sh", timeout=400)
    shutil.move(with_hub.data / "lost", lost)
    assert stopped.code == 1 and stopped.out == ""
    assert "slimpajama-download is complete, but its output differs from its manifest:" in stopped.err
    assert lost.name in stopped.err


def test_a_release_without_a_job_fails_at_once(namespace: Namespace) -> None:
    stopped = namespace.user.run("examples/wait.sh nothing")
    assert (stopped.code, stopped.err) == (1, "nothing has no Job; run: kubectl get jobs\n")


@pytest.mark.skipif(not shutil.which("helmfile"), reason="helmfile is not on PATH")
def test_helmfile_does_the_same(values: Path, with_hub: Namespace) -> None:
    line = "helmfile --no-color -f examples/helmfile.yaml sync"
    change(values / "all.yaml", resources=SMALL, dataset={"root": "by-helmfile"})
    change(values / "preprocess.yaml", tokenizer={"name": "nobody/absent"}, dataset={"targetFiles": 2}, workers=1)
    with_hub.user.check("helm uninstall slimpajama-download slimpajama-preprocess --wait --ignore-not-found")
    stopped = with_hub.user.run(line, timeout=400)
    assert stopped.code != 0, stopped.out + stopped.err
    assert "slimpajama-download is complete" in stopped.out + stopped.err
    assert "slimpajama-preprocess has failed:" in stopped.out + stopped.err
    change(values / "preprocess.yaml", tokenizer={"name": MODEL})
    with_hub.user.check(line, timeout=400)
    assert len(list((with_hub.data / "by-helmfile/preprocessed").glob("*.bin"))) == 2
    before = identities(with_hub)
    with_hub.user.check(line, timeout=400)
    assert identities(with_hub) == before
    assert not list(with_hub.user.directory.glob("charts/*/charts/*.tgz"))

    # If the first stage fails, the next one is not installed.
    change(values / "download.yaml", dataset={"sampleFiles": 5})
    assert with_hub.user.run(line, timeout=400).code != 0
    assert identities(with_hub)[JOBS["preprocess"]] == before[JOBS["preprocess"]]
    change(values / "download.yaml", dataset={"sampleFiles": 4})


@pytest.fixture(scope="module")
def registry(with_hub: Namespace, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Push the charts of the two stages to a registry on this machine; return the options of Helm for one chart."""
    packages = tmp_path_factory.mktemp("packages")
    with serve_registry() as address:
        for stage in JOBS:
            with_hub.user.check(f"helm package charts/dataset-{stage} -d {packages}")
        for package in packages.iterdir():
            with_hub.user.check(f"helm push {package} oci://{address}/charts --plain-http")
        yield f"oci://{address}/charts/CHART --plain-http"


def options_of(release: ReleaseOfChart, registry: str) -> str:
    """Return the arguments of Helm that name the chart and the files of values of a release."""
    files = " ".join(f"-f {file}" for file in release.files)
    return f"{registry.replace('CHART', release.chart)} --version {release.version} {files}"


class Flux:
    """Reconciles releases: upgrades them with Helm 4, waits for their Jobs and tests them."""

    def __init__(self, namespace: Namespace, registry: str) -> None:
        self.namespace, self.registry = namespace, registry
        self.releases = {release.name: release for release in flux_releases(namespace.user.directory)}

    def reconcile(self, name: str, timeout: str = "2m") -> bool:
        """Return whether the release is Ready; Flux repeats this after an interval if it is not."""
        wait = f"--wait --wait-for-jobs --timeout {timeout}"
        line = f"helm4 upgrade --install {name} {options_of(self.releases[name], self.registry)} {wait}"
        if self.namespace.user.run(line, timeout=400).code:
            return False
        return self.namespace.user.run(f"helm4 test {name} --timeout 2m", timeout=400).code == 0


@pytest.mark.skipif(not shutil.which("helm4"), reason="helm4 is not on PATH")
def test_a_retry_of_flux_continues_a_running_job(values: Path, with_hub: Namespace, registry: str) -> None:
    """test_upgrade.py has the upgrade of a failed Job."""
    change(values / "all.yaml", resources=SMALL, dataset={"root": "by-flux"})
    with_hub.user.check("helm uninstall slimpajama-download slimpajama-preprocess --wait --ignore-not-found")
    flux = Flux(with_hub, registry)
    assert not flux.reconcile("slimpajama-download", timeout="1s")
    started = identities(with_hub)
    assert flux.reconcile("slimpajama-download"), with_hub.describe(JOBS["download"])
    assert identities(with_hub) == started
    assert len(list((with_hub.data / "by-flux").glob("*.zst"))) == 4


class ArgoCD:
    """Syncs an Application: renders its sources, applies one wave after the other, and prunes removed objects."""

    def __init__(self, namespace: Namespace, registry: str) -> None:
        self.namespace, self.registry = namespace, registry
        self.releases = argocd_releases(namespace.user.directory)

    def render(self, **more: Any) -> dict[str, list[dict[str, Any]]]:
        """Return the rendered objects by wave, without hooks; `more` updates the first source's values of `job`."""
        waves: dict[str, list[dict[str, Any]]] = {}
        for number, release in enumerate(self.releases):
            job = release.values["job"] | (more if number == 0 else {})
            line = f"helm template {release.name} --skip-tests {options_of(release, self.registry)}"
            rendered = self.namespace.user.check(f"{line} --set-json 'job={json.dumps(job)}'")
            for document in yaml.safe_load_all(rendered):
                annotations = document["metadata"]["annotations"]
                assert "helm.sh/hook" not in annotations
                # Argo CD recognizes its objects by a label.
                document["metadata"]["labels"]["tracked-by"] = "slimpajama"
                waves.setdefault(annotations["argocd.argoproj.io/sync-wave"], []).append(document)
        return dict(sorted(waves.items()))

    def sync(self, **more: Any) -> list[str]:
        """Apply, wait until each wave is Healthy, prune; return the output of kubectl."""
        output: list[str] = []
        waves = self.render(**more)
        for documents in waves.values():
            output += self.apply(documents)
            for document in documents:
                self.namespace.wait_for_job(document["metadata"]["name"], timeout=300)
        flags = "--prune --prune-allowlist=batch/v1/Job -l tracked-by=slimpajama"
        all_documents = [document for documents in waves.values() for document in documents]
        return output + [line for line in self.apply(all_documents, flags) if "pruned" in line]

    def apply(self, documents: list[dict[str, Any]], flags: str = "") -> list[str]:
        return self.namespace.user.check(f"kubectl apply {flags} -f -", yaml.safe_dump_all(documents)).splitlines()


@pytest.fixture(scope="module")
def argocd(values: Path, with_hub: Namespace, registry: str) -> ArgoCD:
    """Return a simulation of Argo CD with examples/argocd.yaml; its two stages write to their own directory."""
    change(values / "all.yaml", resources=SMALL, dataset={"root": "by-argocd"})
    change(values / "preprocess.yaml", tokenizer={"name": MODEL}, dataset={"targetFiles": 2}, workers=1)
    with_hub.user.check("helm uninstall slimpajama-download slimpajama-preprocess --wait --ignore-not-found")
    return ArgoCD(with_hub, registry)


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


def test_a_job_with_a_fixed_name_is_replaced_only_by_force(argocd: ArgoCD, with_hub: Namespace) -> None:
    """A plain apply fails; the annotation Replace=true,Force=true makes Argo CD replace the Job."""
    ((one,), (two,)) = (argocd.render(naming="release", backoffLimitPerIndex=n)["1"] for n in (3, 4))
    argocd.apply([one])
    uid = with_hub.job("slimpajama-download")["metadata"]["uid"]
    refused = with_hub.user.run("kubectl apply -f -", yaml.safe_dump(two))
    assert refused.code != 0 and "field is immutable" in refused.err
    with_hub.user.check("kubectl replace --force -f -", yaml.safe_dump(two))
    job = with_hub.job("slimpajama-download")
    assert job["metadata"]["uid"] != uid and job["spec"]["backoffLimitPerIndex"] == 4
