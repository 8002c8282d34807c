"""Combinations of stages that the guides (test_guides.py) do not have, run by a user of one restricted namespace."""

from pathlib import Path
from typing import Any

import pytest

from e2e.cluster import Namespace, conditions, exit_code, node_name
from e2e.corpus import DATASET, MODEL, assert_same, run_checked, serve
from support.commandline import data_of

pytestmark = pytest.mark.e2e


def download(hub_files: Path, directory: Path, *options: Any) -> None:
    """Download ten files from this machine to a directory of the volume."""
    with serve(hub_files) as hub:
        run_checked("download", f"hf://datasets/{DATASET}", directory, "--sample", 10, *options, hub=hub)
    for path in [directory, *directory.rglob("*")]:
        path.chmod(0o777 if path.is_dir() else 0o666)


def test_a_stage_reads_one_claim_and_writes_into_a_directory_of_another(
    namespace: Namespace, hub_files: Path, tmp_path: Path
) -> None:
    download(hub_files, namespace.data / "corpus")
    second = namespace.data / "second"
    second.mkdir()
    second.chmod(0o777)
    namespace.admin.check(
        "helm install second-storage charts/shared-storage --set backend=local --set pvc.name=second"
        f" --set local.path={second} --set local.nodeName={node_name(namespace.admin)}"
    )
    namespace.install(
        "apart charts/dataset-extract --set storage.pvcName=shared-storage-pvc --set dataset.inputPath=corpus"
        " --set dataset.fromStage=download --set storage.outputPvcName=second --set storage.outputSubPath=deep"
        " --set dataset.outputPath=out"
    )
    namespace.wait_for_job("apart-extract")
    run_checked("extract", namespace.data / "corpus", tmp_path / "out")
    assert_same(data_of(second / "deep/out"), data_of(tmp_path / "out"))
    namespace.user.check("helm test apart --timeout 120s")


def test_streamed_shards_leave_only_pairs(with_hub: Namespace, hub_files: Path, tmp_path: Path) -> None:
    """Two pods fetch to their scratch; the volume has the bytes of download and preprocess, and no shards."""
    with_hub.install(
        "stream charts/dataset-preprocess --set storage.pvcName=shared-storage-pvc --set dataset.stream=true"
        f" --set dataset.repo={DATASET},dataset.sampleFiles=20,dataset.root=streamed,tokenizer.name={MODEL},workers=2"
    )
    with_hub.wait_for_job("stream-preprocess")
    with serve(hub_files) as hub:
        run_checked("download", f"hf://datasets/{DATASET}", tmp_path / "corpus", "--sample", 20, hub=hub)
        run_checked("preprocess", tmp_path / "corpus", tmp_path / "expected", "--tokenizer", MODEL, hub=hub)
    pairs = data_of(with_hub.data / "streamed")
    assert_same(pairs, data_of(tmp_path / "expected"))
    assert sum(name.endswith(".bin") for name in pairs) == 20
    with_hub.user.check("helm test stream --timeout 120s")


def test_a_stage_reports_its_unfinished_upstream(with_hub: Namespace, hub_files: Path) -> None:
    download(hub_files, with_hub.data / "early", "--workers", 2)  # the share of one of two workers
    with_hub.install(
        "too-early charts/dataset-extract --set storage.pvcName=shared-storage-pvc --set dataset.inputPath=early"
    )
    job = with_hub.wait_for_job("too-early-extract", "Failed")
    (pod,) = with_hub.pods("too-early-extract")
    logs = with_hub.logs(pod["metadata"]["name"])
    assert exit_code(pod) == 2, "a retry cannot help"
    assert job["status"]["failedIndexes"] == "0" and "Failed" in conditions(job)
    assert "download in /data/early is not finished: 5 of 10 units" in logs
