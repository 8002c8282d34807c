"""`tokenmill train`: checked before, supervised, judged after, so that exit 0 means the target iteration is saved.

Exit codes are a contract with the engines: 2 for what no retry can help, 143 for an attempt to be repeated
(PyTorchJob's ExitCode policy repeats from 128 on), 0 for a run whose last checkpoint is the one asked for.
Node 0 alone repairs checkpoints and judges; the others wait for what it says.
"""

import contextlib
import shlex
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from signal import SIGTERM
from socket import gethostname

from tokenmill.errors import RequestError, Stopped, TokenmillError
from tokenmill.files.codec import content_id
from tokenmill.files.explain import explained
from tokenmill.files.mounts import settle_seconds
from tokenmill.training.checkpoints import repair as checkpoints
from tokenmill.training.checkpoints.identity import settle
from tokenmill.training.data.index import build_index, sweep
from tokenmill.training.data.resolve import resolve
from tokenmill.training.preflight import cannot_start
from tokenmill.training.runtime.attempts import Attempt, RunRecords
from tokenmill.training.runtime.lease import CheckpointLease, CurrentRun, run_name
from tokenmill.training.runtime.log_monitor import LogMonitor
from tokenmill.training.runtime.node import inherited
from tokenmill.training.runtime.output import say
from tokenmill.training.runtime.peers import PeerStatus
from tokenmill.training.runtime.prepare import TrainingRun, prepare
from tokenmill.training.runtime.rendezvous import Rendezvous
from tokenmill.training.runtime.supervisor import HangTimeouts, LauncherExit, Signals, Supervisor
from tokenmill.training.runtime.verdict import after, ending, judge
from tokenmill.training.settings import Settings, read

VERDICT_PATIENCE = 150.0
"""Seconds that node 0's word may take to be seen: blobfuse caches a directory for up to 120."""
LEAVING = 5.0
"""Seconds for other nodes to end with node 0: what then still runs the operator removes, and its log with it."""


class RetryRun(Stopped):
    """The attempt has not reached the target, and another one may: exit 143."""


def index(path: Path) -> None:
    """Build the sample index of a settings file's run.

    Raises:
        RequestError: the data or the settings are wrong.
    """
    settings = read(path)
    say(build_index(settings, resolve(settings), python=settings.trainer.python))


def train(path: Path) -> None:
    """Run a settings file's training on this node to its end.

    Raises:
        RequestError: it cannot start, or cannot go on.
        RetryRun: it has not reached its target, and another start may.
    """
    with Signals() as signals, _retried(signals), tempfile.TemporaryDirectory(prefix="tokenmill-train-") as scratch:
        run = prepare(path, scratch=Path(scratch))
        for line in run.said:
            say(line)
        if run.sick and not run.reached():
            raise RequestError(cannot_start(run.sick))
        with explained(run.checkpoints):
            _lead(run, signals) if run.node.judges else _follow(run, signals)


@contextlib.contextmanager
def _retried(signals: Signals) -> Iterator[None]:
    """Ask for another start after what may pass; engines take an exit code below 128 for the end of the run."""
    try:
        yield
    except TokenmillError as problem:
        if problem.exit_code in (RequestError.exit_code, RetryRun.exit_code):
            raise
        raise RetryRun(str(problem)) from problem
    except OSError as problem:
        raise RetryRun(f"{problem}; the next start goes on from the last checkpoint") from problem
    except Exception as problem:
        if signals.ending:
            raise
        traceback.print_exc()
        raise RetryRun(
            f"a mistake of tokenmill ({problem!r}), after the trainer had run; it is tried again"
        ) from problem


def _lead(run: TrainingRun, signals: Signals) -> None:
    """Be node 0: hold the checkpoints, repair, record, supervise, judge, prune."""
    records = RunRecords(run.checkpoints)
    lease = CheckpointLease(records.directory, run_name(), run.settings.release)
    lease.take(say)
    try:
        code, words = _attempt(run, records, lease, signals)
    finally:
        with contextlib.suppress(OSError, TokenmillError):  # what somebody put in its place changes no end
            lease.release()
    _end(code, words)
    if run.node.nodes > 1:
        signals.ending = False  # it is done, whatever comes
        time.sleep(LEAVING)


def _attempt(run: TrainingRun, records: RunRecords, lease: CheckpointLease, signals: Signals) -> tuple[int, str]:
    settings = run.settings
    start = checkpoints.prepare(run.checkpoints, say=say)
    for line in start.done:
        say(line)
    allow_change = settings.dataset.allow_change
    for line in settle(records.directory, start.iteration, run.identity, allow_change=allow_change):
        say(line)
    for path in sweep(run.cache, shared=settings.dataset.cache_path is not None):
        say(f"removed {path}: cut short, and Megatron-LM would fail on it at every start")
    if start.iteration >= run.target:
        return 0, f"done: the checkpoint of iteration {start.iteration:,} is there, the target is {run.target:,}"
    attempt = Attempt(content_id(_contract(settings)), start.iteration)
    signals.ending = False  # what is begun is to be ended, too
    retried = records.begin(attempt, settings.supervision.attempts_without_progress)
    if run.sick:
        return _over(records, attempt, 143, cannot_start(run.sick))
    lease.beat()
    say(f"starting at iteration {start.iteration:,} of {run.target:,}: {shlex.join(run.command[:8])} ...")
    watch, others = _watch(settings, start.iteration), PeerStatus(records, run.node)

    chores = (
        lambda: lease.beat(stopping=bool(signals.asked)),
        lambda: others.tell(watch.signs),
        lambda: _note(run, records, attempt, watch),
    )
    end = _supervised(run, watch, others, chores, signals)
    attempt.saved, attempt.stopped = max(attempt.saved or start.iteration, run.reached()), end.stopped
    attempt.iterated = attempt.iterated or watch.started or end.iterated
    return _over(records, attempt, *judge(run.target, end, watch, attempt, retried=retried))


def _note(run: TrainingRun, records: RunRecords, attempt: Attempt, watch: LogMonitor) -> None:
    """Record how far an attempt came, and delete old checkpoints after a new one."""
    reached = run.reached()
    if reached > (attempt.saved or attempt.began_at) or watch.started > attempt.iterated:
        attempt.saved, attempt.iterated = reached, attempt.iterated or watch.started
        records.update(attempt)
        for line in checkpoints.prune(run.checkpoints, run.settings.checkpoint.keep):
            say(line)


def _over(records: RunRecords, attempt: Attempt, code: int, words: str) -> tuple[int, str]:
    """Record how an attempt ended; where that cannot be written it has ended so all the same."""
    attempt.ended = words
    try:
        records.update(attempt)
        records.say(attempt, code, attempt.saved or attempt.began_at)
    except (OSError, TokenmillError) as problem:
        say(f"warning: how this start ended is not recorded: {problem}")
    return code, words


def _follow(run: TrainingRun, signals: Signals) -> None:
    """Be another node: supervise, then end as node 0 says."""
    records = RunRecords(run.checkpoints)
    if _done(run):
        return _end(0, f"done: the checkpoint of iteration {run.reached():,} is there, the target is {run.target:,}")
    if run.sick:
        with contextlib.suppress(OSError):  # node 0 is to count this, not to wait for a machine
            records.write_failure(run.node.rank, gethostname(), "; ".join(run.sick))
            records.write_arrival(run.node.rank, run_name(), time.time(), 1)
        _end(143, cannot_start(run.sick))
    before = records.verdict()
    watch, others = _watch(run.settings, 0), PeerStatus(records, run.node)
    end = _supervised(run, watch, others, (lambda: others.tell(watch.signs),), signals)
    if end.code == 0 and run.reached() >= run.target:
        return _end(0, f"done: iteration {run.target:,} is saved")
    if end.code != 0 and not end.stopped and _done(run):  # torchrun may fail where node 0's was the first to leave
        return _end(0, f"done: iteration {run.target:,} is saved{after(end)}")
    if end.stopped:
        _end(143, "stopped by a signal; the next start goes on from the last checkpoint")
    if end.code != 0:
        cause = end.ended or watch.cause or ending(end)
        with contextlib.suppress(OSError):
            records.write_failure(run.node.rank, gethostname(), cause)
        _end(143, f"the trainer ended with {ending(end)} on this node: {cause}; node 0 judges")
    deadline = time.monotonic() + VERDICT_PATIENCE
    while time.monotonic() < deadline and not signals.asked:
        verdict = records.verdict()
        if run.reached() >= run.target or (verdict and verdict.code == 0 and verdict.iteration >= run.target):
            return _end(0, f"done: iteration {run.target:,} is saved")
        if verdict and verdict != before:
            _end(143, f"node 0 says that the run goes on from iteration {verdict.iteration:,}")
        if records.arrived_after(0, end.met):  # so that a verdict on the start here will never come
            _end(143, "node 0 was lost and has started anew; this node joins it")
        time.sleep(0.5)
    _end(143, f"the trainer ended with 0, and iteration {run.target:,} is not saved as far as this node can see")


def _done(run: TrainingRun) -> bool:
    """Tell whether node 0 will find the run done, by what it goes by itself.

    A node that ends with 0 does not come back, so a tracker that names what is not whole, or that is an old state
    out of a cache, must not end it.
    """
    for seconds in (0.0, settle_seconds(run.checkpoints)):
        time.sleep(seconds)
        last = checkpoints.look(run.checkpoints) if run.reached() >= run.target else None
        if last is None or not last.complete:
            return False
    return True


def _supervised(
    run: TrainingRun, watch: LogMonitor, others: PeerStatus, chores: Sequence[Callable[[], object]], signals: Signals
) -> LauncherExit:
    settings = run.settings
    supervision = settings.supervision
    meeting = supervision.distributed_timeout_minutes if run.node.nodes > 1 else supervision.start_minutes
    patience = HangTimeouts(meeting * 60, supervision.start_minutes * 60, supervision.hang_minutes * 60)
    environment = inherited()
    if (settings.parallelism.tensor_model_parallel_size or 1) * settings.parallelism.context_parallel_size > 1:
        environment.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "1")  # which Megatron-LM asserts before Blackwell
    gathering = Rendezvous(others.records, run.node, run_name(), say)

    def stop(reason: str) -> None:
        say(reason)
        signals.asked.append(SIGTERM)

    current = CurrentRun(stop)
    supervisor = Supervisor(watch, patience, others.signs, [*chores, current.compare], signals, gathering.look)
    return supervisor.run(run.command, environment)


def _watch(settings: Settings, resumes: int) -> LogMonitor:
    training = settings.training
    return LogMonitor(
        tokens_per_iteration=(training.global_batch_size or 0) * settings.model.seq_length,
        peak_tflops=settings.gpu.peak_tflops,
        quiet_iterations=(training.log_interval or 1) + training.eval_iterations,
        resumes=resumes,
    )


def _contract(settings: Settings) -> dict[str, object]:
    """Return what makes an attempt another one: all that is in the file."""
    import msgspec

    contract: dict[str, object] = msgspec.to_builtins(settings)
    return contract


def _end(code: int, words: str) -> None:
    """End with a code and its reason; the last line is what Kubernetes shows as the pod's termination message."""
    if code == 0:
        return say(words)
    raise RequestError(words) if code == RequestError.exit_code else RetryRun(words)
