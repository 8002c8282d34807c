"""Retention of checkpoints: which old ones are deleted, also if the deletion is killed at any step."""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from support.checkpoints import (
    START,
    dies_at_change,
    iterations,
    names_moved_aside,
    remove_shard,
    removing_shard,
    tracker,
    tracking,
    tree,
)
from support.torchdist import UNTRACKED, save
from tokenmill.checkpoints.repair import (
    MAX_FINISHED_ASIDE,
    examine_tracked,
    find_good_iteration,
    list_checkpoints,
    mark_before_nan,
    prune,
    repair_checkpoints,
)
from tokenmill.errors import RequestError


def make_run(path: Path) -> None:
    """Make five checkpoints up to the tracker's (one is damaged), two newer ones, a link, and release."""
    for iteration in (100, 200, 300, 400, 500):
        save(path, iteration)
    remove_shard(path, 300)
    save(path, 600, steps=UNTRACKED)
    save(path, 700, steps=1)
    save(path, "release", steps=UNTRACKED)
    save(path.parent / "base", 50)
    (path / "iter_0000050").symlink_to(path.parent / "base" / "iter_0000050")


ALWAYS = ["iter_0000050", "iter_0000300", "iter_0000500", "iter_0000600", "iter_0000700", "release"]
"""Checkpoints that retention never deletes: a link, a damaged one, the tracker's, the newer ones, release."""


@pytest.mark.parametrize(("keep", "also"), [(2, [400]), (3, [200, 400]), (4, [100, 200, 400]), (9, [100, 200, 400])])
def test_newest_complete_checkpoints_are_kept(keep: int, also: list[int], tmp_path: Path) -> None:
    path = tmp_path / "run"
    make_run(path)
    actions = prune(path, keep)
    assert iterations(path) == sorted([*ALWAYS, *(f"iter_{iteration:07d}" for iteration in also)])
    assert len(actions) == 3 - len(also) and all(
        f"deleted: {keep} newer checkpoints are kept" in action for action in actions
    )
    assert examine_tracked(path).complete  # type: ignore[union-attr]
    assert list(tmp_path.rglob("*-1")) == [] and (tmp_path / "base" / "iter_0000050" / ".metadata").exists()
    assert prune(path, keep) == []


@pytest.mark.parametrize(
    ("marked", "kept"),
    [
        ([], [400, 500]),
        ([500], [300, 400, 500]),
        ([400, 500], [200, 300, 400, 500]),
        ([400], [300, 400, 500]),
        ([100], [400, 500]),
    ],
)
def test_checkpoints_before_nan_do_not_count(marked: list[int], kept: list[int], tmp_path: Path) -> None:
    for iteration in (100, 200, 300, 400, 500):
        save(tmp_path, iteration)
    for iteration in marked:
        mark_before_nan(tmp_path, iteration)
    assert [saved.iteration for saved in list_checkpoints(tmp_path) if saved.before_nan] == marked
    prune(tmp_path, 2)
    assert [saved.iteration for saved in list_checkpoints(tmp_path)] == kept
    assert all(saved.complete for saved in list_checkpoints(tmp_path, full=True))


def test_the_newest_good_checkpoint_is_found(tmp_path: Path) -> None:
    for iteration in (100, 200, 300):
        save(tmp_path, iteration)
    assert find_good_iteration(tmp_path, 300) == 300
    mark_before_nan(tmp_path, 300)
    assert [find_good_iteration(tmp_path, iteration) for iteration in (300, 200)] == [200, 200]
    for iteration in (100, 200):
        mark_before_nan(tmp_path, iteration)
    assert find_good_iteration(tmp_path, 300) == 0
    mark_before_nan(tmp_path, 400)  # deleted meanwhile
    assert not (tmp_path / "iter_0000400").exists()


def test_fewer_than_two_are_refused(tmp_path: Path) -> None:
    for keep in (1, 0, -1):
        with pytest.raises(RequestError, match="at least 2"):
            prune(tmp_path, keep)


@pytest.mark.parametrize(
    "apply_damage",
    [tracking(""), tracking(None), tracking("900"), tracking("release"), removing_shard(500)],
    ids=["torn", "missing", "nowhere", "release", "damaged"],
)
def test_nothing_is_deleted_without_a_valid_tracker(apply_damage: Callable[[Path], Any], tmp_path: Path) -> None:
    path = tmp_path / "run"
    make_run(path)
    apply_damage(path)
    before = tree(path)
    assert prune(path, 2) == []
    assert tree(path) == before


@pytest.mark.slow
def test_killed_retention_leaves_no_partial_checkpoint(tmp_path: Path) -> None:
    make_run(tmp_path / "whole" / "run")
    prune(tmp_path / "whole" / "run", 2)
    for count in range(1, 200):
        path = tmp_path / f"{count}" / "run"
        make_run(path)
        died = dies_at_change(lambda path=path: prune(path, 2), count)
        # A checkpoint that keeps its name is unchanged, and two complete ones up to the tracker exist.
        left = {checkpoint.iteration: checkpoint.complete for checkpoint in list_checkpoints(path)}
        assert {iteration for iteration, complete in left.items() if not complete} == {300, 700}
        assert left[500] and left[400]
        assert repair_checkpoints(path, dry_run=True).name == "iter_0000500"
        prune(path, 2)
        assert tree(path).keys() == tree(tmp_path / "whole" / "run").keys()
        if not died:
            break
    assert count > 8


def test_checkpoints_aside_are_bounded_and_finished_ones_stay(tmp_path: Path) -> None:
    for iteration in (100, 200, 300, 400, 500):
        save(tmp_path, iteration)
    tracker(tmp_path, "100")
    repair_checkpoints(tmp_path)
    assert names_moved_aside(tmp_path) == [START(200), START(300), START(400), START(500)]
    for iteration in (200, 300):
        save(tmp_path, iteration, steps=1)
        repair_checkpoints(tmp_path)
    assert names_moved_aside(tmp_path) == [START(200), START(300), START(300), START(400), START(500)]
    actions = prune(tmp_path, 2)
    assert names_moved_aside(tmp_path) == [START(300), START(400), START(500)] and MAX_FINISHED_ASIDE == 2
    assert len(actions) == 2 and all("deleted: newer ones are kept aside" in action for action in actions)
    assert list((tmp_path / ".tokenmill" / "trash").iterdir()) == []


def test_failed_deletion_is_reported_and_retried(tmp_path: Path) -> None:
    for iteration in (100, 200, 300):
        save(tmp_path, iteration)
    (tmp_path / ".tokenmill" / "trash").mkdir(parents=True)
    (tmp_path / ".tokenmill" / "trash" / "iter_0000050-1").write_text("no directory")
    actions = prune(tmp_path, 2)
    assert "iter_0000100 deleted" in actions[0] and "iter_0000050-1 is not deleted yet" in actions[1]
    assert iterations(tmp_path) == ["iter_0000200", "iter_0000300"]


def test_pipe_in_the_trash_is_reported(tmp_path: Path) -> None:
    save(tmp_path, 100)
    (tmp_path / ".tokenmill" / "trash").mkdir(parents=True)
    os.mkfifo(tmp_path / ".tokenmill" / "trash" / "iter_0000050-1")
    assert [
        "iter_0000050-1 is not deleted yet: Not a directory" in action
        for action in repair_checkpoints(tmp_path).actions
    ] == [True]


@pytest.mark.parametrize("kind", ["aside", "trash"])
def test_nothing_is_deleted_through_a_link(kind: str, tmp_path: Path) -> None:
    for iteration in (100, 200, 300):
        save(tmp_path / "run", iteration)
    for number in range(5):
        save(tmp_path / "elsewhere", f"model-{number}")
    (tmp_path / "run" / ".tokenmill").mkdir()
    (tmp_path / "run" / ".tokenmill" / kind).symlink_to(tmp_path / "elsewhere")
    before = tree(tmp_path)
    with pytest.raises(RequestError, match=f"{kind} is a symbolic link"):
        repair_checkpoints(tmp_path / "run")
    if kind == "trash":
        with pytest.raises(RequestError, match="trash is a symbolic link"):
            prune(tmp_path / "run", 2)
    assert tree(tmp_path) == before
