"""A run of `tokenmill train` with a small trainer in Megatron-LM's place, and what its tests look at.

Every iteration adds its number to a sum that checkpoints carry, so an iteration lost or done twice shows.
"""

import json
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from support.runs import environment

TRAINER = Path(__file__).parents[1] / "trainer"
ITERATIONS = 40


@dataclass
class Job:
    """A run's nodes on this machine, restarted as PyTorchJob does it: exit codes from 128 on, and signals."""

    directory: Path
    settings: dict[str, Any]
    step: float = 0.01
    save: float = 0.0
    variables: dict[str, str] = field(default_factory=dict)
    nodes: list["subprocess.Popen[str] | None"] = field(default_factory=list)
    said: str = ""
    starts: int = 0
    started: list["subprocess.Popen[str]"] = field(default_factory=list)

    def __post_init__(self) -> None:
        """Lay out a run's directory."""
        self.faults = self.directory / "faults"
        self.faults.mkdir(parents=True)
        self.checkpoints = Path(self.settings["checkpoint"]["path"])
        with socket.create_server(("localhost", 0)) as free:
            self.port = free.getsockname()[1]

    def fault(self, *names: str) -> None:
        """Let the trainer run into something, once each."""
        for name in names:
            (self.faults / name).touch()

    def start(self, rank: int = 0) -> "subprocess.Popen[str]":
        """Start a node."""
        path, new = self.directory / "settings.json", self.directory / f"settings-{rank}.new"
        new.write_text(json.dumps(self.settings))
        new.replace(path)  # another node may be reading it
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
        log = (self.directory / f"log-{rank}").open("a")
        node = subprocess.Popen(
            [sys.executable, "-m", "tokenmill", "train", str(path)],
            env=environment() | variables,
            stdout=log,
            stderr=subprocess.STDOUT,
            text=True,
        )
        self.started.append(node)
        return node

    def log(self, rank: int = 0) -> str:
        """Return what a node said over all its starts."""
        return (self.directory / f"log-{rank}").read_text()

    def logs(self) -> str:
        """Return what all nodes said."""
        return "".join(path.read_text() for path in sorted(self.directory.glob("log-*")))

    def once(self, seconds: float = 60) -> tuple[int, str]:
        """Run node 0 alone to its end; return its exit code and what it said."""
        before = len(self.log()) if (self.directory / "log-0").exists() else 0
        code = self.start().wait(seconds)
        return code, self.log()[before:]

    def finish(self, disturb: Callable[["Job"], None] = lambda job: None, seconds: float = 120) -> int:
        """Run all nodes, restarting those whose exit asks for it, until node 0 ends for good; return its code."""
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
                    self.nodes[rank] = None  # it stays Succeeded, and is not started again
                elif 0 <= code < 128:
                    self.stop()
                    return code
                else:
                    self.nodes[rank] = self.start(rank)
            time.sleep(0.01)

    def stop(self) -> None:
        """End what still runs, as the operator does when a job is over."""
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
        """Check that every iteration was done once in what became the result."""
        target = self.settings["training"]["iterations"]
        assert self.result() == (target, target * (target + 1) // 2)


def kill_with_ranks(run: Job, node: "subprocess.Popen[str]") -> None:
    """Kill a node, and wait until its ranks, which end after it, are gone."""
    node.kill()
    node.wait()
    marker, deadline = str(run.directory).encode(), time.monotonic() + 15
    while ranks := [p for p in Path("/proc").glob("[0-9]*/environ") if marker in readable(p)]:
        assert time.monotonic() < deadline, ranks
        time.sleep(0.05)


def readable(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError:
        return b""


def last_line(said: str) -> str:
    return said.rstrip().splitlines()[-1]


def program(tmp_path: Path, name: str, script: str) -> Path:
    """Put a program into a directory of its own; return the directory."""
    path = tmp_path / "bin" / name
    path.parent.mkdir(exist_ok=True)
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o755)
    return path.parent


def children(pid: int) -> list[Path]:
    """Return the command lines of a process's children."""
    found = readable(Path(f"/proc/{pid}/task/{pid}/children")).split()
    return [Path(f"/proc/{int(each)}/cmdline") for each in found]


def wait_for_silence(run: Job) -> None:
    """Wait until node 0 says nothing more."""
    before = ""
    while (now := run.log()) != before:
        before = now
        time.sleep(0.5)


def wait_for(run: Job, words: str, seconds: float = 30, times: int = 1, rank: int = 0) -> None:
    """Wait until a node has said something."""
    deadline = time.monotonic() + seconds
    while run.log(rank).count(words) < times:
        assert time.monotonic() < deadline, run.log(rank)
        time.sleep(0.01)


def blend(*parts: tuple[Path, float]) -> dict[str, Any]:
    return {"blend": {"all": [{"path": str(path), "weight": weight} for path, weight in parts]}, "split": "90,5,5"}


def events(run: Job) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = json.loads((run.checkpoints / ".tokenmill/train/identity.json").read_text())["events"]
    return found
