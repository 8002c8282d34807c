"""Killed, evicted and memory-starved pods, and damaged inputs: the final output is complete and exact."""

import os
import random
from pathlib import Path
from typing import Any

import pytest
import zstandard

from e2e.cluster import CLAIM, Namespace, exit_code, index_of, node_name, running, wait_for
from e2e.corpus import DATASET, MODEL, assert_same, content, receipts, run_checked, serve, shard, write_files
from e2e.training import Training, make_dataset
from support.commandline import data_of, tokenmill
from tokenmill.core.files.codec import read_json

pytestmark = pytest.mark.e2e

STORAGE = f"--set storage.pvcName={CLAIM}"
SMALL = "--set resources.requests.cpu=50m,resources.requests.memory=128Mi"
FAULTS = [
    # The first worker that requests a listing has to wait, and is killed while it waits.
    {"kind": "503", "where": "tree", "retry": "seconds", "seconds": 10},
    {"kind": "slow", "path": "*.zst", "where": "cdn", "rate": 1200, "times": None},
]
FILES = 40
DISTURBED = (
    f"disturbed charts/dataset-download {STORAGE} --set dataset.outputPath=disturbed --set dataset.connections=2"
    f" --set dataset.repo={DATASET} --set dataset.sampleFiles={FILES} --set workers=5"
)
SIGKILL_ALL = "import os, signal; os.kill(-1, signal.SIGKILL)"
"""Kills all processes of a pod but the first, which belongs to the pause container."""


@pytest.fixture(scope="module")
def slow_hub(namespace: Namespace, hub_files: Path) -> Namespace:
    """Return the module's namespace with a slow Hub in it."""
    namespace.start_hub(hub_files, FAULTS)
    return namespace


@pytest.fixture(scope="module", autouse=True)
def orphaned(slow_hub: Namespace) -> str:
    """Start a download whose planner is killed; the other tests run until the lease of that planner expires."""
    slow_hub.install(
        f"orphaned charts/dataset-download {STORAGE} --set dataset.outputPath=orphaned --set dataset.sampleFiles=2"
        f" --set dataset.repo={DATASET} --set workers=2 {SMALL}"
    )
    lease = slow_hub.data / "orphaned/.tokenmill/download/planning.json"
    owner = wait_for(lambda: read_json(lease))
    assert owner, slow_hub.describe("orphaned")
    pods = slow_hub.pods("orphaned")
    (planner,) = (p["metadata"]["name"] for p in pods if p["spec"]["hostname"] == owner["owner"]["host"])
    assert wait_for(lambda: "503" in slow_hub.logs(planner)), slow_hub.describe("orphaned")
    slow_hub.user.run(f"kubectl exec {planner} -- python -c '{SIGKILL_ALL}'")
    assert wait_for(lambda: any(exit_code(pod) == 137 for pod in slow_hub.pods("orphaned")))
    return "orphaned"


def room_for_three(namespace: Namespace) -> str:
    """Return settings with which three pods fit on the node, but not four."""
    node = namespace.admin.get(f"node {node_name(namespace.admin)}")
    memory = int(node["status"]["allocatable"]["memory"].removesuffix("Ki")) * 27 // 100
    return f"--set resources.requests.cpu=50m,resources.requests.memory={memory}Ki,resources.limits.memory={memory}Ki"


def failures(namespace: Namespace, job: str, kind: str = "failure") -> int:
    """Count the failures of a Job's indexes in the annotations of their last pods; `kind` may be `ignored-failure`."""
    last = {index_of(pod): pod["metadata"]["annotations"] for pod in namespace.pods(job)}
    return sum(int(values.get(f"batch.kubernetes.io/job-index-{kind}-count", 0)) for values in last.values())


def drain(namespace: Namespace, job: str) -> None:
    """Drain the node of a Job's pods, as before maintenance."""
    node = node_name(namespace.admin)
    try:
        namespace.admin.check(
            f"kubectl drain {node} --delete-emptydir-data --ignore-daemonsets --force --timeout=60s"
            f" --pod-selector=batch.kubernetes.io/job-name={job}"
        )
    finally:
        namespace.admin.check(f"kubectl uncordon {node}")


@pytest.fixture(scope="module")
def disturbed(slow_hub: Namespace) -> Path:
    """Download with five workers on a node that fits three; three pods are killed, and later all are evicted."""
    slow_hub.install(f"{DISTURBED} {room_for_three(slow_hub)}")
    output = slow_hub.data / "disturbed"
    dice = random.Random(4)
    killed: set[int] = set()
    while len(killed) < 3:
        before = len(receipts(output, "download"))
        progressed = wait_for(lambda before=before: len(receipts(output, "download")) > before, 120)
        assert progressed, slow_hub.describe("disturbed")
        pods = wait_for(lambda: {i: pod for i, pod in running(slow_hub, "disturbed").items() if i not in killed})
        victim = min(pods) if not killed else dice.choice(sorted(pods))
        slow_hub.kill(pods[victim])
        killed.add(victim)
    assert 0 in killed
    # Kubernetes counts a failure when it creates the next pod; an earlier drain would hide the failure.
    assert wait_for(lambda: failures(slow_hub, "disturbed") == 3), slow_hub.describe("disturbed")
    assert wait_for(lambda: running(slow_hub, "disturbed")), slow_hub.describe("disturbed")
    drain(slow_hub, "disturbed")
    slow_hub.wait_for_job("disturbed")
    return output


@pytest.mark.every_change
def test_a_disturbed_run_gives_the_bytes_of_a_local_run(disturbed: Path, hub_files: Path, tmp_path: Path) -> None:
    with serve(hub_files) as hub:
        run_checked("download", f"hf://datasets/{DATASET}", tmp_path / "alone", "--sample", FILES, hub=hub)
    assert_same(content(disturbed), content(tmp_path / "alone"))
    assert receipts(disturbed, "download").keys() == receipts(tmp_path / "alone", "download").keys()
    assert not (disturbed / ".tokenmill/download/attempts").exists(), "files of the killed pods' attempts remain"


def test_an_eviction_is_not_counted_as_a_failure(disturbed: Path, namespace: Namespace) -> None:
    assert failures(namespace, "disturbed") == 3, "one failure for each deleted pod"
    assert failures(namespace, "disturbed", "ignored-failure") > 0


@pytest.mark.parametrize(("seconds", "kind"), [("0", "ignored-failure"), ("600", "failure")], ids=["late", "early"])
def test_a_stopped_pod_counts_only_soon_after_its_start(slow_hub: Namespace, seconds: str, kind: str) -> None:
    """A user or a controller deletes a pod, which has no condition DisruptionTarget then."""
    name = f"stopped-{seconds}"
    early = f'[{{"name":"TOKENMILL_EARLY_STOP_SECONDS","value":"{seconds}"}}]'
    slow_hub.install(
        f"{name} charts/dataset-download {STORAGE} --set dataset.outputPath={name} --set dataset.sampleFiles=4"
        f" --set dataset.repo={DATASET},dataset.connections=1 {SMALL} --set-json 'extraEnv={early}'"
    )
    pod = wait_for(lambda: running(slow_hub, name).get(0))
    assert pod and wait_for(lambda: "to run, " in slow_hub.logs(pod)), slow_hub.describe(name)
    slow_hub.user.check(f"kubectl delete pod {pod} --wait=false")
    counts = wait_for(lambda: {k: n for k in ("failure", "ignored-failure") if (n := failures(slow_hub, name, k))}, 90)
    assert counts == {kind: 1}, slow_hub.describe(name)
    slow_hub.wait_for_job(name)


def test_an_oom_killed_worker_logs_its_limit_and_unit(slow_hub: Namespace) -> None:
    ordinary = shard(2, 1000)  # more than planning reads
    record = b'{"meta":[' + b"[]," * 8_000_000 + b'[]],"text":"a record that takes thirty times its size"}'
    source = put_files(slow_hub, "heavy", {"light.jsonl": shard(1), "outsize.jsonl": ordinary + record})
    line = (
        f"heavy charts/dataset-preprocess {STORAGE} --set dataset.inputPath=heavy --set workers=2 --set processes=1"
        f" --set tokenizer.name={MODEL}"
        " --set resources.requests.cpu=50m,resources.requests.memory=256Mi --set job.backoffLimitPerIndex=0"
        " --set dataset.maxRecordSize=64MiB"  # otherwise the record is refused for its size
    )
    slow_hub.install(f"{line} --set resources.limits.memory=600Mi")
    slow_hub.wait_for_job("heavy-preprocess", "Failed", timeout=300)
    (killed,) = (pod for pod in slow_hub.pods("heavy-preprocess") if exit_code(pod) != 0)
    ended = killed["status"]["containerStatuses"][0]["state"]["terminated"]
    assert ended["reason"] == "OOMKilled"
    last = ended["message"].splitlines()[-1]
    # The kernel kills the whole pod or, without cgroup's oom.group, only the encoder and then Hugging Face's process.
    assert "started outsize (" in last or "outsize.jsonl: the encoder fastokens was killed" in last, last
    assert "memory limit 600 MiB" in last
    finished = receipts(source / "preprocessed", "preprocess")
    assert finished.keys() == {"light"}
    slow_hub.user.check(f"helm upgrade {line} --set resources.limits.memory=1536Mi")
    slow_hub.wait_for_job("heavy-preprocess")
    assert receipts(source / "preprocessed", "preprocess").items() > finished.items()


def test_damaged_files_fail_alone_and_only_they_are_repeated(slow_hub: Namespace, tmp_path: Path) -> None:
    compressor = zstandard.ZstdCompressor(write_checksum=True)
    good = {f"{n}.jsonl.zst": compressor.compress(shard(n)) for n in range(4)}
    cut, torn = good["1.jsonl.zst"], good["3.jsonl.zst"]
    damaged = {"1.jsonl.zst": cut[: len(cut) // 2], "3.jsonl.zst": torn[:50] + bytes(50) + torn[100:]}
    source = put_files(slow_hub, "brought", good | damaged)
    line = f"brought charts/dataset-extract {STORAGE} --set dataset.inputPath=brought --set workers=4 {SMALL}"

    slow_hub.install(line)
    job = slow_hub.wait_for_job("brought-extract", "Failed")
    assert job["status"]["succeeded"] == 2
    failed = failed_once(slow_hub, "brought-extract")
    logs = [slow_hub.logs(pod["metadata"]["name"]) for pod in failed]
    status = tokenmill("status", source).out
    for name in damaged:
        assert sum(f"/data/brought/{name}" in text for text in logs) == 1
        assert f"/data/brought/{name}" in status
    finished = receipts(source / "extracted", "extract")
    assert len(finished) == 2

    (source / "1.jsonl.zst").write_bytes(cut)
    slow_hub.user.check(f"helm upgrade {line}")
    slow_hub.wait_for_job("brought-extract", "Failed")
    assert len(failed_once(slow_hub, "brought-extract")) == 1
    (source / "3.jsonl.zst").write_bytes(torn)
    slow_hub.user.check("helm uninstall brought")
    slow_hub.install(line)
    slow_hub.wait_for_job("brought-extract")

    assert receipts(source / "extracted", "extract").items() > finished.items()
    run_checked("extract", write_files(tmp_path / "brought", good), tmp_path / "extracted")
    assert_same(data_of(source / "extracted"), data_of(tmp_path / "extracted"))


def test_a_truncated_download_is_reported_and_fetched_again(
    slow_hub: Namespace, disturbed: Path, tmp_path: Path
) -> None:
    victim = sorted(disturbed.glob("*.zst"))[0]
    original = victim.read_bytes()
    os.truncate(victim, len(original) // 2)
    line = f"cut charts/dataset-extract {STORAGE} --set dataset.inputPath=disturbed --set workers=2 {SMALL}"
    slow_hub.install(line)
    slow_hub.wait_for_job("cut-extract", "Failed")
    (pod,) = failed_once(slow_hub, "cut-extract")
    logs = slow_hub.logs(pod["metadata"]["name"])
    assert f"/data/disturbed/{victim.name} has {len(original) // 2} bytes" in logs
    assert "run tokenmill download again" in logs

    fetched, extracted = receipt_files(disturbed, "download"), receipt_files(disturbed / "extracted", "extract")
    assert len(extracted) == FILES - 1, "a damaged file stops no other unit, even of the same worker"
    slow_hub.user.check("helm uninstall disturbed")
    slow_hub.install(f"{DISTURBED} {SMALL}")
    slow_hub.wait_for_job("disturbed")
    slow_hub.user.check(f"helm upgrade {line}")
    slow_hub.wait_for_job("cut-extract")

    assert victim.read_bytes() == original
    del fetched[victim.name + ".json"]
    assert receipt_files(disturbed, "download").items() > fetched.items()
    assert receipt_files(disturbed / "extracted", "extract").items() > extracted.items()


def test_another_planner_replaces_a_killed_one(slow_hub: Namespace, orphaned: str) -> None:
    slow_hub.wait_for_job(orphaned)
    assert len(receipts(slow_hub.data / orphaned, "download")) == 2


def test_no_worker_waits_for_a_lost_master(slow_hub: Namespace, tmp_path: Path) -> None:
    """After a forced deletion the ranks of both pods still save and end with 0, but no verdict is written."""
    make_dataset(slow_hub, tmp_path)
    run = Training(slow_hub, "lost")
    run.install(100_000, "--set training.saveInterval=50", step=0.1)

    def worker() -> str | None:
        return next((p["metadata"]["uid"] for p in run.pods() if "-worker-" in p["metadata"]["name"]), None)

    for _ in range(2):
        assert wait_for(run.logged, 120), run.describe()
        before, saved = worker(), run.iteration()
        slow_hub.kill("lost-master-0")
        # The wait for its verdict would take 150 s; the operator creates a new pod within seconds.
        assert wait_for(lambda before=before: worker() not in (None, before), 75), run.describe()
        run.wait_for_iteration(saved + 1)
    run.account.check(f"helm upgrade {run.command(run.iteration() + 50, '--set training.saveInterval=50', step=0.02)}")
    run.succeed()
    run.assert_exact(run.iteration())


def failed_once(namespace: Namespace, job: str) -> list[dict[str, Any]]:
    """Return the pods of the failed indexes: one pod each, because exit code 2 excludes a retry."""
    pods = namespace.pods(job)
    failed = [pod for pod in pods if exit_code(pod) != 0]
    assert [exit_code(pod) for pod in failed] == [2] * len(failed)
    assert len({index_of(pod) for pod in pods}) == len(pods), namespace.describe(job)
    assert namespace.job(job)["status"]["failedIndexes"] == ",".join(str(i) for i in sorted(map(index_of, failed)))
    return failed


def receipt_files(output: Path, stage: str) -> dict[str, tuple[int, bytes]]:
    """Return the receipts with their contents and modification times."""
    paths = (output / f".tokenmill/{stage}/receipts").glob("*.json")
    return {path.name: (path.stat().st_mtime_ns, path.read_bytes()) for path in paths}


def put_files(namespace: Namespace, name: str, files: dict[str, bytes]) -> Path:
    """Write files of the user to the volume, in a directory that pods can write to."""
    return write_files(namespace.data / name, files)
