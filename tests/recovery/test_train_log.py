"""A log that cannot be written, a reader of the log that blocks, a terminal that closes, and a machine that freezes."""

import os
import signal
import time
from collections.abc import Callable

from support.train import Job, assert_stopped_with_a_save, children, last_line, wait_for, wait_for_checkpoint


def test_a_reader_of_the_log_that_has_gone_keeps_the_exit_code(job: Callable[..., Job]) -> None:
    run = job(step=0.1, training__iterations=1000)
    reader, writer = os.pipe()
    node = run.start(log=writer)
    os.close(writer)
    os.close(reader)
    wait_for_checkpoint(run)
    node.terminate()
    assert node.wait(60) == 143
    assert_stopped_with_a_save(run)


def test_a_signal_does_not_wait_for_a_reader_of_the_log_that_blocks(job: Callable[..., Job]) -> None:
    run = job(step=0.001, training__iterations=100_000)
    reader, writer = os.pipe()  # without a reader, the trainer waits, too, after 64 kB and a hundred lines
    node = run.start(log=writer)
    os.close(writer)
    wait_for_checkpoint(run)
    before = (0, 0)
    while (now := run.result()) != before:  # until the trainer waits
        before = now
        time.sleep(3)
    node.terminate()
    assert node.wait(120) == 143
    os.close(reader)
    assert_stopped_with_a_save(run)


def test_nohup_survives_a_terminal_that_closes(job: Callable[..., Job]) -> None:
    run = job(step=0.02)
    run.shell = "trap '' HUP"
    node = run.start()
    wait_for(run, "iteration        7/")
    node.send_signal(signal.SIGHUP)
    assert node.wait(60) == 0, run.log()
    run.assert_exact()


def test_a_machine_that_freezes_longer_than_a_hang_continues(job: Callable[..., Job]) -> None:
    run = job(step=0.1, supervision__hangMinutes=0.15)
    node = run.start()
    wait_for(run, "iteration        7/")
    processes = [node.pid]
    for pid in processes:
        processes += [int(path.parent.name) for path in children(pid)]
    for pid in reversed(processes):
        os.kill(pid, signal.SIGSTOP)
        time.sleep(0.5)  # the supervisor reads all output before it stops, so no line waits for it
    time.sleep(12)  # hangMinutes are 9 s
    for pid in processes:
        os.kill(pid, signal.SIGCONT)
        time.sleep(0.5)  # the supervisor continues before its ranks
    assert node.wait(60) == 0, last_line(run.log())
    run.assert_exact()
