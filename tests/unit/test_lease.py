"""Who may write to a run's checkpoints: one run at a time, and a start of the same run at once."""

import json
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from tokenmill.errors import RequestError, Superseded
from tokenmill.files.publish import write_atomic
from tokenmill.training.runtime import lease as module
from tokenmill.training.runtime.lease import CheckpointLease, ReleaseWatcher

pytestmark = pytest.mark.slow  # they wait for seconds

ELSEWHERE = {"host": "node-7", "boot": "another", "namespace": "pid:[1]", "pid": 1, "started": 5}


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "STALE_SECONDS", 2.0)
    monkeypatch.setattr(module, "STOPPING_TIMEOUT_SECONDS", 4.0)


def owned(directory: Path, **changed: Any) -> None:
    """Let another start hold it, on a machine of which nothing can be known."""
    value = {"owner": ELSEWHERE, "run": "old", "id": "other", "stopping": False, "beat": time.time()} | changed
    directory.mkdir(parents=True, exist_ok=True)
    write_atomic(directory / "owner.json", json.dumps(value).encode())


def beating(directory: Path, seconds: float, **changed: Any) -> threading.Thread:
    """Let another start beat for a while, and then give it back; `directory`/ended is there from then on."""
    owned(directory, **changed)

    def beat() -> None:
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            owned(directory, **changed)
            time.sleep(0.3)
        (directory / "ended").touch()
        (directory / "owner.json").unlink()

    thread = threading.Thread(target=beat)
    thread.start()
    return thread


def taken(directory: Path, run: str = "new") -> list[str]:
    """Take it; return what was said, which is nothing where nobody was waited for."""
    said: list[str] = []
    CheckpointLease(directory, run, "try").acquire(said.append)
    return said


def test_a_start_of_the_same_run_takes_over_at_once(tmp_path: Path) -> None:
    owned(tmp_path, run="new")
    assert taken(tmp_path) == []


@pytest.mark.parametrize("content", ["", "[]", '{"owner": 7}', "{"])
def test_a_record_that_cannot_be_read_keeps_nobody_away(tmp_path: Path, content: str) -> None:
    (tmp_path / "owner.json").write_text(content)
    assert taken(tmp_path) == []
    assert json.loads((tmp_path / "owner.json").read_text())["run"] == "new"


def test_a_run_without_a_name_is_another_one(tmp_path: Path) -> None:
    owned(tmp_path, run="")
    assert "run (no name) on node-7 no longer renews its lease on the checkpoints: taking over" in taken(tmp_path, "")


def test_a_run_without_a_name_is_called_by_its_release(tmp_path: Path) -> None:
    first = CheckpointLease(tmp_path, "", "mine")
    first.acquire(print)
    found = json.loads((tmp_path / "owner.json").read_text())
    owned(tmp_path, **(found | {"owner": ELSEWHERE}))  # as another machine sees it
    assert "run mine on node-7 no longer renews its lease on the checkpoints: taking over" in taken(tmp_path, "")


def test_another_run_that_ends_is_waited_for(tmp_path: Path) -> None:
    thread = beating(tmp_path, 6, stopping=True)
    said = taken(tmp_path)
    assert (tmp_path / "ended").exists()
    thread.join()
    assert "run old on node-7 writes to these checkpoints: waiting until it has ended" in said


def test_another_run_that_goes_on_is_not_disturbed(tmp_path: Path) -> None:
    thread = beating(tmp_path, 8)
    with pytest.raises(RequestError, match=r"run old on node-7 writes to these checkpoints .*stop that run first"):
        taken(tmp_path)
    thread.join()


def test_who_lost_it_is_told_and_gives_nothing_back(tmp_path: Path) -> None:
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


def test_another_run_is_told_once_and_a_late_or_missing_name_never(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "run"
    monkeypatch.setenv("TOKENMILL_RUN", "mine")
    monkeypatch.setenv("TOKENMILL_RUN_FILE", str(path))
    reasons: list[str] = []
    current = ReleaseWatcher(reasons.append)
    for text in ("older", "", "mine", "", "mine\n"):
        path.write_text(text)
        current.check()
    path.unlink()
    current.check()
    path.mkdir()
    current.check()
    assert reasons == []
    path.rmdir()
    path.write_text("theirs")
    current.check()
    current.check()
    assert len(reasons) == 1 and "names run theirs, but this is run mine" in reasons[0]
    monkeypatch.delenv("TOKENMILL_RUN_FILE")
    ReleaseWatcher(reasons.append).check()
    assert len(reasons) == 1


@pytest.mark.parametrize("place", [".tokenmill", ".tokenmill/train", ".tokenmill/train/owner.json"])
def test_a_link_to_itself_is_refused_with_its_name(tmp_path: Path, place: str) -> None:
    link = tmp_path / place
    link.parent.mkdir(parents=True, exist_ok=True)
    link.symlink_to(link.name)
    with pytest.raises(RequestError, match=rf"{link} is a symbolic link"):
        CheckpointLease(tmp_path / ".tokenmill/train", "run", "try").acquire(print)
