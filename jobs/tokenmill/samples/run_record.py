"""The record of the data that a run trains on, `tokenmill-data.json` in the run's directory.

A training program writes it when it starts (`write_record`), and `tokenmill compare` reads it: only runs on the same
data, in the same order and with the same batch are comparable.
"""

from pathlib import Path

import msgspec

from tokenmill.core.files.publish import write_atomic
from tokenmill.core.files.user_path import local_path, read_named_file
from tokenmill.core.typed_json import decode_json
from tokenmill.errors import RequestError
from tokenmill.samples.identity import DataIdentity

NAME = "tokenmill-data.json"


class RunRecord(msgspec.Struct, frozen=True, kw_only=True):
    """The data of a run."""

    identity: DataIdentity
    fingerprint: str
    global_batch: int
    """Samples of all ranks in one step."""
    digest: str = ""
    """Digest of the first `digest_samples` samples (`Samples.digest`), if the program computed it."""
    digest_samples: int = 0
    format: int = 1


def write_record(
    directory: Path, identity: DataIdentity, global_batch: int, digest: str = "", digest_samples: int = 0
) -> Path:
    """Write the record of a run to its directory, which is created if it is missing; return the record's path."""
    directory = local_path(directory, "directory")
    directory.mkdir(parents=True, exist_ok=True)
    record = RunRecord(
        identity=identity,
        fingerprint=identity.fingerprint,
        global_batch=global_batch,
        digest=digest,
        digest_samples=digest_samples,
    )
    path = directory / NAME
    write_atomic(path, msgspec.json.format(msgspec.json.encode(record), indent=1) + b"\n")
    return path


def read_record(directory: Path) -> RunRecord | None:
    """Return the record in the directory of a run; None if there is none.

    Raises:
        RequestError: the record is damaged, or from another version.
    """
    path = directory / NAME
    try:
        return decode_json(read_named_file(path, "the record"), RunRecord)
    except FileNotFoundError:
        return None
    except msgspec.DecodeError as error:
        raise RequestError(
            f"{path} is not a record of a run's data ({error}); remove it, and start the run again"
        ) from error
