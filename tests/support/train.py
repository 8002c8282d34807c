"""Runs of `tokenmill train` with a small trainer instead of Megatron-LM, and helpers for their tests.

Every iteration adds its number to a sum in the checkpoints. A wrong sum reveals a lost or repeated iteration.
"""

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from support.runs import Forge, Run, environment
from tokenmill.train.runtime.attempts import RunRecords

TRAINER = Path(__file__).parents[1] / "trainer"
ITERATIONS = 40


def make_settings(checkpoints: Path, dataset: Path) -> dict[str, Any]:
    """Return the settings of a run of the small trainer with two processes on one node."""
    return {
        "release": "run",
        "model": {"numLayers": 2, "hiddenSize": 64, "numAttentionHeads": 4, "seqLength": 32},
        "training": {
            "nodes": 1,
            "gpusPerNode": 2,
            "iterations": ITERATIONS,
            "globalBatchSize": 4,
            "logInterval": 1,
        },
        "checkpoint": {"path": str(checkpoints), "saveInterval": 5},
        "dataset": {"path": str(dataset), "split": "90,5,5"},
        "trainer": {
            "backend": "gloo",
            "launcher": [sys.executable, str(TRAINER / "launcher.py")],
            "script": str(TRAINER / "trainer.py"),
        },
    }


@dataclass
class ForkedNode:
    """A node that the forge started, with the methods of a process."""

    run: Run

    @property
    def pid(self) -> int:
        return self.run.pid

    def poll(self) -> int | None:
        code = self.run.poll(0)
        return code if isinstance(code, int) else None

    def wait(self, seconds: float = 60) -> int | str:
        return self.run.wait(seconds)

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


@dataclass
class Job:
    """The nodes of a run on this machine; exit codes of 128 or more and signals restart a node, as in a PyTorchJob."""

    directory: Path
    settings: dict[str, Any]
    step: float = 0.01
    save: float = 0.0
    variables: dict[str, str] = field(default_factory=dict)
    nodes: list["subprocess.Popen[str] | ForkedNode | None"] = field(default_factory=list)
    output: str = ""
    starts: int = 0
    started: list["subprocess.Popen[str] | ForkedNode"] = field(default_factory=list)
    shell: str = "true"
    """Commands of a shell that `start` runs before a node."""
    forge: Forge | None = None
    """Starts the runs of `once`, without the imports that every new process needs."""

    def __post_init__(self) -> None:
        """Create the directory of a run, and choose its port."""
        self.faults = self.directory / "faults"
        self.faults.mkdir(parents=True)
        self.checkpoints = Path(self.settings["checkpoint"]["path"])
        with socket.create_server(("localhost", 0)) as free:
            self.port = free.getsockname()[1]

    def fault(self, *names: str) -> None:
        """Set faults of the trainer; each fault happens once."""
        for name in names:
            (self.faults / name).touch()

    def prepare(self, rank: int = 0) -> tuple[list[str], dict[str, str]]:
        """Write the settings; return the arguments and the variables of a node."""
        path, new = self.directory / "settings.json", self.directory / f"settings-{rank}.new"
        new.write_text(json.dumps(self.settings))
        new.replace(path)  # another node may read the file at the same time
        variables = {
            "TRAINER_FAULTS": str(self.faults),
            "TRAINER_STEP_SECONDS": str(self.step),
            "TRAINER_SAVE_SECONDS": str(self.save),
            "RANK": str(rank),
            "MASTER_ADDR": "localhost",
            "MASTER_PORT": str(self.port),
            **self.variables,
        }
        self.starts += 1
        return ["train", str(path)], variables

    def start(self, rank: int = 0, *, log: int | None = None) -> "subprocess.Popen[str]":
        """Start a node, perhaps with another descriptor for its log."""
        arguments, variables = self.prepare(rank)
        node = subprocess.Popen(
            ["sh", "-c", f'{self.shell}; exec "$@"', "sh", sys.executable, "-m", "tokenmill", *arguments],
            env=environment() | variables,
            stdout=(self.directory / f"log-{rank}").open("a") if log is None else log,
            stderr=subprocess.STDOUT,
            text=True,
        )
        self.started.append(node)
        return node

    def fork(self, rank: int = 0) -> "ForkedNode":
        """Start a node as a fork of a process that has imported tokenmill."""
        assert self.forge
        arguments, variables = self.prepare(rank)
        node = ForkedNode(self.forge.start(arguments, log=str(self.directory / f"log-{rank}"), env=variables))
        self.started.append(node)
        return node

    def log(self, rank: int = 0) -> str:
        """Return the output of a node, from all its starts."""
        return (self.directory / f"log-{rank}").read_text()

    def logs(self) -> str:
        """Return the output of all nodes."""
        return "".join(path.read_text() for path in sorted(self.directory.glob("log-*")))

    def once(self, seconds: float = 60) -> tuple[int, str]:
        """Run only node 0 until it ends; return its exit code and its output."""
        before = len(self.log()) if (self.directory / "log-0").exists() else 0
        if self.forge is None:
            return self.start().wait(seconds), self.log()[before:]
        arguments, variables = self.prepare(0)
        run = self.forge.start(arguments, log=str(self.directory / "log-0"), env=variables)
        code = run.wait(seconds)
        assert isinstance(code, int), code
        return code, self.log()[before:]

    def finish(self, disturb: Callable[["Job"], None] = lambda job: None, seconds: float = 120) -> int:
        """Run all nodes, restart nodes with a retryable exit code, and return the final exit code of node 0."""
        count = self.settings["training"].get("nodes", 1)
        deadline = time.monotonic() + seconds
        self.nodes = [self.start(rank) for rank in range(count)]
        while True:
            assert time.monotonic() < deadline, self.log()
            disturb(self)
            for rank, node in enumerate(self.nodes):
                code = node.poll() if node else None
                if code is None:
                    continue
                if code == 0 and rank > 0:
                    self.nodes[rank] = None  # the pod stays Succeeded, without a restart
                elif 0 <= code < 128:
                    self.stop()
                    return code
                else:
                    self.nodes[rank] = self.start(rank)
            time.sleep(0.01)

    def stop(self) -> None:
        """Stop the running nodes, as the operator does at the end of a job."""
        for node in self.nodes:
            if node and node.poll() is None:
                node.terminate()
        for node in self.nodes:
            if node:
                node.wait(30)

    def result(self) -> tuple[int, int]:
        """Return the iteration and the sum of the last checkpoint."""
        iteration = int((self.checkpoints / "latest_checkpointed_iteration.txt").read_text())
        value = json.loads((self.checkpoints / f"iter_{iteration:07d}" / "__0_0.distcp").read_bytes())
        return value["iteration"], value["sum"]

    def assert_exact(self) -> None:
        """Check that the result includes every iteration exactly once."""
        target = self.settings["training"]["iterations"]
        assert self.result() == (target, target * (target + 1) // 2)


def kill_with_ranks(run: Job, node: "subprocess.Popen[str]") -> None:
    """Kill a node, and wait for its ranks, which end later."""
    node.kill()
    node.wait()
    marker, deadline = str(run.directory).encode(), time.monotonic() + 15
    while ranks := [p for p in Path("/proc").glob("[0-9]*/environ") if marker in read_if_possible(p)]:
        assert time.monotonic() < deadline, ranks
        time.sleep(0.05)


def lose(run: Job, rank: int) -> None:
    """Kill a node and its ranks at once, as when its machine is gone."""
    run.started[-1 if rank else 0].kill()
    per_node = run.settings["training"]["gpusPerNode"]
    for path in Path("/proc").glob("[0-9]*/environ"):
        entries = dict(entry.partition(b"=")[::2] for entry in read_if_possible(path).split(b"\0"))
        is_rank = entries.get(b"TRAINER_FAULTS") == str(run.faults).encode() and b"LOCAL_RANK" in entries
        if is_rank and int(entries[b"RANK"]) // per_node == rank:
            os.kill(int(path.parent.name), signal.SIGKILL)


def read_if_possible(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError:
        return b""


def last_line(output: str) -> str:
    return output.rstrip().splitlines()[-1]


def program(tmp_path: Path, name: str, script: str) -> Path:
    """Write a program to the directory `bin`; return this directory."""
    path = tmp_path / "bin" / name
    path.parent.mkdir(exist_ok=True)
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o755)
    return path.parent


def children(pid: int) -> list[Path]:
    """Return the command lines of a process's children."""
    pids = read_if_possible(Path(f"/proc/{pid}/task/{pid}/children")).split()
    return [Path(f"/proc/{int(pid)}/cmdline") for pid in pids]


def wait_until_quiet(run: Job) -> None:
    """Wait until node 0 prints no further output."""
    before = ""
    while (now := run.log()) != before:
        before = now
        time.sleep(0.5)


def wait_for(run: Job, text: str, seconds: float = 30, times: int = 1, rank: int = 0) -> None:
    """Wait until a node has printed a text this many times."""
    deadline = time.monotonic() + seconds
    while run.log(rank).count(text) < times:
        assert time.monotonic() < deadline, run.log(rank)
        time.sleep(0.01)


def wait_for_checkpoint(run: Job) -> None:
    """Wait until the run has saved a checkpoint, without its log."""
    tracker, deadline = run.checkpoints / "latest_checkpointed_iteration.txt", time.monotonic() + 60
    while not read_if_possible(tracker):
        assert time.monotonic() < deadline
        time.sleep(0.01)


def assert_stopped_with_a_save(run: Job) -> None:
    """Check that the last attempt was stopped by a signal, and that nothing of it is lost."""
    attempt, (iteration, total) = RunRecords(run.checkpoints).read_attempts()[-1], run.result()
    assert attempt.stopped and attempt.ended.startswith("stopped by a signal")
    assert attempt.saved == iteration and total == iteration * (iteration + 1) // 2


def blend(*parts: tuple[Path, float]) -> dict[str, Any]:
    return {"blend": {"all": [{"path": str(path), "weight": weight} for path, weight in parts]}, "split": "90,5,5"}


def events(run: Job) -> list[dict[str, Any]]:
    recorded: list[dict[str, Any]] = json.loads((run.checkpoints / ".tokenmill/train/identity.json").read_text())[
        "events"
    ]
    return recorded
