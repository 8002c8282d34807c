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

from charts.rendering import argocd_sources
from e2e.cluster import CLAIM, ROOT, Namespace
from e2e.corpus import DATASET, MODEL, assert_same, content, done, receipts, serve
from tokenmill.testhub import Hub

pytestmark = pytest.mark.e2e

SMALL = {"requests": {"cpu": "50m", "memory": "128Mi"}, "limits": {"cpu": "1", "memory": "1Gi"}}
JOBS = {"download": "slimpajama-download", "preprocess": "slimpajama-preprocess-preprocess"}


@pytest.fixture(scope="module")
def values(with_hub: Namespace) -> Path:
    """Return the clone's examples/values as somebody adapted them: fewer files, small pods, the test Hub's tokenizer."""
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
    again = with_hub.user.does("examples/deploy.sh", timeout=400)
    assert again.splitlines() == [f"slimpajama-{stage} is complete" for stage in JOBS]
    assert identities(with_hub) == before


def test_a_file_that_is_gone_stops_it(values: Path, with_hub: Namespace) -> None:
    """What lies on the volume decides, not that the Job is complete."""
    lost = next((with_hub.data / "slimpajama").glob("*.zst"))
    lost.rename(with_hub.data / "lost")
    stopped = with_hub.user.run("examples/deploy.sh", timeout=400)
    shutil.move(with_hub.data / "lost", lost)
    assert stopped.code == 1 and stopped.out == ""
    assert "slimpajama-download is complete and its output is not as its manifest says:" in stopped.err
    assert lost.name in stopped.err
