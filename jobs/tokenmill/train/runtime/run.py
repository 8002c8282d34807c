"""`tokenmill train`: check, start and supervise one attempt of a run, and decide its verdict.

The exit codes are a contract with the engines. 0: the last checkpoint is that of the target iteration. 2: a retry
cannot help. 143: the attempt must be repeated; PyTorchJob's policy ExitCode repeats from 128 on. Node 0 alone repairs
checkpoints and decides the verdict; the other nodes wait for the verdict.
"""

import contextlib
import shlex
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from signal import SIGINT, SIGTERM
from socket import gethostname

from tokenmill.checkpoints import repair as checkpoints
from tokenmill.checkpoints.model_record import write_model_record
from tokenmill.core.files.codec import content_id
from tokenmill.core.files.explain import explain_os_errors, is_full
from tokenmill.core.files.mounts import directory_cache_seconds
from tokenmill.engine.exporter import MetricsExporter, MetricsTarget
from tokenmill.engine.notify.announcer import Announcer, NotifyTarget
from tokenmill.errors import MachineError, RequestError, Stopped, Superseded, TokenmillError
from tokenmill.train.data.bucket_copies import check_own_reader, copy_pairs, explain_full_scratch
from tokenmill.train.data.index import build_index, forget_index, remove_truncated_files
from tokenmill.train.data.phases import DIRECTORY
from tokenmill.train.identity import check_identity
from tokenmill.train.preflight import describe_problems
from tokenmill.train.runtime.announce import RunEnd
from tokenmill.train.runtime.attempts import Attempt, RunRecords
from tokenmill.train.runtime.flight_recorder import configure_flight_recorder
from tokenmill.train.runtime.hang_record import HangRecord
from tokenmill.train.runtime.lease import CheckpointLease, ReleaseWatcher, get_run_name, read_other_run
from tokenmill.train.runtime.log_monitor import LogMonitor
from tokenmill.train.runtime.metrics import JOB, TrainingCollector
from tokenmill.train.runtime.node import build_launcher_environment, read_rank
from tokenmill.train.runtime.output import log, write, writing_in_background
from tokenmill.train.runtime.peers import PeerStatus
from tokenmill.train.runtime.prepare import (
    TrainingRun,
    find_index_cache,
    list_packed,
    list_starts,
    prepare,
    prepare_data,
)
from tokenmill.train.runtime.rendezvous import Rendezvous
from tokenmill.train.runtime.supervisor import HangTimeouts, LauncherExit, Signals, Supervisor
from tokenmill.train.runtime.uploads import FollowerUploads, LeaderUploads, Uploads
from tokenmill.train.runtime.verdict import (
    AttemptVerdict,
    decide_verdict,
    describe_cause,
    describe_exit,
    describe_late_failure,
)
from tokenmill.train.settings import MEGATRON_LM, Settings, read_settings

VERDICT_TIMEOUT_SECONDS = 150.0
"""Seconds to wait for node 0's verdict: blobfuse caches a directory for up to 120 s."""
RELEASE_TIMEOUT_SECONDS = 180.0
"""Seconds to wait until the release names this run: a node may use an outdated ConfigMap for more than two minutes."""
LINGER_SECONDS = 5.0
"""Seconds for other nodes to end together with node 0: after that the operator removes them, and their logs."""


class RetryRun(Stopped):
    """The attempt has not reached the target, and another attempt may: exit code 143."""


def build_sample_index(path: Path) -> None:
    """Build the sample index of a settings file's run.

    Raises:
        RequestError: the data or the settings are wrong.
    """
    settings = read_settings(path)
    if settings.sft:
        raise RequestError(
            "a fine-tuning run (sft) has no sample index: Megatron-LM reads its rows in their order; remove "
            "--build-index"
        )
    if settings.trainer.framework != MEGATRON_LM:
        raise RequestError(
            f"a run of trainer.framework {settings.trainer.framework} needs no sample index; remove --build-index"
        )
    if settings.checkpoint.is_in_bucket and settings.dataset.cache_path is None:
        raise RequestError(
            f"checkpoint.path is {settings.checkpoint.path}, and each node builds its own sample index on its disk; "
            "remove --build-index, or set dataset.cachePath to a directory that all nodes share"
        )
    settings, phases, data = prepare_data(settings, settings.checkpoint.node_directory / DIRECTORY)
    if check_own_reader(settings, data.pairs):
        raise RequestError(
            "Megatron-LM reads the buckets itself (--object-storage-cache-path); remove --build-index, or the argument"
        )
    copy_pairs(data.pairs, log)
    with tempfile.TemporaryDirectory(prefix="tokenmill-index-") as scratch:
        starts = list_starts(settings, data, phases, Path(scratch))
        cache, trainer = find_index_cache(data, settings), settings.trainer
        packed = list_packed(data)
        log(build_index(starts, cache, script=trainer.script, python=trainer.python, packed=packed))


def train(path: Path, target: MetricsTarget, notify: NotifyTarget) -> None:
    """Run the training of a settings file on this node to its end, with metrics and announcements for their targets.

    Raises:
        RequestError: the run cannot start or cannot continue.
        RetryRun: the run has not reached its target, and another attempt may.
    """
    collector = TrainingCollector()
    with (
        writing_in_background(),
        RunEnd(Announcer(notify, _warn), is_leader=read_rank() == 0).announced() as end,
        Signals() as signals,
        MetricsExporter(target, JOB, [collector], _warn, required=False),
    ):
        try:
            with _convert_errors(signals), tempfile.TemporaryDirectory(prefix="tokenmill-train-") as scratch:
                _wait_for_release(path)
                with explain_full_scratch():
                    end.run = collector.run = run = prepare(path, scratch=Path(scratch))
                for line in run.messages:
                    log(line)
                if run.node_problems and not run.saved_iteration():
                    raise RequestError(describe_problems(run.node_problems))
                with explain_full_scratch():
                    copy_pairs(run.pairs, log)
                if run.make_index is not None:
                    log(run.make_index())
                with explain_os_errors(run.checkpoints), _explain_full_volume(run), explain_full_scratch():
                    (_run_leader if run.node.is_leader else _run_follower)(run, signals, collector, end)
        except BaseException as problem:
            collector.end(problem.exit_code if isinstance(problem, TokenmillError) else 1)
            raise
        collector.end(0)


def _wait_for_release(settings: Path) -> None:
    """Wait until the release names this run.

    A pod may start before its node has the latest content of the ConfigMap. A pod that waited for a node or an image
    may start after a rollback: the rollback has deleted its settings, or the release still names another run.

    Raises:
        RetryRun: the release names another run, whose pod replaces this one.
    """
    started = time.monotonic()
    is_logged = False
    while other := read_other_run():
        if not settings.exists() or time.monotonic() - started > RELEASE_TIMEOUT_SECONDS:
            raise RetryRun(
                f"the release names run {other}, but this is run {get_run_name()}, which a rollback or an upgrade "
                "replaced before this pod started; start the run again (on Kubernetes, the operator does this)"
            )
        if not is_logged:
            log(f"the release names run {other}, but this is run {get_run_name()}: waiting for the release")
            is_logged = True
        time.sleep(1)


@contextlib.contextmanager
def _warn_of_errors() -> Iterator[None]:
    try:
        yield
    except (OSError, TokenmillError) as problem:
        _warn(str(problem))


def _warn(text: str) -> None:
    log(f"warning: {text}")


@contextlib.contextmanager
def _convert_errors(signals: Signals) -> Iterator[None]:
    """Convert errors that may be transient into RetryRun: an exit code below 128 would end the run for an engine."""
    try:
        yield
    except TokenmillError as problem:
        if problem.exit_code in (RequestError.exit_code, RetryRun.exit_code):
            raise
        raise RetryRun(str(problem)) from problem
    except OSError as problem:
        raise RetryRun(
            f"{problem}; start the run again to resume from the last checkpoint (on Kubernetes, the operator does this)"
        ) from problem
    except Exception as problem:
        if signals.raise_on_signal:
            raise
        write(traceback.format_exc())
        raise RetryRun(
            f"internal error of tokenmill after the trainer was started ({problem!r}); start the run again, and report "
            "the traceback above"
        ) from problem


@contextlib.contextmanager
def _explain_full_volume(run: TrainingRun) -> Iterator[None]:
    """Let a run with a checkpoint be retried if its volume is full: it continues once there is space."""
    try:
        yield
    except (OSError, MachineError) as problem:
        if not is_full(problem) or run.bucket is not None:
            raise
        saved = run.saved_iteration()
        kind = RetryRun if saved else MachineError
        place = f" to resume from the checkpoint of iteration {saved:,}" if saved else ""
        raise kind(
            f"no space left on the volume of {run.checkpoints}: free space there, raise its quota, or lower "
            f"checkpoint.keep, and start the run again{place}"
        ) from problem


def _run_leader(run: TrainingRun, signals: Signals, collector: TrainingCollector, end: RunEnd) -> None:
    """Run node 0: hold the lease, repair, record, supervise, decide the verdict, prune."""
    records = RunRecords(run.checkpoints)
    lease = CheckpointLease(records.directory, get_run_name(), run.settings.release)
    records.with_reserve(lambda: lease.acquire(log))
    try:
        while (verdict := _run_attempt(run, records, lease, signals, collector, end)).continues:
            log(f"{verdict.reason}; the next phase begins")
            signals.raise_on_signal = True
    finally:
        # Another program may have replaced the file; the result of the attempt stays the same.
        with contextlib.suppress(OSError, TokenmillError):
            lease.release()
    _finish(verdict.code, verdict.message)
    end.announce_success(verdict.message)
    if run.node.nodes > 1:
        signals.raise_on_signal = False  # the run is complete, and a signal must not change its exit code
        time.sleep(LINGER_SECONDS)


def _run_attempt(
    run: TrainingRun,
    records: RunRecords,
    lease: CheckpointLease,
    signals: Signals,
    collector: TrainingCollector,
    end: RunEnd,
) -> AttemptVerdict:
    """Repair the checkpoints and run one attempt."""
    settings = run.settings
    start = _find_start(run)
    for line in start.actions:
        log(line)
    if run.is_pruned and start.iteration:
        _prune(run, at_start=True)
    records.keep_reserve()
    allow_change = settings.dataset.allow_change
    for line in check_identity(records.directory, start.iteration, run.identity, allow_change=allow_change):
        log(line)
    if run.is_megatron_lm:
        write_model_record(run.checkpoints, run.model_record, run.tokenizer)
    for path in remove_truncated_files(run.cache):
        log(f"removed {path}: the file is truncated, and Megatron-LM would fail with it at every start")
    if start.iteration >= run.target:
        return AttemptVerdict(
            0, f"completed: the checkpoint of iteration {start.iteration:,} exists, and the target is {run.target:,}"
        )
    good = _find_good_iteration(run, start.iteration) if start.iteration else None
    attempt = Attempt(content_id(_settings_contract(settings)), start.iteration, good=good)
    signals.raise_on_signal = False  # an attempt whose start is recorded must also record its end
    supervision = settings.supervision
    retried = records.start_attempt(
        attempt, supervision.attempts_without_progress, supervision.preemptions_without_progress
    )
    collector.count_attempts(records.read_attempts())
    if run.node_problems:
        return _record_end(records, attempt, AttemptVerdict(143, describe_problems(run.node_problems)))
    lease.renew()
    with _warn_of_errors():
        records.write_settings(settings)
    command = run.command_at(start.iteration)
    log(f"starting at iteration {start.iteration:,} of {run.target:,}: {shlex.join(command[:8])} ...")
    monitor, peers = _create_monitor(run, start.iteration, start.iteration), PeerStatus(records, run.node)

    pruned = start.iteration

    def delete_replaced() -> None:
        """Delete old checkpoints once training has continued after a new one: none may replace them before NaN."""
        nonlocal pruned
        saved, peer = run.saved_iteration(), peers.read_progress()
        if run.is_pruned and pruned < saved < max(monitor.iteration or 0, (peer and peer.iteration) or 0):
            pruned = saved
            _prune(run)

    tasks = (
        lambda: lease.renew(stopping=bool(signals.received)),
        lambda: peers.publish(monitor.progress),
        lambda: _record_progress(run, records, attempt, monitor, collector),
        delete_replaced,
    )

    def record_stop() -> None:
        attempt.stopped = True
        records.update_attempt(attempt)

    uploads = None
    if run.bucket is not None:
        uploads = LeaderUploads(
            run, run.bucket, records, start.iteration, lambda: lease.renew(stopping=bool(signals.received))
        )
    launcher_exit = _supervise(run, command, monitor, peers, tasks, signals, end, record_stop, collector, uploads)
    stopped_nodes = _read_stopped_nodes(records, attempt)
    attempt.saved = max(attempt.saved or start.iteration, run.saved_iteration())
    attempt.stopped = launcher_exit.stopped or bool(stopped_nodes)
    attempt.iterated = attempt.iterated or monitor.training_started or launcher_exit.has_iterated
    _settle_checkpoints(run, attempt, monitor)
    verdict = decide_verdict(
        run.target,
        launcher_exit,
        monitor,
        attempt,
        retried=retried,
        stopped_nodes=stopped_nodes,
        is_transition=run.is_transition(attempt.saved),
    )
    return _record_end(records, attempt, _distrust_index(run, attempt, verdict, command))


def _distrust_index(
    run: TrainingRun, attempt: Attempt, verdict: AttemptVerdict, command: Sequence[str]
) -> AttemptVerdict:
    """Return the verdict on an attempt; if it failed before its first iteration with an index, the next has none."""
    failed = verdict.code and not attempt.iterated and not attempt.stopped
    if not failed or run.make_index is not None or not forget_index(command, run.cache):
        return verdict
    return AttemptVerdict(
        143, f"{verdict.reason}; the next start does not trust the index of --build-index, and looks for its files"
    )


def _read_stopped_nodes(records: RunRecords, attempt: Attempt) -> list[str]:
    with contextlib.suppress(OSError, TokenmillError):
        return records.read_stopped_nodes(attempt.id)
    return []


def _find_start(run: TrainingRun) -> checkpoints.StartPoint:
    """Return where the run starts, after a repair of Megatron-LM's checkpoints.

    The programs of other frameworks need none: they set the tracker last, with one rename, and load what it names.
    """
    if run.bucket is not None:
        return run.bucket.find_start(log)
    if run.is_megatron_lm:
        return checkpoints.repair_checkpoints(run.checkpoints, save_bytes=run.save_bytes, log=log)
    iteration = checkpoints.read_tracked_iteration(run.checkpoints) or 0
    return checkpoints.StartPoint(iteration, f"checkpoint-{iteration}" if iteration else None)


def _find_good_iteration(run: TrainingRun, iteration: int) -> int:
    if run.bucket is not None:
        return run.bucket.find_good_iteration(iteration)
    return checkpoints.find_good_iteration(run.checkpoints, iteration)


def _settle_checkpoints(run: TrainingRun, attempt: Attempt, monitor: LogMonitor) -> None:
    """Mark the last checkpoint of an attempt that ended with NaN; else delete the checkpoints that it replaces."""
    if not run.is_pruned:
        return
    try:
        if monitor.saved_before_nan and attempt.saved:
            if run.bucket is not None:
                run.bucket.mark_before_nan(attempt.saved)
            else:
                checkpoints.mark_before_nan(run.checkpoints, attempt.saved)
            log(
                f"the checkpoint of iteration {attempt.saved:,} was saved because the next iteration had NaN: it is "
                "marked, replaces no older checkpoint and does not count as progress"
            )
        elif attempt.saved != attempt.began_at:
            _prune(run)
    except (OSError, TokenmillError) as problem:
        log(f"warning: {problem}")


def _prune(run: TrainingRun, *, at_start: bool = False) -> None:
    keep = run.settings.checkpoint.keep
    if run.bucket is not None:
        lines = run.bucket.prune(keep)
    else:
        lines = checkpoints.prune(run.checkpoints, keep, at_start=at_start)
    for line in lines:
        log(line)


def _record_progress(
    run: TrainingRun, records: RunRecords, attempt: Attempt, monitor: LogMonitor, collector: TrainingCollector
) -> None:
    """Record the progress of an attempt."""
    saved = run.saved_iteration()
    collector.saved, collector.saved_at = saved, checkpoints.tracked_since(run.checkpoints)
    if saved > (attempt.saved or attempt.began_at) or monitor.training_started > attempt.iterated:
        attempt.saved, attempt.iterated = saved, attempt.iterated or monitor.training_started
        records.update_attempt(attempt)
        collector.count_attempts(records.read_attempts())


def _record_end(records: RunRecords, attempt: Attempt, verdict: AttemptVerdict) -> AttemptVerdict:
    """Record how an attempt ended, and return its verdict even if the record cannot be written."""
    attempt.ended = verdict.reason

    def record() -> None:
        records.update_attempt(attempt)
        records.write_verdict(attempt, verdict.code, attempt.saved or attempt.began_at)

    try:
        records.with_reserve(record)
    except (OSError, TokenmillError) as problem:
        log(f"warning: cannot record how this attempt ended: {problem}")
    return verdict


def _run_follower(run: TrainingRun, signals: Signals, collector: TrainingCollector, end: RunEnd) -> None:
    """Run any other node than node 0 to the end of the run, through all phases."""
    records = RunRecords(run.checkpoints)
    while _follow_attempt(run, records, signals, collector, end):
        log("a phase ended; the next phase begins")


def _follow_attempt(
    run: TrainingRun, records: RunRecords, signals: Signals, collector: TrainingCollector, end: RunEnd
) -> bool:
    """Supervise an attempt, then end with node 0's verdict; return whether node 0 begins the next phase."""
    if _is_target_saved(run):
        _finish(
            0,
            f"completed: the checkpoint of iteration {run.saved_iteration():,} exists, and the target is "
            f"{run.target:,}",
        )
        return False
    if run.node_problems:
        # Node 0 must count this attempt, and must not wait for a machine that cannot train.
        with contextlib.suppress(OSError):
            records.write_failure(run.node.rank, gethostname(), "; ".join(run.node_problems))
            records.write_arrival(run.node.rank, get_run_name(), time.time(), 1)
        _finish(143, describe_problems(run.node_problems))
    previous_verdict, began_at = records.read_verdict(), run.saved_iteration()
    monitor, peers = _create_monitor(run, began_at, 0), PeerStatus(records, run.node)

    def record_stop() -> None:
        records.write_stop(run.node.rank, gethostname())

    if run.bucket is not None:
        run.bucket.prepare_node(run.checkpoint_name(began_at) if began_at else None, log)

    def check_phase() -> None:
        """End a launcher that waits for ranks that load another checkpoint, or begin another phase.

        A file system showed an outdated checkpoint, or node 0 has completed another one in the bucket since.
        """
        if run.command_at(run.saved_iteration()) != run.command_at(began_at):
            raise Superseded("the checkpoint to resume from is another one than at the start of this node")

    tasks = (lambda: peers.publish(monitor.progress),)
    uploads = FollowerUploads(run, run.bucket, records) if run.bucket else None
    command = run.command_at(began_at)
    launcher_exit = _supervise(
        run, command, monitor, peers, tasks, signals, end, record_stop, collector, uploads, check_phase
    )
    saved = run.saved_iteration()
    has_ended_phase = saved > began_at and run.is_transition(saved)
    if not launcher_exit.has_failed and run.saved_iteration() >= run.target:
        _finish(0, f"completed: iteration {run.target:,} is saved")
        return False
    # torchrun may fail on this node if node 0's launcher ended first.
    if launcher_exit.has_failed and not launcher_exit.stopped and _is_target_saved(run):
        _finish(0, f"completed: iteration {run.target:,} is saved{describe_late_failure(launcher_exit)}")
        return False
    if launcher_exit.stopped:
        _finish(
            143,
            "stopped by a signal; start the run again to resume from the last checkpoint (on "
            "Kubernetes, the operator does this)",
        )
    if launcher_exit.has_failed and not has_ended_phase:
        cause = _record_failure(records, run, launcher_exit, monitor)
        _finish(
            143,
            f"the trainer ended with {describe_exit(launcher_exit)} on this node: {cause}; see the log of node "
            "0 for the result of the attempt",
        )
    deadline = time.monotonic() + VERDICT_TIMEOUT_SECONDS
    while time.monotonic() < deadline and not signals.received:
        # In a bucket, node 0 may write its verdict on the attempt before while this node is already in the next one.
        verdict = records.read_verdict() if run.bucket is None else records.read_last_verdict()
        is_new = verdict is not None and verdict != previous_verdict  # an earlier one may be of a run that was set back
        if run.saved_iteration() >= run.target or (
            verdict and is_new and verdict.code == 0 and verdict.iteration >= run.target
        ):
            _finish(0, f"completed: iteration {run.target:,} is saved")
            return False
        if verdict and is_new:
            if verdict.iteration > began_at and run.is_transition(verdict.iteration):
                return True
            _finish(
                143,
                f"node 0 recorded that the run resumes from iteration {verdict.iteration:,}; start this node again (on "
                "Kubernetes, the operator does this)",
            )
        # A new start of node 0 never writes a verdict on this attempt.
        if records.has_arrived_since(0, launcher_exit.ranks_started_at):
            _finish(
                143,
                "node 0 was lost and has restarted; start this node again to join it (on Kubernetes, the operator does "
                "this)",
            )
        time.sleep(0.5)
    _finish(
        143,
        f"the ranks of this node ended without a failure, but this node does not see a checkpoint of iteration "
        f"{run.end_at(began_at):,}; start the run again (on Kubernetes, the operator does this)",
    )
    return False


def _is_target_saved(run: TrainingRun) -> bool:
    """Return whether node 0 will find the run complete, by the rules that node 0 itself uses.

    A node that exits with code 0 does not come back. A tracker that names an incomplete checkpoint, or an outdated
    tracker from a cache, must therefore not end this node.
    """
    if run.bucket is not None or not run.is_megatron_lm:
        return run.saved_iteration() >= run.target
    for seconds in (0.0, directory_cache_seconds(run.checkpoints)):
        time.sleep(seconds)
        last = checkpoints.examine_tracked(run.checkpoints) if run.saved_iteration() >= run.target else None
        if last is None or not last.complete:
            return False
    return True


def _supervise(
    run: TrainingRun,
    command: Sequence[str],
    monitor: LogMonitor,
    peers: PeerStatus,
    tasks: Sequence[Callable[[], object]],
    signals: Signals,
    end: RunEnd,
    record_stop: Callable[[], object],
    collector: TrainingCollector,
    uploads: Uploads | None,
    check_start: Callable[[], object] = lambda: None,
) -> LauncherExit:
    """Run an attempt and its uploads; `check_start` is called until there are ranks, and may raise Superseded."""
    collector.monitor = monitor
    settings = run.settings
    supervision = settings.supervision
    rendezvous_minutes = supervision.distributed_timeout_minutes if run.node.nodes > 1 else supervision.start_minutes
    timeouts = HangTimeouts(rendezvous_minutes * 60, supervision.start_minutes * 60, supervision.hang_minutes * 60)
    environment = build_launcher_environment()
    if (settings.parallelism.tensor_model_parallel_size or 1) * settings.parallelism.context_parallel_size > 1:
        environment.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "1")  # Megatron-LM asserts it on GPUs before Blackwell
    gpus = settings.training.gpus_per_node
    recorder = configure_flight_recorder(
        environment, run.scratch, range(run.node.rank * gpus, (run.node.rank + 1) * gpus)
    )
    hang_record = HangRecord(run.checkpoints, run.node, recorder, run.scratch, environment)
    rendezvous = Rendezvous(peers.records, run.node, get_run_name(), log)

    def stop(reason: str) -> None:
        log(reason)
        signals.received.append(SIGTERM)

    def announce_hang(reason: str) -> None:
        collector.stalled = True
        end.announce_hang(reason)

    watcher = ReleaseWatcher(stop)

    def record_curve() -> None:
        peers.records.append_curve(monitor.take_curve())

    def poll(ranks_started: bool) -> bool:
        if not ranks_started:
            check_start()
        return rendezvous.poll(ranks_started)

    supervisor = Supervisor(
        monitor,
        timeouts,
        peers.read_progress,
        [*tasks, record_curve, watcher.check, hang_record.check_announcement],
        signals,
        poll,
        hang_record,
        announce_hang,
        record_stop,
    )
    if uploads:
        uploads.start()
    launcher_exit = supervisor.run(command, environment)
    with _warn_of_errors():
        peers.records.append_curve(monitor.take_curve(), last=True)
    if uploads:
        if launcher_exit.has_failed and not (run.node.is_leader or launcher_exit.stopped):
            _record_failure(peers.records, run, launcher_exit, monitor)  # node 0 reads it before this node ends
        uploads.finish(launcher_exit.ranks_started_at, lambda: signals.received.count(SIGINT) > 1)
    return launcher_exit


def _record_failure(records: RunRecords, run: TrainingRun, launcher_exit: LauncherExit, monitor: LogMonitor) -> str:
    """Record why the trainer failed on this node, which is not node 0, and return the cause."""
    cause = launcher_exit.abort_reason or describe_cause(monitor).removeprefix(": ") or describe_exit(launcher_exit)
    with contextlib.suppress(OSError):
        records.write_failure(run.node.rank, gethostname(), cause)
    return cause


def _create_monitor(run: TrainingRun, began_at: int, resume_iteration: int) -> LogMonitor:
    settings = run.settings_at(began_at)
    training = settings.training
    return LogMonitor(
        tokens_per_iteration=(training.global_batch_size or 0) * settings.model.seq_length,
        peak_tflops=settings.gpu.peak_tflops,
        iterations_between_reports=(training.log_interval or 1) + training.eval_iterations,
        resume_iteration=resume_iteration,
        log_interval=training.log_interval or 1,
        evaluation_interval=(training.eval_interval or 0) if training.eval_iterations else 0,
        target=run.target,
        end=run.end_at(began_at),
    )


def _settings_contract(settings: Settings) -> dict[str, object]:
    """Return all content of the settings file: attempts with another content are counted separately."""
    import msgspec

    contract: dict[str, object] = msgspec.to_builtins(settings)
    return contract


def _finish(code: int, message: str) -> None:
    """Log success, or raise the error for an exit code.

    The last line of the log is the pod's termination message on Kubernetes.
    """
    if code == 0:
        return log(message)
    raise RequestError(message) if code == RequestError.exit_code else RetryRun(message)
