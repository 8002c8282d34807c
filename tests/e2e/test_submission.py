"""`--on kubernetes` on a real cluster: the objects are accepted, the stage runs, and `tokenmill status` sees it."""

from pathlib import Path

import pytest

from e2e.cluster import CLAIM, ROOT, Namespace
from support.commandline import tokenmill
from support.corpus import text

pytestmark = pytest.mark.e2e


def test_a_command_runs_on_the_cluster(namespace: Namespace, tmp_path: Path) -> None:
    corpus = namespace.data / "submitted"
    corpus.mkdir()
    for number in range(3):
        (corpus / f"{number}.jsonl").write_bytes(text(number, 30))
    for path in (corpus, *corpus.iterdir()):
        path.chmod(0o777 if path.is_dir() else 0o666)
    profiles = tmp_path / "tokenmill.toml"
    profiles.write_text(f'[team]\non = "kubernetes"\nclaim = "{CLAIM}"\ncharts = "{ROOT}/charts"\nworkers = 2\n')
    options = ("--on", "team", "--profiles", profiles)
    command = ("concatenate", "/data/submitted", "/data/submitted/joined", "--target-files", 2, *options)
    variables = {"KUBECONFIG": str(namespace.user.kubeconfig)}

    rendered = tokenmill(*command, "--dry-run", **variables)
    assert rendered.code == 0, rendered.err
    accepted = namespace.user.check("kubectl apply --dry-run=server -f -", rendered.out)
    submitted = tokenmill(*command, "--job-name", "sent", **variables)
    assert submitted.code == 0, submitted.err
    assert "job.batch/" in accepted and "release sent of dataset-concatenate is installed" in submitted.out

    namespace.wait_for_job("sent-concatenate")
    status = tokenmill("status", "/data/submitted", *options, **variables)
    assert "job/sent-concatenate of Kubernetes: complete, 2 of 2 workers done" in status.out, status
    assert len(list((corpus / "joined").glob("*.jsonl"))) == 2
