"""CheckpointLease: one run at a time writes checkpoints; a start of the same run takes over at once."""

import json
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from tokenmill.core.files.publish import write_atomic
from tokenmill.errors import RequestError, Superseded
from tokenmill.train.runtime import lease as module
from tokenmill.train.runtime.lease import CheckpointLease, ReleaseWatcher

pytestmark = pytest.mark.slow  # these tests wait for seconds

ELSEWHERE = {"host": "node-7", "boot": "another", "namespace": "pid:[1]", "pid": 1, "started": 5}


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "STALE_SECONDS", 2.0)
    monkeypatch.setattr(module, "STOPPING_TIMEOUT_SECONDS", 4.0)


def write_lease(directory: Path, **changed: Any) -> None:
    """Write the lease of another start, on a machine whose processes cannot be checked."""
    value = {"owner": ELSEWHERE, "run": "old", "id": "other", "stopping": False, "beat": time.time()} | changed
    directory.mkdir(parents=True, exist_ok=True)
    write_atomic(directory / "owner.json", json.dumps(value).encode())


def renew_for(directory: Path, seconds: float, **changed: Any) -> threading.Thread:
    """Let another start renew its lease for some seconds, create `directory`/ended, and release the lease."""
    write_lease(directory, **changed)

    def renew() -> None:
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            write_lease(directory, **changed)
            time.sleep(0.3)
        (directory / "ended").touch()
        (directory / "owner.json").unlink()

    thread = threading.Thread(target=renew)
    thread.start()
    return thread


def acquire(directory: Path, run: str = "new") -> list[str]:
    """Acquire the lease; return the log messages. The list is empty without a wait."""
    messages: list[str] = []
    CheckpointLease(directory, run, "try").acquire(messages.append)
    return messages


def test_a_start_of_the_same_run_takes_over_at_once(tmp_path: Path) -> None:
    write_lease(tmp_path, run="new")
    assert acquire(tmp_path) == []


@pytest.mark.parametrize("content", ["", "[]", '{"owner": 7}', "{"])
def test_unreadable_lease_is_taken_over(tmp_path: Path, content: str) -> None:
    (tmp_path / "owner.json").write_text(content)
    assert acquire(tmp_path) == []
    assert json.loads((tmp_path / "owner.json").read_text())["run"] == "new"


def test_unnamed_run_is_another_run(tmp_path: Path) -> None:
    write_lease(tmp_path, run="")
    assert "run (no name) on node-7 no longer renews its lease on the checkpoints: taking over" in acquire(tmp_path, "")


def test_unnamed_run_is_named_by_its_release(tmp_path: Path) -> None:
    first = CheckpointLease(tmp_path, "", "mine")
    first.acquire(print)
    record = json.loads((tmp_path / "owner.json").read_text())
    write_lease(tmp_path, **(record | {"owner": ELSEWHERE}))  # the view of another machine
    assert "run mine on node-7 no longer renews its lease on the checkpoints: taking over" in acquire(tmp_path, "")


def test_new_run_waits_for_a_stopping_run(tmp_path: Path) -> None:
    thread = renew_for(tmp_path, 6, stopping=True)
    messages = acquire(tmp_path)
    assert (tmp_path / "ended").exists()
    thread.join()
    assert "run old on node-7 writes to these checkpoints: waiting until it has ended" in messages


def test_active_run_keeps_its_lease(tmp_path: Path) -> None:
    thread = renew_for(tmp_path, 8)
    with pytest.raises(RequestError, match=r"run old on node-7 writes to these checkpoints .*stop that run first"):
        acquire(tmp_path)
    thread.join()


def test_lost_lease_is_not_released(tmp_path: Path) -> None:
    first, second = CheckpointLease(tmp_path, "run", "try"), CheckpointLease(tmp_path, "run", "try")
    first.acquire(print)
    first.renew()
    second.acquire(print)
    with pytest.raises(Superseded):
        first.renew()
    first.release()
    second.renew(stopping=True)
    assert json.loads((tmp_path / "owner.json").read_text())["stopping"]
    second.release()
    assert not (tmp_path / "owner.json").exists()


def test_new_release_is_reported_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "run"
    monkeypatch.setenv("TOKENMILL_RUN", "mine")
    monkeypatch.setenv("TOKENMILL_RUN_FILE", str(path))
    reasons: list[str] = []
    watcher = ReleaseWatcher(reasons.append)
    for text in ("", "mine", "", "mine\n"):
        path.write_text(text)
        watcher.check()
    path.unlink()
    watcher.check()
    path.mkdir()
    watcher.check()
    assert reasons == []
    path.rmdir()
    path.write_text("theirs")
    watcher.check()
    watcher.check()
    assert len(reasons) == 1 and "names run theirs, but this is run mine" in reasons[0]
    before_the_first_match = ReleaseWatcher(reasons.append)
    before_the_first_match.check()
    assert len(reasons) == 2
    monkeypatch.delenv("TOKENMILL_RUN_FILE")
    ReleaseWatcher(reasons.append).check()
    assert len(reasons) == 2


@pytest.mark.parametrize("place", [".tokenmill", ".tokenmill/train", ".tokenmill/train/owner.json"])
def test_a_link_to_itself_is_refused_with_its_name(tmp_path: Path, place: str) -> None:
    link = tmp_path / place
    link.parent.mkdir(parents=True, exist_ok=True)
    link.symlink_to(link.name)
    with pytest.raises(RequestError, match=rf"{link} is a symbolic link"):
        CheckpointLease(tmp_path / ".tokenmill/train", "run", "try").acquire(print)
