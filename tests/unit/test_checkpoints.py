"""Checkpoints: which are complete, what is wrong with the others, and the commands that report it."""

import io
import json
import os
import pickle
import re
import shutil
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from support.checkpoints import SAVED, START, integrity, only_checkpoint, remove_shard, tracker
from support.commandline import run_many
from support.torchdist import NOW, archive, make_older, metadata, save, write
from tokenmill.checkpoints.repair import examine_tracked, list_checkpoints, repair_checkpoints
from tokenmill.checkpoints.torch_dist import CLOCK_TOLERANCE_SECONDS, Checkpoint
from tokenmill.core.printing import format_bytes

DATA = Path(__file__).parent / "data"


REAL = sorted(DATA.glob("torch_dist*"))


# -- complete checkpoints


def test_finished_save_is_complete(tmp_path: Path) -> None:
    directory = save(tmp_path, 100)
    checkpoint = only_checkpoint(tmp_path, full=True)
    assert (checkpoint.complete, checkpoint.state, checkpoint.problems, checkpoint.finished) == (
        True,
        "complete",
        (),
        True,
    )
    assert (checkpoint.iteration, checkpoint.path, checkpoint.mtime) == (100, directory, NOW + 6000 + 3)
    assert checkpoint.bytes == sum(file.stat().st_size for file in directory.iterdir())
    assert examine_tracked(tmp_path) == checkpoint


@pytest.mark.parametrize("real", REAL, ids=lambda path: path.name)
def test_megatron_checkpoints_are_complete_until_truncated(real: Path, tmp_path: Path) -> None:
    """See data/README.md for how these checkpoints were made."""
    directory = tmp_path / "iter_0000100"
    shutil.copytree(real, directory)
    for number, file in enumerate(
        (*sorted(directory.glob("*.distcp")), directory / ".metadata", directory / "metadata.json")
    ):
        os.utime(file, (NOW + number, NOW + number))
    modules = set(sys.modules)
    assert only_checkpoint(tmp_path, full=True).problems == ()
    assert not [name for name in set(sys.modules) - modules if name.startswith(("torch", "megatron"))]
    for file in sorted(directory.glob("*.distcp")):
        data = file.read_bytes()
        write(file, data[:-1], NOW)
        assert (
            f"{file.name} has {len(data) - 1:,} bytes, but .metadata requires {len(data):,}"
            in only_checkpoint(tmp_path).state
        )
        write(file, data, NOW)
    assert only_checkpoint(tmp_path).complete
    write(file, bytes(len(data)), NOW)
    assert only_checkpoint(tmp_path).complete
    if (directory / "integrity.json").exists():
        assert only_checkpoint(tmp_path, full=True).state == f"{file.name} does not match its hash in integrity.json"


def test_one_real_checkpoint_has_hashes() -> None:
    assert len(REAL) == 2 and sum((path / "integrity.json").exists() for path in REAL) == 1


def test_list_is_sorted_and_ignores_foreign_names(tmp_path: Path) -> None:
    for iteration in (300, 100, 12345678, 200, "release"):
        save(tmp_path, iteration)
    for name in ("iter_100", "iter_0000100.bak", "iter_00000100", "iter_x", "iterations", "non_persistent"):
        (tmp_path / name).mkdir()
    assert [checkpoint.iteration for checkpoint in list_checkpoints(tmp_path)] == [0, 100, 200, 300, 12345678]
    assert list_checkpoints(tmp_path / "nowhere") == []


def shorten(file: Path) -> None:
    write(file, file.read_bytes()[:-1], file.stat().st_mtime)


def set_mtime(file: Path, mtime: float) -> None:
    os.utime(file, (mtime, mtime))


DAMAGES: dict[str, tuple[Callable[[Path], Any], str]] = {
    "missing distcp": (lambda d: (d / "__1_0.distcp").unlink(), "__1_0.distcp is missing"),
    "short distcp": (lambda d: shorten(d / "__1_0.distcp"), "__1_0.distcp has 131 bytes, but .metadata requires 132"),
    "empty distcp": (lambda d: write(d / "__1_0.distcp", b"", SAVED), "__1_0.distcp has 0 bytes"),
    "two things": (
        lambda d: ((d / "__0_0.distcp").unlink(), shorten(d / "__1_0.distcp")),
        r"is missing \(and 1 more\)",
    ),
    "no .metadata": (lambda d: (d / ".metadata").unlink(), "has no .metadata: a save over it was interrupted"),
    "empty .metadata": (lambda d: write(d / ".metadata", b"", SAVED), ".metadata is damaged"),
    "no metadata.json": (lambda d: (d / "metadata.json").unlink(), r"no metadata.json: .* such as torch_dcp"),
    "empty metadata.json": (lambda d: write(d / "metadata.json", b"", SAVED), "metadata.json is not JSON"),
    "half metadata.json": (lambda d: shorten(d / "metadata.json"), "metadata.json is not JSON"),
    "another format": (
        lambda d: write(d / "metadata.json", b'{"sharded_backend": "zarr"}', SAVED + 3),
        "names the format 'zarr', not 'torch_dist'",
    ),
    "no format": (lambda d: write(d / "metadata.json", b"[]", SAVED + 3), "names the format None"),
    "legacy": (
        lambda d: (shutil.rmtree(d), write(d / "mp_rank_00" / "model_optim_rng.pt", b"x", SAVED)),
        "older format, torch",
    ),
    "no directory": (lambda d: (shutil.rmtree(d), write(d, b"x", SAVED)), "is not a directory"),
    "link to nothing": (lambda d: (shutil.rmtree(d), d.symlink_to("gone")), "is a dangling symbolic link"),
    "pipe for data": (
        lambda d: ((d / "__1_0.distcp").unlink(), os.mkfifo(d / "__1_0.distcp")),
        "__1_0.distcp is not a regular file",
    ),
    "pipe for .metadata": (
        lambda d: ((d / ".metadata").unlink(), os.mkfifo(d / ".metadata")),
        ".metadata is not a regular file",
    ),
    "large metadata.json": (lambda d: write(d / "metadata.json", bytes(2 << 20), SAVED), "has 2,097,152 bytes"),
    "large .metadata": (lambda d: os.truncate(d / ".metadata", 2 << 40), ".metadata has 2,199,023,255,552 bytes"),
    "a format of many words": (
        lambda d: write(d / "metadata.json", json.dumps({"sharded_backend": "x" * 9999}).encode(), SAVED + 3),
        "names the format 'x{99}, not 'torch_dist'$",
    ),
    "newer data": (
        lambda d: set_mtime(d / "__1_0.distcp", SAVED + 3 + 1000),
        r"__1_0.distcp is 1,001 s newer than .metadata: a save over it was interrupted .*touch",
    ),
    "newer data and .metadata": (
        lambda d: (set_mtime(d / "__1_0.distcp", SAVED + 1000), set_mtime(d / ".metadata", SAVED + 1001)),
        "__1_0.distcp is 997 s newer than metadata.json",
    ),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_damage_is_reported(damage: str, tmp_path: Path) -> None:
    directory = save(tmp_path, 100)
    apply_damage, expected = DAMAGES[damage]
    apply_damage(directory)
    checkpoint = only_checkpoint(tmp_path)
    assert not checkpoint.complete
    assert re.search(expected, checkpoint.state), checkpoint.state


COMMON = {"args": {"seq_length": 32}, "iteration": 100, "optimizer": {"param_groups": [{"lr": 0.1}]}}


ARCHIVE = archive(COMMON)


@pytest.mark.parametrize("common", [ARCHIVE, archive({}), (REAL[0] / "common.pt").read_bytes()])
def test_every_truncation_of_a_common_file_is_detected(common: bytes, tmp_path: Path) -> None:
    """Older Megatron-LM syncs neither common.pt nor metadata.json: a power failure can truncate them."""
    save(tmp_path, 100)
    directory = make_older(save(tmp_path, 200), common)
    assert only_newest(tmp_path).complete
    for end in {0, 1, 16, 100, len(common) // 2, len(common) - 60, len(common) - 22, len(common) - 1}:
        write(directory / "common.pt", common[:end], SAVED + 6000)
        assert only_newest(tmp_path).state.startswith("common.pt is truncated or damaged"), end
        assert repair_checkpoints(tmp_path, dry_run=True).name == "iter_0000100"


BAD_COMMON: dict[str, tuple[Callable[[Path], Any], str]] = {
    "missing": (lambda f: f.unlink(), "common.pt is missing"),
    "zeros": (lambda f: write(f, bytes(len(ARCHIVE)), SAVED), "common.pt is truncated or damaged"),
    "zeros at the end": (
        lambda f: write(f, ARCHIVE[:500] + bytes(len(ARCHIVE) - 500), SAVED),
        "is truncated or damaged",
    ),
    "a page of zeros": (
        lambda f: write(f, ARCHIVE.replace(bytes(range(256)), bytes(256), 1), SAVED),
        "Bad CRC-32 for file 'common/data/0'",
    ),
    "another byte": (lambda f: write(f, ARCHIVE.replace(b"seq_length", b"seq_lengtH"), SAVED), "Bad CRC-32"),
    "bytes before it": (lambda f: write(f, ARCHIVE + b"x" * 70_000, SAVED), "is truncated or damaged"),
    "a bomb": (lambda f: write(f, archive(bytes(10**7), zipfile.ZIP_DEFLATED), SAVED), "has compressed members"),
    "overlapping": (lambda f: write(f, overlapping(), SAVED), "its members are larger than the file"),
    "another archive": (lambda f: write(f, ARCHIVE.replace(b"data.pkl", b"data.pkx"), SAVED), "has no data.pkl"),
    "before torch 1.6": (
        lambda f: write(f, pickle.dumps(0x1950A86A20F9469CFC6C, 2) + bytes(1000), SAVED),
        "common.pt has the format of torch.save before torch 1.6: load it with torch",
    ),
    "a pickle": (lambda f: write(f, pickle.dumps(COMMON), SAVED), "is truncated or damaged"),
    "a pipe": (lambda f: (f.unlink(), os.mkfifo(f)), "common.pt is not a regular file"),
    "a directory": (lambda f: (f.unlink(), f.mkdir()), "common.pt is not a regular file"),
    "a link out": (lambda f: (f.unlink(), f.symlink_to("/etc/passwd")), "is a symbolic link that leads out"),
}


def overlapping() -> bytes:
    """Return an archive whose directory lists one large member many times."""
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w") as writer:
        writer.writestr("common/data.pkl", bytes(100_000))
        writer.filelist *= 1000
    return file.getvalue()


@pytest.mark.parametrize("damage", BAD_COMMON)
def test_damaged_common_file_is_reported(damage: str, tmp_path: Path) -> None:
    directory = make_older(save(tmp_path, 100), ARCHIVE)
    apply_damage, expected = BAD_COMMON[damage]
    apply_damage(directory / "common.pt")
    assert expected in only_checkpoint(tmp_path).state


def test_common_file_is_optional(tmp_path: Path) -> None:
    directory = save(tmp_path, 100)
    assert only_checkpoint(tmp_path).complete
    write(directory / "common.pt", ARCHIVE[:-1], SAVED)  # every Megatron-LM reads it if it exists
    assert "common.pt is truncated or damaged" in only_checkpoint(tmp_path).state


def only_newest(path: Path) -> Checkpoint:
    return list_checkpoints(path)[-1]


def test_small_clock_differences_are_tolerated_and_touch_accepts_a_copy(tmp_path: Path) -> None:
    directory = save(tmp_path, 100)
    set_mtime(directory / "__0_0.distcp", SAVED + 2 + CLOCK_TOLERANCE_SECONDS)
    assert only_checkpoint(tmp_path).complete
    set_mtime(directory / "__0_0.distcp", SAVED + 2 + CLOCK_TOLERANCE_SECONDS + 1)
    assert not only_checkpoint(tmp_path).complete
    (directory / ".metadata").touch()
    (directory / "metadata.json").touch()
    assert only_checkpoint(tmp_path).complete


def test_every_truncation_of_metadata_is_detected(tmp_path: Path) -> None:
    file = save(tmp_path, 100) / ".metadata"
    data = file.read_bytes()
    for end in range(len(data)):
        write(file, data[:end], SAVED + 2)
        assert only_checkpoint(tmp_path).state.startswith(".metadata is damaged"), end


PATHS: list[Any] = [
    "../outside",
    "/etc/passwd",
    "sub/../../outside",
    "./x",
    "",
    "a\0b",
    "x" * 300,
    "\ud800",
    ".",
    "__0_0.distcp/x",
]


@pytest.mark.parametrize("path", PATHS, ids=ascii)
def test_path_outside_the_checkpoint_is_damage(path: str, tmp_path: Path) -> None:
    directory = save(tmp_path, 100)
    write(tmp_path / "outside", bytes(1000), SAVED)
    write(directory / ".metadata", metadata([("__0_0.distcp", 0, 10), (path, 0, 10)]), SAVED + 2)
    assert any(word in only_checkpoint(tmp_path).state for word in ("is outside the checkpoint", "is not a valid path"))


@pytest.mark.parametrize(
    "entry", [(1, 0, 1), ("x", -1, 1), ("x", 0, -1), ("x", "0", 1), ("x", True, 1), ("x", 0, None)]
)
def test_entry_that_is_not_an_extent_is_damage(entry: Any, tmp_path: Path) -> None:
    write(save(tmp_path, 100) / ".metadata", metadata([entry]), SAVED + 2)
    assert "does not name an extent of a file" in only_checkpoint(tmp_path).state


def test_metadata_without_data_is_damage(tmp_path: Path) -> None:
    file = save(tmp_path, 100) / ".metadata"
    for content in (metadata([]), pickle.dumps({"storage_data": {}}), pickle.dumps(None)):
        write(file, content, SAVED + 2)
        assert only_checkpoint(tmp_path).state == ".metadata lists no data files"


def test_links_must_stay_inside_the_checkpoint(tmp_path: Path) -> None:
    directory = save(tmp_path, 100)
    file, moved = directory / "__0_0.distcp", directory / "sub" / "data"
    write(moved, file.read_bytes(), SAVED)
    write(tmp_path / "outside" / "data", file.read_bytes(), SAVED)

    def link(target: str) -> Checkpoint:
        file.unlink()
        file.symlink_to(target)
        return only_checkpoint(tmp_path)

    assert link("sub/data").complete
    assert link("../outside/data").state == "__0_0.distcp is a symbolic link that leads out of the checkpoint"
    assert link("/etc/passwd").state == "__0_0.distcp is a symbolic link that leads out of the checkpoint"
    assert link("sub/gone").state == "__0_0.distcp is missing"
    assert "is not a valid path" in link("__0_0.distcp").state
    # A parent directory may also be a link.
    shutil.rmtree(moved.parent)
    moved.parent.symlink_to("../outside")
    write(directory / ".metadata", metadata([("sub/data", 0, 10)]), SAVED + 2)
    assert only_checkpoint(tmp_path).state == "sub/data is a symbolic link that leads out of the checkpoint"


def test_checkpoint_directory_may_be_a_link(tmp_path: Path) -> None:
    save(tmp_path / "base", 100)
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "iter_0000100").symlink_to("../base/iter_0000100")
    assert only_checkpoint(tmp_path / "run").complete


def test_recorded_hashes_are_compared_on_request(tmp_path: Path) -> None:
    directory = save(tmp_path, 100)
    integrity(directory)
    assert only_checkpoint(tmp_path, full=True).complete
    file = directory / "__0_0.distcp"
    write(file, file.read_bytes()[:-1] + b"?", SAVED)
    assert only_checkpoint(tmp_path).complete
    assert only_checkpoint(tmp_path, full=True).state == "__0_0.distcp does not match its hash in integrity.json"
    integrity(directory, common="0" * 64)
    assert only_checkpoint(tmp_path, full=True).state == "common is missing, but integrity.json has its hash"
    integrity(directory, **{"../iter_0000100/__0_0.distcp": "0" * 64})
    assert "is outside the checkpoint" in only_checkpoint(tmp_path, full=True).state
    for content in (b"", b"{}", b"[]", b'{"algorithm": "md5", "files": {}}', b'{"files": 3}'):
        write(directory / "integrity.json", content, SAVED + 4)
        assert only_checkpoint(tmp_path).complete
        assert ("'md5', not of 'sha256'" if b"md5" in content else "is truncated") in only_checkpoint(
            tmp_path, full=True
        ).state


def save_two_and_interrupt_a_third(path: Path) -> None:
    save(path, 100)
    save(path, 200)
    save(path, 300, steps=1)


# -- the command line


def test_list_verify_and_repair(tmp_path: Path) -> None:
    good, broken, lost = tmp_path / "good", tmp_path / "broken", tmp_path / "lost"
    save(good, 100)
    integrity(save(good, 200))
    for path in (broken, lost):
        save_two_and_interrupt_a_third(path)
    tracker(broken, "")
    remove_shard(lost, 200)
    commands = [
        ["list", good], ["list", good, "--json"], ["list", broken], ["list", tmp_path / "nowhere"],
        ["verify", good], ["verify", good, "--json"], ["verify", lost], ["verify", lost, "--quick", "--json"],
        ["verify", broken], ["verify", tmp_path],
        ["repair", broken, "--dry-run"], ["repair", broken, "--json"], ["verify", broken],
        ["repair", lost], ["repair", lost], ["repair", lost, "--start-over"],
        *([command, tmp_path / name] for command in ("list", "verify", "repair") for name in ("nowhere", "x" * 300)),
    ]  # fmt: skip
    ended, _ = run_many([["checkpoint", *map(str, command)] for command in commands])
    assert [result.code for result in ended] == [0, 0, 0, 2, 0, 0, 2, 2, 2, 2, 0, 0, 0, 0, 0, 2] + [2] * 6
    assert all("is not a directory" in result.err for result in ended[16:])
    assert not any("Traceback" in result.err for result in ended)

    head, *lines = ended[0].out.splitlines()
    assert head.split() == ["iteration", "size", "age", "state"]
    size = sum(file.stat().st_size for file in (good / START(100)).iterdir())
    assert lines[0].split()[:3] == ["100", *format_bytes(size).split()] and lines[0].endswith("complete")
    assert lines[1].split()[:2] == ["*", "200"] and lines[1].endswith("complete")
    listing = json.loads(ended[1].out)
    assert listing["tracker"] == "iter_0000200" and [
        checkpoint["tracked"] for checkpoint in listing["checkpoints"]
    ] == [False, True]
    assert {"iteration": 100, "complete": True, "bytes": size}.items() <= listing["checkpoints"][0].items()
    assert "is empty" in ended[2].out and "has no metadata.json" in ended[2].out
    assert "is not a directory" in ended[3].err

    assert "iter_0000200 is complete, and its hashes are correct" in ended[4].out
    assert json.loads(ended[5].out)["problems"] == []
    assert "problem: __0_0.distcp is missing" in ended[6].out and "tokenmill checkpoint list" in ended[6].err
    assert json.loads(ended[7].out)["problems"] == ["__0_0.distcp is missing"]
    assert "tokenmill checkpoint repair" in ended[8].err
    assert "there is no" in ended[9].err

    assert "would change: tracker set to 200" in ended[10].out and "nothing was changed" in ended[10].out
    repaired = json.loads(ended[11].out)
    assert (repaired["iteration"], repaired["checkpoint"], len(repaired["done"])) == (200, "iter_0000200", 2)
    assert ended[12].out.endswith("iter_0000200 is complete\n")
    assert "tracker set to 100" in ended[13].out and "resumes from" in ended[13].out
    assert ended[14].out == f"a run resumes from {lost / 'iter_0000100'}\n"
    assert "iter_0000100 is complete" in ended[15].err
