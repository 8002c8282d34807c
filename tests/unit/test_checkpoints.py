"""Checkpoints: what is whole, hostile .metadata, where a start resumes, what is deleted; killed at every step."""

import contextlib
import hashlib
import io
import json
import os
import pickle
import pickletools
import re
import shutil
import struct
import sys
import tempfile
import threading
import time
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from support.commandline import many, tokenmill
from support.torchdist import (
    CUT_OFF,
    NOW,
    TRACKER,
    UNTRACKED,
    archive,
    legacy,
    metadata,
    older,
    save,
    write,
)
from tokenmill.errors import RequestError
from tokenmill.files import mounts
from tokenmill.flow.progress import size
from tokenmill.training.checkpoints import repair
from tokenmill.training.checkpoints.metadata import Damage, extents
from tokenmill.training.checkpoints.repair import (
    ASIDE_FINISHED,
    ASIDE_UNFINISHED,
    TornTracker,
    look,
    prepare,
    prune,
    read_tracker,
    scan,
)
from tokenmill.training.checkpoints.torch_dist import CLOCK_TOLERANCE, Checkpoint

DATA = Path(__file__).parent / "data"
REAL = sorted(DATA.glob("torch_dist*"))


def only(path: Path, *, full: bool = False) -> Checkpoint:
    """Look at the one checkpoint there."""
    [found] = scan(path, full=full)
    return found


def tree(path: Path) -> dict[str, bytes | None]:
    """Return what lies in a directory: directories, links as their targets, files as their bytes."""
    return {
        each.relative_to(path).as_posix(): os.readlink(each).encode()
        if each.is_symlink()
        else None
        if each.is_dir()
        else each.read_bytes()
        for each in path.rglob("*")
    }


def aside(path: Path) -> list[str]:
    """Return the names of what was moved aside, without the numbers."""
    return sorted(each.name.rpartition("-")[0] for each in (path / ".tokenmill" / "aside").glob("*"))


def iterations(path: Path) -> list[str]:
    return sorted(each.name for each in path.iterdir() if each.name.startswith(("iter_", "release")))


# -- what is whole


def test_a_finished_save_is_whole(tmp_path: Path) -> None:
    directory = save(tmp_path, 100)
    found = only(tmp_path, full=True)
    assert (found.complete, found.state, found.problems, found.finished) == (True, "complete", (), True)
    assert (found.iteration, found.path, found.mtime) == (100, directory, NOW + 6000 + 3)
    assert found.bytes == sum(file.stat().st_size for file in directory.iterdir())
    assert look(tmp_path) == found


@pytest.mark.parametrize("real", REAL, ids=lambda path: path.name)
def test_what_megatron_itself_saved_is_whole_and_a_byte_less_is_not(real: Path, tmp_path: Path) -> None:
    """See data/README.md for how they were made."""
    directory = tmp_path / "iter_0000100"
    shutil.copytree(real, directory)
    for number, file in enumerate(
        (*sorted(directory.glob("*.distcp")), directory / ".metadata", directory / "metadata.json")
    ):
        os.utime(file, (NOW + number, NOW + number))
    modules = set(sys.modules)
    assert only(tmp_path, full=True).problems == ()
    assert not [name for name in set(sys.modules) - modules if name.startswith(("torch", "megatron"))]
    for file in sorted(directory.glob("*.distcp")):
        data = file.read_bytes()
        write(file, data[:-1], NOW)
        assert f"{file.name} has {len(data) - 1:,} bytes where .metadata needs {len(data):,}" in only(tmp_path).state
        write(file, data, NOW)
    assert only(tmp_path).complete
    write(file, bytes(len(data)), NOW)
    assert only(tmp_path).complete
    if (directory / "integrity.json").exists():
        assert only(tmp_path, full=True).state == f"{file.name} has other bytes than integrity.json says"


def test_there_are_real_ones_and_one_has_hashes() -> None:
    assert len(REAL) == 2 and sum((one / "integrity.json").exists() for one in REAL) == 1


def test_oldest_first_and_what_no_tracker_can_name_is_somebody_elses(tmp_path: Path) -> None:
    for iteration in (300, 100, 12345678, 200, "release"):
        save(tmp_path, iteration)
    for name in ("iter_100", "iter_0000100.bak", "iter_00000100", "iter_x", "iterations", "non_persistent"):
        (tmp_path / name).mkdir()
    assert [one.iteration for one in scan(tmp_path)] == [0, 100, 200, 300, 12345678]
    assert scan(tmp_path / "nowhere") == []


def short(file: Path) -> None:
    write(file, file.read_bytes()[:-1], file.stat().st_mtime)


def at(file: Path, after: float) -> None:
    os.utime(file, (after, after))


SAVED = NOW + 6000
"""When iteration 100 was."""

DAMAGES: dict[str, tuple[Callable[[Path], Any], str]] = {
    "missing distcp": (lambda d: (d / "__1_0.distcp").unlink(), "__1_0.distcp is missing"),
    "short distcp": (lambda d: short(d / "__1_0.distcp"), "__1_0.distcp has 131 bytes where .metadata needs 132"),
    "empty distcp": (lambda d: write(d / "__1_0.distcp", b"", SAVED), "__1_0.distcp has 0 bytes"),
    "two things": (lambda d: ((d / "__0_0.distcp").unlink(), short(d / "__1_0.distcp")), r"is missing \(and 1 more\)"),
    "no .metadata": (lambda d: (d / ".metadata").unlink(), "has no .metadata: a save over it was cut off"),
    "empty .metadata": (lambda d: write(d / ".metadata", b"", SAVED), ".metadata is damaged"),
    "no metadata.json": (lambda d: (d / "metadata.json").unlink(), r"no metadata.json: .* such as torch_dcp"),
    "empty metadata.json": (lambda d: write(d / "metadata.json", b"", SAVED), "metadata.json is no JSON"),
    "half metadata.json": (lambda d: short(d / "metadata.json"), "metadata.json is no JSON"),
    "another format": (
        lambda d: write(d / "metadata.json", b'{"sharded_backend": "zarr"}', SAVED + 3),
        "names the format 'zarr', not 'torch_dist'",
    ),
    "no format": (lambda d: write(d / "metadata.json", b"[]", SAVED + 3), "names the format None"),
    "legacy": (
        lambda d: (shutil.rmtree(d), write(d / "mp_rank_00" / "model_optim_rng.pt", b"x", SAVED)),
        "older format, torch",
    ),
    "no directory": (lambda d: (shutil.rmtree(d), write(d, b"x", SAVED)), "is no directory"),
    "link to nothing": (lambda d: (shutil.rmtree(d), d.symlink_to("gone")), "is a link to nothing"),
    "pipe for data": (
        lambda d: ((d / "__1_0.distcp").unlink(), os.mkfifo(d / "__1_0.distcp")),
        "__1_0.distcp is no file",
    ),
    "pipe for .metadata": (lambda d: ((d / ".metadata").unlink(), os.mkfifo(d / ".metadata")), ".metadata is no file"),
    "large metadata.json": (lambda d: write(d / "metadata.json", bytes(2 << 20), SAVED), "has 2,097,152 bytes"),
    "large .metadata": (lambda d: os.truncate(d / ".metadata", 2 << 40), ".metadata has 2,199,023,255,552 bytes"),
    "a format of many words": (
        lambda d: write(d / "metadata.json", json.dumps({"sharded_backend": "x" * 9999}).encode(), SAVED + 3),
        "names the format 'x{99}, not 'torch_dist'$",
    ),
    "newer data": (
        lambda d: at(d / "__1_0.distcp", SAVED + 3 + 1000),
        r"__1_0.distcp is 1,001 s newer than .metadata: a save over it was cut off .*touch",
    ),
    "newer data and .metadata": (
        lambda d: (at(d / "__1_0.distcp", SAVED + 1000), at(d / ".metadata", SAVED + 1001)),
        "__1_0.distcp is 997 s newer than metadata.json",
    ),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_damage_is_found_and_named(damage: str, tmp_path: Path) -> None:
    directory = save(tmp_path, 100)
    hurt, said = DAMAGES[damage]
    hurt(directory)
    found = only(tmp_path)
    assert not found.complete
    assert re.search(said, found.state), found.state


COMMON = {"args": {"seq_length": 32}, "iteration": 100, "optimizer": {"param_groups": [{"lr": 0.1}]}}
ARCHIVE = archive(COMMON)


@pytest.mark.parametrize("common", [ARCHIVE, legacy(), archive({}), (REAL[0] / "common.pt").read_bytes()])
def test_a_common_file_that_torch_wrote_is_whole_and_no_beginning_of_it_is(common: bytes, tmp_path: Path) -> None:
    """What older Megatron-LM leaves when power fails under it: it syncs neither that file nor metadata.json."""
    save(tmp_path, 100)
    directory = older(save(tmp_path, 200), common)
    assert only_newest(tmp_path).complete
    for end in {0, 1, 16, 100, len(common) // 2, len(common) - 60, len(common) - 22, len(common) - 1}:
        write(directory / "common.pt", common[:end], SAVED + 6000)
        assert only_newest(tmp_path).state.startswith("common.pt is cut off or damaged"), end
        assert prepare(tmp_path, dry_run=True).name == "iter_0000100"


BAD_COMMON: dict[str, tuple[Callable[[Path], Any], str]] = {
    "missing": (lambda f: f.unlink(), "common.pt is missing"),
    "zeros": (lambda f: write(f, bytes(len(ARCHIVE)), SAVED), "common.pt is cut off or damaged"),
    "zeros at the end": (lambda f: write(f, ARCHIVE[:500] + bytes(len(ARCHIVE) - 500), SAVED), "is cut off or damaged"),
    "a page of zeros": (
        lambda f: write(f, ARCHIVE.replace(bytes(range(256)), bytes(256), 1), SAVED),
        "Bad CRC-32 for file 'common/data/0'",
    ),
    "another byte": (lambda f: write(f, ARCHIVE.replace(b"seq_length", b"seq_lengtH"), SAVED), "Bad CRC-32"),
    "bytes before it": (lambda f: write(f, ARCHIVE + b"x" * 70_000, SAVED), "is cut off or damaged"),
    "a bomb": (lambda f: write(f, archive(bytes(10**7), zipfile.ZIP_DEFLATED), SAVED), "has compressed parts"),
    "overlapping": (lambda f: write(f, overlapping(), SAVED), "its parts are larger than all of it"),
    "another archive": (lambda f: write(f, ARCHIVE.replace(b"data.pkl", b"data.pkx"), SAVED), "has no data.pkl"),
    "a pickle": (lambda f: write(f, pickle.dumps(COMMON), SAVED), "is cut off or damaged"),
    "a pipe": (lambda f: (f.unlink(), os.mkfifo(f)), "common.pt is no file"),
    "a directory": (lambda f: (f.unlink(), f.mkdir()), "common.pt is no file"),
    "a link out": (lambda f: (f.unlink(), f.symlink_to("/etc/passwd")), "is a link that leads out"),
}


def overlapping() -> bytes:
    """Return an archive whose directory names one large part again and again."""
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w") as made:
        made.writestr("common/data.pkl", bytes(100_000))
        made.filelist *= 1000
    return file.getvalue()


@pytest.mark.parametrize("damage", BAD_COMMON)
def test_a_common_file_that_is_not_whole_is_damage(damage: str, tmp_path: Path) -> None:
    directory = older(save(tmp_path, 100), ARCHIVE)
    hurt, said = BAD_COMMON[damage]
    hurt(directory / "common.pt")
    assert said in only(tmp_path).state


def test_a_common_file_is_missed_only_where_megatron_wrote_one(tmp_path: Path) -> None:
    directory = save(tmp_path, 100)
    assert only(tmp_path).complete
    write(directory / "common.pt", ARCHIVE[:-1], SAVED)  # read by every Megatron-LM wherever there is one
    assert "common.pt is cut off or damaged" in only(tmp_path).state


def only_newest(path: Path) -> Checkpoint:
    return scan(path)[-1]


def test_clocks_may_differ_a_little_and_touching_says_that_a_copy_is_whole(tmp_path: Path) -> None:
    directory = save(tmp_path, 100)
    at(directory / "__0_0.distcp", SAVED + 2 + CLOCK_TOLERANCE)
    assert only(tmp_path).complete
    at(directory / "__0_0.distcp", SAVED + 2 + CLOCK_TOLERANCE + 1)
    assert not only(tmp_path).complete
    (directory / ".metadata").touch()
    (directory / "metadata.json").touch()
    assert only(tmp_path).complete


def test_a_truncated_metadata_is_damage_wherever_it_ends(tmp_path: Path) -> None:
    file = save(tmp_path, 100) / ".metadata"
    data = file.read_bytes()
    for end in range(len(data)):
        write(file, data[:end], SAVED + 2)
        assert only(tmp_path).state.startswith(".metadata is damaged"), end


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
def test_a_path_that_leads_out_of_the_checkpoint_is_damage(path: str, tmp_path: Path) -> None:
    directory = save(tmp_path, 100)
    write(tmp_path / "outside", bytes(1000), SAVED)
    write(directory / ".metadata", metadata([("__0_0.distcp", 0, 10), (path, 0, 10)]), SAVED + 2)
    assert any(word in only(tmp_path).state for word in ("is outside the checkpoint", "leads nowhere"))


@pytest.mark.parametrize(
    "entry", [(1, 0, 1), ("x", -1, 1), ("x", 0, -1), ("x", "0", 1), ("x", True, 1), ("x", 0, None)]
)
def test_an_entry_that_is_no_stretch_of_a_file_is_damage(entry: Any, tmp_path: Path) -> None:
    write(save(tmp_path, 100) / ".metadata", metadata([entry]), SAVED + 2)
    assert "names no stretch of a file" in only(tmp_path).state


def test_metadata_without_data_is_damage(tmp_path: Path) -> None:
    file = save(tmp_path, 100) / ".metadata"
    for content in (metadata([]), pickle.dumps({"storage_data": {}}), pickle.dumps(None)):
        write(file, content, SAVED + 2)
        assert only(tmp_path).state == ".metadata names no data"


def test_links_inside_a_checkpoint_are_followed_and_links_out_of_it_are_damage(tmp_path: Path) -> None:
    directory = save(tmp_path, 100)
    file, moved = directory / "__0_0.distcp", directory / "sub" / "data"
    write(moved, file.read_bytes(), SAVED)
    write(tmp_path / "outside" / "data", file.read_bytes(), SAVED)

    def link(target: str) -> Checkpoint:
        file.unlink()
        file.symlink_to(target)
        return only(tmp_path)

    assert link("sub/data").complete
    assert link("../outside/data").state == "__0_0.distcp is a link that leads out of the checkpoint"
    assert link("/etc/passwd").state == "__0_0.distcp is a link that leads out of the checkpoint"
    assert link("sub/gone").state == "__0_0.distcp is missing"
    assert "leads nowhere" in link("__0_0.distcp").state
    # A directory on the way may be a link too.
    shutil.rmtree(moved.parent)
    moved.parent.symlink_to("../outside")
    write(directory / ".metadata", metadata([("sub/data", 0, 10)]), SAVED + 2)
    assert only(tmp_path).state == "sub/data is a link that leads out of the checkpoint"


def test_a_checkpoint_may_be_a_link_as_a_whole(tmp_path: Path) -> None:
    save(tmp_path / "base", 100)
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "iter_0000100").symlink_to("../base/iter_0000100")
    assert only(tmp_path / "run").complete


def integrity(directory: Path, **changed: str) -> None:
    """Write integrity.json as --verify-integrity does."""
    hashed = [file for file in sorted(directory.iterdir()) if file.name != "integrity.json"]
    files = {file.name: hashlib.sha256(file.read_bytes()).hexdigest() for file in hashed}
    content = {"algorithm": "sha256", "files": files | changed}
    write(directory / "integrity.json", json.dumps(content, indent=2).encode(), SAVED + 4)


def test_recorded_hashes_are_compared_when_asked(tmp_path: Path) -> None:
    directory = save(tmp_path, 100)
    integrity(directory)
    assert only(tmp_path, full=True).complete
    file = directory / "__0_0.distcp"
    write(file, file.read_bytes()[:-1] + b"?", SAVED)
    assert only(tmp_path).complete
    assert only(tmp_path, full=True).state == "__0_0.distcp has other bytes than integrity.json says"
    integrity(directory, common="0" * 64)
    assert only(tmp_path, full=True).state == "common, of which integrity.json has the hash, is missing"
    integrity(directory, **{"../iter_0000100/__0_0.distcp": "0" * 64})
    assert "is outside the checkpoint" in only(tmp_path, full=True).state
    for torn in (b"", b"{}", b"[]", b'{"algorithm": "md5", "files": {}}', b'{"files": 3}'):
        write(directory / "integrity.json", torn, SAVED + 4)
        assert only(tmp_path).complete
        assert ("'md5', not of 'sha256'" if b"md5" in torn else "was cut off") in only(tmp_path, full=True).state


# -- hostile .metadata

MADE = [
    b"2\x86\x94",
    b"2\x85\x94",
    b"22\x87\x94",
    b"](22e\x94",
    b"h\x00\x86\x94",
    b"(22t\x94",
    b"(22\x91\x94",
    b"2",
    b"}22s\x94",
]
"""What makes something of the top of the stack, or of the first thing in the memo, and remembers it."""


class Call:
    """Pickles as a call."""

    def __init__(self, function: Any, *arguments: Any) -> None:
        self.call = function, arguments

    def __reduce__(self) -> Any:
        return self.call


class Persistent(pickle.Pickler):
    def persistent_id(self, obj: Any) -> Any:
        return "x" if obj == "persistent" else None


def hostile(path: Path) -> dict[str, bytes]:
    """Return pickles that would create a file if anything of them were run."""
    bad = path / "executed"
    with open(path / "p", "wb") as file:
        Persistent(file).dump("persistent")
    # GLOBAL 'torch.hub load'; the arguments; REDUCE
    hub = b"ctorch.hub\nload\n(X\x01\x00\x00\x00xtR."
    enum = b"ctorch.distributed.checkpoint.metadata\n"
    return {
        "os.system": pickle.dumps(Call(os.system, f"touch {bad}")),
        "posix.system": b"cposix\nsystem\n(X\x05\x00\x00\x00touchtR.",
        "exec": pickle.dumps(Call(exec, f"open({str(bad)!r}, 'w')")),
        "eval": pickle.dumps({"a": [Call(eval, f"open({str(bad)!r}, 'w')")]}),
        "protocol 0": pickle.dumps(Call(os.system, f"touch {bad}"), 0),
        "inst": b"(S'touch'\nios\nsystem\n.",
        "obj": b"(cos\nsystem\nS'touch'\no.",
        "getattr of a module": pickle.dumps(Call(getattr, Call(__import__, "os"), "system")),
        "getattr of a class": b"cbuiltins\ngetattr\n(" + enum + b"Metadata\nX\x0e\x00\x00\x00__subclasses__tR.",
        "getattr of getattr": b"cbuiltins\ngetattr\n(cbuiltins\ngetattr\nX\x08\x00\x00\x00__self__tR.",
        "dotted": b"\x80\x04\x8c\x04copy\x8c\x12deepcopy.__globals__\x93.",
        "torch.hub": hub,
        "a function that looks like a dtype": b"ctorch\nfloat_power\n.",
        "state into a class": enum + b"Metadata\n}X\x0c\x00\x00\x00storage_data}sb.",
        "state into a function": b"cbuiltins\ngetattr\n(N}X\x0c\x00\x00\x00__defaults__)stb.",
        "extension": b"\x80\x02\x82\x01.",
        "persistent": (path / "p").read_bytes(),
        "memory": b"\x80\x04Nr\xff\xff\xff\x7f.",
        "deep": b"(" * 100_000 + b"t" * 100_000 + b".",
        "not a pickle": b"PK\x03\x04 not a pickle at all",
        **{f"endless: {name}": content for name, content in endless().items()},
    }


def endless() -> dict[str, bytes]:
    """Return small pickles that Python's own unpickler would work on for years, or take all memory for."""
    doubled = b")" + b"2\x86" * 60  # DUP, TUPLE2: a tuple of two of the one before
    remembered = b")\x94" + b"".join(b"h%ch%c\x86\x94" % (n, n) for n in range(60))
    tripled = b")q\x00" + b"".join(b"h%ch%ch%c\x87q%c" % (n, n, n, n + 1) for n in range(60))
    frozen = b"(" + b"N" * 4 + b"\x91" + b"".join(b"\x94(h%ch%c\x86\x91" % (n, n) for n in range(60))
    # Integers whose hashes are all 0: each is compared with all before it.
    collisions = b"".join(b"\x8a\x10" + (n * (2**61 - 1)).to_bytes(16, "little") + b"N" for n in range(20_000))
    floats = b"".join(b"G" + struct.pack(">d", float(n * (2**61 - 1))) + b"N" for n in range(20_000))
    million = b"\x8b" + struct.pack("<i", 1_000_000) + b"\xff" * 999_999 + b"\x7f"
    whole = pickletools.optimize(metadata({"__0_0.distcp": 70}))
    everything = b"ccollections\nOrderedDict\n(" + b"(NNt" * 20_000 + b"l\x94"
    return {
        "a key of tuples": b"\x80\x02}" + doubled + b"Ns.",
        "keys of tuples, many": b"\x80\x02}(" + doubled + b"N" + doubled + b"Nu.",
        "a remembered key": b"\x80\x04}" + remembered + b"Ns.",
        "a key of three": b"\x80\x02}" + tripled + b"Ns.",
        "in a set": b"\x80\x04\x8f(" + doubled + b"\x90.",
        "in a frozen set": b"\x80\x04(" + doubled + b"\x91.",
        "frozen sets within each other": b"\x80\x04" + frozen + b".",
        "in an ordered dict": b"\x80\x02ccollections\nOrderedDict\n)R" + doubled + b"Ns.",
        "as a name": b"\x80\x04" + doubled + doubled + b"\x93.",
        "as a state": b"\x80\x02ctorch\nSize\n)R" + doubled + b"b.",
        "as arguments": b"\x80\x02ctorch\nSize\n" + doubled + b"R.",
        "beside a stretch": whole.replace(b"}", b"}" + doubled + b"Ns", 1),
        "colliding integers": b"\x80\x02}(" + collisions + b"u.",
        "colliding floats": b"\x80\x02}(" + floats + b"u.",
        "a huge integer": b"\x80\x02" + million + b"2}" + b"0" + b"R" * 10 + b".",
        "huge integers as keys": b"\x80\x02}" + million + b"\x94" + b"h\x00Ns" * 20_000 + b".",
        "copies of a long list": b"\x80\x02" + everything + b"h\x000" * 20_000 + b".",
        "lists within each other": b"\x80\x02" + b"](" * 100_000 + b"e" * 100_000 + b".",
        "a list in itself": b"\x80\x02]q\x00h\x00a.",
        "much to come": b"\x80\x04\x96\xff\xff\xff\xff\xff\x00\x00\x00x.",
        "a long text to come": b"\x80\x04\x8d\xff\xff\xff\xff\xff\xff\xff\x7fx.",
        "a long frame": b"\x80\x04\x95\xff\xff\xff\xff\xff\xff\xff\x7f.",
        "far away in the memo": b"\x80\x02Nr\xff\xff\xff\xffj\xff\xff\xff\xff.",
        "a memo by its text": b"\x80\x02Np" + b"9" * 100_000 + b"\n.",
    }


def test_a_hostile_metadata_is_refused_and_nothing_of_it_runs(tmp_path: Path) -> None:
    file = save(tmp_path, 100) / ".metadata"
    for name, content in hostile(tmp_path).items():
        write(file, content, SAVED + 2)
        found = only(tmp_path)
        assert not found.complete and ".metadata" in found.state, name
        assert name[:10] != "getattr of" or "takes attributes" in found.state or "which no checkpoint" in found.state
        assert not (tmp_path / "executed").exists(), name
    # It is no pickle for nothing: the real thing runs it.
    pickle.loads(hostile(tmp_path)["os.system"])
    assert (tmp_path / "executed").exists()


@pytest.mark.slow
def test_no_pickle_keeps_the_command_line_busy(tmp_path: Path) -> None:
    for number, content in enumerate(endless().values(), 1):
        write(save(tmp_path, number) / ".metadata", content, NOW + 60 * number + 2)
    last = len(endless())
    ended = tokenmill("checkpoint", "list", tmp_path, "--json")
    assert ended.code == 0, ended
    states = dict(zip(endless(), ended.result["checkpoints"], strict=True))
    assert {name: one["problems"] for name, one in states.items() if one["complete"]} == {}
    for command, code in (("verify", 2), ("repair", 2)):
        ended = tokenmill("checkpoint", command, tmp_path)
        assert (ended.code, "Traceback" in ended.err) == (code, False) and f"iter_{last:07d}" in ended.err, ended


@settings(max_examples=300)
@given(
    st.lists(st.sampled_from(MADE), max_size=200), st.sampled_from([b"}", b"\x8f", b"ccollections\nOrderedDict\n)R"])
)
def test_what_is_made_of_parts_of_itself_is_never_looked_through(parts: list[bytes], last: bytes) -> None:
    """Random growth by tuples, lists, sets and dictionaries of what is there; then all of it as a key or an item."""
    content = b"\x80\x04)\x94" + b"".join(parts) + last + b"h\x00" + b"".join(parts) + b"Ns."
    with contextlib.suppress(Damage):
        extents(content)


@settings(max_examples=100)
@given(
    st.lists(st.tuples(st.text("ab/._0é\n", min_size=1), st.integers(0, 2**62), st.integers(0, 2**62)), min_size=1),
    st.integers(3, pickle.HIGHEST_PROTOCOL),
    st.booleans(),
)
def test_every_pickler_of_an_honest_metadata_is_understood(
    entries: list[tuple[str, int, int]], protocol: int, optimized: bool
) -> None:
    content = metadata(entries, protocol)
    needed = extents(pickletools.optimize(content) if optimized else content)
    assert needed == {path: max(start + size for name, start, size in entries if name == path) for path, *_ in entries}


@pytest.mark.slow
def test_a_large_honest_metadata_is_whole(tmp_path: Path) -> None:
    directory = save(tmp_path, 100)
    sizes = {f"__{rank}_{part}.distcp": 100 for rank in range(500) for part in range(2)}
    for name, length in sizes.items():
        write(directory / name, bytes(length), SAVED)
    entries = [(name, start, 1) for name in sizes for start in range(10)]
    write(directory / ".metadata", metadata([*entries, *((name, 0, 100) for name in sizes)]), SAVED + 2)
    assert only(tmp_path).complete
    (directory / "__499_1.distcp").unlink()
    assert only(tmp_path).state == "__499_1.distcp is missing"


@pytest.mark.parametrize(
    ("bound", "content", "said"),
    [
        ("OPERATIONS", b"\x80\x02" + b"N0" * 50 + b"N.", "more than 60 opcodes"),
        ("OBJECTS", b"\x80\x02" + b"}0" * 61 + b"N.", "more than 60 objects"),
        ("DEPTH", b"\x80\x02" + b"(" * 61 + b"t" * 61 + b".", "more than 60 collections within each other"),
    ],
)
def test_work_is_bounded(bound: str, content: bytes, said: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(f"tokenmill.training.checkpoints.metadata.{bound}", 60)
    if bound != "OPERATIONS":
        monkeypatch.setattr("tokenmill.training.checkpoints.metadata.OPERATIONS", 1000)
    with pytest.raises(Damage, match=said):
        extents(content)


def test_a_refused_name_is_said_and_fit_to_print(tmp_path: Path) -> None:
    file = save(tmp_path, 100) / ".metadata"
    write(file, pickle.dumps(Call(os.system, "x")), SAVED + 2)
    assert only(tmp_path).state == ".metadata names posix.system, which no checkpoint needs: do not load it"
    write(file, b"\x80\x04\x8c\x05a\x1b[2J\x8c\x01b\x93.", SAVED + 2)
    assert "\x1b" not in only(tmp_path).state


@pytest.mark.slow
@settings(max_examples=300)
@given(st.data())
def test_no_damage_to_metadata_does_more_than_be_found(data: st.DataObject) -> None:
    """A byte or two other, anywhere: the answer is whole or damaged, never an error or a run-away."""
    pristine = metadata({"__0_0.distcp": 70, "__1_0.distcp": 77})
    content = bytearray(pristine)
    for _ in range(data.draw(st.integers(1, 3))):
        content[data.draw(st.integers(0, len(content) - 1))] = data.draw(st.integers(0, 255))
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory)
        write(save(path, 100) / ".metadata", bytes(content), SAVED + 2)
        assert isinstance(only(path), Checkpoint)


# -- the tracker


@pytest.mark.parametrize(("content", "iteration"), [(b"100", 100), (b" 0000100\n", 100), (b"release", 0), (b"0", 0)])
def test_the_tracker_is_read_as_megatron_reads_it(content: bytes, iteration: int, tmp_path: Path) -> None:
    assert read_tracker(tmp_path) is None
    write(tmp_path / TRACKER, content, NOW)
    assert read_tracker(tmp_path) == iteration


TORN = [
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


@pytest.mark.parametrize("content", TORN, ids=lambda content: ascii(content[:12]))
def test_a_torn_tracker_is_an_error_of_its_own(content: bytes, tmp_path: Path) -> None:
    write(tmp_path / TRACKER, content, NOW)
    with pytest.raises(TornTracker, match="tokenmill checkpoint repair") as problem:
        read_tracker(tmp_path)
    assert problem.value.exit_code == 2 and TRACKER in str(problem.value)


def test_a_tracker_that_is_no_file_is_torn(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / TRACKER)
    with pytest.raises(TornTracker, match="is no file"):
        read_tracker(tmp_path)
    (tmp_path / TRACKER).unlink()
    (tmp_path / TRACKER).mkdir()
    with pytest.raises(TornTracker, match="is no file"):
        read_tracker(tmp_path)


# -- before a start


def tracker(path: Path, content: str | None) -> None:
    if content is None:
        (path / TRACKER).unlink(missing_ok=True)
    else:
        write(path / TRACKER, content.encode(), NOW)


def missing(path: Path, iteration: int) -> None:
    (path / f"iter_{iteration:07d}" / "__0_0.distcp").unlink()


def two_and_a_cut_off(path: Path) -> None:
    save(path, 100)
    save(path, 200)
    save(path, 300, steps=1)


class Case:
    """What lies there, what a start makes of it."""

    def __init__(
        self,
        make: Callable[[Path], Any],
        start: str | None,
        holds: str | None,
        left: list[int | str],
        moved: list[int | str] = [],  # noqa: B006
        said: list[str] = [],  # noqa: B006
    ) -> None:
        def names(of: list[int | str]) -> list[str]:
            return sorted(f"iter_{one:07d}" if isinstance(one, int) else one for one in of)

        self.make, self.start, self.holds, self.said = make, start, holds, said
        self.left, self.moved = names(left), names(moved)


def made(*steps: Callable[[Path], Any]) -> Callable[[Path], None]:
    def make(path: Path) -> None:
        path.mkdir()
        for step in steps:
            step(path)

    return make


def s(iteration: int | str, steps: int = 99) -> Callable[[Path], Any]:
    return lambda path: save(path, iteration, steps=steps)


def t(content: str | None) -> Callable[[Path], Any]:
    return lambda path: tracker(path, content)


def m(iteration: int) -> Callable[[Path], Any]:
    return lambda path: missing(path, iteration)


START = "iter_{:07d}".format
UNTRUE = "it is whole, but the tracker was never set to it, or was set back"
CASES = {
    "nothing": Case(made(), None, None, []),
    "no directory": Case(lambda path: None, None, None, []),
    "logs alone": Case(made(lambda p: write(p / "progress.txt", b"x", NOW)), None, None, []),
    "in order": Case(made(s(100), s(200)), START(200), "200", [100, 200]),
    "a long run": Case(made(s(12_345_678)), "iter_12345678", "12345678", [12_345_678]),
    "tracker with a newline": Case(made(s(100), t("100\n")), START(100), "100\n", [100]),
    "cut off while saving": Case(
        made(s(100), s(200), s(300, CUT_OFF)),
        START(200),
        "200",
        [100, 200],
        [300],
        ["iter_0000300 moved aside: newer than where the run resumes (has no metadata.json"],
    ),
    "cut off at once": Case(made(s(100), s(200, 0)), START(100), "100", [100], [200], ["iter_0000200 moved aside"]),
    "cut off before the tracker": Case(
        made(s(100), s(200, UNTRACKED)),
        START(100),
        "100",
        [100],
        [200],
        [f"iter_0000200 moved aside: newer than where the run resumes ({UNTRUE})"],
    ),
    "set back": Case(made(s(100), s(200), s(300), t("100")), START(100), "100", [100], [200, 300], [UNTRUE, UNTRUE]),
    "empty tracker": Case(
        made(s(100), s(200), t("")),
        START(200),
        "200",
        [100, 200],
        [],
        [f"tracker set to 200, the newest whole checkpoint: {{path}}/{TRACKER} is empty"],
    ),
    "partial tracker": Case(
        made(s(100), s(1000), t("10")),
        START(1000),
        "1000",
        [100, 1000],
        [],
        ["it named iter_0000010, which is not whole (is not there)"],
    ),
    "tracker of garbage": Case(
        made(s(100), t("x;y")), START(100), "100", [100], [], ["holds b'x;y', which is no iteration"]
    ),
    "tracker cut off over a cut-off save": Case(
        made(s(100), s(200), s(300, CUT_OFF), t("")), START(200), "200", [100, 200], [300], ["is empty", "iter_0000300"]
    ),
    "no tracker": Case(made(s(100), s(200), t(None)), START(200), "200", [100, 200], [], ["there was none"]),
    "first save, killed before the tracker": Case(
        made(s(100, UNTRACKED)), START(100), "100", [100], [], ["there was none"]
    ),
    "names nothing": Case(
        made(s(100), t("500")), START(100), "100", [100], [], ["iter_0000500, which is not whole (is not there)"]
    ),
    "names a damaged one": Case(
        made(s(100), s(200), m(200)),
        START(100),
        "100",
        [100],
        [200],
        ["which is not whole (__0_0.distcp is missing)", "iter_0000200 moved"],
    ),
    "names a damaged one, older and newer whole": Case(
        made(s(100), s(200), s(300), m(200), t("200")), START(300), "300", [100, 200, 300], [], ["tracker set to 300"]
    ),
    "names a damaged one, newer cut off": Case(
        made(s(100), s(200), m(200), s(300, 2)),
        START(100),
        "100",
        [100],
        [200, 300],
        ["tracker", "0200 moved", "0300 moved"],
    ),
    "an older one is damaged": Case(made(s(100), s(200), m(100)), START(200), "200", [100, 200]),
    "tracker release": Case(made(s("release")), "release", "release", ["release"]),
    "tracker release, a save cut off": Case(
        made(s("release"), s(100, 2)), "release", "release", ["release"], [100], ["iter_0000100"]
    ),
    "torn after release": Case(
        made(s("release"), s(100), t("")), START(100), "100", [100, "release"], [], ["tracker set to 100"]
    ),
    "only release is whole": Case(
        made(s("release"), s(100), m(100)),
        "release",
        "release",
        ["release"],
        [100],
        ["tracker set to release", "iter_0000100"],
    ),
    "first save cut off": Case(
        made(s(100, 1)), None, None, [], [100], ["iter_0000100 moved aside: the run's first save was never finished"]
    ),
    "first save cut off in metadata.json": Case(
        made(s(100, UNTRACKED), lambda p: write(p / "iter_0000100" / "metadata.json", b"", NOW)),
        None,
        None,
        [],
        [100],
        ["never finished"],
    ),
    "first save cut off twice": Case(
        made(s(100, 0), s(200, CUT_OFF)), None, None, [], [200], ["0100 moved", "0200 moved", "0100-1 deleted: newer"]
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_a_start_resumes_from_the_right_one(name: str, tmp_path: Path) -> None:
    case, path = CASES[name], tmp_path / "run"
    case.make(path)
    before = tree(path)
    dry = prepare(path, dry_run=True)
    assert tree(path) == before
    start = prepare(path)
    assert start.done[: len(dry.done)] == dry.done and (start.iteration, start.name) == (dry.iteration, dry.name)
    assert (start.name, start.resume) == (case.start, case.start is not None)
    assert start.iteration == (int(case.start[5:]) if case.start and case.start != "release" else 0)
    for sentence, said in zip(start.done, case.said, strict=True):
        assert said.format(path=path) in sentence
    if not path.exists():
        return
    assert ((path / TRACKER).read_text() if (path / TRACKER).exists() else None) == case.holds
    assert (iterations(path), aside(path)) == (case.left, case.moved)
    # What was there is there, here or aside; and a second start has nothing to do.
    after = tree(path)
    for kept in case.left:
        assert {k: v for k, v in before.items() if k.startswith(kept)} == {
            k: v for k, v in after.items() if k.startswith(kept)
        }
    assert prepare(path) == type(start)(start.iteration, start.name)
    assert tree(path) == after
    if case.start:
        assert look(path) == next(one for one in scan(path) if one.path.name == case.start)


REFUSED = {
    "the only one is damaged": (
        made(s(100), m(100)),
        "the tracker names iter_0000100; iter_0000100: __0_0.distcp is missing",
    ),
    "damaged, without a tracker": (
        made(s(100), m(100), t(None)),
        "there is no tracker; iter_0000100: __0_0.distcp is missing",
    ),
    "damaged, and one cut off": (
        made(s(100), m(100), s(200, 1)),
        "iter_0000200: has no metadata.json: .*; iter_0000100: __0_0",
    ),
    "a tracker alone": (made(t("100")), "the tracker names iter_0000100; there are none"),
    "a torn tracker alone": (made(t("")), "is empty; there are none"),
    "a torn tracker over a cut-off save": (
        made(s(100, CUT_OFF), t("")),
        "is empty; iter_0000100: has no metadata.json",
    ),
    "an older format": (
        made(lambda p: write(p / "iter_0000100" / "mp_rank_00" / "model_optim_rng.pt", b"x", NOW)),
        "older format, torch",
    ),
    "a release of an older format": (
        made(lambda p: write(p / "release" / "mp_rank_00" / "model_optim_rng.pt", b"x", NOW), t("release")),
        "the tracker names release; release: .* older format, torch",
    ),
    "a link to what went": (made(lambda p: (p / "iter_0000100").symlink_to("/nonexistent/x")), "is a link to nothing"),
    "a hostile one": (
        made(s(100), lambda p: write(p / "iter_0000100" / ".metadata", b"cos\nsystem\n.", NOW)),
        "names os.system",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_was_a_checkpoint_is_never_passed_over_in_silence(name: str, tmp_path: Path) -> None:
    make, said = REFUSED[name]
    path = tmp_path / "run"
    make(path)
    before = tree(path)
    with pytest.raises(RequestError, match=said) as refusal:
        prepare(path)
    assert tree(path) == before
    for word in (str(path), "storage.checkpointPath", "tokenmill checkpoint repair", "--start-over"):
        assert word in str(refusal.value)
    # Told to, it begins anew, and throws nothing away.
    assert prepare(path, start_over=True, dry_run=True).done == prepare(path, start_over=True).done != ()
    assert sorted(before.keys() & {TRACKER, "release", START(100), START(200)}) == sorted(
        [*aside(path), *iterations(path)]
    )
    assert prepare(path) == type(prepare(path))(0, None)


def test_starting_over_is_refused_where_there_is_something_to_resume_from(tmp_path: Path) -> None:
    save(tmp_path, 100)
    tracker(tmp_path, "")
    before = tree(tmp_path)
    with pytest.raises(RequestError, match=r"iter_0000100 is whole.*storage\.checkpointPath"):
        prepare(tmp_path, start_over=True)
    assert tree(tmp_path) == before


def test_a_file_in_place_of_the_directory_is_refused(tmp_path: Path) -> None:
    write(tmp_path / "file", b"", NOW)
    for call in (prepare, scan, lambda path: prepare(path / "below")):
        with pytest.raises(RequestError):
            call(tmp_path / "file")


def test_what_is_moved_aside_never_meets_what_was_moved_before(tmp_path: Path) -> None:
    save(tmp_path, 100)
    for _ in range(5):
        save(tmp_path, 200, steps=CUT_OFF)
        assert prepare(tmp_path).name == "iter_0000100"
    # The newest stays for somebody who wants to know; a run that dies in every save does not fill the disk.
    assert [each.name for each in (tmp_path / ".tokenmill" / "aside").iterdir()] == ["iter_0000200-5"]
    assert list((tmp_path / ".tokenmill" / "trash").iterdir()) == []
    assert ASIDE_UNFINISHED == 1


@pytest.mark.slow
def test_an_old_view_of_a_network_file_system_moves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The tracker seems to be behind, and is not once the cache has expired."""
    save(tmp_path, 100)
    save(tmp_path, 200)
    tracker(tmp_path, "100")
    for module in (mounts, repair):
        monkeypatch.setattr(module, "settle_seconds", lambda _: 60.0)
    said: list[str] = []

    def say(words: str) -> None:
        said.append(words)
        threading.Timer(0.1, lambda: tracker(tmp_path, "200")).start()

    assert prepare(tmp_path, say=say) == type(prepare(tmp_path))(200, "iter_0000200")
    assert iterations(tmp_path) == ["iter_0000100", "iter_0000200"] and "network file system" in said[0]
    # In order, it does not wait.
    begun = time.monotonic()
    prepare(tmp_path)
    assert time.monotonic() - begun < 30


# -- killed

CHANGES = {"os.rename", "os.mkdir", "os.remove", "os.rmdir", "os.link", "os.truncate", "os.utime"}
KILLED = 77


def killed(work: Callable[[], Any], count: int) -> bool:
    """Do some work in a child that dies just before its `count`-th change to a file system; tell whether it did."""
    child = os.fork()
    if child == 0:
        left = count

        def hook(event: str, arguments: tuple[Any, ...]) -> None:
            nonlocal left
            writes = event == "open" and isinstance(arguments[2], int) and arguments[2] & (os.O_WRONLY | os.O_RDWR)
            if event in CHANGES or writes:
                left -= 1
                if left == 0:
                    os._exit(KILLED)

        code = 1
        try:
            sys.addaudithook(hook)
            work()
            code = 0
        finally:
            os._exit(code)
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    assert code in (0, KILLED)
    return code == KILLED


@pytest.mark.parametrize("name", CASES)
def test_a_start_that_is_killed_anywhere_comes_to_the_same_end(name: str, tmp_path: Path) -> None:
    case = CASES[name]
    case.make(tmp_path / "whole")
    start = prepare(tmp_path / "whole")
    for count in range(1, 100):
        path = tmp_path / f"{count}"
        case.make(path)
        died = killed(lambda path=path: prepare(path), count)
        again = prepare(path)
        assert (again.iteration, again.name) == (start.iteration, start.name)
        assert not path.exists() or tree(path).keys() - {".tokenmill"} == tree(tmp_path / "whole").keys() - {
            ".tokenmill"
        }
        if not died:
            break
    else:
        raise AssertionError("it never ended")
    assert count > 1 or not (case.moved or case.said)


@pytest.mark.parametrize("name", REFUSED)
def test_starting_over_that_is_killed_anywhere_can_be_done_again(name: str, tmp_path: Path) -> None:
    for count in range(1, 100):
        path = tmp_path / f"{count}"
        REFUSED[name][0](path)
        died = killed(lambda path=path: prepare(path, start_over=True), count)
        prepare(path, start_over=True)
        assert iterations(path) == [] and not prepare(path).resume
        if not died:
            break
    assert count > 2


# -- retention


def run_of(path: Path) -> None:
    """Five whole checkpoints up to the tracker's, one cut off, two newer, a link, and release."""
    for iteration in (100, 200, 300, 400, 500):
        save(path, iteration)
    missing(path, 300)
    save(path, 600, steps=UNTRACKED)
    save(path, 700, steps=1)
    save(path, "release", steps=UNTRACKED)
    save(path.parent / "base", 50)
    (path / "iter_0000050").symlink_to(path.parent / "base" / "iter_0000050")


ALWAYS = ["iter_0000050", "iter_0000300", "iter_0000500", "iter_0000600", "iter_0000700", "release"]
"""A link, a damaged one, the tracker's, the newer ones, release."""


@pytest.mark.parametrize(("keep", "also"), [(2, [400]), (3, [200, 400]), (4, [100, 200, 400]), (9, [100, 200, 400])])
def test_the_newest_whole_ones_up_to_the_tracker_are_kept(keep: int, also: list[int], tmp_path: Path) -> None:
    path = tmp_path / "run"
    run_of(path)
    said = prune(path, keep)
    assert iterations(path) == sorted([*ALWAYS, *(f"iter_{one:07d}" for one in also)])
    assert len(said) == 3 - len(also) and all(f"deleted: {keep} newer ones are kept" in one for one in said)
    assert look(path).complete  # type: ignore[union-attr]
    assert list(tmp_path.rglob("*-1")) == [] and (tmp_path / "base" / "iter_0000050" / ".metadata").exists()
    assert prune(path, keep) == []


def test_fewer_than_two_are_refused(tmp_path: Path) -> None:
    for keep in (1, 0, -1):
        with pytest.raises(RequestError, match="at least 2"):
            prune(tmp_path, keep)


@pytest.mark.parametrize(
    "hurt", [t(""), t(None), t("900"), t("release"), m(500)], ids=["torn", "missing", "nowhere", "release", "damaged"]
)
def test_nothing_is_deleted_unless_the_tracker_names_a_whole_one(hurt: Callable[[Path], Any], tmp_path: Path) -> None:
    path = tmp_path / "run"
    run_of(path)
    hurt(path)
    before = tree(path)
    assert prune(path, 2) == []
    assert tree(path) == before


@pytest.mark.slow
def test_retention_that_is_killed_anywhere_leaves_nothing_that_is_half_there(tmp_path: Path) -> None:
    run_of(tmp_path / "whole" / "run")
    prune(tmp_path / "whole" / "run", 2)
    for count in range(1, 200):
        path = tmp_path / f"{count}" / "run"
        run_of(path)
        died = killed(lambda path=path: prune(path, 2), count)
        # Whatever is left under its name is as it was; two whole ones up to the tracker are there.
        left = {one.iteration: one.complete for one in scan(path)}
        assert {one for one, whole in left.items() if not whole} == {300, 700}
        assert left[500] and left[400]
        assert prepare(path, dry_run=True).name == "iter_0000500"
        prune(path, 2)
        assert tree(path).keys() == tree(tmp_path / "whole" / "run").keys()
        if not died:
            break
    assert count > 8


def test_what_lies_aside_is_bounded_and_what_was_finished_stays_longest(tmp_path: Path) -> None:
    for iteration in (100, 200, 300, 400, 500):
        save(tmp_path, iteration)
    tracker(tmp_path, "100")
    prepare(tmp_path)
    assert aside(tmp_path) == [START(200), START(300), START(400), START(500)]
    for iteration in (200, 300):
        save(tmp_path, iteration, steps=1)
        prepare(tmp_path)
    assert aside(tmp_path) == [START(200), START(300), START(300), START(400), START(500)]
    said = prune(tmp_path, 2)
    assert aside(tmp_path) == [START(300), START(400), START(500)] and ASIDE_FINISHED == 2
    assert len(said) == 2 and all("deleted: newer ones lie aside" in one for one in said)
    assert list((tmp_path / ".tokenmill" / "trash").iterdir()) == []


def test_what_cannot_be_deleted_now_is_said_and_tried_again(tmp_path: Path) -> None:
    for iteration in (100, 200, 300):
        save(tmp_path, iteration)
    (tmp_path / ".tokenmill" / "trash").mkdir(parents=True)
    (tmp_path / ".tokenmill" / "trash" / "iter_0000050-1").write_text("no directory")
    said = prune(tmp_path, 2)
    assert "iter_0000100 deleted" in said[0] and "iter_0000050-1 is not deleted yet" in said[1]
    assert iterations(tmp_path) == ["iter_0000200", "iter_0000300"]


def test_a_pipe_in_the_trash_is_left_and_said(tmp_path: Path) -> None:
    save(tmp_path, 100)
    (tmp_path / ".tokenmill" / "trash").mkdir(parents=True)
    os.mkfifo(tmp_path / ".tokenmill" / "trash" / "iter_0000050-1")
    assert ["iter_0000050-1 is not deleted yet: Not a directory" in one for one in prepare(tmp_path).done] == [True]


@pytest.mark.parametrize("kind", ["aside", "trash"])
def test_nothing_is_deleted_through_a_link(kind: str, tmp_path: Path) -> None:
    for iteration in (100, 200, 300):
        save(tmp_path / "run", iteration)
    for number in range(5):
        save(tmp_path / "elsewhere", f"model-{number}")
    (tmp_path / "run" / ".tokenmill").mkdir()
    (tmp_path / "run" / ".tokenmill" / kind).symlink_to(tmp_path / "elsewhere")
    before = tree(tmp_path)
    with pytest.raises(RequestError, match=f"{kind} is a link"):
        prepare(tmp_path / "run")
    if kind == "trash":
        with pytest.raises(RequestError, match="trash is a link"):
            prune(tmp_path / "run", 2)
    assert tree(tmp_path) == before


def test_temporary_trackers_of_the_dead_are_cleared_away(tmp_path: Path) -> None:
    save(tmp_path, 100)
    tracker(tmp_path, "")
    counts = iter(range(1, 10))
    while not list(tmp_path.glob(".tokenmill/.*.tmp")):
        assert killed(lambda: prepare(tmp_path), next(counts))
    prepare(tmp_path)
    assert list((tmp_path / ".tokenmill").iterdir()) == []


# -- the command line


def test_list_verify_and_repair(tmp_path: Path) -> None:
    good, torn, lost = tmp_path / "good", tmp_path / "torn", tmp_path / "lost"
    save(good, 100)
    integrity(save(good, 200))
    for path in (torn, lost):
        two_and_a_cut_off(path)
    tracker(torn, "")
    missing(lost, 200)
    asked = [
        ["list", good], ["list", good, "--json"], ["list", torn], ["list", tmp_path / "nowhere"],
        ["verify", good], ["verify", good, "--json"], ["verify", lost], ["verify", lost, "--quick", "--json"],
        ["verify", torn], ["verify", tmp_path],
        ["repair", torn, "--dry-run"], ["repair", torn, "--json"], ["verify", torn], ["repair", lost], ["repair", lost],
        ["repair", lost, "--start-over"],
        *([command, tmp_path / name] for command in ("list", "verify", "repair") for name in ("nowhere", "x" * 300)),
    ]  # fmt: skip
    ended, _ = many([["checkpoint", *map(str, one)] for one in asked])
    assert [one.code for one in ended] == [0, 0, 0, 2, 0, 0, 2, 2, 2, 2, 0, 0, 0, 0, 0, 2] + [2] * 6
    assert all("is no directory" in one.err for one in ended[16:])
    assert not any("Traceback" in one.err for one in ended)

    lines = ended[0].out.splitlines()
    bytes_there = sum(file.stat().st_size for file in (good / START(100)).iterdir())
    assert lines[0].split()[:3] == ["100", *size(bytes_there).split()] and lines[0].endswith("complete")
    assert lines[1].split()[:2] == ["*", "200"] and lines[1].endswith("complete")
    facts = json.loads(ended[1].out)
    assert facts["tracker"] == "iter_0000200" and [one["tracked"] for one in facts["checkpoints"]] == [False, True]
    assert {"iteration": 100, "complete": True, "bytes": bytes_there}.items() <= facts["checkpoints"][0].items()
    assert "is empty" in ended[2].out and "has no metadata.json" in ended[2].out
    assert "is no directory" in ended[3].err

    assert "iter_0000200 is whole, and its hashes are right" in ended[4].out
    assert json.loads(ended[5].out)["problems"] == []
    assert "wrong: __0_0.distcp is missing" in ended[6].out and "tokenmill checkpoint list" in ended[6].err
    assert json.loads(ended[7].out)["problems"] == ["__0_0.distcp is missing"]
    assert "tokenmill checkpoint repair" in ended[8].err
    assert "there is no" in ended[9].err

    assert "would be done: tracker set to 200" in ended[10].out and "nothing was changed" in ended[10].out
    repaired = json.loads(ended[11].out)
    assert (repaired["iteration"], repaired["checkpoint"], len(repaired["done"])) == (200, "iter_0000200", 2)
    assert ended[12].out.endswith("iter_0000200 is whole\n")
    assert "tracker set to 100" in ended[13].out and "resumes from" in ended[13].out
    assert ended[14].out == f"a run resumes from {lost / 'iter_0000100'}\n"
    assert "iter_0000100 is whole" in ended[15].err
