"""The files that a stage reads from a plain directory: splits, links, duplicate texts and special files."""

import bz2
import contextlib
import gzip
import io
import json
import os
import shutil
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import zstandard

from support.commandline import CommandResult, tokenmill
from tokenmill.cli import main
from tokenmill.engine.inputs import OpenInput, walk_files
from tokenmill.errors import RequestError
from tokenmill.sources.factory import open_source
from tokenmill.sources.retry import RetryPolicy
from tokenmill.sources.source import SourceChanged

pytestmark = pytest.mark.slow

PACK: dict[str, Callable[[bytes], bytes]] = {
    ".zst": zstandard.ZstdCompressor().compress,
    ".gz": gzip.compress,
    ".bz2": bz2.compress,
}
STAGES = {
    "extract": ["--processes", "1"],
    "concatenate": ["--processes", "1", "--target-files", "1"],
    "download": [],
}
PREPROCESS = ["--tokenizer", "t"]


def write(root: Path, *names: str, text: str | None = None) -> Path:
    """Write files of one record, the file's name without its compression suffix; the suffix decides the compression."""
    for name in names:
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        stem = name.removesuffix(path.suffix) if path.suffix in PACK else name
        record = json.dumps({"text": text or stem}).encode() + b"\n"
        path.write_bytes(PACK.get(path.suffix, bytes)(record))
    return root


def run(stage: str, source: Any, output: Path, *options: str) -> CommandResult:
    """Run a stage in this process."""
    out, err, code = io.StringIO(), io.StringIO(), 0
    argv, sys.argv = sys.argv, ["tokenmill", stage, str(source), str(output), *STAGES.get(stage, PREPROCESS), *options]
    try:
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            main()
    except SystemExit as end:
        code = int(end.code or 0)
    finally:
        sys.argv = argv
    return CommandResult(code, out.getvalue(), err.getvalue())


def read_sources(output: Path) -> list[str]:
    """Return the source files whose records a finished stage holds."""
    (manifest,) = output.glob(".tokenmill/*/manifest.json")
    return sorted(part["source"] for file in json.loads(manifest.read_bytes())["files"] for part in file["parts"])


def assert_refused(ended: CommandResult, *texts: str) -> None:
    assert ended.code == 2 and "Traceback" not in ended.err, ended
    for text in texts:
        assert text in ended.err, (text, ended.err)


# -- one split

LAYOUTS = {
    "folders": (["train/0.jsonl", "train/deep/1.jsonl"], ["test/0.jsonl", "validation.jsonl", "dev/0.jsonl"]),
    "names": (["train-00000-of-00002.jsonl", "train-00001-of-00002.jsonl"], ["test-00000-of-00001.jsonl", "val.jsonl"]),
    "words": (["en/c4-train.00000.json"], ["en/c4-validation.00000.json"]),
    "folders of a set": (["train-clean-100/0.jsonl"], ["test-clean/0.jsonl", "dev_other/0.jsonl"]),
    "beside others": (["Train/0.jsonl"], ["extra/0.jsonl", "TEST/0.jsonl"]),
}


@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
def test_held_out_text_is_not_read_by_default(layout: tuple[list[str], list[str]], tmp_path: Path) -> None:
    train, others = layout
    source = write(tmp_path / "in", *train, *others)
    for stage in STAGES:
        ended = run(stage, source, tmp_path / stage)
        assert ended.code == 0 and "reading only split train" in ended.err, ended
        assert read_sources(tmp_path / stage) == sorted(train)
    options = ["--split", "any"]
    assert run("concatenate", source, tmp_path / "any", *options).code == 0
    assert read_sources(tmp_path / "any") == sorted([*train, *others])
    assert_refused(run("preprocess", tmp_path / "any", tmp_path / "x"), "more than one split", "--split any")


def test_split_is_chosen_after_the_patterns(tmp_path: Path) -> None:
    source = write(tmp_path / "in", "train/0.jsonl", "train/1.jsonl", "test/0.jsonl", "stats.json")
    for stage in STAGES:
        for number, (options, expected) in enumerate(
            {
                ("--split", "test"): ["test/0.jsonl"],
                ("--include", "t*/0.jsonl", "--exclude", "test/*"): ["train/0.jsonl"],
                ("--exclude", "stats.json", "--split", "train"): ["train/0.jsonl", "train/1.jsonl"],
            }.items()
        ):
            output = tmp_path / f"{stage}-{number}"
            ended = run(stage, source, output, *options)
            assert (ended.code, read_sources(output)) == (0, expected), ended
        assert_refused(run(stage, source, tmp_path / "x", "--include", "*/0.jsonl"), "more than one split", "--split")
        assert_refused(run(stage, source, tmp_path / "x", "--split", "validation"), "--split validation")
        assert_refused(run(stage, source, tmp_path / "x", "--include", "*.parquet"), "check --include")


def test_names_that_only_look_like_a_split_are_read(tmp_path: Path) -> None:
    names = ["attest.jsonl", "contest.jsonl", "devices/0.jsonl", "latest/0.jsonl", "training-data/0.jsonl"]
    source = write(tmp_path / "in", *names)
    only = write(tmp_path / "only", "test/0.jsonl", "test/1.jsonl")
    for stage in STAGES:
        for directory, expected in ((source, names), (only, ["test/0.jsonl", "test/1.jsonl"])):
            output = tmp_path / f"{stage}-{directory.name}"
            assert run(stage, directory, output).code == 0
            assert read_sources(output) == expected
        assert run(stage, only / "test/0.jsonl", tmp_path / f"{stage}-file").code == 0
        assert read_sources(tmp_path / f"{stage}-file") == ["0.jsonl"]


def test_splits_of_a_finished_stage_follow_the_same_rule(tmp_path: Path) -> None:
    source = write(tmp_path / "in", "train/0.jsonl", "test/0.jsonl")
    assert run("download", source, tmp_path / "all", "--split", "any").code == 0
    for options, expected in (([], ["train/0.jsonl"]), (["--split", "test"], ["test/0.jsonl"])):
        output = tmp_path / f"out-{len(options)}"
        ended = run("extract", tmp_path / "all", output, *options)
        assert (ended.code, read_sources(output)) == (0, expected), ended
    assert run("extract", tmp_path / "all", tmp_path / "any", "--split", "any").code == 0
    assert len(read_sources(tmp_path / "any")) == 2


def test_the_same_files_give_the_same_plan(tmp_path: Path) -> None:
    """A run that started before these options existed can resume."""
    source = write(tmp_path / "in", "train/0.jsonl", "train/1.jsonl")
    assert run("download", source, tmp_path / "got").code == 0
    for number, directory in enumerate((source, tmp_path / "got")):
        output = tmp_path / f"out-{number}"
        assert run("extract", directory, output).code == 0
        plan = (output / ".tokenmill/extract/plan.json").read_bytes()
        assert set(json.loads(plan)["request"]) == {"input"}
        for options in (["--split", "train"], ["--include", "train/*"], ["--exclude", "test/*"]):
            ended = run("extract", directory, output, *options)
            assert ended.code == 0 and "0 units to run" in ended.err, ended
        assert (output / ".tokenmill/extract/plan.json").read_bytes() == plan


# -- one form of each text


@pytest.mark.parametrize(
    ("plain", "packed"),
    [("a.jsonl", "a.jsonl.zst"), ("deep/a.json", "deep/a.json.gz"), ("a.ndjson", "a.ndjson.bz2")],
)
@pytest.mark.parametrize("stage", ["extract", "download"])
def test_text_in_two_forms_is_not_read_twice(plain: str, packed: str, stage: str, tmp_path: Path) -> None:
    source = write(tmp_path / "in", plain, packed, "b.jsonl")
    assert_refused(run(stage, source, tmp_path / "x"), f"{plain} and {packed} in ", "--prefer")
    for word, form in (("plain", plain), ("compressed", packed)):
        ended = run(stage, source, tmp_path / word, "--prefer", word)
        assert ended.code == 0 and f"reading the {word} form of 1 texts" in ended.err, ended
        assert read_sources(tmp_path / word) == sorted([form, "b.jsonl"])
    assert run(stage, source, tmp_path / "without", "--exclude", packed).code == 0


def test_one_of_two_compressions_is_read(tmp_path: Path) -> None:
    source = write(tmp_path / "in", "a.jsonl.zst", "a.jsonl.gz")
    assert_refused(run("extract", source, tmp_path / "x"), "a.jsonl.gz and a.jsonl.zst in ", "would be read twice")
    for word in ("plain", "compressed"):
        assert run("extract", source, tmp_path / word, "--prefer", word).code == 0
        assert read_sources(tmp_path / word) == ["a.jsonl.zst"]


def test_texts_of_other_names_are_all_read(tmp_path: Path) -> None:
    names = ["a.jsonl", "b.jsonl.zst", "sub/a.jsonl.gz", "a.1.jsonl.gz"]
    source = write(tmp_path / "in", *names)
    assert run("extract", source, tmp_path / "out", "--prefer", "plain").code == 0
    assert read_sources(tmp_path / "out") == sorted(names)
    splits = write(tmp_path / "splits", "train/a.jsonl", "test/a.jsonl.zst", "test/a.jsonl")
    assert run("extract", splits, tmp_path / "train").code == 0


# -- links


def nothing(root: Path) -> tuple[Path, str]:
    return root / "b.jsonl", "gone.jsonl"


def blob_of_a_partial_cache(root: Path) -> tuple[Path, str]:
    return root / "deep/b.jsonl.zst", "../../../blobs/0123abcd"


def directory(root: Path) -> tuple[Path, str]:
    return root / "more", "/nowhere/more"


def itself(root: Path) -> tuple[Path, str]:
    return root / "loop.jsonl", "loop.jsonl"


def readme(root: Path) -> tuple[Path, str]:
    return root / "README.md", "../blobs/readme"


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("place", [nothing, blob_of_a_partial_cache, directory, itself, readme])
def test_dangling_link_is_refused_by_name(
    place: Callable[[Path], tuple[Path, str]], stage: str, tmp_path: Path
) -> None:
    source = write(tmp_path / "in", "a.jsonl")
    link, target = place(source)
    link.parent.mkdir(exist_ok=True)
    link.symlink_to(target)
    name = link.relative_to(source).as_posix()
    assert_refused(run(stage, source, tmp_path / "x"), f"{link} points to {target}", f"--exclude '{name}'")
    assert run(stage, source, tmp_path / "out", "--exclude", name).code == 0
    assert read_sources(tmp_path / "out") == ["a.jsonl"]


def test_links_are_followed_except_hidden_ones(tmp_path: Path) -> None:
    cache = tmp_path / "models--x"
    for number in range(3):
        write(cache, f"blobs/{number}", text=f"text {number}")
        link = cache / f"snapshots/main/data/{number}.jsonl"
        link.parent.mkdir(parents=True, exist_ok=True)
        link.symlink_to(f"../../../blobs/{number}")
    (cache / "snapshots/main/.lock").symlink_to("nowhere")
    write(tmp_path / "else", "c.jsonl")
    (cache / "snapshots/main/linked").symlink_to(tmp_path / "else")
    for stage in STAGES:
        ended = run(stage, cache / "snapshots/main", tmp_path / stage)
        assert ended.code == 0, ended
        assert read_sources(tmp_path / stage) == ["data/0.jsonl", "data/1.jsonl", "data/2.jsonl", "linked/c.jsonl"]


@pytest.mark.parametrize("stage", STAGES)
def test_second_path_to_the_same_data_is_read_once(stage: str, tmp_path: Path) -> None:
    source = write(tmp_path / "in", "a.jsonl", "sub/b.jsonl")
    (source / "again").symlink_to("sub")
    (source / "up").symlink_to(source)
    (source / "latest.jsonl").symlink_to("a.jsonl")
    ended = run(stage, source, tmp_path / "out")
    assert ended.code == 0 and read_sources(tmp_path / "out") == ["a.jsonl", "again/b.jsonl"], ended
    assert f"reading {source / 'again'} only once: {source / 'sub'} is the same directory" in ended.err
    assert f"left out {source / 'up'}: it is a link back to {source}" in ended.err
    assert "latest.jsonl is a.jsonl" in ended.err
    alone = run(stage, source, tmp_path / "alone", "--include", "latest.jsonl")
    assert (alone.code, read_sources(tmp_path / "alone")) == (0, ["latest.jsonl"])


def test_links_to_one_outside_file_are_read_once(tmp_path: Path) -> None:
    source = write(tmp_path / "in", "own.jsonl")
    write(tmp_path, "far.jsonl")
    for name in ("x.jsonl", "y.jsonl"):
        (source / name).symlink_to("../far.jsonl")
    os.link(source / "own.jsonl", source / "hard.jsonl")  # a copy, as rsync --link-dest makes them
    assert walk_files(source).second_names == [("y.jsonl", "x.jsonl")]
    assert run("extract", source, tmp_path / "out").code == 0
    assert read_sources(tmp_path / "out") == ["hard.jsonl", "own.jsonl", "x.jsonl"]


# -- special files


def fifo(path: Path) -> str:
    os.mkfifo(path)
    return "a FIFO"


def listening(path: Path) -> str:
    before = Path.cwd()
    os.chdir(path.parent)  # the address of a socket has 108 bytes
    try:
        with socket.socket(socket.AF_UNIX) as server:
            server.bind(path.name)
    finally:
        os.chdir(before)
    return "a socket"


def zeros(path: Path) -> str:
    path.symlink_to("/dev/zero")
    return "a character device"


def hollow(path: Path) -> str:
    path.mkdir()
    return "an empty directory"


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("make", [fifo, listening, zeros, hollow])
def test_special_files_are_refused(make: Callable[[Path], str], stage: str, tmp_path: Path) -> None:
    source = write(tmp_path / "in", "a.jsonl")
    kind = make(source / "b.jsonl")
    command = [stage, source, tmp_path / "x", *STAGES[stage]]
    assert_refused(tokenmill(*command), f"{source / 'b.jsonl'} is {kind}")
    if make is not hollow:
        assert_refused(run(stage, source / "b.jsonl", tmp_path / "x"), f"{source / 'b.jsonl'} is {kind}", "to a file")
    assert run(stage, source, tmp_path / "out", "--exclude", "b.jsonl").code == 0
    (source / "b.jsonl").rename(source / "agent.sock")  # not the name of a data file
    assert run(stage, source, tmp_path / "other").code == 0


@pytest.mark.parametrize("stage", [*STAGES, "preprocess"])
def test_shell_stream_is_refused_with_a_remedy(stage: str, tmp_path: Path) -> None:
    more = STAGES.get(stage, PREPROCESS)
    reader, writer = os.pipe()
    try:
        for name in (f"/dev/fd/{reader}", "/dev/stdin", "/dev/zero"):
            done = subprocess.run(
                [sys.executable, "-m", "tokenmill", stage, name, str(tmp_path / "x"), *more],
                stdin=reader,
                pass_fds=[reader],
                capture_output=True,
                text=True,
                timeout=60,
                check=False,
            )
            assert_refused(
                CommandResult(done.returncode, done.stdout, done.stderr), name, "Write the data to a file first"
            )
    finally:
        os.close(reader)
        os.close(writer)


def test_a_directory_with_the_name_of_a_file_is_read(tmp_path: Path) -> None:
    source = write(tmp_path / "in", "out.jsonl/part-00000.json", "out.jsonl/_SUCCESS")
    assert run("extract", source, tmp_path / "out").code == 0
    assert read_sources(tmp_path / "out") == ["out.jsonl/part-00000.json"]


# -- files without read permission

AS_USER = ["setpriv", "--bounding-set=-dac_override,-dac_read_search", "--inh-caps=-dac_override,-dac_read_search"]
"""A command prefix that removes root's right to read every file, so that root acts like another user."""


def as_user(*arguments: Any) -> CommandResult:
    prefix = AS_USER if os.geteuid() == 0 else []
    command = [*prefix, sys.executable, "-m", "tokenmill", *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    return CommandResult(done.returncode, done.stdout, done.stderr)


@pytest.fixture
def forbidden(tmp_path: Path) -> Any:
    """Return a function that makes a directory without permissions."""
    if os.geteuid() == 0 and (
        not shutil.which("setpriv") or subprocess.run([*AS_USER, "true"], capture_output=True, check=False).returncode
    ):
        pytest.skip("as root, needs setpriv to give up rights")
    directories = []

    def make(path: Path) -> Path:
        path.mkdir()
        path.chmod(0)
        directories.append(path)
        return path

    yield make
    for path in directories:
        path.chmod(0o755)


def test_lost_and_found_is_ignored(tmp_path: Path, forbidden: Callable[[Path], Path]) -> None:
    source = write(tmp_path / "in", "a.jsonl")
    volume = tmp_path / "volume"
    volume.mkdir()
    places = [forbidden(place / "lost+found") for place in (source, volume)]
    for command in (
        ["download", source, volume],
        ["extract", volume],
        ["concatenate", volume, "--target-files", 1],
        ["status", volume],
        ["verify", volume],
        ["extract", source],
    ):
        ended = as_user(*command)
        assert ended.code == 0, (command, ended)
        if source in command:
            assert f"left out {places[0]}" in ended.err
    assert read_sources(volume / "concatenated") == ["a.jsonl"]


@pytest.mark.parametrize("place", ["private", "deep/er/private"])
def test_unreadable_directory_is_named(tmp_path: Path, forbidden: Callable[[Path], Path], place: str) -> None:
    source = write(tmp_path / "in", "a.jsonl", "deep/er/b.jsonl")
    private = forbidden(source / place)
    for command in (["extract"], ["concatenate", "--target-files", 1], ["download"]):
        stage, *options = command
        ended = as_user(stage, source, tmp_path / "x", *options)
        assert_refused(ended, f"cannot read {private}: permission denied for uid", f"--exclude '{place}/*'")
        assert as_user(stage, source, tmp_path / stage, *options, "--exclude", f"{place}/*").code == 0
        assert read_sources(tmp_path / stage) == ["a.jsonl", "deep/er/b.jsonl"]
    if place == "private":
        for command in (["status", source], ["verify", source]):
            assert_refused(as_user(*command), f"cannot read {private}: permission denied for uid")
        assert_refused(as_user("extract", private), f"cannot read {private}: permission denied for uid")


# -- changes during a read


def rewritten(path: Path) -> None:
    path.write_bytes(path.read_bytes()[::-1])


def grown(path: Path) -> None:
    with path.open("ab") as file:
        file.write(b"more")


def replaced(path: Path) -> None:
    """Replace the file with one of the same size and time, as rsync --times does."""
    before = path.stat()
    other = path.with_name(".new")
    other.write_bytes(path.read_bytes()[::-1])
    os.utime(other, ns=(before.st_atime_ns, before.st_mtime_ns))
    other.rename(path)


def deleted(path: Path) -> None:
    path.unlink()


@pytest.mark.parametrize("change", [rewritten, grown, replaced, deleted])
def test_change_of_an_open_file_is_detected(change: Callable[[Path], None], tmp_path: Path) -> None:
    path = write(tmp_path, "a.jsonl") / "a.jsonl"
    with OpenInput(path) as opened:
        assert not opened.changed()
        path.chmod(0o600)
        os.link(path, tmp_path / "b.jsonl")
        assert not opened.changed()
        os.utime(path, ns=(0, path.stat().st_mtime_ns))
        assert not opened.changed()
        change(path)
        assert opened.changed()


@pytest.mark.parametrize("change", [rewritten, grown, replaced])
def test_file_that_changes_during_its_download_is_refused(change: Callable[[Path], None], tmp_path: Path) -> None:
    path = write(tmp_path / "in", "a.jsonl") / "a.jsonl"
    path.write_bytes(b"x" * (20 << 20))
    os.utime(path, (1, 1))
    source = open_source(str(path.parent), stall_seconds=1)
    (file,) = source.list(None, RetryPolicy(0)).files
    assert b"".join(bytes(block) for block in source.open(file, None, 0)) == path.read_bytes()
    body = iter(source.open(file, None, 0))
    next(body)
    change(path)
    with pytest.raises(SourceChanged):
        list(body)


def test_input_must_be_a_regular_file(tmp_path: Path) -> None:
    for make in (fifo, listening, zeros, hollow):
        make(tmp_path / make.__name__)
        with pytest.raises(RequestError, match="a stage requires regular files"):
            OpenInput(tmp_path / make.__name__)
