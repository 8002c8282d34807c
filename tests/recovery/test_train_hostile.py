"""`tokenmill train` with links, pipes and sockets that another user planted in its directories."""

import os
import shutil
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from support.commandline import tokenmill
from support.runs import Forge, tree
from support.train import Job

# -- hostile directories

RECORDS = ["attempts.json", "owner.json", "identity.json", "failure-1.json"]
FILES = ["latest_checkpointed_iteration.txt", *(f".tokenmill/train/{name}" for name in RECORDS)]
DIRECTORIES = [".tokenmill", ".tokenmill/train", ".tokenmill/index", ".tokenmill/aside", ".tokenmill/trash"]
PLANTED: dict[str, Callable[[Path, Path], Any]] = {
    "pipe": lambda place, _: os.mkfifo(place),
    "socket": lambda place, _: socket.socket(socket.AF_UNIX).bind(str(place)),
    "link to itself": lambda place, _: place.symlink_to(place.name),
    "link": lambda place, victim: place.symlink_to(victim),
    "link to nothing": lambda place, victim: place.symlink_to(victim / "new"),
    "link to a device": lambda place, _: place.symlink_to("/dev/zero"),
}


@pytest.mark.parametrize("kind", PLANTED)
def test_a_planted_record_neither_redirects_nor_blocks_a_start(
    job: Callable[..., Job], forge: Forge, kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = job(training__iterations=10, supervision__attemptsWithoutProgress=1)
    assert run.once()[0] == 0
    run.settings["training"]["iterations"] = 20
    run.fault("raise.always")
    assert run.once()[0] == 143
    pristine, victim = tmp_path / "pristine", tmp_path / "victim"
    shutil.copytree(run.checkpoints, pristine)
    for name in ("aside/iter_0000001-1", "trash/iter_0000001-1", "index/HASH", "train"):
        (victim / name).mkdir(parents=True)
        (victim / name / "cut.npy").write_bytes(b"precious")
    (victim / "iter_0000001-1").mkdir()
    (victim / "file.json").write_text("{}")
    before = tree(victim)
    for place in FILES + DIRECTORIES:
        shutil.rmtree(run.checkpoints)
        shutil.copytree(pristine, run.checkpoints)
        planted = run.checkpoints / place
        if planted.is_dir():
            shutil.rmtree(planted)
        planted.unlink(missing_ok=True)
        planted.parent.mkdir(parents=True, exist_ok=True)
        monkeypatch.chdir(planted.parent)  # the path of a socket must be short
        PLANTED[kind](Path(planted.name), victim / "file.json" if place in FILES else victim)
        code, log = run.once()
        assert code == 2 and str(planted) in log and "Traceback" not in log, (place, log)
        assert tree(victim) == before, place
        if place not in (".tokenmill/index", ".tokenmill/train", *FILES[1:]):
            for command in ("repair", "list", "verify"):
                ended = forge.run(["checkpoint", command, run.checkpoints])
                expected = (0, 2) if command != "repair" and place in DIRECTORIES else (2,)
                assert ended.exit in expected and "Traceback" not in ended.output, (place, command, ended.output)
            assert tree(victim) == before, place


@pytest.mark.parametrize("kind", ["pipe", "socket", "link to itself", "link to nothing", "link to a device"])
def test_settings_must_be_a_file(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    PLANTED[kind](Path("settings.json"), tmp_path)
    for options in ((), ("--dry-run",), ("--build-index",)):
        ended = tokenmill("train", "settings.json", *options)
        assert ended.code == 2 and "settings.json" in ended.err and "Traceback" not in ended.err, ended


@pytest.mark.parametrize(
    "content", ['{"attempt": 1}', "[[[]]]", '[{"began_at": 10, "settings": 7}]', '{"iteration": "x", "code": []}', "7"]
)
def test_records_of_other_types_count_as_missing(job: Callable[..., Job], content: str) -> None:
    run = job(training__nodes=2, training__gpusPerNode=1, training__iterations=20)
    directory = run.checkpoints / ".tokenmill" / "train"
    directory.mkdir(parents=True)
    names = [f"{name}-{rank}.json" for name in ("progress", "arrival", "failure") for rank in range(2)]
    for name in (*names, "attempts.json", "verdict.json", "owner.json"):
        (directory / name).write_text(content)
    assert run.finish() == 0, run.logs()
    assert "internal error of tokenmill" not in run.logs()
    run.assert_exact()
