"""The position of a run in its samples: what every loader stores in a checkpoint, and checks when a run resumes.

The position is one number, the samples that all ranks together have consumed (`tokenmill.samples.order`). Each rank
stores the same state, so any rank's state resumes any rank, on any number of ranks.
"""

import logging
from collections.abc import Mapping
from typing import Annotated

import msgspec

from tokenmill.core.printing import printable
from tokenmill.core.typed_json import convert_json, decode_json
from tokenmill.errors import RequestError
from tokenmill.samples.identity import DataIdentity, list_differences
from tokenmill.samples.samples import Samples

FORMAT = 1
"""The version of the state."""

MAX_IDENTITY = 64 << 20
"""The largest length of an identity in a state; that of 32,766 datasets has 8 MB."""

SHOWN_DIFFERENCES = 8
"""Differences that a refusal lists."""

MAX_DIFFERENCE = 500
"""Characters of a difference that it shows."""

log = logging.getLogger("tokenmill")


class LoaderState(msgspec.Struct, frozen=True, kw_only=True):
    """The state of a loader in a checkpoint: numbers and texts, so that every format of checkpoints can store it.

    The identity is stored as JSON, in one text: the keys of a state are the same for all data, as torch's distributed
    checkpoints require.
    """

    consumed: Annotated[int, msgspec.Meta(ge=0, le=2**62)]
    """Samples that all ranks together have consumed: those of batches that the loader yielded, not prefetched ones."""
    global_batch: Annotated[int, msgspec.Meta(ge=0, le=2**62)]
    """Samples of all ranks in one step of the optimizer; 0 if the loader did not know it."""
    fingerprint: Annotated[str, msgspec.Meta(max_length=64)]
    identity: Annotated[str, msgspec.Meta(max_length=MAX_IDENTITY)]
    """The identity of the samples (`DataIdentity`), as JSON."""
    format: int = FORMAT

    @classmethod
    def capture(cls, identity: DataIdentity, consumed: int, global_batch: int) -> dict[str, int | str]:
        """Return a state as a dictionary for a checkpoint."""
        state = cls(
            consumed=consumed,
            global_batch=global_batch,
            fingerprint=identity.fingerprint,
            identity=msgspec.json.encode(identity).decode(),
        )
        return msgspec.structs.asdict(state)


def read_state(state: object) -> tuple[LoaderState, DataIdentity]:
    """Return the state in a checkpoint, and the identity of the data that it was saved with.

    Raises:
        RequestError: it is not the state of a loader, is damaged, or is from another version.
    """
    if not isinstance(state, Mapping) or "consumed" not in state:
        raise RequestError(
            f"invalid state of a loader: a {type(state).__name__} without the entry consumed; pass the dictionary that "
            "state_dict of a loader of tokenmill returned"
        )
    version = state.get("format")
    if version != FORMAT or isinstance(version, bool):
        raise RequestError(
            f"invalid state of a loader: format {str(version)[:20]!r}, but this version of tokenmill reads format "
            f"{FORMAT}; use the version of tokenmill that saved the checkpoint"
        )
    try:
        content = convert_json(dict(state), LoaderState)
        identity = decode_json(content.identity, DataIdentity)
        fingerprint = identity.fingerprint
    except (msgspec.MsgspecError, UnicodeError, RecursionError, TypeError) as error:
        raise RequestError(f"damaged state of a loader ({error}); use another checkpoint") from error
    if fingerprint != content.fingerprint:
        raise RequestError(
            f"damaged state of a loader: its identity has the fingerprint {fingerprint}, not "
            f"{printable(content.fingerprint, MAX_DIFFERENCE)}; use another checkpoint"
        )
    return content, identity


def check_state(state: object, samples: Samples) -> LoaderState:
    """Return the state in a checkpoint after checking that it belongs to these samples.

    Raises:
        RequestError: it is not a state, is damaged, belongs to other samples (the message lists the differences), or
            is after their end.
    """
    content, identity = read_state(state)
    current = samples.identity
    if identity.documents is None:  # of a version that did not record how batches show documents
        current = msgspec.structs.replace(current, documents=None, boundary=None)
    if content.fingerprint != current.fingerprint:
        differences = list_differences(identity, samples.identity)
        shown = [printable(difference, MAX_DIFFERENCE) for difference in differences[:SHOWN_DIFFERENCES]]
        if len(differences) > len(shown):
            shown.append(f"and {len(differences) - len(shown):,} more differences")
        remedy = (
            "Restore the data and the arguments of the checkpoint; to train on the new data from their first sample, "
            "leave out the loader's state"
        )
        if msgspec.structs.replace(identity, samples=samples.identity.samples) == samples.identity:
            remedy = (
                f"The number of samples determines the order: use samples={identity.samples}, and start again to train "
                "on more"
            )
        raise RequestError(
            f"{mark(samples.identity)}the checkpoint belongs to other samples (fingerprint {content.fingerprint[:12]} "
            f"before, {samples.fingerprint()[:12]} now): {'; '.join(shown)}. {remedy}"
        )
    if content.consumed > len(samples):
        raise RequestError(
            f"damaged state of a loader: {content.consumed:,} samples were consumed of {len(samples):,}; use another "
            "checkpoint"
        )
    return content


def mark(identity: DataIdentity) -> str:
    """Return the word with which every message about synthetic data starts; nothing for a text's samples."""
    return "SYNTHETIC: " if identity.synthetic else ""


def describe(samples: Samples, consumed: int, rank: int, world: int) -> str:
    """Return the line that a loader logs when it starts."""
    return (
        f"{mark(samples.identity)}tokenmill data: fingerprint={samples.fingerprint()} samples={len(samples)} "
        f"seq_length={samples.seq_length} consumed={consumed} rank {rank} of {world}"
    )


def log_start(samples: Samples, consumed: int, rank: int, world: int) -> None:
    """Log where a loader starts: as a warning if its samples are synthetic."""
    log.log(
        logging.WARNING if samples.identity.synthetic else logging.INFO,
        "%s",
        describe(samples, consumed, rank, world),
    )


def log_batch_change(samples: Samples, before: int, now: int) -> None:
    """Log that a run resumes with another global batch, if it does: the order is the same, but steps differ.

    0 stands for a global batch that a loader did not know.
    """
    if before and now and before != now:
        log.warning(
            "%stokenmill data: the global batch was %d samples, and is %d now", mark(samples.identity), before, now
        )
