"""How processes of several machines agree through objects: leases, and who announces an end."""

import os
import time
from pathlib import Path

import pytest

from support.buckets import Store
from tokenmill.core.buckets.mirror import locate
from tokenmill.core.buckets.tree import open_tree
from tokenmill.core.files.lease import Lease, LeaseClaim, Owner, current_process, new_token
from tokenmill.engine.notify.announcer import Marker


@pytest.fixture
def root(s3_store: Store, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the directory that stands for a new bucket."""
    for name, value in s3_store.environment.items():
        monkeypatch.setitem(os.environ, name, value)
    return Path(locate(f"{s3_store.uri}/run", "path"))


def test_a_heartbeat_of_another_machine_is_seen(root: Path) -> None:
    tree, path = open_tree(root), root / "owner.json"
    there = Lease(tree, path, LeaseClaim(owner=Owner("other", "boot", "namespace", 1, 1), token=new_token()))
    here = Lease(tree, path, LeaseClaim(owner=current_process(), token=new_token()))
    there.write()
    deadline = time.monotonic() + 30
    while not (holder := here.watch()) or not holder.changed:
        assert time.monotonic() < deadline
        time.sleep(0.1)  # the times of S3 are whole seconds
        there.renew()


def test_one_of_two_nodes_announces(root: Path) -> None:
    markers = [Marker(open_tree(root), root / "announced/run-failed") for _ in range(2)]
    assert [marker.claim() for marker in markers] == [True, False]
