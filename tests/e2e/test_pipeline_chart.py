"""charts/dataset-pipeline on a real cluster: order, bytes, failure and repair, upgrades that leave it alone or not."""

import itertools
import re
import shutil
from pathlib import Path
from typing import Any

import pytest

import tokenmill.sample
from e2e.cluster import CLAIM, Namespace, describe_pod, exit_code, wait_for
from e2e.corpus import DATASET, MODEL, assert_same, content, done, receipts, serve

pytestmark = pytest.mark.e2e

RAN = ("download", "extract", "concatenate", "preprocess")
"""The stages that `corpus` enables."""

SMALL = "--set resources.requests.cpu=50m,resources.requests.memory=128Mi"
CHART = f"charts/dataset-pipeline --set storage.pvcName={CLAIM} {SMALL}"


def jobset(namespace: Namespace, name: str) -> dict[str, Any]:
    found: dict[str, Any] = namespace.user.get(f"jobset {name}")
    return found


def ended(namespace: Namespace, name: str, timeout: float = 300) -> dict[str, Any]:
    """Wait until a JobSet has ended, and return it."""

    def look() -> dict[str, Any] | None:
        found = jobset(namespace, name)
        return found if found.get("status", {}).get("terminalState") else None

    found: dict[str, Any] | None = wait_for(look, timeout)
    assert found, describe(namespace, name)
    return found


def describe(namespace: Namespace, name: str) -> str:
    """Tell how a JobSet's Jobs and pods are."""
    lines = [f"jobset {name}: {jobset(namespace, name).get('status')}"]
    for pod in pods_of(namespace, name):
        lines += [describe_pod(pod), namespace.logs(pod["metadata"]["name"])[-1500:]]
    return "\n".join(lines)


def pods_of(namespace: Namespace, name: str) -> list[dict[str, Any]]:
    items: list[dict[str, Any]] = namespace.user.get(f"pods -l jobset.sigs.k8s.io/jobset-name={name}")["items"]
    return items


def stage_of(pod: dict[str, Any]) -> str:
    stage: str = pod["metadata"]["labels"]["app.kubernetes.io/component"]
    return stage


def uid_of(namespace: Namespace, name: str) -> str:
    uid: str = jobset(namespace, name)["metadata"]["uid"]
    return uid


@pytest.fixture(scope="module", autouse=True)
def rights(namespace: Namespace) -> None:
    """Give the user what JobSet's installation does not add to the role edit: the lines of docs/pipeline.md."""
    verbs = "get,list,watch,create,update,patch,delete"
    namespace.admin.does(f"kubectl create role jobsets --verb={verbs} --resource=jobsets.jobset.x-k8s.io")
    namespace.admin.does(f"kubectl create rolebinding jobsets --role=jobsets --serviceaccount={namespace.name}:editor")


@pytest.fixture(scope="module")
def corpus(with_hub: Namespace) -> str:
    """Run the stages of RAN on a sample; return the line that did it."""
    line = f"corpus {CHART} -f values/datasets/slimpajama.yaml --set download.dataset.sampleFiles=6,download.workers=2"
    line += (
        " --set extract.enabled=true,concatenate.enabled=true,concatenate.dataset.targetFiles=3,preprocess.workers=2"
    )
    with_hub.install(line)
    found = ended(with_hub, "corpus")
    assert found["status"]["terminalState"] == "Completed", describe(with_hub, "corpus")
    return line


def test_a_stage_begins_when_the_one_before_it_is_complete(corpus: str, with_hub: Namespace) -> None:
    jobs = {stage: with_hub.job(f"corpus-{stage}-0") for stage in RAN}
    began: dict[str, list[str]] = {stage: [] for stage in RAN}
    for pod in pods_of(with_hub, "corpus"):
        began[stage_of(pod)].append(pod["metadata"]["creationTimestamp"])
    assert [jobs[stage]["status"]["succeeded"] for stage in RAN] == [2, 1, 1, 2]
    for before, after in itertools.pairwise(RAN):
        complete = jobs[before]["status"]["completionTime"]
        assert complete <= jobs[after]["metadata"]["creationTimestamp"] <= min(began[after])


def test_the_bytes_are_those_of_a_run_on_one_machine(
    corpus: str, with_hub: Namespace, hub_files: Path, tmp_path: Path
) -> None:
    root = tmp_path / "slimpajama"
    with serve(hub_files) as hub:
        chosen = ("--sample", 6, "--include", "train/*", "--split", "train")
        done("download", f"hf://datasets/{DATASET}", root, *chosen, hub=hub)
        done("extract", root)
        done("concatenate", root, "--target-files", 3)
        done("preprocess", root, "--tokenizer", MODEL, hub=hub)
    assert_same(content(with_hub.data / "slimpajama"), content(root))


def test_helm_test_verifies_each_stage(corpus: str, with_hub: Namespace) -> None:
    with_hub.user.does("helm test corpus --timeout 120s")
    assert all(with_hub.logs(f"corpus-{stage}-verify").endswith("no problems\n") for stage in RAN)


def test_unchanged_values_restart_nothing(corpus: str, with_hub: Namespace) -> None:
    before = uid_of(with_hub, "corpus"), {pod["metadata"]["name"] for pod in pods_of(with_hub, "corpus")}
    with_hub.user.does(f"helm upgrade {corpus}")
    assert (uid_of(with_hub, "corpus"), {pod["metadata"]["name"] for pod in pods_of(with_hub, "corpus")}) == before


def test_a_failed_stage_says_why_and_is_repaired(with_hub: Namespace) -> None:
    """With the same values it runs again; with others, and by a rollback, it is made anew; what is done is kept."""
    line = f"mended {CHART} --set dataset.root=mended,download.dataset.sampleFiles=3"
    line += " --set preprocess.tokenizer.path=tokenizers/mine"
    with_hub.install(line)
    failed = ended(with_hub, "mended")
    assert failed["status"]["terminalState"] == "Failed", describe(with_hub, "mended")
    (condition,) = [c for c in failed["status"]["conditions"] if c["type"] == "Failed"]
    assert "mended-preprocess-0" in condition["message"]
    (pod,) = [pod for pod in pods_of(with_hub, "mended") if stage_of(pod) == "preprocess"]
    assert exit_code(pod) == 2, "a retry cannot help"
    assert "/data/tokenizers/mine" in pod["status"]["containerStatuses"][0]["state"]["terminated"]["message"]
    fetched = receipts(with_hub.data / "mended", "download")
    assert len(fetched) == 3

    shutil.copytree(Path(tokenmill.sample.__path__[0]) / "tokenizer", with_hub.data / "tokenizers/mine")
    with_hub.user.does(f"helm upgrade {line}")
    again = ended(with_hub, "mended")
    assert again["status"]["terminalState"] == "Completed", describe(with_hub, "mended")
    assert again["metadata"]["uid"] != failed["metadata"]["uid"]
    assert receipts(with_hub.data / "mended", "download") == fetched

    made = receipts(with_hub.data / "mended/preprocessed", "preprocess")
    with_hub.user.does(f"helm upgrade {line} --set preprocess.workers=2")
    other = ended(with_hub, "mended")
    assert other["status"]["terminalState"] == "Completed", describe(with_hub, "mended")
    assert other["metadata"]["uid"] != again["metadata"]["uid"]
    assert with_hub.job("mended-preprocess-0")["spec"]["completions"] == 2
    assert receipts(with_hub.data / "mended/preprocessed", "preprocess") == made

    with_hub.user.does("helm rollback mended 2")
    (_, preprocess) = jobset(with_hub, "mended")["spec"]["replicatedJobs"]
    assert preprocess["template"]["spec"]["completions"] == 1
    assert uid_of(with_hub, "mended") != other["metadata"]["uid"]


def test_the_server_takes_every_option_at_once(namespace: Namespace) -> None:
    files = "-f values/datasets/fineweb-edu.yaml -f values/clusters/eks-p5.yaml"
    more = "extract.enabled=true,concatenate.enabled=true,job.ttlSecondsAfterFinished=9,kueue.queueName=queue"
    more += ",hub.tokenSecret.name=token,environment.caBundle.configMap=ca,download.job.activeDeadlineSeconds=9"
    more += (
        ",preprocess.storage.outputPvcName=other,preprocess.dataset.outputPath=out,job.naming=hash,job.annotations.a=b"
    )
    rendered = namespace.user.does(f"helm template one {CHART} {files} --set {more}")
    taken = namespace.user.run("kubectl apply --dry-run=server --validate=strict -f -", rendered)
    assert taken.code == 0, taken.err
    assert "would violate PodSecurity" not in taken.err
    assert re.search("jobset.jobset.x-k8s.io/one-[0-9a-f]{8} created", taken.out)
