"""Output directories in which another user left links, pipes and forged records: nothing outside is touched.

The tests replace each record, attempt and output of an interrupted run. A victim's directory is next to the output;
its content and times, including the times of the last read, are compared before and after.
"""

import json
import os
import shutil
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from support.corpus import TOKENIZER
from support.runs import Forge, kill_at
from support.sweep import DRAWN, EVERYTHING, SEED, drawn
from tokenmill.core.files.codec import content_id
from tokenmill.engine.record import Plan

OLD = 1_600_000_000
"""A time so old that every planted file seems to be abandoned."""


class Scene:
    """An interrupted output, a victim's directory next to it, and the command that a user then runs."""

    def __init__(self, forge: Forge, output: Path, command: list[Any], victim: Path) -> None:
        self.forge = forge
        self.output = output
        self.command = command
        self.victim = victim
        self.records = output / ".tokenmill" / str(command[0])

    def plant(self, place: Path, kind: str) -> None:
        """Replace the file or directory at `place` with something hostile."""
        was_directory = place.is_dir()
        if was_directory:
            shutil.rmtree(place)
        else:
            place.unlink(missing_ok=True)
        place.parent.mkdir(parents=True, exist_ok=True)
        target = self.victim / ("folder" if was_directory else "file.json")
        match kind:
            case "link":
                place.symlink_to(target)
            case "link to a name":
                place.symlink_to(self.victim / "folder" / place.name)
            case "link to itself":
                place.symlink_to(place.name)
            case "pipe":
                os.mkfifo(place)
            case "socket":
                handle = os.open(place.parent, os.O_RDONLY)  # the address of a socket has at most 107 bytes
                with socket.socket(socket.AF_UNIX) as end:
                    end.bind(f"/proc/self/fd/{handle}/{place.name}")
                os.close(handle)
            case "swapped" if was_directory:
                place.write_bytes(b"{}")
            case "swapped":
                place.mkdir()
            case "other name":
                place.hardlink_to(target)
        if kind != "other name":
            os.utime(place, (OLD, OLD), follow_symlinks=False)

    def check_commands(self, *, message: str = "") -> None:
        """Run each command that reads the output; it must end without help and not touch the victim's files."""
        before = snapshot(self.victim)
        commands = [self.command, [*self.command, "--replace"], ["status", self.output], ["verify", self.output]]
        for argv in [*commands, *([["inspect", self.output]] if self.command[0] == "preprocess" else [])]:
            run = self.forge.run(argv)
            assert run.exit in (0, 2), f"{argv}: exit {run.exit}\n{run.output}"
            assert "Traceback" not in run.output, f"{argv}\n{run.output}"
            assert message in run.output or not message, f"{argv}\n{run.output}"
            assert snapshot(self.victim) == before, f"{argv}\n{run.output}"


def snapshot(root: Path) -> dict[str, tuple[Any, ...]]:
    """Return the paths below a directory, with the times of the last change and of the last read.

    The time of the last status change is left out: it changes when another name of a file in the output is removed.
    """
    files = {}
    for path in [root, *sorted(root.rglob("*"))]:
        status = path.lstat()
        times = (status.st_mtime_ns, status.st_atime_ns if path.is_file() else 0)
        files[str(path)] = (status.st_mode, status.st_uid, status.st_gid, status.st_size, times)
    return files


@pytest.fixture
def victim(tmp_path: Path) -> Path:
    """Return another user's directory, in which each read shows (relatime: the last read is before the last change)."""
    victim = tmp_path / "victim"
    names = (
        "file.json",
        "folder/plan.json",
        "folder/a.json",
        "folder/old/owner.json",
        "folder/old/data",
        "config.json",
    )
    for name in names:
        (victim / name).parent.mkdir(parents=True, exist_ok=True)
        (victim / name).write_text('{"precious": true}\n')
    for path in sorted(victim.rglob("*"), reverse=True):
        os.utime(path, (OLD - 1000, OLD))
    probe = tmp_path / "probe"
    probe.write_text("x")
    os.utime(probe, (OLD - 1000, OLD))
    probe.read_text()
    assert probe.stat().st_atime != OLD - 1000, "this file system does not record reads"
    return victim


@pytest.fixture(scope="module")
def interrupted(
    forge: Forge, corpus: Path, prepared: Path, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, tuple[Path, list[Any]]]:
    """Return for each kind of stage an output that was killed, with a dead attempt in it, and its command."""
    outputs = {}
    root = tmp_path_factory.mktemp("interrupted")
    source = root / "source"
    source.mkdir()
    for number in range(4):
        (source / f"{number}.jsonl").write_bytes(b'{"text": "once upon a time"}\n' * (50 + number))
    commands: dict[str, list[Any]] = {
        "download": ["download", source, root / "download"],
        "extract": ["extract", corpus, root / "extract", "--processes", 1],
        "preprocess": ["preprocess", corpus, root / "preprocess", "--tokenizer", TOKENIZER, "--processes", 1],
    }
    shutil.copytree(prepared, root / "preprocess")
    for stage, command in commands.items():
        output = root / stage
        forge.run([*command], kill_at(output, r"rename .*/receipts/", 3))
        for attempt in (output / ".tokenmill" / stage / "attempts").glob("[!.]*"):
            for path in [*attempt.iterdir(), attempt]:
                os.utime(path, (OLD, OLD))
        for folder, name in (("failures", "left.json"), ("runs", "left"), ("receipts", "left.json")):
            (output / ".tokenmill" / stage / folder).mkdir(exist_ok=True)
            (output / ".tokenmill" / stage / folder / name).write_text("{}")
        assert list((output / ".tokenmill" / stage / "attempts").glob("*~*")), "no attempt was left"
        outputs[stage] = (output, command)
    return outputs


@pytest.fixture(params=["download", "extract", "preprocess"])
def scene(
    request: pytest.FixtureRequest,
    forge: Forge,
    interrupted: dict[str, tuple[Path, list[Any]]],
    tmp_path: Path,
    victim: Path,
) -> Callable[[], Scene]:
    """Return a function that makes a fresh copy of an interrupted output."""
    original, command = interrupted[request.param]

    def fresh() -> Scene:
        output = tmp_path / "out"
        shutil.rmtree(output, ignore_errors=True)
        shutil.copytree(original, output, copy_function=shutil.copy2)
        argv = [output if argument == original else argument for argument in command]
        return Scene(forge, output, argv, victim)

    return fresh


def places(scene: Scene) -> list[Path]:
    """Return a path of each kind at which a record, an attempt or an output is or may be."""
    paths: dict[str, Path] = {}
    for path in [scene.output / ".tokenmill", *sorted(scene.output.rglob("*"))]:
        name = path.relative_to(scene.output).as_posix()
        parts = name.split("/")
        if "receipts" in parts:
            parts[-1] = path.suffix if path.is_file() else parts[-1]
        if "attempts" in parts[:-1]:
            parts[3] = "ATTEMPT"
        paths.setdefault("/".join(parts), path)
    more = ["plan.json", "manifest.json", "replaced.json", "planning.json"]
    return [*paths.values(), *(scene.records / name for name in more if not (scene.records / name).exists())]


KINDS = ["link", "link to a name", "link to itself", "pipe", "socket", "swapped"]


def test_nothing_outside_is_read_changed_or_deleted(scene: Callable[[], Scene]) -> None:
    """Each place becomes a link and one other kind; with TOKENMILL_TEST_ALL all kinds, which takes minutes."""
    first = scene()
    names = [path.relative_to(first.output) for path in places(first)]
    assert len(names) > 15
    for number, name in drawn(list(enumerate(names))):
        for kind in KINDS if EVERYTHING else ("link", KINDS[1 + number % 5]):
            here = scene()
            here.plant(here.output / name, kind)
            here.check_commands()


def test_a_file_with_another_name_is_not_written_to(scene: Callable[[], Scene]) -> None:
    """Only the number of names distinguishes a hard link from a file."""
    here = scene()
    attempt = next(here.records.glob("attempts/*~*"))
    for path in [path for path in attempt.iterdir() if path.name != "owner.json"]:
        here = scene()
        here.plant(attempt / path.name if here.output in attempt.parents else path, "other name")
        here.check_commands()


@pytest.mark.parametrize("name", ["attempts", "failures", "receipts", "plan.json"])
def test_a_linked_record_is_refused_with_its_name(scene: Callable[[], Scene], name: str) -> None:
    here = scene()
    if not (here.records / name).exists():
        (here.records / name).write_text("{}")
    here.plant(here.records / name, "link")
    run = here.forge.run([*here.command, "--replace"])
    assert run.exit == 2 and str(here.records / name) in run.output and "is a symbolic link" in run.output, run.output


def forge_plan(scene: Scene, change: Callable[[dict[str, Any]], None]) -> None:
    """Change a plan and give it the id that belongs to it."""
    path = scene.records / "plan.json"
    value = json.loads(path.read_bytes())
    change(value)
    value["id"] = content_id({name: part for name, part in value.items() if name != "id"})
    path.write_text(json.dumps(value, indent=1))


ELSEWHERE = [
    "../victim/config.json",
    "../../victim/config.json",
    "{victim}/config.json",
    ".tokenmill/x",
    "a/../../victim",
]


@pytest.mark.parametrize("path", ELSEWHERE)
@pytest.mark.parametrize("where", ["outputs", "tokenizer files", "inputs", "id"])
def test_a_forged_path_leads_nowhere(scene: Callable[[], Scene], where: str, path: str) -> None:
    here = scene()
    path = path.format(victim=here.victim)

    def change(plan: dict[str, Any]) -> None:
        match where:
            case "outputs":
                plan["units"][0]["outputs"][0] = path
            case "tokenizer files" if "tokenizer" in plan["details"]:
                plan["details"]["tokenizer"]["files"] = {path: "0" * 64}
            case "inputs" if "inputs" in plan["units"][0]["spec"]:
                plan["units"][0]["spec"]["inputs"][0]["path"] = path
            case _:
                plan["units"][0]["id"] = path

    forge_plan(here, change)
    here.check_commands(message=str(here.records / "plan.json"))


FORGED: dict[str, Callable[[dict[str, Any]], object]] = {
    "units are not a list": lambda plan: plan.update(units={"a": 1}),
    "units are numbers": lambda plan: plan.update(units=[1, 2]),
    "a unit is empty": lambda plan: plan["units"].append({}),
    "a weight is text": lambda plan: plan["units"][0].update(weight="9"),
    "a weight is negative": lambda plan: plan["units"][0].update(weight=-9),
    "outputs are text": lambda plan: plan["units"][0].update(outputs="abc"),
    "a spec is a list": lambda plan: plan["units"][0].update(spec=[]),
    "a spec is empty": lambda plan: plan["units"][0].update(spec={}),
    "upstream is text": lambda plan: plan.update(upstream="download"),
    "upstream is a number": lambda plan: plan.update(upstream={"stage": 7}),
    "source is a list": lambda plan: plan.update(source=[]),
    "the basis is a list": lambda plan: plan.update(basis=[1]),
    "details are text": lambda plan: plan.update(details="x"),
    "the tokenizer is text": lambda plan: plan.update(
        details={"tokenizer": "x"} if "tokenizer" in plan["details"] else "x"
    ),
    "the request is a list": lambda plan: plan.update(request=[]),
    "the stage is a number": lambda plan: plan.update(stage=3),
    "require is unknown": lambda plan: plan.update(require="gold"),
}


@pytest.mark.parametrize("change", FORGED.values(), ids=FORGED)
def test_a_forged_plan_is_refused_with_its_name(scene: Callable[[], Scene], change: Callable[..., object]) -> None:
    here = scene()
    forge_plan(here, change)
    run = here.forge.run(here.command)
    assert run.exit == 2 and str(here.records / "plan.json") in run.output, run.output
    here.check_commands()


VALUES: list[Any] = [None, [], "x", {"": 1}, 0, {"encoder": 5}]


def test_forged_records_cause_no_traceback(scene: Callable[[], Scene]) -> None:
    """Replace each JSON record, then each value in it, with something else."""
    first, number = scene(), 0
    for place in [path for path in places(first) if path.suffix == ".json" and path.is_file()]:
        here = scene()
        path = here.output / place.relative_to(first.output)
        old = json.loads(path.read_bytes())
        large = path.name in ("plan.json", "tokenizer.json", "backend.json", "encoder.json")
        names = [] if large or not isinstance(old, dict) else list(old)
        for name in [None, *names]:
            number += 1
            if not EVERYTHING and (number + SEED) % DRAWN:
                continue
            for value in VALUES if EVERYTHING else [VALUES[number // DRAWN % len(VALUES)]]:
                here = scene()
                path.write_text(json.dumps(value if name is None else old | {name: value}))
                here.check_commands()


def test_a_forged_dataset_causes_no_traceback(tokenized: Path, forge: Forge, tmp_path: Path, victim: Path) -> None:
    """Replace each value in the records of a finished dataset, then use the dataset in each command."""
    output, settings = tmp_path / "out", tmp_path / "settings.json"
    settings.write_text(
        json.dumps(
            {
                "release": "run",
                "model": {"numLayers": 2, "hiddenSize": 64, "numAttentionHeads": 4, "seqLength": 32},
                "training": {"nodes": 1, "gpusPerNode": 1, "iterations": 9, "globalBatchSize": 4},
                "checkpoint": {"path": str(tmp_path / "checkpoints")},
                "dataset": {"path": str(output), "split": "90,5,5"},
                "trainer": {"backend": "gloo", "script": __file__},
            }
        )
    )
    commands: list[list[Any]] = [
        ["blend", tmp_path / "blend.json", output, "--root", tmp_path, "--split", "90,5,5"],
        ["train", "--dry-run", settings],
        ["verify", output],
        ["inspect", output],
    ]
    before, number = snapshot(victim), 0
    shutil.copytree(tokenized, output)
    for command in commands:
        forge.complete(command)
    names = ["plan.json", "manifest.json", "receipts/" + next((output / ".tokenmill").glob("*/receipts/*.json")).name]
    for path in [output / ".tokenmill/preprocess" / name for name in names]:
        content = path.read_bytes()
        old = json.loads(content)
        for name in [None, *old]:
            for value in [*VALUES, str(victim / "folder")]:
                number += 1
                path.write_text(json.dumps(value if name is None else old | {name: value}))
                run = forge.run(commands[number % len(commands)])
                assert run.exit in (0, 2) and "Traceback" not in run.output, f"{path} {name} {value}\n{run.output}"
        path.write_bytes(content)
    assert number > 100
    assert snapshot(victim) == before


def test_a_planted_plan_deletes_nothing_outside(scene: Callable[[], Scene]) -> None:
    """`--replace` removes the files that the old plan names, and an attacker can choose these names."""
    here = scene()
    (here.output / "link").symlink_to(here.victim)
    stage = str(here.command[0])
    plan = Plan(stage, {"other": True}, [], {})
    value = json.loads(plan.to_bytes())
    value["units"] = [{"id": "x", "weight": 1, "spec": {}, "outputs": ["link/config.json", "link/folder/a.json"]}]
    value["id"] = content_id({name: part for name, part in value.items() if name != "id"})
    (here.records / "plan.json").write_text(json.dumps(value))
    here.check_commands()
    assert (here.victim / "config.json").exists()


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a file to another user")
def test_a_record_of_another_user_is_not_used_unless_that_user_is_trusted(scene: Callable[[], Scene]) -> None:
    here = scene()
    stranger = 54321
    for name in ("plan.json", "attempts"):
        os.chown(here.records / name, stranger, stranger)
        run = here.forge.run(here.command)
        assert run.exit == 2 and f"{here.records / name} belongs to user {stranger}" in run.output, run.output
        here.forge.complete(here.command, env={"TOKENMILL_TRUSTED_UIDS": f"1,{stranger}"})
        here = scene()
    os.chown(here.records / "plan.json", stranger, stranger)
    os.chown(here.output, stranger, stranger)  # the owner of the output may write its records
    here.forge.complete(here.command)
