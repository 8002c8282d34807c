"""LogMonitor: the progress of a run and the cause of its end, from real lines of Megatron-LM and torchrun."""

import time

import pytest

from tokenmill.training.runtime.log_monitor import LogMonitor, TrainingProgress

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
    for line in "".join(parts).splitlines(keepends=True):
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
        ("ERROR: Failed to compile the C++ helper functions\n" + report(0, 1), "ERROR: Failed to compile", False),
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


def test_progress() -> None:
    monitor = LogMonitor(tokens_per_iteration=2_000_000, peak_tflops=1000, iterations_between_reports=20)
    assert monitor.progress == TrainingProgress(None, saving=False, report_interval_seconds=0)
    assert monitor.read_line(STARTED) == (True, []) and monitor.training_started
    alive, messages = monitor.read_line(LINE.format(7, "1.100000E+01", 0))
    assert alive and messages == ["iteration 7: 1,000,000 tokens/s, 40.0% of the GPUs' peak (MFU)"]
    assert monitor.progress == TrainingProgress(7, saving=False, report_interval_seconds=40)
    assert monitor.read_line("  saving checkpoint at iteration       7 to /c in torch_dist format\n")[0]
    assert monitor.progress.saving
    monitor.read_line(LINE.format(8, "1.100000E+01", 0))  # an asynchronous save
    assert not monitor.progress.saving
    assert "3 iterations had NaN values" in monitor.read_line(LINE.format(9, "nan", 3))[1][1]
    for iteration in range(10, 30):
        assert len(monitor.read_line(LINE.format(iteration, "2.0E+00", 0))[1]) == 1
    assert "the loss 10 is far from" in monitor.read_line(LINE.format(30, "1.0E+01", 0))[1][1]


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
    monitor.read_line(LINE.format(101, "1.0", 0))
    assert not monitor.abort_reason
    monitor.read_line(LINE.format(100, "1.0", 0))
    assert "at iteration 100, but must continue after iteration 100" in monitor.abort_reason


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
