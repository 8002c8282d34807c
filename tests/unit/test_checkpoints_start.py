"""Checkpoints: the tracker, the checkpoint that a start resumes from, and starts that are killed at every step."""

import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from support.checkpoints import (
    START,
    dies_at_change,
    iterations,
    names_moved_aside,
    removing_shard,
    saving,
    tracker,
    tracking,
    tree,
)
from support.torchdist import CUT_OFF, NOW, TRACKER, UNTRACKED, save, write
from tokenmill.checkpoints import repair
from tokenmill.checkpoints.repair import (
    MAX_UNFINISHED_ASIDE,
    InvalidTracker,
    examine_tracked,
    list_checkpoints,
    read_tracked_iteration,
    repair_checkpoints,
)
from tokenmill.core.files import mounts
from tokenmill.errors import RequestError


@pytest.mark.parametrize(("content", "iteration"), [(b"100", 100), (b" 0000100\n", 100), (b"release", 0), (b"0", 0)])
def test_the_tracker_is_read_as_megatron_reads_it(content: bytes, iteration: int, tmp_path: Path) -> None:
    assert read_tracked_iteration(tmp_path) is None
    write(tmp_path / TRACKER, content, NOW)
    assert read_tracked_iteration(tmp_path) == iteration


INVALID = [
    b"",
    b"\n",
    b"\0\0\0",
    b"rel",
    b"iter_0000100",
    b"100\0",
    b"-1",
    b"1_0",
    b"+10",
    b"1e3",
    b"\xff",
    b"9" * 5000,
    bytes(2 << 20),
]


@pytest.mark.parametrize("content", INVALID, ids=lambda content: ascii(content[:12]))
def test_invalid_tracker_has_its_own_error(content: bytes, tmp_path: Path) -> None:
    write(tmp_path / TRACKER, content, NOW)
    with pytest.raises(InvalidTracker, match="tokenmill checkpoint repair") as problem:
        read_tracked_iteration(tmp_path)
    assert problem.value.exit_code == 2 and TRACKER in str(problem.value)


def test_tracker_that_is_not_a_file_is_invalid(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / TRACKER)
    with pytest.raises(InvalidTracker, match="cannot use the tracker"):
        read_tracked_iteration(tmp_path)
    (tmp_path / TRACKER).unlink()
    (tmp_path / TRACKER).mkdir()
    with pytest.raises(InvalidTracker, match="cannot use the tracker"):
        read_tracked_iteration(tmp_path)


class Case:
    """The content of a directory, and the result of a start in it."""

    def __init__(
        self,
        make: Callable[[Path], Any],
        start: str | None,
        holds: str | None,
        left: list[int | str],
        moved: list[int | str] = [],  # noqa: B006
        actions: list[str] = [],  # noqa: B006
    ) -> None:
        def names(checkpoints: list[int | str]) -> list[str]:
            return sorted(
                f"iter_{checkpoint:07d}" if isinstance(checkpoint, int) else checkpoint for checkpoint in checkpoints
            )

        self.make, self.start, self.holds, self.actions = make, start, holds, actions
        self.left, self.moved = names(left), names(moved)


def prepare(*steps: Callable[[Path], Any]) -> Callable[[Path], None]:
    def make(path: Path) -> None:
        path.mkdir()
        for step in steps:
            step(path)

    return make


NEVER_TRACKED = "it is complete, but the tracker never named it or was set back"


CASES = {
    "nothing": Case(prepare(), None, None, []),
    "no directory": Case(lambda path: None, None, None, []),
    "logs alone": Case(prepare(lambda p: write(p / "progress.txt", b"x", NOW)), None, None, []),
    "in order": Case(prepare(saving(100), saving(200)), START(200), "200", [100, 200]),
    "a long run": Case(prepare(saving(12_345_678)), "iter_12345678", "12345678", [12_345_678]),
    "tracker with a newline": Case(prepare(saving(100), tracking("100\n")), START(100), "100\n", [100]),
    "cut off while saving": Case(
        prepare(saving(100), saving(200), saving(300, CUT_OFF)),
        START(200),
        "200",
        [100, 200],
        [300],
        ["iter_0000300 moved aside: newer than the checkpoint to resume from (has no metadata.json"],
    ),
    "cut off at once": Case(
        prepare(saving(100), saving(200, 0)), START(100), "100", [100], [200], ["iter_0000200 moved aside"]
    ),
    "cut off before the tracker": Case(
        prepare(saving(100), saving(200, UNTRACKED)),
        START(100),
        "100",
        [100],
        [200],
        [f"iter_0000200 moved aside: newer than the checkpoint to resume from ({NEVER_TRACKED})"],
    ),
    "set back": Case(
        prepare(saving(100), saving(200), saving(300), tracking("100")),
        START(100),
        "100",
        [100],
        [200, 300],
        [NEVER_TRACKED, NEVER_TRACKED],
    ),
    "empty tracker": Case(
        prepare(saving(100), saving(200), tracking("")),
        START(200),
        "200",
        [100, 200],
        [],
        [f"tracker set to 200, the newest complete checkpoint: {{path}}/{TRACKER} is empty"],
    ),
    "partial tracker": Case(
        prepare(saving(100), saving(1000), tracking("10")),
        START(1000),
        "1000",
        [100, 1000],
        [],
        ["the tracker named iter_0000010, which is not complete (does not exist)"],
    ),
    "tracker of garbage": Case(
        prepare(saving(100), tracking("x;y")),
        START(100),
        "100",
        [100],
        [],
        ["contains b'x;y', which is not an iteration"],
    ),
    "tracker cut off over a cut-off save": Case(
        prepare(saving(100), saving(200), saving(300, CUT_OFF), tracking("")),
        START(200),
        "200",
        [100, 200],
        [300],
        ["is empty", "iter_0000300"],
    ),
    "no tracker": Case(
        prepare(saving(100), saving(200), tracking(None)), START(200), "200", [100, 200], [], ["there was no tracker"]
    ),
    "first save, killed before the tracker": Case(
        prepare(saving(100, UNTRACKED)), START(100), "100", [100], [], ["there was no tracker"]
    ),
    "names nothing": Case(
        prepare(saving(100), tracking("500")),
        START(100),
        "100",
        [100],
        [],
        ["iter_0000500, which is not complete (does not exist)"],
    ),
    "names a damaged one": Case(
        prepare(saving(100), saving(200), removing_shard(200)),
        START(100),
        "100",
        [100],
        [200],
        ["which is not complete (__0_0.distcp is missing)", "iter_0000200 moved"],
    ),
    "names a damaged one, older and newer whole": Case(
        prepare(saving(100), saving(200), saving(300), removing_shard(200), tracking("200")),
        START(300),
        "300",
        [100, 200, 300],
        [],
        ["tracker set to 300"],
    ),
    "names a damaged one, newer cut off": Case(
        prepare(saving(100), saving(200), removing_shard(200), saving(300, 2)),
        START(100),
        "100",
        [100],
        [200, 300],
        ["tracker", "0200 moved", "0300 moved"],
    ),
    "an older one is damaged": Case(
        prepare(saving(100), saving(200), removing_shard(100)), START(200), "200", [100, 200]
    ),
    "tracker release": Case(prepare(saving("release")), "release", "release", ["release"]),
    "tracker release, a save cut off": Case(
        prepare(saving("release"), saving(100, 2)), "release", "release", ["release"], [100], ["iter_0000100"]
    ),
    "torn after release": Case(
        prepare(saving("release"), saving(100), tracking("")),
        START(100),
        "100",
        [100, "release"],
        [],
        ["tracker set to 100"],
    ),
    "only release is whole": Case(
        prepare(saving("release"), saving(100), removing_shard(100)),
        "release",
        "release",
        ["release"],
        [100],
        ["tracker set to release", "iter_0000100"],
    ),
    "first save cut off": Case(
        prepare(saving(100, 1)),
        None,
        None,
        [],
        [100],
        ["iter_0000100 moved aside: the first save of the run did not finish"],
    ),
    "first save cut off in metadata.json": Case(
        prepare(saving(100, UNTRACKED), lambda p: write(p / "iter_0000100" / "metadata.json", b"", NOW)),
        None,
        None,
        [],
        [100],
        ["did not finish"],
    ),
    "first save cut off twice": Case(
        prepare(saving(100, 0), saving(200, CUT_OFF)),
        None,
        None,
        [],
        [200],
        ["0100 moved", "0200 moved", "0100-1 deleted: newer"],
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_start_resumes_from_the_right_checkpoint(name: str, tmp_path: Path) -> None:
    case, path = CASES[name], tmp_path / "run"
    case.make(path)
    before = tree(path)
    dry = repair_checkpoints(path, dry_run=True)
    assert tree(path) == before
    start = repair_checkpoints(path)
    assert start.actions[: len(dry.actions)] == dry.actions and (start.iteration, start.name) == (
        dry.iteration,
        dry.name,
    )
    assert (start.name, start.has_checkpoint) == (case.start, case.start is not None)
    assert start.iteration == (int(case.start[5:]) if case.start and case.start != "release" else 0)
    for action, expected in zip(start.actions, case.actions, strict=True):
        assert expected.format(path=path) in action
    if not path.exists():
        return
    assert ((path / TRACKER).read_text() if (path / TRACKER).exists() else None) == case.holds
    assert (iterations(path), names_moved_aside(path)) == (case.left, case.moved)
    # Every checkpoint still exists, in place or aside, and a second start does nothing.
    after = tree(path)
    for kept in case.left:
        assert {k: v for k, v in before.items() if k.startswith(kept)} == {
            k: v for k, v in after.items() if k.startswith(kept)
        }
    assert repair_checkpoints(path) == type(start)(start.iteration, start.name)
    assert tree(path) == after
    if case.start:
        assert examine_tracked(path) == next(
            checkpoint for checkpoint in list_checkpoints(path) if checkpoint.path.name == case.start
        )


REFUSED = {
    "the only one is damaged": (
        prepare(saving(100), removing_shard(100)),
        "the tracker names iter_0000100; iter_0000100: __0_0.distcp is missing",
    ),
    "damaged, without a tracker": (
        prepare(saving(100), removing_shard(100), tracking(None)),
        "there is no tracker; iter_0000100: __0_0.distcp is missing",
    ),
    "damaged, and one cut off": (
        prepare(saving(100), removing_shard(100), saving(200, 1)),
        "iter_0000200: has no metadata.json: .*; iter_0000100: __0_0",
    ),
    "a tracker alone": (prepare(tracking("100")), "the tracker names iter_0000100; there are no checkpoints"),
    "a torn tracker alone": (prepare(tracking("")), "is empty; there are no checkpoints"),
    "a torn tracker over a cut-off save": (
        prepare(saving(100, CUT_OFF), tracking("")),
        "is empty; iter_0000100: has no metadata.json",
    ),
    "an older format": (
        prepare(lambda p: write(p / "iter_0000100" / "mp_rank_00" / "model_optim_rng.pt", b"x", NOW)),
        "older format, torch",
    ),
    "a release of an older format": (
        prepare(lambda p: write(p / "release" / "mp_rank_00" / "model_optim_rng.pt", b"x", NOW), tracking("release")),
        "the tracker names release; release: .* older format, torch",
    ),
    "a link to what went": (
        prepare(lambda p: (p / "iter_0000100").symlink_to("/nonexistent/x")),
        "is a dangling symbolic link",
    ),
    "a hostile one": (
        prepare(saving(100), lambda p: write(p / "iter_0000100" / ".metadata", b"cos\nsystem\n.", NOW)),
        "names os.system",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_damaged_checkpoints_are_never_ignored(name: str, tmp_path: Path) -> None:
    make, message = REFUSED[name]
    path = tmp_path / "run"
    make(path)
    before = tree(path)
    with pytest.raises(RequestError, match=message) as refusal:
        repair_checkpoints(path)
    assert tree(path) == before
    for word in (str(path), "storage.checkpointPath", "tokenmill checkpoint repair", "--start-over"):
        assert word in str(refusal.value)
    # With start_over, the run starts again, and no checkpoint is deleted.
    assert (
        repair_checkpoints(path, start_over=True, dry_run=True).actions
        == repair_checkpoints(path, start_over=True).actions
        != ()
    )
    assert sorted(before.keys() & {TRACKER, "release", START(100), START(200)}) == sorted(
        [*names_moved_aside(path), *iterations(path)]
    )
    assert repair_checkpoints(path) == type(repair_checkpoints(path))(0, None)


def test_start_over_is_refused_if_a_run_can_resume(tmp_path: Path) -> None:
    save(tmp_path, 100)
    tracker(tmp_path, "")
    before = tree(tmp_path)
    with pytest.raises(RequestError, match=r"iter_0000100 is complete.*storage\.checkpointPath"):
        repair_checkpoints(tmp_path, start_over=True)
    assert tree(tmp_path) == before


def test_a_file_in_place_of_the_directory_is_refused(tmp_path: Path) -> None:
    write(tmp_path / "file", b"", NOW)
    for call in (repair_checkpoints, list_checkpoints, lambda path: repair_checkpoints(path / "below")):
        with pytest.raises(RequestError):
            call(tmp_path / "file")


def test_moving_aside_never_overwrites(tmp_path: Path) -> None:
    save(tmp_path, 100)
    for _ in range(5):
        save(tmp_path, 200, steps=CUT_OFF)
        assert repair_checkpoints(tmp_path).name == "iter_0000100"
    # The newest stays for inspection; a run that dies in every save does not fill the disk.
    assert [path.name for path in (tmp_path / ".tokenmill" / "aside").iterdir()] == ["iter_0000200-5"]
    assert list((tmp_path / ".tokenmill" / "trash").iterdir()) == []
    assert MAX_UNFINISHED_ASIDE == 1


@pytest.mark.slow
def test_stale_network_file_system_moves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The tracker looks outdated until the directory cache expires."""
    save(tmp_path, 100)
    save(tmp_path, 200)
    tracker(tmp_path, "100")
    for module in (mounts, repair):
        monkeypatch.setattr(module, "directory_cache_seconds", lambda _: 60.0)
    messages: list[str] = []

    def log(message: str) -> None:
        messages.append(message)
        threading.Timer(0.1, lambda: tracker(tmp_path, "200")).start()

    assert repair_checkpoints(tmp_path, log=log) == type(repair_checkpoints(tmp_path))(200, "iter_0000200")
    assert iterations(tmp_path) == ["iter_0000100", "iter_0000200"] and "network file system" in messages[0]
    # A start without a difference does not wait.
    repair_checkpoints(tmp_path, log=log)
    assert len(messages) == 1


@pytest.mark.parametrize("name", CASES)
def test_killed_start_reaches_the_same_end(name: str, tmp_path: Path) -> None:
    case = CASES[name]
    case.make(tmp_path / "whole")
    start = repair_checkpoints(tmp_path / "whole")
    for count in range(1, 100):
        path = tmp_path / f"{count}"
        case.make(path)
        died = dies_at_change(lambda path=path: repair_checkpoints(path), count)
        again = repair_checkpoints(path)
        assert (again.iteration, again.name) == (start.iteration, start.name)
        assert not path.exists() or tree(path).keys() - {".tokenmill"} == tree(tmp_path / "whole").keys() - {
            ".tokenmill"
        }
        if not died:
            break
    else:
        raise AssertionError("the start never finished")
    assert count > 1 or not (case.moved or case.actions)


@pytest.mark.parametrize("name", REFUSED)
def test_killed_start_over_can_be_repeated(name: str, tmp_path: Path) -> None:
    for count in range(1, 100):
        path = tmp_path / f"{count}"
        REFUSED[name][0](path)
        died = dies_at_change(lambda path=path: repair_checkpoints(path, start_over=True), count)
        repair_checkpoints(path, start_over=True)
        assert iterations(path) == [] and not repair_checkpoints(path).has_checkpoint
        if not died:
            break
    assert count > 2


def test_stale_temporary_trackers_are_removed(tmp_path: Path) -> None:
    save(tmp_path, 100)
    tracker(tmp_path, "")
    counts = iter(range(1, 10))
    while not list(tmp_path.glob(".tokenmill/.*.tmp")):
        assert dies_at_change(lambda: repair_checkpoints(tmp_path), next(counts))
    repair_checkpoints(tmp_path)
    assert list((tmp_path / ".tokenmill").iterdir()) == []
