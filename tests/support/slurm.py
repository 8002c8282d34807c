"""A real Slurm with two nodes on this machine: its controller, its daemons and munge, in a directory of their own."""

import contextlib
import os
import re
import secrets
import shutil
import socket
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from support.commandline import CommandResult, tokenmill
from support.hub import Hub

NODES = ("n1", "n2")
CPUS = 2
PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch", "squeue", "scontrol", "scancel")
KILL_WAIT_SECONDS = 30
REQUEUE_SECONDS = 3.0
ENDED = frozenset(("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL"))
"""States in which a job does not run again."""

_CONFIGURATION = """\
ClusterName=t
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={controller}
AuthType=auth/munge
AuthInfo=socket={root}/munge/socket
CredType=cred/munge
StateSaveLocation={root}/controller
SlurmdSpoolDir={root}/spool-%n
SlurmctldPidFile={root}/controller.pid
SlurmdPidFile={root}/%n.pid
SlurmctldLogFile={root}/controller.log
SlurmdLogFile={root}/%n.log
SlurmUser=root
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SlurmdParameters=config_overrides
SchedulerParameters=batch_sched_delay=1,sched_interval=2,bf_interval=5,max_rpc_cnt=0
KillWait={kill_wait}
ReturnToService=2
InactiveLimit=0
{nodes}
PartitionName=main Nodes=n[1-2] Default=YES State=UP MaxTime=INFINITE
"""


class Slurm:
    """A running Slurm."""

    def __init__(self, root: Path) -> None:
        """Prepare the configuration in a directory, whose path must be short enough for a socket."""
        self.root = root
        self.configuration = root / "slurm.conf"
        ports = _free_ports(1 + len(NODES))
        host = socket.gethostname().partition(".")[0]
        nodes = [
            f"NodeName={name} NodeHostname={host} NodeAddr=127.0.0.1 Port={port} CPUs={CPUS} RealMemory=4000"
            for name, port in zip(NODES, ports[1:], strict=True)
        ]
        for name in ("munge", "controller", *(f"spool-{name}" for name in NODES)):
            (root / name).mkdir()
        text = _CONFIGURATION.format(
            host=host, controller=ports[0], root=root, nodes="\n".join(nodes), kill_wait=KILL_WAIT_SECONDS
        )
        self.configuration.write_text(text)
        self._waiting_since: dict[str, float] = {}
        self._daemons: list[subprocess.Popen[bytes]] = []

    @property
    def environment(self) -> dict[str, str]:
        """Return the environment in which the client programs use this Slurm."""
        return {**os.environ, "SLURM_CONF": str(self.configuration)}

    def start(self) -> None:
        """Start the daemons, and wait until both nodes accept jobs."""
        munge = self.root / "munge"
        (munge / "key").write_bytes(secrets.token_bytes(1024))
        (munge / "key").chmod(0o400)
        files = {name: munge / name for name in ("socket", "key-file", "pid-file", "log-file", "seed-file")}
        files["key-file"] = munge / "key"
        self._start(["munged", "--foreground", "--force", *(f"--{name}={path}" for name, path in files.items())])
        wait_for((munge / "socket").exists, "munged listens")
        self._start(["slurmctld", "-D"])
        for name in NODES:
            self._start(["slurmd", "-D", "-N", name])
        wait_for(lambda: self.query("sinfo", "-h", "-o", "%T %D") == "idle 2", "both nodes are idle")

    def stop(self) -> None:
        """Cancel all jobs and stop the daemons."""
        with contextlib.suppress(Exception):
            self.query("scancel", "--user=root")
            wait_for(lambda: not self.query("squeue", "-h"), "all jobs have ended", KILL_WAIT_SECONDS + 30)
        for daemon in reversed(self._daemons):
            daemon.terminate()
        for daemon in self._daemons:
            with contextlib.suppress(subprocess.TimeoutExpired):
                daemon.wait(20)
            daemon.kill()

    def query(self, *command: str, text: str = "") -> str:
        """Run a client program and return its output."""
        ended = subprocess.run(
            command, input=text, capture_output=True, text=True, env=self.environment, timeout=60, check=False
        )
        assert ended.returncode == 0, (command, ended.stderr)
        return ended.stdout.strip()

    def states(self, job: str) -> list[str]:
        """Return the states of the tasks of a job."""
        return self.query("squeue", "-h", "--array", "--states=all", f"--jobs={job}", "--format=%T").split()

    @staticmethod
    def scripts(text: str) -> list[str]:
        """Return the batch scripts in the output of --dry-run."""
        return [script for _, script in re.findall(r"<<'(END-OF-JOB-\w+)'\n(.*?)\1\n", text, re.DOTALL)]

    def start_pending(self) -> None:
        """Let the jobs that wait after a requeue start: Slurm delays them by two minutes.

        A job must have waited for some seconds. A new start that is earlier than the message about the end of the last
        one takes this message for its own end.
        """
        waiting = self.query("squeue", "-h", "--array", "--states=PENDING", "--format=%i|%r").splitlines()
        jobs = {job for job, _, reason in (line.partition("|") for line in waiting) if reason == "BeginTime"}
        now = time.monotonic()
        self._waiting_since = {job: self._waiting_since.get(job, now) for job in jobs}
        for job, since in self._waiting_since.items():
            if now - since > REQUEUE_SECONDS:
                command = ["scontrol", "update", f"JobId={job}", "StartTime=now"]
                subprocess.run(command, env=self.environment, capture_output=True, check=False)

    def _start(self, command: list[str]) -> None:
        log = (self.root / f"{command[0]}-{len(self._daemons)}.out").open("wb")
        self._daemons.append(
            subprocess.Popen(
                command, env=self.environment, stdout=log, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL
            )
        )


@contextlib.contextmanager
def running_slurm() -> Iterator[Slurm]:
    """Run a Slurm; skip the test where it is not installed or cannot run."""
    if missing := [name for name in PROGRAMS if shutil.which(name) is None]:
        pytest.skip(f"Slurm is not installed: {missing[0]}")
    if os.geteuid() != 0:
        pytest.skip("the daemons of Slurm need root")
    root = Path(tempfile.mkdtemp(prefix="slurm-", dir="/tmp"))
    slurm = Slurm(root)
    try:
        slurm.start()
        yield slurm
    finally:
        slurm.stop()
        shutil.rmtree(root, ignore_errors=True)


def wait_for(condition: Callable[[], object], description: str, seconds: float = 60) -> None:
    """Wait until a condition holds."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"not within {seconds:.0f} s: {description}"
        time.sleep(0.2)


def submit(slurm: Slurm, *arguments: Any, hub: Hub | None = None, profile: str = "", **variables: str) -> CommandResult:
    """Submit a command with a profile of Slurm."""
    profiles = slurm.root / "tokenmill.toml"
    profiles.write_text(f'[slurm]\non = "slurm"\ncpus = 1\nmemory = "500M"\n{profile}\n')
    return tokenmill(
        *arguments, "--on", "slurm", "--profiles", profiles, hub=hub, SLURM_CONF=str(slurm.configuration), **variables
    )


def submitted_jobs(result: CommandResult) -> dict[str, str]:
    """Return the ids of submitted jobs by stage."""
    assert result.code == 0, result.err
    return dict(re.findall(r"^(\w+): submitted as job (\d+)$", result.out, re.MULTILINE))


def wait_for_end(slurm: Slurm, jobs: dict[str, str], *, seconds: float = 120) -> dict[str, set[str]]:
    """Wait until no task of the jobs runs or waits; return the final states of each stage."""

    def ended() -> bool:
        slurm.start_pending()
        return all(states and set(states) <= ENDED for states in map(slurm.states, jobs.values()))

    wait_for(ended, f"the jobs {jobs} end", seconds)
    return {stage: set(slurm.states(job)) for stage, job in jobs.items()}


def logs(output: Path) -> str:
    """Return the logs of all jobs of an output."""
    return "\n".join(path.read_text(errors="replace") for path in sorted(output.glob(".tokenmill/slurm/*.log")))


def find_processes(task: str) -> list[int]:
    """Return the processes of tokenmill in the job step of a task of an array, or of a job."""
    job, _, index = task.partition("_")
    wanted = {f"SLURM_ARRAY_JOB_ID={job}".encode(), f"SLURM_ARRAY_TASK_ID={index}".encode()}
    wanted = wanted if index else {f"SLURM_JOB_ID={job}".encode()}
    pids = []
    for path in Path("/proc").glob("[0-9]*/environ"):
        with contextlib.suppress(OSError):
            variables, command = set(path.read_bytes().split(b"\0")), path.with_name("cmdline").read_bytes()
            if wanted <= variables and b"\0tokenmill\0" in command and (not index or b"--worker-index" in command):
                pids.append(int(path.parent.name))
    return pids


def _free_ports(count: int) -> list[int]:
    with contextlib.ExitStack() as stack:
        servers = [stack.enter_context(socket.create_server(("127.0.0.1", 0))) for _ in range(count)]
        return [server.getsockname()[1] for server in servers]
