"""charts/dataset-pipeline on a real cluster: order, bytes, failure and repair, and the effects of upgrades."""

import itertools
import re
import shutil
from pathlib import Path

import pytest

import tokenmill.pipelines.sample
from e2e.cluster import CLAIM, Namespace, exit_code
from e2e.corpus import DATASET, MODEL, assert_same, content, receipts, run_checked, serve
from e2e.jobsets import describe, jobset, pods_of, stage_of, wait_for_end

pytestmark = pytest.mark.e2e

RAN = ("download", "extract", "concatenate", "preprocess")
"""The stages that `corpus` enables."""

SMALL = "--set resources.requests.cpu=50m,resources.requests.memory=128Mi"
CHART = f"charts/dataset-pipeline --set storage.pvcName={CLAIM} {SMALL}"


def uid_of(namespace: Namespace, name: str) -> str:
    uid: str = jobset(namespace, name)["metadata"]["uid"]
    return uid


@pytest.fixture(scope="module", autouse=True)
def rights(namespace: Namespace) -> None:
    """Give the user the rights that JobSet's installation does not add to the role edit, as docs/pipeline.md does."""
    verbs = "get,list,watch,create,update,patch,delete"
    namespace.admin.check(f"kubectl create role jobsets --verb={verbs} --resource=jobsets.jobset.x-k8s.io")
    namespace.admin.check(f"kubectl create rolebinding jobsets --role=jobsets --serviceaccount={namespace.name}:editor")


@pytest.fixture(scope="module")
def corpus(with_hub: Namespace) -> str:
    """Run the stages of RAN on a sample; return the arguments of its `helm install`."""
    line = f"corpus {CHART} -f values/datasets/slimpajama.yaml --set preprocess.tokenizer.name={MODEL}"
    line += " --set download.dataset.sampleFiles=6,download.workers=2,preprocess.workers=2"
    line += " --set extract.enabled=true,concatenate.enabled=true,concatenate.dataset.targetFiles=3"
    with_hub.install(line)
    result = wait_for_end(with_hub, "corpus")
    assert result["status"]["terminalState"] == "Completed", describe(with_hub, "corpus")
    return line


@pytest.mark.every_change
def test_a_stage_starts_after_the_previous_stage(corpus: str, with_hub: Namespace) -> None:
    jobs = {stage: with_hub.job(f"corpus-{stage}-0") for stage in RAN}
    starts: dict[str, list[str]] = {stage: [] for stage in RAN}
    for pod in pods_of(with_hub, "corpus"):
        starts[stage_of(pod)].append(pod["metadata"]["creationTimestamp"])
    assert [jobs[stage]["status"]["succeeded"] for stage in RAN] == [2, 1, 1, 2]
    for before, after in itertools.pairwise(RAN):
        complete = jobs[before]["status"]["completionTime"]
        assert complete <= jobs[after]["metadata"]["creationTimestamp"] <= min(starts[after])


@pytest.mark.every_change
def test_the_bytes_equal_those_of_a_local_run(
    corpus: str, with_hub: Namespace, hub_files: Path, tmp_path: Path
) -> None:
    root = tmp_path / "slimpajama"
    with serve(hub_files) as hub:
        chosen = ("--sample", 6, "--include", "train/*", "--split", "train")
        run_checked("download", f"hf://datasets/{DATASET}", root, *chosen, hub=hub)
        run_checked("extract", root)
        run_checked("concatenate", root, "--target-files", 3)
        run_checked("preprocess", root, "--tokenizer", MODEL, hub=hub)
    assert_same(content(with_hub.data / "slimpajama"), content(root))


def test_helm_test_verifies_each_stage(corpus: str, with_hub: Namespace) -> None:
    with_hub.user.check("helm test corpus --timeout 120s")
    assert all(with_hub.logs(f"corpus-{stage}-verify").endswith("no problems\n") for stage in RAN)


def test_unchanged_values_restart_nothing(corpus: str, with_hub: Namespace) -> None:
    before = uid_of(with_hub, "corpus"), {pod["metadata"]["name"] for pod in pods_of(with_hub, "corpus")}
    with_hub.user.check(f"helm upgrade {corpus}")
    assert (uid_of(with_hub, "corpus"), {pod["metadata"]["name"] for pod in pods_of(with_hub, "corpus")}) == before


def test_a_failed_stage_reports_why_and_is_repaired(with_hub: Namespace) -> None:
    """It runs again with the same values; other values and a rollback replace it; finished units are kept."""
    line = f"mended {CHART} --set dataset.root=mended,dataset.repo={DATASET},download.dataset.sampleFiles=3"
    line += " --set preprocess.tokenizer.path=tokenizers/mine"
    with_hub.install(line)
    failed = wait_for_end(with_hub, "mended")
    assert failed["status"]["terminalState"] == "Failed", describe(with_hub, "mended")
    (condition,) = [c for c in failed["status"]["conditions"] if c["type"] == "Failed"]
    assert "mended-preprocess-0" in condition["message"]
    (pod,) = [pod for pod in pods_of(with_hub, "mended") if stage_of(pod) == "preprocess"]
    assert exit_code(pod) == 2, "a retry cannot help"
    assert "/data/tokenizers/mine" in pod["status"]["containerStatuses"][0]["state"]["terminated"]["message"]
    fetched = receipts(with_hub.data / "mended", "download")
    assert len(fetched) == 3

    shutil.copytree(Path(tokenmill.pipelines.sample.__path__[0]) / "tokenizer", with_hub.data / "tokenizers/mine")
    with_hub.user.check(f"helm upgrade {line}")
    again = wait_for_end(with_hub, "mended")
    assert again["status"]["terminalState"] == "Completed", describe(with_hub, "mended")
    assert again["metadata"]["uid"] != failed["metadata"]["uid"]
    assert receipts(with_hub.data / "mended", "download") == fetched

    made = receipts(with_hub.data / "mended/preprocessed", "preprocess")
    with_hub.user.check(f"helm upgrade {line} --set preprocess.workers=2")
    other = wait_for_end(with_hub, "mended")
    assert other["status"]["terminalState"] == "Completed", describe(with_hub, "mended")
    assert other["metadata"]["uid"] != again["metadata"]["uid"]
    assert with_hub.job("mended-preprocess-0")["spec"]["completions"] == 2
    assert receipts(with_hub.data / "mended/preprocessed", "preprocess") == made

    with_hub.user.check("helm rollback mended 2")
    (_, preprocess) = jobset(with_hub, "mended")["spec"]["replicatedJobs"]
    assert preprocess["template"]["spec"]["completions"] == 1
    assert uid_of(with_hub, "mended") != other["metadata"]["uid"]


def test_the_server_accepts_all_options(namespace: Namespace) -> None:
    files = "-f values/datasets/fineweb-edu.yaml -f values/clusters/eks-p5.yaml"
    more = f"preprocess.tokenizer.name={MODEL}"
    more += ",extract.enabled=true,concatenate.enabled=true,job.ttlSecondsAfterFinished=9,kueue.queueName=queue"
    more += ",hub.tokenSecret.name=token,environment.caBundle.configMap=ca,download.job.activeDeadlineSeconds=9"
    more += (
        ",preprocess.storage.outputPvcName=other,preprocess.dataset.outputPath=out,job.naming=hash,job.annotations.a=b"
    )
    rendered = namespace.user.check(f"helm template one {CHART} {files} --set {more}")
    applied = namespace.user.run("kubectl apply --dry-run=server --validate=strict -f -", rendered)
    assert applied.code == 0, applied.err
    assert "would violate PodSecurity" not in applied.err
    assert re.search("jobset.jobset.x-k8s.io/one-[0-9a-f]{8} created", applied.out)
