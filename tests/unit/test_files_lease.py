"""Leases: the rule that decides whether a process is alive, and a file that one process at a time holds."""

import json
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tokenmill.core.files import lease as module
from tokenmill.core.files.lease import (
    Lease,
    LeaseClaim,
    Liveness,
    Owner,
    current_process,
    get_creator_liveness,
    get_liveness,
    is_abandoned,
    new_token,
    remove_abandoned,
)
from tokenmill.core.files.tree import Tree, UnexpectedEntry
from tokenmill.core.machine import machine_identity, machine_tag, process_name, start_ticks
from tokenmill.errors import Superseded

ELSEWHERE = Owner("node-7", "another", "pid:[1]", 1, 5)


def here(pid: int, started: int) -> Owner:
    return Owner("host", *machine_identity(), pid, started)


@pytest.fixture
def dead() -> int:
    """Return the id of a process that has ended."""
    process = subprocess.Popen([sys.executable, "-c", ""])
    process.wait()
    return process.pid


def lease(directory: Path, owner: Owner | None = None) -> Lease[LeaseClaim]:
    return Lease(
        Tree(directory), directory / "lease.json", LeaseClaim(owner=owner or current_process(), token=new_token())
    )


def test_local_process_is_checked_without_a_timeout(dead: int) -> None:
    for silent in (0.0, 1e9):
        assert get_liveness(current_process(), silent, 60) is Liveness.ALIVE
        assert get_liveness(here(os.getppid(), start_ticks(os.getppid()) or 0), silent, 60) is Liveness.ALIVE
        assert get_liveness(here(dead, 5), silent, 60) is Liveness.DEAD
        assert get_liveness(here(os.getpid(), 5), silent, 60) is Liveness.DEAD  # another process had this id before


@pytest.mark.parametrize("owner", [ELSEWHERE, None, Owner("host", machine_identity()[0], "pid:[1]", os.getpid(), 5)])
def test_remote_process_is_dead_after_a_timeout(owner: Owner | None) -> None:
    assert get_liveness(owner) is get_liveness(owner, 1e9) is get_liveness(owner, 60, 60) is Liveness.UNKNOWN
    assert get_liveness(owner, -3600, 60) is Liveness.UNKNOWN  # a file from the future
    assert get_liveness(owner, 60.5, 60) is Liveness.DEAD


def test_a_temporary_file_is_abandoned_by_the_same_rule(tmp_path: Path, dead: int) -> None:
    def make(name: str, age: float) -> Path:
        path = tmp_path / name
        path.touch()
        os.utime(path, (time.time() - age,) * 2)
        return path

    own, other = f".a.json.{process_name()}.tmp", "0" * 8
    assert not is_abandoned(make(own, 1e6))
    assert is_abandoned(make(f".a.json.{machine_tag()}-{dead}-0123abcd.tmp", 0))
    assert not is_abandoned(make(f".a.json.{other}-{dead}-0123abcd.tmp", 500))
    assert not is_abandoned(make(f".a.json.{other}-{dead}-0123abcd.tmp", -1e6))
    assert is_abandoned(make(f".a.json.{other}-{dead}-0123abcd.tmp", 700))
    for name in (".a.tmp", "a.json", f".a.{other}-x-0123abcd.tmp", f".a.{other}-1-0123abcd"):
        assert not is_abandoned(make(name, 1e6))
    assert get_creator_liveness(f"scratch-{machine_tag()}-{dead}-0123abcd") is Liveness.DEAD
    assert get_creator_liveness(f"scratch-{process_name()}") is Liveness.ALIVE
    assert get_creator_liveness(f"scratch-{other}-{dead}-0123abcd") is Liveness.UNKNOWN
    assert get_creator_liveness("scratch") is None


def test_a_later_process_with_the_same_number_is_not_the_maker(tmp_path: Path) -> None:
    """The numbers of ended processes are used again, in containers within seconds; the start time tells them apart."""
    number, started = os.getpid(), start_ticks(os.getpid()) or 0
    old, own = f"{machine_tag()}-{number}.{started - 1}-0123abcd", f"{machine_tag()}-{number}.{started}-0123abcd"
    assert get_creator_liveness(own) is Liveness.ALIVE
    assert get_creator_liveness(f"scratch-{old}") is Liveness.DEAD
    unnamed = f".a.{machine_tag()}-{number}-0123abcd.tmp"  # of a version whose names have no start time
    assert get_creator_liveness(unnamed) is Liveness.UNKNOWN
    for age, name, abandoned in ((0, f".a.{old}.tmp", True), (0, unnamed, False), (1e6, unnamed, True)):
        (tmp_path / name).touch()
        os.utime(tmp_path / name, (time.time() - age,) * 2)
        assert is_abandoned(tmp_path / name) == abandoned
    (tmp_path / f".b.{own}.tmp").touch()
    (tmp_path / f".c.{old}.tmp").mkdir()
    (tmp_path / ".user.tmp").touch()
    (tmp_path / f".link.{old}.tmp").symlink_to(tmp_path)
    remove_abandoned(Tree(tmp_path), "")
    assert {".user.tmp", f".b.{own}.tmp"} <= {path.name for path in tmp_path.iterdir()}
    assert not list(tmp_path.glob(f".[ac].{old}.tmp"))


def test_a_forked_child_has_its_own_identity() -> None:
    names = [process_name()]
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        os.write(write, process_name().encode())
        os._exit(0)
    os.waitpid(child, 0)
    names.append(os.read(read, 100).decode())
    assert [name.split("-")[1].split(".")[0] for name in names] == [str(os.getpid()), str(child)]
    assert get_creator_liveness(names[1]) is Liveness.DEAD


def test_lease_is_held_until_its_block_ends(tmp_path: Path) -> None:
    first, second = lease(tmp_path), lease(tmp_path)
    assert second.watch() is None
    with first.hold() as held, second.hold() as second_held:
        assert (held, second_held) == (True, False)
        holder = second.watch(0)
        assert holder is not None and (holder.claim, holder.liveness) == (first.claim, Liveness.ALIVE)
    assert os.listdir(tmp_path) == []
    with pytest.raises(ValueError, match="not made"), second.hold() as held:
        assert held
        raise ValueError("not made")
    assert second.acquire()


def test_lost_lease_is_not_renewed_or_released(tmp_path: Path) -> None:
    first, second = lease(tmp_path), lease(tmp_path)
    assert first.acquire()
    second.write()
    with pytest.raises(Superseded, match=r"lease\.json"):
        first.renew()
    first.release()
    assert second.check() == second.claim
    second.release()
    second.renew()  # renew writes a deleted file again
    assert first.read() == second.claim


def test_only_the_observed_lease_is_broken(tmp_path: Path, dead: int) -> None:
    old, new, other = lease(tmp_path, here(dead, 5)), lease(tmp_path), lease(tmp_path)
    assert old.acquire()
    holder = other.watch()
    assert holder is not None and holder.liveness is Liveness.DEAD
    new.write()
    other.break_stale(holder.claim)
    assert other.read() == new.claim and os.listdir(tmp_path) == ["lease.json"]
    other.break_stale(new.claim)
    other.break_stale(new.claim)
    assert os.listdir(tmp_path) == []


def test_remote_holder_is_dead_if_its_file_is_unchanged(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = [0.0]
    monkeypatch.setattr(module.time, "monotonic", lambda: clock[0])
    far, near = lease(tmp_path, ELSEWHERE), lease(tmp_path)
    assert far.acquire()
    os.utime(far.path, (2e9, 2e9))  # the clock of that machine is years ahead

    def after(seconds: float) -> tuple[Liveness, bool]:
        clock[0] += seconds
        holder = near.watch(60)
        assert holder is not None
        return holder.liveness, holder.changed

    assert after(1000) == (Liveness.UNKNOWN, False)
    assert after(59) == (Liveness.UNKNOWN, False)
    far.renew()
    assert after(59) == (Liveness.UNKNOWN, True)
    assert after(59) == (Liveness.UNKNOWN, True)
    assert after(2) == (Liveness.DEAD, True)
    lease(tmp_path, ELSEWHERE).write()
    assert after(1000) == (Liveness.UNKNOWN, True)


def test_failed_heartbeat_is_repeated_until_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "HEARTBEAT_SECONDS", 0.001)
    beats = 0
    enough = threading.Event()

    def beat() -> None:
        nonlocal beats
        beats += 1
        if beats > 3:
            enough.set()
        raise [OSError("away"), UnexpectedEntry("a link")][beats % 2]

    with module.heartbeat(beat):
        assert enough.wait(60)
    count = beats
    time.sleep(0.01)
    assert beats == count


CLAIM: dict[str, Any] = {"owner": {"host": "h", "boot": "b", "namespace": "n", "pid": 1, "started": 5}, "id": "x"}


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"{",
        b"[]",
        b"7",
        b'{"owner": 7}',
        b'{"id": "x"}',
        b"[" * 100_000,
        b'{"owner": ' * 100_000,
        b" " * (1 << 20),
        b"\xff",
        json.dumps(CLAIM).encode().replace(b'"x"', b'"\xff"'),
        json.dumps(CLAIM | {"id": 7}).encode(),
        *(json.dumps(CLAIM | {"owner": CLAIM["owner"] | {"pid": pid}}).encode() for pid in (0, -1, 1 << 31, "1", 1.5)),
    ],
    ids=range(17),
)
def test_unreadable_lease_has_an_unknown_owner(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "lease.json").write_bytes(content)
    holder = lease(tmp_path).watch(60)
    assert holder is not None and (holder.claim, holder.liveness) == (None, Liveness.UNKNOWN)
    lease(tmp_path).break_stale(None)
    assert os.listdir(tmp_path) == []


def test_a_claim_of_a_later_version_is_read(tmp_path: Path) -> None:
    (tmp_path / "lease.json").write_text(json.dumps(CLAIM | {"later": [1], "owner": CLAIM["owner"] | {"gpu": 3}}))
    assert lease(tmp_path).read() == LeaseClaim(owner=Owner("h", "b", "n", 1, 5), token="x")


@pytest.mark.parametrize(
    "plant",
    [
        os.mkfifo,
        Path.mkdir,
        lambda path: path.symlink_to("elsewhere.json"),
        lambda path: path.symlink_to("/dev/zero"),
        lambda path: socket.socket(socket.AF_UNIX).bind(str(path)),
    ],
    ids=["pipe", "directory", "link", "device", "socket"],
)
def test_special_files_are_refused_and_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, plant: Callable[[Path], Any]
) -> None:
    (tmp_path / "elsewhere.json").write_text(json.dumps(CLAIM))
    monkeypatch.chdir(tmp_path)  # a socket's path is short
    plant(Path("lease.json"))
    own_lease = lease(tmp_path)
    assert not own_lease.acquire()
    for method in (own_lease.read, own_lease.watch, own_lease.renew):
        with pytest.raises(UnexpectedEntry, match=r"lease\.json"):
            method()
    own_lease.release()
    assert sorted(os.listdir(tmp_path)) == ["elsewhere.json", "lease.json"]
    assert (tmp_path / "elsewhere.json").read_text() == json.dumps(CLAIM)
