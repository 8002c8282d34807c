"""`tokenmill train`: checked before, supervised, judged after, so that exit 0 means the target iteration is saved.

Exit codes are a contract with the engines: 2 for what no retry can help, 143 for an attempt to be repeated
(PyTorchJob's ExitCode policy repeats from 128 on), 0 for a run whose last checkpoint is the one asked for.
Node 0 alone repairs checkpoints and judges; the others wait for what it says.
"""

import contextlib
import os
import shlex
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from tokenmill.errors import RequestError, Stopped, TokenmillError
from tokenmill.files import content_id
from tokenmill.training import checkpoints, data
from tokenmill.training.arguments import megatron_arguments
from tokenmill.training.attempts import Attempt, Records
from tokenmill.training.index import build_index, sweep
from tokenmill.training.node import Node, launcher, node_of
from tokenmill.training.preflight import check
from tokenmill.training.settings import Settings, read
from tokenmill.training.supervise import End, Patience, Supervisor
from tokenmill.training.watch import Watch

VERDICT_PATIENCE = 150.0
"""Seconds that node 0's word may take to be seen: blobfuse caches a directory for up to 120."""
PROGRESS_SECONDS = 10.0
TORCHRUN_SETTINGS = (
    "PET_NNODES",
    "PET_NPROC_PER_NODE",
    "PET_NODE_RANK",
    "PET_MASTER_ADDR",
    "PET_MASTER_PORT",
    "PET_MAX_RESTARTS",
)
"""PyTorchJob's operator sets these for torchrun, which is given its own words instead."""


class Retry(Stopped):
    """The attempt has not reached the target, and another one may: exit 143."""


@dataclass(frozen=True)
class Run:
    """A run on this node, checked."""

    settings: Settings
    node: Node
    command: list[str]
    cache: Path
    """Where Megatron-LM keeps its sample index."""
    said: list[str]

    @property
    def checkpoints(self) -> Path:
        """Where its checkpoints are."""
        return Path(self.settings.checkpoint.path)

    @property
    def target(self) -> int:
        """The iteration at which it is done."""
        return self.settings.training.iterations

    def reached(self) -> int:
        """Return the iteration of the last checkpoint, 0 before there is one or when it cannot be read just now."""
        with contextlib.suppress(RequestError, OSError):
            return checkpoints.read_tracker(self.checkpoints) or 0
        return 0


def prepare(path: Path, *, scratch: Path, dry_run: bool = False) -> Run:
    """Read the settings, check all that can be checked on this node, and compose its command.

    Raises:
        RequestError: something is wrong that a retry cannot help.
    """
    settings = read(path)
    node = node_of(settings.training.nodes) if not dry_run else Node(0, settings.training.nodes, "NODE-0", 29500)
    corpus = data.resolve(settings)
    said = check(settings, corpus, machine=not dry_run)
    said += data.summary(corpus, settings)
    read_from = data.data_flags(corpus, settings, scratch)
    words = megatron_arguments(settings, read_from)
    training = settings.training
    start = launcher(node, settings.trainer.launcher, training.gpus_per_node, settings.release)
    return Run(settings, node, [*start, settings.trainer.script, *words], read_from.cache, said)


def index(path: Path) -> None:
    """Build the sample index of a settings file's run.

    Raises:
        RequestError: the data or the settings are wrong.
    """
    settings = read(path)
    _say(build_index(settings, data.resolve(settings), python=settings.trainer.python))


def train(path: Path) -> None:
    """Run a settings file's training on this node to its end.

    Raises:
        RequestError: it cannot start, or cannot go on.
        Retry: it has not reached its target, and another start may.
    """
    with tempfile.TemporaryDirectory(prefix="tokenmill-train-") as scratch:
        run = prepare(path, scratch=Path(scratch))
        for line in run.said:
            _say(line)
        _lead(run) if run.node.judges else _follow(run)


def _lead(run: Run) -> None:
    """Be node 0: repair, record, supervise, judge, prune."""
    settings, records = run.settings, Records(run.checkpoints)
    start = checkpoints.prepare(run.checkpoints, say=_say)
    for line in start.done:
        _say(line)
    for path in sweep(run.cache, shared=run.settings.dataset.cache_path is not None):
        _say(f"removed {path}: cut short, and Megatron-LM would fail on it at every start")
    if start.iteration >= run.target:
        _say(f"done: the checkpoint of iteration {start.iteration:,} is there, the target is {run.target:,}")
        return
    attempt = Attempt(content_id(_contract(settings)), start.iteration)
    retried = records.begin(attempt, settings.supervision.attempts_without_progress)
    _say(f"starting at iteration {start.iteration:,} of {run.target:,}: {shlex.join(run.command[:8])} ...")
    watch = _watch(settings)

    def look_after() -> None:
        reached = run.reached()
        if reached > (attempt.saved or start.iteration) or watch.started > attempt.iterated:
            attempt.saved, attempt.iterated = reached, watch.started
            records.update(attempt)
            _prune(run)

    end = _supervised(run, watch, records, look_after)
    attempt.saved, attempt.iterated = run.reached(), attempt.iterated or watch.started or _moved(run, records, start)
    code, words = _judge(run, end, watch, attempt, retried or start.iteration > 0)
    attempt.ended = words
    records.update(attempt)
    records.say(attempt, code, attempt.saved)
    _prune(run)
    _end(code, words)


def _prune(run: Run) -> None:
    """Delete old checkpoints; what cannot be deleted must not end a run."""
    try:
        for line in checkpoints.prune(run.checkpoints, run.settings.checkpoint.keep):
            _say(line)
    except TokenmillError as problem:
        _say(f"warning: {problem}")


def _moved(run: Run, records: Records, start: "checkpoints.Start") -> bool:
    """Tell whether the node of the last rank saw an iteration after this start's."""
    progress = records.progress()
    return isinstance(progress, dict) and progress.get("iteration", 0) > start.iteration and run.node.nodes > 1


def _judge(run: Run, end: End, watch: Watch, attempt: Attempt, went_before: bool) -> tuple[int, str]:
    """Say how an attempt ended: 0, 2 or 143, and why."""
    reached = attempt.saved or 0
    where = f"iteration {reached:,} of {run.target:,} is saved"
    if reached >= run.target:
        also = "" if end.code == 0 else f"; the trainer then ended with {_ending(end)}, which changes nothing"
        return 0, f"done: {where}{also}"
    if end.stopped:
        return 143, f"stopped by a signal: {where}; the next start goes on from there"
    if end.hung:
        return 143, f"it hung for {end.hung}: {where}; the next start goes on from there"
    if end.code == 0:
        return 143, f"the trainer ended with 0 before its target: {where}; the next start goes on from there"
    cause = f": {watch.cause or watch.lost_peer}" if watch.cause or watch.lost_peer else ""
    lost_peer = watch.lost_peer and not watch.cause  # a rank that fails by itself makes the others miss it, too
    if attempt.iterated or went_before or lost_peer or end.code < 0:
        return 143, f"the trainer ended with {_ending(end)}{cause}; {where}; the next start goes on from there"
    return 2, (
        f"the trainer ended with {_ending(end)} before its first iteration{cause}; no retry can help: "
        "mend the settings, the image or the data, and start it again"
    )


def _ending(end: End) -> str:
    return f"signal {-end.code}" if end.code < 0 else f"exit code {end.code}"


def _follow(run: Run) -> None:
    """Be another node: supervise, then end as node 0 says."""
    records = Records(run.checkpoints)
    if (reached := run.reached()) >= run.target:
        _end(0, f"done: the checkpoint of iteration {reached:,} is there, the target is {run.target:,}")
        return
    before = records.verdict()
    end = _supervised(run, _watch(run.settings), records, lambda: None)
    if end.stopped and run.reached() < run.target:
        _end(143, "stopped by a signal; the next start goes on from the last checkpoint")
    if end.code != 0:
        _end(143, f"the trainer ended with {_ending(end)} on this node; node 0 says why, or knows no more")
    deadline = time.monotonic() + VERDICT_PATIENCE
    while time.monotonic() < deadline:
        verdict = records.verdict()
        if run.reached() >= run.target or (verdict != before and verdict and verdict["code"] == 0):
            return _end(0, f"done: iteration {run.target:,} is saved")
        if verdict and verdict != before:
            _end(143, f"node 0 says that the run goes on from iteration {verdict['iteration']:,}")
        time.sleep(0.5)
    _end(143, f"the trainer ended with 0, and iteration {run.target:,} is not saved as far as this node can see")


def _supervised(run: Run, watch: Watch, records: Records, every_while: Callable[[], None]) -> End:
    settings = run.settings
    written = 0.0

    def on_iteration(iteration: int) -> None:
        nonlocal written
        if time.monotonic() - written > PROGRESS_SECONDS:
            written = time.monotonic()
            with contextlib.suppress(OSError):
                records.write_progress(iteration)

    supervision = settings.supervision
    patience = Patience(supervision.start_minutes * 60, supervision.hang_minutes * 60)
    environment = {name: value for name, value in os.environ.items() if name not in TORCHRUN_SETTINGS}
    if (settings.parallelism.tensor_model_parallel_size or 1) * settings.parallelism.context_parallel_size > 1:
        environment.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "1")  # which Megatron-LM asserts before Blackwell
    supervisor = Supervisor(watch, patience, on_iteration, records.progress, every_while)
    return supervisor.run(run.command, environment)


def _watch(settings: Settings) -> Watch:
    tokens = (settings.training.global_batch_size or 0) * settings.model.seq_length
    return Watch(tokens, settings.gpu.peak_tflops)


def _contract(settings: Settings) -> dict[str, object]:
    """Return what makes an attempt another one: all that is in the file."""
    import msgspec

    contract: dict[str, object] = msgspec.to_builtins(settings)
    return contract


def _say(words: str) -> None:
    sys.stdout.write(f"tokenmill: {words}\n")
    sys.stdout.flush()


def _end(code: int, words: str) -> None:
    """End with a code and its reason; the last line is what Kubernetes shows as the pod's termination message."""
    if code == 0:
        return _say(words)
    raise RequestError(words) if code == RequestError.exit_code else Retry(words)
