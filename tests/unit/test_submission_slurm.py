"""The batch scripts of `--on slurm`, and the record of the jobs, with programs of Slurm that only write what they get.

tests/slurm runs the scripts on a real Slurm.
"""

import json
import os
import shlex
import subprocess
from pathlib import Path

import pytest

from support.commandline import CommandResult
from support.commandline import run_in_process as run

JOBS = Path(".tokenmill/slurm/jobs.jsonl")


@pytest.fixture
def programs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Put a `sbatch` that stores scripts, and a `squeue` that knows all jobs, on PATH; return their directory."""
    directory = tmp_path / "programs"
    directory.mkdir()
    scripts = {
        "sbatch": f'n=$(ls {directory} | wc -l); cat >{directory}/script-$n; echo "$*" >>{directory}/calls; echo $n',
        "squeue": 'echo "RUNNING|None"',
        "scancel": f'echo "scancel $*" >>{directory}/calls',
    }
    for name, text in scripts.items():
        (directory / name).write_text(f"#!/bin/bash\n{text}\n")
        (directory / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{directory}:{os.environ['PATH']}")
    return directory


def run_script(programs: Path, srun: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run the only script with a `srun` of this text, as the first task of an array."""
    (programs / "srun").write_text(f"#!/bin/bash\n{srun}\n")
    (programs / "srun").chmod(0o755)
    (script,) = programs.glob("script-*")
    variables = {"PATH": f"{programs}:/usr/bin:/bin", "SLURM_ARRAY_JOB_ID": "1", "SLURM_ARRAY_TASK_ID": "0"}
    return subprocess.run(
        ["bash", script],
        env=variables | {"SLURM_JOB_NODELIST": "n1"} | environment,
        cwd=programs.parent,
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )


def submit(*arguments: object) -> CommandResult:
    return run(*arguments, "--on", "slurm")


def corpus(tmp_path: Path) -> Path:
    (tmp_path / "in").mkdir()
    (tmp_path / "in/a.jsonl").write_text('{"text": "a"}\n')
    return tmp_path / "in"


@pytest.mark.parametrize("character", ["\n", "\r", "\x1b", "\t", "\x7f", "\x85", "\u2028"])
@pytest.mark.parametrize("place", ["output", "input", "option", "directory"])
def test_a_control_character_does_not_reach_a_script(
    character: str, place: str, programs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source, hostile = corpus(tmp_path), f"o{character}touch PWNED{character}#"
    arguments: list[object] = ["extract", source, tmp_path / "out"]
    if place == "output":
        arguments[2] = tmp_path / hostile
    elif place == "input":
        arguments[1] = tmp_path / hostile
    elif place == "option":
        arguments += ["--include", hostile]
    else:
        (tmp_path / hostile).mkdir()
        monkeypatch.chdir(tmp_path / hostile)
    for more in ([], ["--dry-run"]):
        ended = submit(*arguments, *more)
        assert ended.code == 2, ended
        assert "contains a control character, which a script of Slurm cannot contain" in ended.err
        assert not ended.out
    assert not (programs / "calls").exists()
    assert not (tmp_path / "out").exists()


def test_a_name_that_is_not_utf8_is_refused(programs: Path, tmp_path: Path) -> None:
    ended = submit("extract", corpus(tmp_path), os.fsdecode(bytes(tmp_path / "out-") + b"\xff"))
    assert ended.code == 2
    assert "which a script of Slurm cannot contain" in ended.err


@pytest.mark.parametrize("name", ["END-OF-JOB", "out@WORKER@", "@COMMAND@", "@RETRIES@@SRUN@", 'a\'b "c" $(d) `e`'])
def test_an_argument_reaches_the_command_unchanged(name: str, programs: Path, tmp_path: Path) -> None:
    source = corpus(tmp_path)
    command = ["extract", str(source), str(tmp_path / name), "--include", name]
    ended = submit(*command, "--dry-run")
    assert ended.code == 0, ended
    subprocess.run(["bash"], input=ended.out, text=True, env={"PATH": f"{programs}:/usr/bin:/bin"}, check=True)
    (script,) = programs.glob("script-*")
    words = shlex.split(script.read_text().replace("\\\n", " "), comments=True)
    start = words.index("tokenmill") if "tokenmill" in words else words.index("-m") + 1
    assert words[start + 1 : start + 4] == command[:3]
    assert words[start + 4] == f"--include={name}"
    assert words[start + 5] == "--worker-index=$SLURM_ARRAY_TASK_ID"


def test_a_line_of_setup_cannot_end_the_script(programs: Path, tmp_path: Path) -> None:
    profiles = tmp_path / "tokenmill.toml"
    profiles.write_text('[s]\non = "slurm"\nsetup = ["END-OF-JOB", "touch PWNED"]\n')
    ended = run("extract", corpus(tmp_path), tmp_path / "out", "--on=s", f"--profiles={profiles}", "--dry-run")
    subprocess.run(
        ["bash"], input=ended.out, text=True, env={"PATH": f"{programs}:/usr/bin:/bin"}, cwd=tmp_path, check=True
    )
    (script,) = programs.glob("script-*")
    assert "touch PWNED" in script.read_text()
    assert not (tmp_path / "PWNED").exists()


@pytest.mark.parametrize(
    ("setup", "code"),
    [
        (["true", "load() { return 3; }", "load x"], 3),
        (["cd /nowhere"], 1),
        (["false || true", "if false; then", "exit 9", "fi", ". ./benign"], 0),
        ([". ./failing"], 4),
    ],
)
def test_a_line_of_setup_that_fails_ends_the_job(setup: list[str], code: int, programs: Path, tmp_path: Path) -> None:
    (tmp_path / "benign").write_text("false\ntrue\n")
    (tmp_path / "failing").write_text("true\nreturn 4\n")
    profiles = tmp_path / "tokenmill.toml"
    profiles.write_text(f'[s]\non = "slurm"\nsetup = {json.dumps(setup)}\ncommand = ["tokenmill"]\n')
    command = ("extract", corpus(tmp_path), tmp_path / "out", "--on=s", f"--profiles={profiles}")
    assert run(*command).code == 0
    ended = run_script(programs, "exit 0")
    assert ended.returncode == code, ended
    assert ("a line of setup failed" in ended.stderr) == (code != 0)


def submit_worker(programs: Path, tmp_path: Path, retries: int = 0) -> None:
    """Submit a stage whose worker is started again after so many failures."""
    profiles = tmp_path / "tokenmill.toml"
    profiles.write_text(f'[s]\non = "slurm"\nretries = {retries}\n')
    assert run("extract", corpus(tmp_path), tmp_path / "out", "--on=s", f"--profiles={profiles}").code == 0
    (programs / "sinfo").write_text("#!/bin/bash\necho idle\n")
    (programs / "sinfo").chmod(0o755)
    (programs / "squeue").write_text("#!/bin/bash\necho RUNNING\n")


@pytest.mark.parametrize("name", ["USR1", "TERM"])
def test_a_signal_to_the_script_does_not_replace_the_exit_code_of_the_step(
    name: str, programs: Path, tmp_path: Path
) -> None:
    submit_worker(programs, tmp_path)
    ended = run_script(programs, f"kill -{name} $PPID; sleep 0.5; exit 2")
    assert ended.returncode == 2, ended
    calls = (programs / "calls").read_text()
    assert calls.count("scancel --signal=USR1 1_0") == (name == "USR1"), calls


def test_a_later_process_with_the_pid_of_the_step_does_not_count(programs: Path, tmp_path: Path) -> None:
    """A signal ends the step. The function `kill` finds a process with any pid, as if the kernel had given it again."""
    submit_worker(programs, tmp_path)
    ended = run_script(programs, "builtin kill -TERM $$", **{"BASH_FUNC_kill%%": "() { true; }"})
    assert ended.returncode == 143, ended
    assert "exit code 143, 1 times" in ended.stderr


def test_a_signal_between_two_starts_queues_the_job_again(programs: Path, tmp_path: Path) -> None:
    """The time limit is near: another start would be killed."""
    submit_worker(programs, tmp_path, retries=1)
    started, signalled = (
        programs / "started",
        "until pgrep -P $PPID sleep; do sleep 0.1; kill -0 $PPID || exit; done; kill -USR1 $PPID",
    )
    ended = run_script(programs, f"echo >>{started}; ({signalled}) >/dev/null 2>&1 & exit 1")
    assert ended.returncode == 143, ended
    assert "stopped with exit code 1: the job is queued again" in ended.stderr
    assert started.read_text() == "\n", "the command was started again"


def test_the_next_commands_can_be_copied(programs: Path, tmp_path: Path) -> None:
    output = tmp_path / "my out"
    ended = submit("extract", corpus(tmp_path), output)
    assert f"status: tokenmill status '{output}'\n" in ended.out
    status = run("status", output)
    assert f"of Slurm: 1 running, writes to {output}" in status.out


def test_each_of_several_outputs_is_named(programs: Path, tmp_path: Path) -> None:
    source = corpus(tmp_path)
    for name in ("one", "two"):
        assert submit("extract", source, tmp_path / f"all/{name}").code == 0
    lines = run("status", tmp_path / "all").out.splitlines()
    assert [line.rpartition("/")[2] for line in lines] == ["one", "two"]


def plant(place: Path, kind: str, outside: Path) -> None:
    if kind == "fifo":
        os.mkfifo(place)
    elif kind == "hard link":
        place.hardlink_to(outside)
    else:
        place.symlink_to(outside if kind == "link" else "/dev/zero")


@pytest.mark.parametrize("kind", ["fifo", "link", "device", "hard link"])
def test_the_record_of_jobs_is_a_file_of_the_output(kind: str, programs: Path, tmp_path: Path) -> None:
    source, output, outside = corpus(tmp_path), tmp_path / "out", tmp_path / "outside"
    outside.write_text("mine\n")
    (output / JOBS).parent.mkdir(parents=True)
    plant(output / JOBS, kind, outside)
    submitted = submit("extract", source, output)
    assert submitted.code == 2, submitted
    assert outside.read_text() == "mine\n"
    if kind != "hard link":  # which can be read, but not written to
        assert run("status", output).code == 2


@pytest.mark.parametrize("parent", [".tokenmill", ".tokenmill/slurm"])
def test_the_directory_of_the_record_is_no_link(parent: str, programs: Path, tmp_path: Path) -> None:
    source, output, outside = corpus(tmp_path), tmp_path / "out", tmp_path / "outside"
    outside.mkdir()
    (output / parent).parent.mkdir(parents=True)
    (output / parent).symlink_to(outside)
    assert submit("extract", source, output).code == 2
    assert not list(outside.iterdir())
    assert run("status", output).code == 2
    assert not (programs / "calls").exists()


def test_text_of_the_record_is_no_line_of_status(programs: Path, tmp_path: Path) -> None:
    output = tmp_path / "out"
    (output / JOBS).parent.mkdir(parents=True)
    job = {"job": "1", "stage": "extract", "name": "n", "submitted": "t"}
    forged = [job | {"stage": "\x1b[31m\nerror: forged"}, job | {"job": "1\nerror: forged"}, job]
    lines = [*map(json.dumps, forged), "[" * 100_000, "\x00", '{"job": ']
    (output / JOBS).write_text("\n".join(lines) + "\n")
    status = run("status", output)
    assert status.out == f"extract: job 1 of Slurm: 1 running, writes to {output}\n"


@pytest.mark.parametrize("content", [None, '[kubernetes]\ncharts = "charts"\n'])
def test_a_profile_without_a_claim_is_refused_with_the_lines_to_write(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, content: str | None
) -> None:
    monkeypatch.chdir(tmp_path)
    if content:
        (tmp_path / "tokenmill.toml").write_text(content)
    ended = run("preprocess", tmp_path, "/data/out", "--tokenizer", "x", "--on", "kubernetes")
    assert ended.code == 2
    assert ended.err.endswith('|     [kubernetes]\n|     on = "kubernetes"\n|     claim = "shared-storage-pvc"\n'), (
        ended.err
    )
