"""The data that a run was trained on, from its record or from the identity that `tokenmill train` keeps.

A training program that reads with `tokenmill.data` writes tokenmill-data.json (`samples.run_record`). `tokenmill train`
writes .tokenmill/train/identity.json next to the checkpoints; it has the same content with other names, and leaves out
the number of samples, which follows from the iterations and the batch. `verdict` compares the data of two runs.
"""

import contextlib
from pathlib import Path
from typing import Annotated

import msgspec

from tokenmill.checkpoints.model_record import MODEL_RECORD
from tokenmill.core.typed_json import decode_json
from tokenmill.errors import RequestError
from tokenmill.reports.compare.search import MAX_SMALL_BYTES, RunFiles, read_small
from tokenmill.reports.compare.settings import GLOBAL_BATCH_NAMES, find_integer
from tokenmill.samples.identity import DataIdentity, SourceIdentity
from tokenmill.samples.run_record import NAME, read_record
from tokenmill.train.identity import History, Identity, is_same_data

_MEGATRON_SURPLUS = 0.005
"""Megatron-LM's --mid-level-dataset-surplus, unless extraArgs sets it."""


class _BatchRecord(msgspec.Struct):
    """The part of model.json that a comparison needs."""

    batch: Annotated[int, msgspec.Meta(gt=0, lt=10**12)]


class RunData(msgspec.Struct, frozen=True, kw_only=True):
    """The data of a run."""

    identity: DataIdentity
    fingerprint: str
    """As recorded; empty for the identity of `tokenmill train`, whose fingerprint lacks the number of samples."""
    global_batch: int | None
    digest: str = ""
    """Digest of the first `digest_samples` samples, or empty."""
    digest_samples: int = 0
    arguments: tuple[str, ...] = ()
    """Megatron-LM's arguments that change the samples in other ways."""
    path: str
    """The file with the record."""
    plan: str = ""
    """The file with the plan of the phases, if `tokenmill train` has recorded one."""
    begin: int = 0
    """The iteration after which the run read this data."""
    change: str = ""
    """Why the identity is not that of all steps; empty if it is."""


def read_run_data(
    files: RunFiles, settings: dict[str, str], notes: list[str], iteration: int | None = None
) -> RunData | None:
    """Return the data of a run, None if there is no record of it; of several, the last, or that of an iteration.

    Raises:
        RequestError: a record is damaged, or there are records of several runs.
    """
    records = [data for directory in files.records if (data := _read_record(directory))]
    if len({(data.fingerprint, data.global_batch) for data in records}) > 1:
        paths = ", ".join(data.path for data in records[:3])
        raise RequestError(
            f"the directory contains the records of several runs ({paths}); specify the directory of one run"
        )
    if records:
        return records[0]
    for path in files.identities[:1]:
        return _read_history(path, settings, notes, iteration)
    return None


def _read_record(directory: Path) -> RunData | None:
    path = directory / NAME
    try:
        if not path.is_file() or path.stat().st_size > MAX_SMALL_BYTES:
            raise RequestError(f"{path} is not a record of a run's data; remove it")
        record = read_record(directory)
    except OSError as error:
        raise RequestError(f"cannot read {path}: {error.strerror}; check its permissions") from None
    if record is None:
        return None
    if record.fingerprint != record.identity.fingerprint:
        raise RequestError(
            f"{path} was changed: its fingerprint is {record.fingerprint[:40]!r}, but that of its fields is "
            f"{record.identity.fingerprint!r}; restore it, or remove it"
        )
    return RunData(
        identity=record.identity,
        fingerprint=record.fingerprint,
        global_batch=record.global_batch,
        digest=record.digest,
        digest_samples=record.digest_samples,
        path=str(path),
    )


def _read_history(
    path: Path, settings: dict[str, str], notes: list[str], iteration: int | None = None
) -> RunData | None:
    try:
        history = decode_json(read_small(path), History)
    except (OSError, msgspec.DecodeError) as error:
        raise RequestError(f"cannot read {path} ({error}); restore it, or remove it") from None
    if not history.events:
        return None
    last, change = history.events[-1], ""
    # An event after a tracker was set back replaces the later ones.
    valid = [*(event for event in history.events[:-1] if event.iteration < last.iteration), last]
    if not all(is_same_data(event.identity, last.identity) for event in valid):
        change = f"its data was changed at iteration {last.iteration:,} ({path})"
    elif valid[0].adopted:
        change = f"there is no record of its data before iteration {valid[0].iteration:,} ({path})"
    if change:
        notes.append(f"{change}; the comparison uses the last data")
    batch = find_integer(settings, GLOBAL_BATCH_NAMES) or _read_batch(path)
    if iteration is not None:
        last = next((event for event in reversed(valid) if event.iteration < iteration), valid[0])
    data = _convert_identity(last.identity, settings, path, batch)
    return msgspec.structs.replace(data, begin=last.iteration, change=change)


def _read_batch(identity: Path) -> int | None:
    """Return the global batch that `tokenmill train` recorded next to the identity of a run's data."""
    with contextlib.suppress(OSError, msgspec.DecodeError):
        return decode_json(read_small(identity.with_name(MODEL_RECORD.name)), _BatchRecord).batch
    return None


def _convert_identity(identity: Identity, settings: dict[str, str], path: Path, batch: int | None) -> RunData:
    batch = identity.batch or batch
    if identity.samples is not None:
        return RunData(
            identity=identity.samples,
            fingerprint=identity.samples.fingerprint,
            global_batch=batch,
            arguments=tuple(identity.arguments),
            path=str(path),
            plan=str(path.parents[1] / "phases" / identity.plan),
        )
    name = "train" if "train" in identity.lists else next(iter(identity.lists), "")
    parts = identity.lists.get(name, [])
    iterations = find_integer(settings, ("train_iters", "training.iterations"))
    return RunData(
        identity=DataIdentity(
            kind="packed" if "--sft" in identity.arguments else "pairs",
            sources=tuple(SourceIdentity(part.path, part.content, part.share) for part in parts),
            tokenizer=identity.tokenizer,
            seq_length=identity.sequence_length,
            samples=identity.planned or (batch * iterations if batch and iterations else None),
            seed=identity.seed,
            split=identity.split,
            part="train",
            surplus=_MEGATRON_SURPLUS,
        ),
        fingerprint="",
        global_batch=batch,
        arguments=tuple(identity.arguments),
        path=str(path),
    )
