"""The four lines of the README, typed as they stand by a user of one restricted namespace."""

from pathlib import Path
from typing import Any

import pytest

from contract.commandline import data_of
from e2e.cluster import Namespace, conditions, exit_code, node_name
from e2e.corpus import DATASET, MODEL, assert_same, content, done, serve

pytestmark = pytest.mark.e2e

LINES = {
    "dataset-prep": """helm install dataset-prep charts/dataset-download --set storage.pvcName="shared-storage-pvc"
        --set dataset.outputPath="slimpajama" --set dataset.fullDataset=false --set dataset.sampleFiles=100""",
    "dataset-extract": """helm install dataset-extract charts/dataset-extract
        --set storage.pvcName="shared-storage-pvc"
        --set dataset.inputPath="slimpajama" --set dataset.outputPath="slimpajama/preprocessed" """,
    "dataset-concat": """helm install dataset-concat charts/dataset-concatenate
        --set storage.pvcName="shared-storage-pvc" --set dataset.inputPath="slimpajama" --set dataset.targetFiles=72""",
    "dataset-preprocess": """helm install dataset-preprocess charts/dataset-preprocess
        --set storage.pvcName="shared-storage-pvc"
        --set dataset.inputPath="slimpajama" --set dataset.outputPath="slimpajama/preprocessed" """,
}
JOBS = {
    "dataset-prep": "dataset-prep",
    "dataset-extract": "dataset-extract-extract",
    "dataset-concat": "dataset-concat-concatenate",
    "dataset-preprocess": "dataset-preprocess-preprocess",
}


@pytest.fixture(scope="module")
def ran(with_hub: Namespace) -> dict[str, list[dict[str, Any]]]:
    """Install each stage when the one before it is complete; return their pods by release."""
    pods = {}
    for release, line in LINES.items():
        with_hub.user.does(line)
        with_hub.wait_for_job(JOBS[release])
        pods[release] = with_hub.pods(JOBS[release])
    return pods


@pytest.fixture(scope="module")
def slimpajama(ran: Any, namespace: Namespace) -> Path:
    """Return the dataset's directory, all stages done."""
    return namespace.data / "slimpajama"


def test_the_outputs_lie_where_they_always_did(slimpajama: Path) -> None:
    assert len(list(slimpajama.glob("*.zst"))) == 100
    assert len(list((slimpajama / "preprocessed").glob("*.bin"))) == 72


def test_the_bytes_are_those_of_a_run_on_one_machine(slimpajama: Path, undisturbed: Path) -> None:
    assert_same(content(slimpajama), content(undisturbed))


@pytest.mark.parametrize("release", LINES)
def test_pods_have_no_token_and_no_root_to_write_to(ran: dict[str, list[dict[str, Any]]], release: str) -> None:
    assert ran[release]
    for pod in ran[release]:
        assert pod["spec"]["automountServiceAccountToken"] is False
        assert not [v for v in pod["spec"]["volumes"] if "projected" in v]
        assert pod["spec"]["securityContext"]["runAsUser"] == 1000
        for container in pod["spec"]["containers"]:
            assert container["securityContext"]["readOnlyRootFilesystem"] is True
            assert container["resources"]["requests"].keys() >= {"cpu", "memory"}
        assert exit_code(pod) == 0


@pytest.mark.parametrize("release", LINES)
def test_helm_test_verifies_the_output(ran: Any, namespace: Namespace, release: str) -> None:
    namespace.user.does(f"helm test {release} --timeout 120s")
    pod = JOBS[release] + "-verify"
    assert namespace.logs(pod).endswith("all right\n")


def test_a_stage_reads_one_claim_and_writes_into_a_directory_of_another(
    slimpajama: Path, namespace: Namespace, undisturbed: Path
) -> None:
    second = namespace.data / "second"
    second.mkdir()
    second.chmod(0o777)
    namespace.admin.does(
        "helm install second-storage charts/shared-storage --set backend=local --set pvc.name=second"
        f" --set local.path={second} --set local.nodeName={node_name(namespace.admin)}"
    )
    namespace.install(
        "apart charts/dataset-extract --set storage.pvcName=shared-storage-pvc --set dataset.inputPath=slimpajama"
        " --set dataset.fromStage=download --set storage.outputPvcName=second --set storage.outputSubPath=deep"
        " --set dataset.outputPath=out"
    )
    namespace.wait_for_job("apart-extract")
    expected = {name: data for name, data in data_of(undisturbed / "preprocessed").items() if name.endswith(".jsonl")}
    assert_same(data_of(second / "deep/out"), expected)
    namespace.user.does("helm test apart --timeout 120s")


def test_shards_that_are_streamed_leave_nothing_but_pairs(with_hub: Namespace, hub_files: Path, tmp_path: Path) -> None:
    """Two pods fetch to their scratch; the volume ends with the bytes of download and preprocess, and no shard."""
    with_hub.install(
        "stream charts/dataset-preprocess --set storage.pvcName=shared-storage-pvc --set dataset.stream=true"
        f" --set dataset.repo={DATASET} --set dataset.sampleFiles=20 --set dataset.root=streamed --set workers=2"
    )
    with_hub.wait_for_job("stream-preprocess")
    with serve(hub_files) as hub:
        done("download", f"hf://datasets/{DATASET}", tmp_path / "corpus", "--sample", 20, hub=hub)
        done("preprocess", tmp_path / "corpus", tmp_path / "expected", "--tokenizer", MODEL, hub=hub)
    found = data_of(with_hub.data / "streamed")
    assert_same(found, data_of(tmp_path / "expected"))
    assert sum(name.endswith(".bin") for name in found) == 20
    with_hub.user.does("helm test stream --timeout 120s")


def test_a_stage_that_comes_too_early_says_what_it_waits_for(with_hub: Namespace, hub_files: Path) -> None:
    early = with_hub.data / "early"
    with serve(hub_files) as hub:  # one of two workers
        done("download", f"hf://datasets/{DATASET}", early, "--sample", 10, "--workers", 2, hub=hub)
    for path in [early, *early.rglob("*")]:
        path.chmod(0o777 if path.is_dir() else 0o666)
    with_hub.install(
        "too-early charts/dataset-extract --set storage.pvcName=shared-storage-pvc --set dataset.inputPath=early"
    )
    job = with_hub.wait_for_job("too-early-extract", "Failed")
    (pod,) = with_hub.pods("too-early-extract")
    said = with_hub.logs(pod["metadata"]["name"])
    assert exit_code(pod) == 2, "a retry cannot help"
    assert job["status"]["failedIndexes"] == "0" and "Failed" in conditions(job)
    assert "download in /data/early is not finished: 5 of 10 units" in said


def test_uninstalling_leaves_the_data(slimpajama: Path, namespace: Namespace) -> None:
    before = content(slimpajama)
    for release in LINES:
        namespace.user.does(f"helm uninstall {release} --wait --timeout 60s")
    left = {job["metadata"]["name"] for job in namespace.user.get("jobs")["items"]}
    assert not left & set(JOBS.values())
    assert_same(content(slimpajama), before)
