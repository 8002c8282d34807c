"""The supervisor, in a separate process, because it stops all of its descendants."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.slow  # most of these tests wait for seconds

SETUP = """
import json, sys, time
from tokenmill.errors import RequestError, Superseded
from tokenmill.train.runtime import supervisor
from tokenmill.train.runtime.log_monitor import LogMonitor, TrainingProgress
supervisor.TASK_SECONDS = supervisor.STARTUP_TASK_SECONDS = 0.1
counts = []
def run(
    script, peers=lambda: None, tasks=(), rendezvous=60, start=60, iteration=60, monitor=None, poll=lambda started: True
):
    timeouts = supervisor.HangTimeouts(rendezvous, start, iteration)
    with supervisor.Signals() as signals:
        runner = supervisor.Supervisor(monitor or LogMonitor(), timeouts, peers, tasks, signals, poll)
        end = runner.run(["sh", "-c", script], {})
    print("END", json.dumps([end.exit_code, end.stopped, end.abort_reason, end.has_iterated]))
    return end
STEP = "echo ' iteration 7/ 10 | consumed samples: 28 | elapsed time per iteration (ms): 100.0 |'"
"""


def supervise(tmp_path: Path, script: str) -> tuple[list[Any], str]:
    """Run a script; return the end of the command and the output. Processes to stop sleep longer than the timeout."""
    process = subprocess.run(
        [sys.executable, "-c", SETUP + script], capture_output=True, text=True, timeout=60, cwd=tmp_path, check=False
    )
    ends = [json.loads(line[4:]) for line in process.stdout.splitlines() if line.startswith("END ")]
    assert ends, process.stdout + process.stderr
    return ends[0], process.stdout


def test_adopted_processes_that_end_are_reaped(tmp_path: Path) -> None:
    """A zombie would keep its process id until the end of the run."""
    end, output = supervise(
        tmp_path,
        """
import os
from pathlib import Path
def zombies():
    states = [(p.parent.name, *p.read_text().rpartition(")")[2].split()[:2]) for p in Path("/proc").glob("[0-9]*/stat")]
    launcher = Path("launcher").read_text().strip()  # the launcher ends by itself
    counts.append(sum(state == "Z" and int(parent) == os.getpid() and pid != launcher for pid, state, parent in states))
    if Path("started").exists() and counts[-3:] == [0, 0, 0]:
        Path("gone").touch()
run('''
echo $$ > launcher
for i in $(seq 50); do (true &); done; sleep 1.5; touch started
for i in $(seq 100); do [ -e gone ] && break; sleep 0.1; done
''', tasks=[zombies])
print("LEFT", counts[-3:])
""",
    )
    assert end[0] == 0 and "LEFT [0, 0, 0]" in output


@pytest.mark.parametrize(
    ("progress", "hangs"),
    [
        ("None", True),
        ("TrainingProgress(3, False, 0.0)", True),
        ("TrainingProgress(3, True, 0.0)", False),  # node 0 saves a checkpoint
        ("TrainingProgress(3, False, 9.0)", False),  # node 0 reports rarely
        ("TrainingProgress(int(time.time() * 10), False, 0.0)", False),  # node 0 makes progress
    ],
)
def test_progress_of_other_nodes_counts(tmp_path: Path, progress: str, hangs: bool) -> None:
    script = f'run(STEP + "; sleep 3", peers=lambda: {progress}, iteration=1, start=9)'
    end, output = supervise(tmp_path, script)
    assert (end[0] != 0) == hangs and end[2].startswith("the run hangs") == hangs
    assert ("the stacks of all ranks" in output) == hangs and end[3]


def test_a_node_without_progress_has_the_timeout_of_a_start(tmp_path: Path) -> None:
    end, _ = supervise(tmp_path, 'run("sleep 300", iteration=1, start=2)')
    assert end[2] == "the run hangs: no progress for 0.0333 minutes" and not end[3]


def test_stacks_are_appended_to_the_log_file_of_a_launcher(tmp_path: Path) -> None:
    rank = "import time; print('started', flush=True); time.sleep(300)"
    script = f"exec >> log 2>&1; echo kept; RANK=5 '{sys.executable}' -c \"{rank}\"; sleep 300"
    end, _ = supervise(tmp_path, f"run({script!r}, iteration=1, start=2)")
    assert end[2].startswith("the run hangs")
    log = (tmp_path / "log").read_text()
    assert log.startswith("kept\nstarted\ntokenmill: stacks of RANK=5\nFatal Python error: Aborted\n")


def test_unreadable_records_are_not_a_hang(tmp_path: Path) -> None:
    script = """
def broken(): raise OSError(107, "Transport endpoint is not connected")
run("sleep 3", peers=broken, tasks=[broken], iteration=1, start=1)
"""
    end, output = supervise(tmp_path, script)
    assert end[0] == 0 and output.count("Transport endpoint is not connected; the run continues") == 1


def test_silent_shared_storage_delays_nothing(tmp_path: Path) -> None:
    script = """
import threading
supervisor.KILL_TIMEOUT_SECONDS = 1
def silent():
    if threading.current_thread() is not threading.main_thread():  # the last check runs in the main thread
        threading.Event().wait()
run(STEP + "; sleep 300", tasks=[silent], iteration=1)
"""
    end, output = supervise(tmp_path, script)
    assert end[2].startswith("the run hangs") and "the stacks of all ranks" in output


def test_a_takeover_ends_the_run_at_once(tmp_path: Path) -> None:
    script = """
def lost(): raise Superseded("another start has taken over")
run("exec sleep 300", tasks=[lost])
"""
    end, _ = supervise(tmp_path, script)
    assert end[0] < 0 and end[2] == "another start has taken over"


def test_large_output_is_forwarded(tmp_path: Path) -> None:
    end, output = supervise(tmp_path, 'run("seq 1 30000; printf end")')
    lines = output.splitlines()
    assert end[0] == 0 and lines[:30000] == [str(number) for number in range(1, 30001)]
    assert lines[30000] == "end" and lines[30001].startswith("END ")


def test_slow_output_of_a_launcher_is_forwarded(tmp_path: Path) -> None:
    """The last lines contain the reason of the end; a slow reader of the log must not lose them or cause a hang."""
    end, output = supervise(
        tmp_path,
        """
supervisor.DRAIN_SECONDS = 0.5
class Slow(LogMonitor):
    def read_line(self, text):
        time.sleep(0.1)
        return super().read_line(text)
run("for i in $(seq 30); do printf '%60000s\\n' $i; done; exit 3", monitor=Slow(), rendezvous=1, start=1, iteration=1)
""",
    )
    assert end == [3, False, "", False]
    assert output.split()[:30] == [str(number) for number in range(1, 31)]


def test_a_rank_that_outlives_its_launcher_is_ended(tmp_path: Path) -> None:
    script = 'run("(while sleep 0.1; do echo still here; done) & exit 4")'
    end, output = supervise(tmp_path, "supervisor.DRAIN_SECONDS = 1\n" + script)
    assert end == [4, False, "", False]
    assert "still here" in output


def test_a_launcher_that_closes_its_output_is_waited_for(tmp_path: Path) -> None:
    end, _ = supervise(tmp_path, 'run("exec >&- 2>&-; sleep 2; exit 7")')
    assert end[0] == 7


@pytest.mark.parametrize(
    ("text", "code", "verdict", "reason"),
    [
        ("", None, 143, "the trainer ended with an unknown exit code before its target: iteration 5"),
        (
            "Traceback (most recent call last):\n  step()\nValueError: a bad batch",
            1,
            143,
            "the trainer ended with exit code 1: ValueError: a bad batch; iteration 5",
        ),
        (
            "E1122 06:03:28.134000 19316 api.py:1002] failed (exitcode: -9) local_rank: 0 (pid: 3) of binary: python",
            -9,
            143,
            "the trainer ended with signal 9",
        ),
        (
            "E1122 06:03:28.134000 19316 api.py:1002] failed (exitcode: 3) local_rank: 0 (pid: 3) of binary: python",
            3,
            143,
            "the trainer ended with exit code 3",
        ),
        ("before: usage\ntrain.py: error: unrecognized arguments: --x", 1, 2, "before its first iteration: train.py"),
    ],
)
def test_a_launcher_that_waits_after_its_ranks_is_ended(
    tmp_path: Path, text: str, code: int | None, verdict: int, reason: str
) -> None:
    """torchrun waits for the other nodes' ranks; what its own ranks printed decides, and never an exit code 0."""
    (tmp_path / "launcher.py").write_text(
        f"import subprocess, sys, time\nsubprocess.run(['sleep', '1'])\nprint({text!r}, flush=True)\ntime.sleep(300)\n"
    )
    end, output = supervise(
        tmp_path,
        f"""
from tokenmill.train.runtime.attempts import Attempt
from tokenmill.train.runtime.verdict import decide_verdict
supervisor.BARRIER_TIMEOUT_SECONDS = 1
monitor = LogMonitor()
launcher_exit = run("exec {sys.executable} launcher.py", monitor=monitor)
trained = not {text.startswith("before")}
verdict = decide_verdict(9, launcher_exit, monitor, Attempt("x", 5 * trained, saved=5 * trained), retried=trained)
print("VERDICT", verdict.code, verdict.message)
""",
    )
    assert end[0] == code and "all ranks of this node have ended" in output
    assert f"VERDICT {verdict} " in output and reason in output.partition("VERDICT")[2]
    assert "exit code 0" not in output


def test_a_child_before_the_rendezvous_is_not_a_rank(tmp_path: Path) -> None:
    """torchrun's imports run ldconfig, which ends before the next check; torchrun may then wait for hours."""
    end, output = supervise(
        tmp_path,
        """
supervisor.STARTUP_TASK_SECONDS = supervisor.TASK_SECONDS = supervisor.BARRIER_TIMEOUT_SECONDS = 1
met = []
run("for i in $(seq 40); do sleep 0.1; done; exec sleep 4", rendezvous=0.5, start=0.5, poll=met.append)
print("MET", any(met))
""",
    )
    assert end == [0, False, "", False]
    assert "MET False" in output and "all ranks of this node have ended" not in output


def test_missing_nodes_are_waited_for(tmp_path: Path) -> None:
    """The launcher has no ranks, like torchrun before the rendezvous; that is neither a hang nor an error."""
    end, _ = supervise(
        tmp_path, 'run("exec sleep 2.5", rendezvous=0.5, start=0.5, iteration=0.5, poll=lambda met: False)'
    )
    assert end == [0, False, "", False]


def test_nodes_that_cannot_connect_end_the_run(tmp_path: Path) -> None:
    end, _ = supervise(
        tmp_path,
        """
since = time.monotonic()
run("exec sleep 300", rendezvous=1, poll=lambda met: time.monotonic() > since + 1)
""",
    )
    assert end[2] == (
        "all nodes have started, but their ranks did not connect for 0.0167 minutes (check the network between them)"
    )


@pytest.mark.parametrize(
    "ranks",
    [
        "subprocess.run(['sleep', '3'], start_new_session=True)",
        "print('E1122 06:03:28.134 16 x] failed (exitcode: 3)')",
    ],
)
def test_a_launcher_that_waits_after_short_ranks_is_ended(tmp_path: Path, ranks: str) -> None:
    """The ranks are visible in one poll of this process, or in none."""
    (tmp_path / "launcher.py").write_text(
        f"import subprocess, sys, time\n{ranks}\nsys.stdout.flush()\ntime.sleep(300)\n"
    )
    _, output = supervise(
        tmp_path,
        f"""
supervisor.STARTUP_TASK_SECONDS = supervisor.TASK_SECONDS = 2
supervisor.BARRIER_TIMEOUT_SECONDS = 1
run("exec {sys.executable} launcher.py")
""",
    )
    assert "all ranks of this node have ended" in output
