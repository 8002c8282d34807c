"""Training runs with random disturbances, and their log of iterations as the truth about them.

A seed determines the run and its disturbances. TOKENMILL_CAMPAIGN_RUNS=300 makes 300 runs, one for each seed from 0 on;
a failed test prints its seed and its disturbances.
"""

import contextlib
import json
import os
import random
import re
import signal
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from support.disk import Disk
from support.train import Job, last_line, read_if_possible
from tokenmill.train.runtime.attempts import RESERVE_BYTES, RunRecords

RUNS = int(os.environ.get("TOKENMILL_CAMPAIGN_RUNS", "0"))
FAST_SEEDS = (7, 20, 32, 45, 66)
"""Seeds of runs that end within seconds: signals, kills, a full volume, a lost reader of the log, two nodes."""
ITERATIONS = 60
HANG_SECONDS = 9.0
FREEZE_SECONDS = 11.0
RUN_SECONDS = 420.0
"""Timeout of a run; a hang at the start and a lost peer take a minute each."""

SIGNALS = ("SIGTERM", "SIGUSR1", "SIGHUP", "SIGINT")
LEADER_FAULTS = ("die-in-save", "torn-tracker")
"""Faults that only rank 0 has."""
FAULTS = (*LEADER_FAULTS, "hang", "disconnect", "progress-bar", "exit-0", "exit-3", "exit-77", "nan-exit")
"""Faults of the trainer."""
LOST_PEER = (
    r"Connection closed by peer|Connection reset by peer|Broken pipe|Timed out waiting for rank 0"
    r"|node [01] has restarted"
)
REASONS = {
    "kill-node": "^$",
    "kill-launcher": r"ended with signal 9",
    "kill-rank": r"rank \d was terminated by signal 9",
    **dict.fromkeys(SIGNALS, "^stopped by a signal: "),
    "hang": "^the run hangs: ",
    "disconnect": LOST_PEER,
    "exit-0": r"ended with exit code 0 before its target",
    "exit-3": r"ended with exit code 3",
    "exit-77": r"ended with exit code 77",
    "nan-exit": "Unexpected result nan on rank|exit code 16 because of NaN",
    "die-in-save": "rank 0 was terminated by signal 9",
    "torn-tracker": "rank 0 was terminated by signal 9",
    "full": "(?i)no space left on",
}
"""The recorded reasons of an attempt on the node of a disturbance; the kinds without one end no attempt."""
KINDS = (*dict.fromkeys((*REASONS, *FAULTS)), "freeze", "reader-gone")


@dataclass(frozen=True)
class Disturbance:
    """A fault from outside or inside a run."""

    kind: str
    node: int
    rank: int
    moment: str
    """What `count` counts since the start of the attempt: seconds ("start"), "trained" iterations, or "saving"."""
    count: float

    @property
    def fault(self) -> str:
        """Return the name of the trainer's fault."""
        return self.kind if self.kind in LEADER_FAULTS else f"{self.kind}.rank{self.rank}"

    def reasons(self, *, has_peers: bool) -> list[str]:
        """Return the reasons that node 0 may record for the end of an attempt with this disturbance."""
        if self.kind not in REASONS:
            return []
        # The launcher may observe first that another rank failed, which lost this one.
        lost_peer = [LOST_PEER] if has_peers else []
        if self.node == 0 or self.kind in ("hang", "full", "nan-exit"):
            return [REASONS[self.kind], *lost_peer]
        return [r"^a signal stopped node 1 \(", *lost_peer] if self.kind in SIGNALS else lost_peer


@dataclass(frozen=True)
class Plan:
    """A run and its disturbances."""

    nodes: int
    ranks: int
    """Ranks of each node."""
    save_interval: int
    small: bool
    """The checkpoints are on a small volume."""
    restarts_all: bool
    """The engine starts all nodes again after the failure of one, as JobSet does, instead of the failed node alone."""
    disturbances: tuple[Disturbance, ...]

    @classmethod
    def draw(cls, seed: int) -> "Plan":
        """Return the plan of a seed."""
        dice = random.Random(seed)
        nodes = dice.choice((1, 1, 2))
        ranks = dice.randint(1, 4 // nodes)
        small = dice.random() < 0.4
        disturbances = []
        for _ in range(dice.randint(3, 6)):
            kind = dice.choice([kind for kind in KINDS if small or kind != "full"])
            node = 0 if kind in LEADER_FAULTS else dice.randrange(nodes)
            rank = 0 if kind in LEADER_FAULTS else node * ranks + dice.randrange(ranks)
            moment = dice.choice(("start", "trained", "trained", "trained", "saving"))
            if moment == "start" and (kind in FAULTS or kind in ("kill-rank", "kill-launcher")):
                moment = "trained"
            count = {"start": dice.uniform(0, 2), "trained": dice.choice((0, *range(1, 13))), "saving": 1}[moment]
            disturbances.append(Disturbance(kind, node, rank, moment, count))
        return cls(nodes, ranks, dice.randint(3, 15), small, dice.random() < 0.5, tuple(disturbances))


@dataclass
class Campaign:
    """The engine of a run, which also disturbs it."""

    run: Job
    plan: Plan
    disk: Disk | None
    dice: random.Random
    pending: list[Disturbance] = field(init=False)
    causes: list[Disturbance] = field(default_factory=list)
    """Disturbances that may explain how the present attempt ends."""
    given: list[Disturbance] = field(default_factory=list)
    ends: list[tuple[int, int, str]] = field(default_factory=list)
    """Node, exit code and recorded reason of each end."""
    readers: dict[int, int] = field(default_factory=dict)
    """The test's end of the pipe for the log of a node."""
    silent: set[int] = field(default_factory=set)
    """Nodes whose present start has lost the reader of its log."""
    started_at: dict[int, float] = field(default_factory=dict)
    attempt_begins: int = 0
    """Position of the present attempt in the history."""
    known_attempts: set[str] = field(default_factory=set)
    ending: bool = False
    """The engine ends all nodes, to start all again."""

    def __post_init__(self) -> None:
        """Prepare the log of the iterations."""
        self.pending = list(self.plan.disturbances)
        self.history = self.run.directory / "history"
        self.history.touch()
        self.run.variables["TRAINER_HISTORY"] = str(self.history)

    # -- the engine

    def finish(self) -> None:
        """Run all nodes until node 0 ends with exit code 0."""
        deadline = time.monotonic() + RUN_SECONDS
        self.start_all()
        while True:
            assert time.monotonic() < deadline, "the run does not end"
            self.disturb()
            if self.disk and self.disk.is_full:  # another program takes what the run frees, but not its reserve
                self.disk.fill(leave=RESERVE_BYTES * 2)
            for rank, node in enumerate(self.run.nodes):
                self.read_log(rank)
                if node and (code := node.poll()) is not None and self.end(rank, code):
                    return self.run.stop()
            if not any(self.run.nodes):
                self.start_all()
            time.sleep(0.01)

    def start_all(self) -> None:
        self.ending = False
        self.run.nodes = [None] * self.plan.nodes
        for rank in range(self.plan.nodes):
            self.start(rank)

    def start(self, rank: int) -> None:
        """Start a node, with a pipe for its log if the reader of the log will go."""
        self.run.variables["CAMPAIGN_NODE"] = str(rank)
        self.silent.discard(rank)
        pending = [cause for cause in self.pending if cause.node == rank]
        self.started_at[rank] = time.monotonic()
        if rank == 0:
            self.attempt_begins = len(self.history.read_text())
        if not any(cause.kind == "reader-gone" for cause in pending):
            # A fork saves the imports, and may ignore SIGHUP as the tests do.
            is_early = any(cause.moment == "start" or cause.kind == "SIGHUP" for cause in pending)
            self.run.nodes[rank] = self.run.start(rank) if is_early else self.run.fork(rank)
            return
        (self.run.directory / f"log-{rank}").touch()
        self.readers[rank], writer = os.pipe()
        os.set_blocking(self.readers[rank], False)
        self.run.nodes[rank] = self.run.start(rank, log=writer)
        os.close(writer)

    def read_log(self, rank: int) -> None:
        if rank in self.readers:
            with (self.run.directory / f"log-{rank}").open("ab") as log, contextlib.suppress(BlockingIOError):
                while data := os.read(self.readers[rank], 1 << 16):
                    log.write(data)

    def end(self, rank: int, code: int) -> bool:
        """Check the end of a node, and start it again; return whether the run is complete."""
        self.read_log(rank)
        if rank in self.readers:
            os.close(self.readers.pop(rank))
        self.run.nodes[rank] = None
        self.ends.append((rank, code, ""))
        if code == -signal.SIGKILL:
            self.kill(rank)
        assert not self.processes(rank), "processes outlive their node"
        if rank == 0:
            self.check_attempt(code)
        if code == 0:
            assert self.tracker == str(ITERATIONS)
            return rank == 0
        if code in (2, 143) and rank not in self.silent:
            assert re.search(r"^error: .+\n(\| .*\n)*\Z", self.run.log(rank), re.MULTILINE), "the log has no reason"
        if code == 2:
            assert self.disk and self.disk.is_full and not self.events("saved"), last_line(self.run.log(rank))
            self.disk.free()
        else:
            number = -code if code < 0 else code - 128
            assert code == 143 or number in map(signal_number, self.causes), f"exit code {code}"
        if rank == 0:
            if self.disk and self.dice.random() < 0.5:
                self.disk.free()
            self.causes = [cause for cause in self.causes if self.continues(cause)]
        if code == 2 or self.plan.restarts_all:
            self.end_others()
        else:
            self.start(rank)
        return False

    def end_others(self) -> None:
        """End all other nodes, as JobSet does, once."""
        if not self.ending:
            self.ending = True
            for rank, node in enumerate(self.run.nodes):
                if node:
                    self.causes.append(Disturbance("SIGTERM", rank, rank, "start", 0))
                    node.terminate()

    def check_attempt(self, code: int) -> None:
        """Check what node 0 recorded about its attempt."""
        attempts = RunRecords(self.run.checkpoints).read_attempts()
        new = [attempt for attempt in attempts if attempt.id not in self.known_attempts]
        self.known_attempts |= {attempt.id for attempt in new}
        assert len(new) <= 1
        reasons = [
            reason for cause in self.causes for reason in cause.reasons(has_peers=self.plan.nodes * self.plan.ranks > 1)
        ]
        if self.tracker == str(ITERATIONS):
            assert code <= 0 or not new, "the target is saved"
            reasons.append(f"^completed: iteration {ITERATIONS} of {ITERATIONS} is saved")
        assert code == 0 or reasons, "the attempt ended without a cause"
        for attempt in new:
            self.ends[-1] = (0, code, attempt.ended)
            loaded = re.search(r"loaded (\d+)", self.history.read_text()[self.attempt_begins :])
            assert loaded is None or attempt.began_at == int(loaded[1])
            assert self.tracker in ("", str(attempt.saved)) or not attempt.ended, f"{attempt} has another iteration"
            assert not attempt.stopped or any(cause.kind in SIGNALS for cause in self.causes)
            assert any(re.search(reason, attempt.ended) for reason in reasons), f"{attempt} has none of {reasons}"

    # -- disturbances

    def disturb(self) -> None:
        """Cause the disturbances whose moment has come."""
        while self.pending and self.has_come(self.pending[0]) and self.cause(self.pending[0]):
            self.given.append(self.pending.pop(0))
            self.causes.append(self.given[-1])

    def has_come(self, disturbance: Disturbance) -> bool:
        if self.run.nodes[disturbance.node] is None or self.ending:
            return False
        if disturbance.moment == "start":
            return time.monotonic() - self.started_at[disturbance.node] >= disturbance.count
        attempt = self.history.read_text()[self.attempt_begins :]
        return "loaded" in attempt and attempt.count(disturbance.moment) >= disturbance.count

    def cause(self, disturbance: Disturbance) -> bool:
        """Cause a disturbance; return whether its node or its process still exists."""
        kind, node = disturbance.kind, self.run.nodes[disturbance.node]
        if node is None or node.poll() is not None or (kind == "reader-gone" and disturbance.node not in self.readers):
            return False
        if kind in FAULTS:
            self.run.fault(disturbance.fault)
        elif kind in SIGNALS:
            node.send_signal(signal.Signals[kind])
        elif kind == "kill-node":
            self.kill(disturbance.node)
        elif kind == "full":
            assert self.disk
            self.disk.fill()
        elif kind == "freeze":
            self.freeze()
        elif kind == "reader-gone":
            os.close(self.readers.pop(disturbance.node))
            self.silent.add(disturbance.node)
        else:
            program, variable = (
                ("launcher.py", "") if kind == "kill-launcher" else ("trainer.py", f"RANK={disturbance.rank}")
            )
            pids = self.processes(disturbance.node, program, variable)
            for pid in pids:
                signal_process(pid, signal.SIGKILL)
            return bool(pids)
        return True

    def processes(self, rank: int, program: str = "", variable: str = "") -> list[int]:
        """Return the live processes of a node, or only those of a program of the trainer with a variable."""
        marks = {f"CAMPAIGN_NODE={rank}".encode(), f"TRAINER_FAULTS={self.run.faults}".encode()}
        marks |= {variable.encode()} if variable else set()
        node = self.run.nodes[rank]
        pids = [node.pid] if node and not program and node.poll() is None else []
        for path in Path("/proc").glob("[0-9]*/environ"):
            if marks <= set(read_if_possible(path).split(b"\0")):
                # The launcher's arguments contain the trainer's program.
                command = read_if_possible(path.with_name("cmdline")).split(b"\0")
                if any(part.endswith(program.encode()) for part in command[1:2]):
                    pids.append(int(path.parent.name))
        return sorted(set(pids))

    def kill(self, rank: int) -> None:
        """Kill all processes of a node at once, as the end of a container does."""
        while pids := self.processes(rank):
            for pid in pids:
                signal_process(pid, signal.SIGKILL)
            if node := self.run.nodes[rank]:
                node.wait(30)
            time.sleep(0.005)

    def freeze(self) -> None:
        """Stop all processes of all nodes for longer than the timeout of a hang."""
        stopped: set[int] = set()
        while new := {pid for rank in range(self.plan.nodes) for pid in self.processes(rank)} - stopped:
            for pid in self.dice.sample(sorted(new), len(new)):
                signal_process(pid, signal.SIGSTOP)
            stopped |= new
        time.sleep(FREEZE_SECONDS)
        for pid in self.dice.sample(sorted(stopped), len(stopped)):
            signal_process(pid, signal.SIGCONT)

    # -- checks

    def events(self, event: str) -> list[int]:
        """Return the iterations of an event of the history."""
        return [int(line.split()[1]) for line in self.history.read_text().splitlines() if line.startswith(f"{event} ")]

    @property
    def tracker(self) -> str:
        return read_if_possible(self.run.checkpoints / "latest_checkpointed_iteration.txt").decode()

    def continues(self, cause: Disturbance) -> bool:
        """Return whether a disturbance may also explain the end of the next attempt."""
        if cause.kind == "full":
            return self.disk is not None and self.disk.is_full
        return cause.kind in FAULTS and (self.run.faults / cause.fault).exists()

    def check_history(self) -> None:
        """Check that no iteration of a completed save is lost or repeated, and that the final history is complete."""
        final: list[int] = []
        saved = 0
        for event, text in (line.split() for line in self.history.read_text().splitlines()):
            iteration = int(text)
            if event == "loaded":
                assert saved <= iteration <= len(final), f"loaded {iteration} after {saved} was saved"
                del final[iteration:]
            elif event == "trained":
                final.append(iteration)
            elif event == "saved":
                assert iteration == len(final)
                saved = iteration
        assert final == list(range(1, ITERATIONS + 1))


def signal_number(cause: Disturbance) -> int:
    """Return the signal that may end a node at once, 0 for another kind of disturbance."""
    name = "SIGKILL" if cause.kind == "kill-node" else cause.kind
    return signal.Signals[name].value if name.startswith("SIG") else 0


def signal_process(pid: int, number: signal.Signals) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, number)


@pytest.fixture
def default_signals() -> Iterator[None]:
    """Let nodes receive SIGHUP and SIGINT, also if the tests run in the background."""
    previous = signal.signal(signal.SIGHUP, signal.SIG_DFL), signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGHUP, previous[0])
    signal.signal(signal.SIGINT, previous[1])


@pytest.mark.parametrize("seed", range(RUNS) if RUNS else FAST_SEEDS)
@pytest.mark.usefixtures("default_signals")
def test_a_disturbed_run_is_exact(
    seed: int, job: Callable[..., Job], request: pytest.FixtureRequest, record_property: Callable[[str, str], None]
) -> None:
    plan = Plan.draw(seed)
    disk = request.getfixturevalue("disk") if plan.small else None
    run = job(
        step=0.02,
        save=0.1,
        training__iterations=ITERATIONS,
        training__nodes=plan.nodes,
        training__gpusPerNode=plan.ranks,
        training__globalBatchSize=12,
        checkpoint__saveInterval=plan.save_interval,
        supervision__hangMinutes=HANG_SECONDS / 60,
        supervision__startMinutes=0.5,
        supervision__distributedTimeoutMinutes=1,
        supervision__attemptsWithoutProgress=30,
    )
    if disk:
        disk.remount("size=32m")  # room for all checkpoints, because the run deletes old ones every 5 s
        run.variables["TRAINER_SHARD_BYTES"] = "300000"
        run.settings["checkpoint"]["path"] = str(disk.path / "run")
        run.checkpoints = disk.path / "run"
    campaign = Campaign(run, plan, disk, random.Random(seed))
    print(f"seed {seed}: {plan}")
    try:
        campaign.finish()
        campaign.check_history()
        run.assert_exact()
    except AssertionError:
        print(f"given: {campaign.given}\nends: {campaign.ends}\n{campaign.history.read_text()}\n{run.logs()}")
        raise
    finally:
        for rank in range(plan.nodes):
            campaign.kill(rank)
        record_property("given", json.dumps([disturbance.kind for disturbance in campaign.given]))
        record_property("ends", json.dumps(campaign.ends))
