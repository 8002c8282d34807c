"""Values that cannot work are refused at the installation with a remedy, and leave nothing behind."""

import pytest

from e2e.cluster import CLAIM, Namespace, wait_for

pytestmark = pytest.mark.e2e

REFUSED = {
    "unknown key": ("x charts/dataset-extract --set dataset.inputPath=a --set wrokers=2", "wrokers"),
    "negative workers": ("x charts/dataset-extract --set dataset.inputPath=a --set workers=-1", "workers"),
    "no claim": ("x charts/dataset-extract --set dataset.inputPath=a --set storage.pvcName=", "storage.pvcName"),
    "absent claim": (
        "x charts/dataset-extract --set dataset.inputPath=a --set storage.pvcName=nowhere",
        'there is no PersistentVolumeClaim "nowhere"',
    ),
    "no files": ("x charts/dataset-concatenate --set dataset.inputPath=a --set dataset.targetFiles=0", "targetFiles"),
    "path outside": (
        "x charts/dataset-extract --set dataset.inputPath=a --set dataset.outputPath=../x",
        'dataset.outputPath="../x"',
    ),
    "sample of everything": (
        "x charts/dataset-download --set dataset.outputPath=a,dataset.repo=a/b --set dataset.fullDataset=true"
        " --set dataset.sampleFiles=100",
        "sampleFiles",
    ),
    "no quantity": (
        "x charts/dataset-extract --set dataset.inputPath=a --set resources.limits.memory=2GB",
        "/resources/limits/memory",
    ),
    "absent variables": (
        "x charts/dataset-extract --set dataset.inputPath=a --set environment.configMap=tokenmill-enviroment",
        'there is no ConfigMap "tokenmill-enviroment"',
    ),
    "secret in the clear": (
        "x charts/dataset-extract --set dataset.inputPath=a --set extraEnv[0].name=HF_TOKEN,extraEnv[0].value=abc",
        "the value of HF_TOKEN looks like a secret",
    ),
    "long name": (f"{'x' * 50} charts/dataset-concatenate --set dataset.inputPath=a --set workers=100", "too long"),
}


@pytest.mark.parametrize("program", ["helm", "helm4"])
@pytest.mark.parametrize(("line", "message"), REFUSED.values(), ids=REFUSED)
def test_refused_at_install(namespace: Namespace, line: str, message: str, program: str) -> None:
    release, rest = line.split(" ", 1)
    refused = namespace.user.run(
        f"{program} install {release} {rest.replace(' --', f' --set storage.pvcName={CLAIM} --', 1)}"
    )
    assert refused.code != 0 and message in refused.err
    assert namespace.user.run(f"helm status {release}").code != 0, "a release was left"
    assert namespace.user.get("jobs")["items"] == []


def test_a_tag_of_digits_is_used_unchanged(namespace: Namespace) -> None:
    line = f"x charts/dataset-extract --set storage.pvcName={CLAIM} --set dataset.inputPath=a --set image.tag=20260422"
    namespace.install(f"{line} --set image.pullPolicy=Never")
    (container,) = namespace.job("x-extract")["spec"]["template"]["spec"]["containers"]
    namespace.user.check("helm uninstall x")
    assert container["image"] == "localhost/tokenmill-jobs:20260422"


def test_a_claim_that_is_being_deleted_is_refused(namespace: Namespace) -> None:
    spec = {"accessModes": ["ReadWriteOnce"], "storageClassName": "none", "resources": {"requests": {"storage": "1Gi"}}}
    metadata = {"name": "leaving", "finalizers": ["tokenmill.test/keep"]}
    namespace.user.apply({"apiVersion": "v1", "kind": "PersistentVolumeClaim", "metadata": metadata, "spec": spec})
    namespace.user.check("kubectl delete pvc leaving --wait=false")
    line = "helm install x charts/dataset-extract --set dataset.inputPath=a,storage.pvcName=leaving"
    refused = namespace.user.run(line)
    removed = """kubectl patch pvc leaving --type=merge -p '{"metadata":{"finalizers":null}}'"""
    namespace.user.check(removed)
    assert refused.code and 'the PersistentVolumeClaim "leaving" is being deleted' in refused.err, refused.err


def test_the_notes_lead_to_the_reason_of_forbidden_pods(namespace: Namespace) -> None:
    quota = {"hard": {"pods": "0"}}
    namespace.admin.apply({"apiVersion": "v1", "kind": "ResourceQuota", "metadata": {"name": "none"}, "spec": quota})
    try:
        line = f"charts/dataset-extract --set dataset.inputPath=a --set storage.pvcName={CLAIM}"
        notes = namespace.install(f"forbidden {line}")
        (hint,) = [row for row in notes.splitlines() if row.startswith("If no pod starts:")]
        command = hint.partition(":")[2].partition("   (")[0].strip()
        assert wait_for(lambda: "exceeded quota" in namespace.user.check(command), 60), namespace.user.check(command)
    finally:
        namespace.admin.run("helm uninstall forbidden")
        namespace.admin.check("kubectl delete resourcequota none")
