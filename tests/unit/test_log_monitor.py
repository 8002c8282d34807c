"""LogMonitor: the progress of a run and the cause of its end, from real lines of Megatron-LM and torchrun."""

import io
import queue
import re
import time

import pytest

from tokenmill.train.runtime.log_monitor import LogMonitor, TrainingProgress
from tokenmill.train.runtime.output import pump_lines

LINE = (
    " [2026-11-22 04:05:06.123456] iteration      {:3d}/    1000 | consumed samples:         4096 | elapsed time per "
    "iteration (ms): 2000.0 | throughput per GPU (TFLOP/s/GPU): 400.0 | learning rate: 1.000000E-04 | global batch "
    "size:  512 | lm loss: {} | loss scale: 1.0 | grad norm: 1.234 | number of skipped iterations:   0 | number of nan "
    "iterations:   {} |\n"
)
STARTED = "[before the start of training step] datetime: 2026-11-22 04:05:06.123456 \n"
LEFT = 'Traceback (most recent call last):\n  File "t.py", line 14, in <module>\n    dist.all_reduce(x)\n    ~~~~^^^\n'
CLOSED = "RuntimeError: [/__w/gloo/transport/tcp/pair.cc:561] Connection closed by peer [127.0.0.1]:22415. This is\n"
NCCL = (
    "torch.distributed.DistBackendError: NCCL error in: /opt/NCCLUtils.hpp:268, unhandled system error, NCCL 2\n"
    "ncclSystemError: System call (e.g. socket, malloc) or external library call failed or device error.\nLast error:\n"
)
BAR = "\rloading:   0%|          | 0/20 [00:00<?, ?it/s]\rloading:  45%|████▌     | 9/20 [00:01<00:01,  8.52it/s]"
"""A progress bar of tqdm, which has no newline while the loop runs, nor after an exception in the loop."""
ARRAY = LEFT + "AttributeError: _ARRAY_API not found\n"


def report(rank: int, code: int) -> str:
    """Return the report of torchrun 2.15 for two ranks: `rank` fails first, and torchrun stops the other one."""
    return f"""W1122 06:03:28.101000 19316 torch/distributed/elastic/multiprocessing/api.py:1028] Sending process 19325
E1122 06:03:28.134000 19316 torch/distributed/elastic/multiprocessing/api.py:1002] failed (exitcode: {code})
Traceback (most recent call last):
  File "/opt/torch/distributed/launcher/api.py", line 386, in launch_agent
    raise ChildFailedError(
torch.distributed.elastic.multiprocessing.errors.ChildFailedError: \n============================================
/opt/megatron-lm/pretrain_gpt.py FAILED
--------------------------------------------
Failures:
[1]:
  time      : 2026-11-22_06:03:28
  host      : localhost
  rank      : {1 - rank} (local_rank: {1 - rank})
  exitcode  : -15 (pid: 19325)  (SIGTERM)
  traceback : Signal 15 (SIGTERM) received by PID 19325
--------------------------------------------
Root Cause (first observed failure):
[0]:
  time      : 2026-11-22_06:03:28
  host      : localhost
  rank      : {rank} (local_rank: {rank})
  exitcode  : {code} (pid: 19326) \n  error_file: <N/A>
============================================
"""


def prefix_lines(rank: int, text: str) -> str:
    return "".join(f"[rank{rank}]: {line}\n" for line in text.splitlines())


def read(*parts: str) -> LogMonitor:
    monitor = LogMonitor()
    for line in io.StringIO("".join(parts), newline="\n"):
        monitor.read_line(line)
    return monitor


@pytest.mark.parametrize(
    ("output", "cause"),
    [
        (prefix_lines(1, LEFT + NCCL) + report(1, 1), "torch.distributed.DistBackendError: NCCL error in"),
        (prefix_lines(0, LEFT + CLOSED) + report(1, -9), "rank 1 was terminated by signal 9"),
        (report(0, -9), "rank 0 was terminated by signal 9"),
        (report(0, -6), "rank 0 was terminated by signal 6"),
        (
            prefix_lines(0, LEFT + CLOSED) + report(0, 1),
            "RuntimeError: [/__w/gloo/transport/tcp/pair.cc:561] Connection closed",
        ),
        (
            prefix_lines(1, LEFT + "torch.AcceleratorError: CUDA error: uncorrectable ECC error encountered")
            + report(1, 1),
            "CUDA",
        ),
        (
            prefix_lines(1, LEFT + "RuntimeError: CUDA error: unspecified launch failure")
            + prefix_lines(0, LEFT + CLOSED),
            "CUDA error",
        ),
        (
            prefix_lines(1, LEFT + "OSError: [Errno 5] Input/output error: '/data/x.bin'") + report(1, 1),
            "Input/output error",
        ),
        (ARRAY + prefix_lines(0, LEFT + CLOSED) + report(0, 1), "Connection closed by peer"),
        (BAR + prefix_lines(0, LEFT + CLOSED) + report(0, 1), "Connection closed by peer"),
        (BAR + LEFT + CLOSED + BAR + report(0, 1), "Connection closed by peer"),
        (
            LEFT + "torch.distributed.DistNetworkError: The server socket has failed to listen on any local network "
            "address. port: 29500, useIpv6: false, code: -98, name: EADDRINUSE, message: address already in use\n",
            "EADDRINUSE",
        ),
        (
            LEFT + "torch.distributed.DistStoreError: Timed out after 901 seconds waiting for clients. 1/64 joined.\n",
            "Timed out after 901 seconds waiting for clients",
        ),
        (LEFT + "torch.distributed.DistNetworkError: ... cannot be retrieved (gai error: -2 - Name or service", "gai"),
        (
            prefix_lines(3, LEFT + "RuntimeError: DataLoader worker (pid 77) is killed by signal: Killed. ")
            + report(3, 1),
            "DataLoader worker",
        ),
    ],
)
def test_transient_causes(output: str, cause: str) -> None:
    monitor = read(output)
    assert cause in monitor.cause and monitor.is_transient and not monitor.is_permanent


@pytest.mark.parametrize(
    ("output", "cause", "lasting"),
    [
        (
            "usage: pretrain_gpt.py [-h]\npretrain_gpt.py: error: unrecognized arguments: --foo\n" + report(0, 2),
            "pretrain_gpt.py: error: unrecognized arguments: --foo",
            True,
        ),
        (
            "/usr/bin/python3: can't open file '/opt/x.py': [Errno 2] No such file or directory\n" + report(0, 2),
            "can't open file '/opt/x.py'",
            True,
        ),
        (LEFT + "ModuleNotFoundError: No module named 'megatron'\n" + report(0, 1), "No module named 'megatron'", True),
        (
            prefix_lines(1, LEFT + "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB.")
            + prefix_lines(0, LEFT + CLOSED)
            + report(1, 1),
            "torch.OutOfMemoryError: CUDA out of memory",
            True,
        ),
        # torch aborts if the interpreter destroys a process group at its end.
        (
            prefix_lines(1, LEFT + "torch.OutOfMemoryError: CUDA out of memory.")
            + "terminate called without an active exception\nFatal Python error: Aborted\n"
            + report(1, -6),
            "CUDA out of memory",
            True,
        ),
        (
            prefix_lines(1, LEFT + "AssertionError") + prefix_lines(0, LEFT + CLOSED) + report(1, 1),
            "AssertionError: dist.all_reduce(x)",
            False,
        ),
        # torchrun reports the rank that lost its peer as the first failure.
        (
            prefix_lines(1, LEFT + "ValueError: wrong") + prefix_lines(0, LEFT + CLOSED) + report(0, 1),
            "ValueError: wrong",
            False,
        ),
        (prefix_lines(0, LEFT + "RuntimeError: CUDA error: device-side assert triggered"), "device-side assert", False),
        (prefix_lines(0, LEFT + "RuntimeError: CUDA error: no kernel image is available"), "no kernel image", True),
        (LEFT + "TypeError: got an unexpected keyword argument 'timeout'\n" + report(0, 1), "'timeout'", False),
        # Two ranks fail at once with mixed lines, and a third rank prints a warning.
        ((LEFT + "ValueError: wrong\n").replace("\n", "\nWARNING: unlike others\n"), "ValueError: wrong", False),
        (LEFT + "torch._dynamo.exc.Unsupported: call_function\n", "torch._dynamo.exc.Unsupported", False),
        (
            "ERROR: Failed to compile the C++ helper functions\n" + report(0, 1),
            "rank 0 ended with exit code 1 without a traceback; the last line of the output: ERROR: Failed to compile",
            False,
        ),
        (
            LINE.format(7, "1.0", 0) + report(1, 3),
            "rank 1 ended with exit code 3 without a traceback",
            False,
        ),
        # The first rank that failed printed nothing, and the others lost their connections to it.
        (prefix_lines(0, LEFT + CLOSED) + report(1, 1), "rank 1 ended with exit code 1 without a traceback", False),
        (LEFT + CLOSED + report(1, 3), "rank 1 ended with exit code 3 without a traceback", False),
        # Both failed within a second, which torchrun sorts by rank.
        (
            prefix_lines(0, LEFT + CLOSED) + report(0, 1).replace("-15 (pid: 19325)", "3 (pid: 19325)"),
            "rank 1 ended with exit code 3 without a traceback",
            False,
        ),
        (BAR + prefix_lines(1, LEFT + "ValueError: wrong") + report(1, 1), "ValueError: wrong", False),
        # Megatron-LM saves after NaN, and ends without a traceback.
        (
            "ERROR:megatron.core.rerun_state_machine:Unexpected result nan on rank 1 at iteration #3 invocation #1 "
            "(message='found NaN in local forward loss calculation')\nINFO:megatron.core.timers:(min, max) time\n"
            "    save-checkpoint ................................: (239.98, 240.57)\n" + report(1, 16),
            "Unexpected result nan on rank 1 at iteration #3 invocation #1 (message='found NaN in local forward loss",
            False,
        ),
        (
            "ERROR:megatron.core.rerun_state_machine:Got rescheduled on the same GPU. Need to resume again (node: a)\n"
            "WARNING:megatron.core.rerun_state_machine:Exiting now. Please resume the job\n" + report(1, 16),
            "Got rescheduled on the same GPU. Need to resume again (node: a)",
            False,
        ),
    ],
)
def test_lasting_causes(output: str, cause: str, lasting: bool) -> None:
    monitor = read(output)
    assert cause in monitor.cause and not monitor.is_transient and monitor.is_permanent == lasting


NAN = (
    "ERROR:megatron.core.rerun_state_machine:Unexpected result nan on rank 1 at iteration #8 invocation #1 "
    "(message='found NaN in local forward loss calculation')\n"
)
SAVING = "  [2026-11-22 04:05:06] saving checkpoint at iteration       7 to /c in torch_dist format\n"


@pytest.mark.parametrize(
    ("output", "expected"),
    [
        (LINE.format(7, "1.0", 0) + NAN + SAVING + report(1, 16), True),
        (LINE.format(7, "1.0", 0) + SAVING + report(0, 16), True),  # another node printed the cause
        (LINE.format(7, "1.0", 0) + SAVING + report(0, 17), True),
        (SAVING + LINE.format(8, "1.0", 0) + NAN + report(1, 1), False),  # without a save after the NaN
        (NAN + SAVING + LINE.format(8, "1.0", 0) + SAVING + report(1, -9), False),
        (LINE.format(7, "1.0", 0) + SAVING + prefix_lines(1, LEFT + "ValueError: wrong") + report(1, 1), False),
    ],
)
def test_a_save_before_nan(output: str, expected: bool) -> None:
    monitor = read(output)
    assert monitor.saved_before_nan == expected
    assert re.search("because of NaN|Unexpected result nan", monitor.cause) or not expected


@pytest.mark.parametrize(
    ("output", "hint"),
    [
        (
            prefix_lines(1, LEFT + "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate"),
            "training.microBatch",
        ),
        (prefix_lines(0, LEFT + "RuntimeError: HIP out of memory. Tried to allocate 2.00 GiB"), "training.microBatch"),
        (prefix_lines(0, LEFT + "RuntimeError: CUDA error: out of memory"), "training.microBatch"),
        (report(0, -9), "memory limit of the pods"),
        (LEFT + "OSError: [Errno 12] Cannot allocate memory\n", "memory limit of the pods"),
        (
            LEFT
            + "RuntimeError: [enforce fail at alloc_cpu.cpp:117] DefaultCPUAllocator: can't allocate memory: you\n",
            "memory limit of the pods",
        ),
        (
            prefix_lines(3, LEFT + "RuntimeError: DataLoader worker (pid 77) is killed by signal: Bus error. "),
            "/dev/shm",
        ),
        (report(0, -11), ""),
        (prefix_lines(0, LEFT + "RuntimeError: CUDA error: an illegal memory access was encountered"), ""),
        (prefix_lines(0, LEFT + "ValueError: the memory of the past"), ""),
        (LEFT + CLOSED, ""),
    ],
)
def test_a_lack_of_memory_has_a_hint(output: str, hint: str) -> None:
    text = read(output).hint
    assert hint in text and bool(text) == bool(hint)


@pytest.mark.parametrize(
    "healthy",
    [
        "/opt/torch/x.py:10: UserWarning: ... Error in reading, falling back\n  warnings.warn(\n",
        "node0:12:34 [0] NCCL WARN Call to ibv_query_device failed\n",
        "[W1122 06:03:40 socket.cpp:764] [c10d] The IPv6 addresses of (x) cannot be retrieved (gai error: -2)\n",
        "Exception ignored in: <function _releaseLock at 0x1>\n" + LEFT + "KeyboardInterrupt: \n",
        "nvcc: error: something in a build log\n",
        ARRAY,
        prefix_lines(0, LEFT + "ImportError: cannot import name 'x'; falling back"),
    ],
)
def test_output_of_healthy_runs_is_ignored(healthy: str) -> None:
    reason = prefix_lines(1, LEFT + "ValueError: wrong")
    assert "ValueError: wrong" in read(healthy, reason, report(1, 1)).cause
    assert read(healthy, STARTED, LEFT + CLOSED).is_transient
    assert read(healthy, LINE.format(1, "1.0E+01", 0), LEFT + CLOSED).is_transient


@pytest.mark.parametrize("progress", [STARTED, LINE.format(7, "1.0", 0)])
@pytest.mark.parametrize("failure", [prefix_lines(1, LEFT + "ValueError: wrong"), LEFT + "ValueError: wrong\n"])
def test_a_failure_before_the_last_line_of_another_rank_is_the_cause(failure: str, progress: str) -> None:
    assert "ValueError: wrong" in read(failure, progress, report(1, 1)).cause
    assert "without a traceback" in read(failure, progress, LINE.format(8, "1.0", 0), report(1, 1)).cause
    assert "without a traceback" in read(failure, progress, report(1, 3)).cause


@pytest.mark.parametrize("has_ranks", [True, False])
@pytest.mark.parametrize("progress", [STARTED, LINE.format(7, "1.0", 0)])
def test_the_peer_that_torchrun_names_first_hides_no_earlier_failure_of_another_rank(
    progress: str, has_ranks: bool
) -> None:
    def by(rank: int, text: str) -> str:
        return prefix_lines(rank, text) if has_ranks else f"{text}\n"

    lost = by(1, LEFT + "RuntimeError: CUDA error: an illegal memory access was encountered")
    both = report(0, 1).replace("-15 (pid", "1 (pid")  # in the same second, which torchrun sorts by rank
    monitor = read(lost, progress, by(0, LEFT + CLOSED), both)
    assert "an illegal memory access" in monitor.cause and monitor.is_transient
    survived = LEFT + "ImportError: cannot import name 'x'; falling back\n"
    assert read(survived, progress, by(0, LEFT + CLOSED), both).is_transient


@pytest.mark.parametrize("progress", [STARTED, SAVING, LINE.format(7, "1.0", 0)])
def test_a_line_before_the_last_progress_is_no_cause(progress: str) -> None:
    warning = "WARNING: could not find the metadata file /c/latest_checkpointed_iteration.txt\n"
    assert read(warning, progress).cause == ""
    assert read(warning, progress, report(0, 3)).cause == "rank 0 ended with exit code 3 without a traceback"


def test_the_progress_is_summarized_at_intervals_and_at_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 0.0
    monkeypatch.setattr("tokenmill.train.runtime.log_monitor.time.monotonic", lambda: now)
    monitor = LogMonitor(tokens_per_iteration=2_000_000, target=200)
    lines = []
    for iteration in range(1, 201):
        now += 1.0
        lines += monitor.read_line(LINE.format(iteration, "1.100000E+01", 0))[1]
    assert [line.partition(":")[0] for line in lines] == [
        f"iteration {number} of 200" for number in (1, 31, 61, 91, 121, 151, 181, 200)
    ]
    assert lines[1].endswith("about 5 min 38 s left") and "left" not in lines[-1]


def test_progress() -> None:
    monitor = LogMonitor(tokens_per_iteration=2_000_000, peak_tflops=1000, iterations_between_reports=20)
    assert monitor.progress == TrainingProgress(None, saving=False, report_interval_seconds=0)
    assert monitor.read_line(STARTED) == (True, []) and monitor.training_started
    alive, messages = monitor.read_line(LINE.format(7, "1.100000E+01", 0))
    assert alive and messages == ["iteration 7: loss 11, 1,000,000 tokens/s, 40.0% of the GPUs' peak (MFU)"]
    assert monitor.progress == TrainingProgress(7, saving=False, report_interval_seconds=40)
    assert monitor.read_line("  saving checkpoint at iteration       7 to /c in torch_dist format\n")[0]
    assert monitor.progress.saving
    monitor.read_line(LINE.format(8, "1.100000E+01", 0))  # an asynchronous save
    assert not monitor.progress.saving
    assert "3 iterations had NaN values" in monitor.read_line(LINE.format(9, "nan", 3))[1][0]
    for iteration in range(10, 30):
        assert monitor.read_line(LINE.format(iteration, "2.0E+00", 0))[1] == []
    assert "the loss 10 is far from" in monitor.read_line(LINE.format(30, "1.0E+01", 0))[1][0]


@pytest.mark.parametrize(("iteration", "silent"), [(89, False), (90, False), (91, True), (100, True), (101, False)])
def test_the_output_is_silent_during_an_evaluation(iteration: int, silent: bool) -> None:
    monitor = LogMonitor(log_interval=10, evaluation_interval=100, target=1000)
    monitor.read_line(LINE.format(iteration, "1.0", 0))
    assert monitor.progress.saving == silent
    monitor.read_line(LINE.format(991, "1.0", 0))  # the run evaluates at its end
    assert monitor.progress.saving


def test_updates_of_a_progress_bar_are_one_line() -> None:
    """Reading each update took a second of CPU for a megabyte."""
    updates = b"".join(b"\rloading: %d%%|####" % percent for percent in range(50_000))
    output = b"before\r\n" + updates + b"Traceback (most recent call last):\r\n  step()\nValueError: wrong\r"
    batches: queue.Queue[list[bytes] | None] = queue.Queue()
    pump_lines(io.BytesIO(output), batches)
    lines = [line for batch in iter(batches.get, None) for line in batch]
    assert b"".join(lines) == output + b"\n" and len(lines) < 100
    assert read(*(line.decode() for line in lines)).cause == "ValueError: wrong"


def test_a_gradient_that_is_not_a_number_is_reported() -> None:
    line = LINE.format(7, "1.0E+01", 0).replace("lm loss: 1.0E+01 | ", "").replace("norm: 1.234", "norm: nan")
    assert any("warning: the norm of the gradient is nan" in message for message in LogMonitor().read_line(line)[1])


@pytest.mark.parametrize("loss", ["", "|", "1.2.3", "-", "1e", "٣"])
def test_invalid_number_is_ignored(loss: str) -> None:
    line = LINE.format(7, loss, 0).replace("2000.0", loss).replace("400.0", loss)
    assert LogMonitor().read_line(line)[0]


def test_run_that_does_not_resume_is_aborted() -> None:
    fresh = "    will not load any checkpoints and will start from random\n"
    monitor = LogMonitor(resume_iteration=100)
    monitor.read_line(fresh)
    assert "did not load the checkpoint of iteration 100" in monitor.abort_reason
    assert not read(fresh).abort_reason
    monitor = LogMonitor(resume_iteration=100)
    monitor.read_line(LINE.format(100, "1.0", 0))
    assert "at iteration 100, but must continue after iteration 100" in monitor.abort_reason


@pytest.mark.parametrize(
    "text",
    [
        "a document with iteration 10/ 100 | in it\n",
        " iteration       10/     100 |\n",
        "a document about a log that will not load any checkpoints and will start from random\n",
        "text: [before the start of training step] datetime: and saving checkpoint at iteration 7\n",
    ],
)
def test_text_of_the_data_is_no_line_of_megatron_lm(text: str) -> None:
    monitor = LogMonitor(resume_iteration=100)
    assert monitor.read_line(text) == (False, [])
    assert not monitor.abort_reason and not monitor.saving and not monitor.training_started


def test_old_lines_do_not_matter_after_the_first_iteration() -> None:
    """A trainer that has continued after its checkpoint has loaded it, whatever it prints later."""
    monitor = LogMonitor(resume_iteration=100)
    assert monitor.read_line(LINE.format(101, "1.0", 0))[0]
    assert monitor.read_line(LINE.format(7, "1.0", 0)) == (False, [])
    monitor.read_line("    will not load any checkpoints and will start from random\n")
    assert not monitor.abort_reason and monitor.iteration == 101


def test_lines_after_an_unfinished_progress_bar_count() -> None:
    monitor = LogMonitor(resume_iteration=6)
    bar = BAR.rpartition("\r")[2]
    assert monitor.read_line(f"{bar}{LINE.format(7, '1.0', 0)}")[0] and monitor.iteration == 7
    assert monitor.read_line(f"{bar}  saving checkpoint at iteration       7 to /c in torch_dist format\n")[0]
    assert monitor.saving


OTHER = ("    will not load any checkpoints\n", "WARNING: no file x\n    will not load any checkpoints\n")
"""The texts of another rank, also of two lines, that began with no space."""


@pytest.mark.parametrize("rank", [None, 1])
@pytest.mark.parametrize("other", OTHER)
@pytest.mark.parametrize(
    ("message", "transient"), [(": wrong", False), (": Connection closed by peer", True), ("", True)]
)
def test_text_of_another_rank_after_the_name_of_an_exception(
    rank: int | None, other: str, message: str, transient: bool
) -> None:
    """Python writes the name and the message of an exception one after the other."""
    lost = [LEFT + f"RuntimeError{other}", f"{message}\n", LEFT + CLOSED]
    texts = lost if rank is None else [prefix_lines(rank, text) for text in lost[:2]] + [lost[2]]
    monitor = read(*texts)
    assert monitor.is_transient is transient
    assert ("RuntimeError: wrong" in monitor.cause) is not transient


def test_verbose_ranks_are_read_fast_enough() -> None:
    monitor = LogMonitor()
    line = (
        "[rank7]: 2026-11-22 04:05:06 DEBUG some.module: a message of the usual length about nothing at all, really\n"
    )
    start = time.process_time()
    for _ in range(50_000):
        monitor.read_line(line)
    for text in ("a" * 10_000_000, "Rendezvous" * 1_000_000, "x.y." * 2_000_000, " iteration " * 1_000_000):
        monitor.read_line(text)
    assert time.process_time() - start < 4
