"""Errors of a store as errors of tokenmill, which name the object and say what to do."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tokenmill.core.buckets.address import BucketUnavailable
from tokenmill.core.buckets.client import (
    BucketError,
    BucketRefused,
    CredentialsExpired,
    ForkedProcess,
    InvalidKey,
    ObjectChanged,
    ObjectMissing,
)
from tokenmill.core.buckets.mirror import show_addresses
from tokenmill.errors import RequestError, TransientError

_SET_CLOCK = "the clock of this machine differs from the store's: set the clock"
_PERMISSIONS = "check that these credentials may read, write, list and delete objects there"


@contextmanager
def explain_requests(path: Path) -> Iterator[None]:
    """Raise errors of the block for the object for which `path` stands.

    Raises:
        FileNotFoundError: there is no such object.
        BucketUnavailable: the store refuses these credentials.
        TransientError: the store does not answer, or the object was replaced.
    """
    name = show_addresses(str(path))
    try:
        yield
    except ObjectMissing as error:
        raise FileNotFoundError(2, str(error), str(path)) from error
    except ObjectChanged as error:
        raise TransientError(f"{name} changed while it was read; run the same command again") from error
    except CredentialsExpired as error:
        raise TransientError(f"{name}: {error}; renew the credentials and run the same command again") from error
    except BucketRefused as error:
        remedy = _SET_CLOCK if "TimeTooSkewed" in str(error) else _PERMISSIONS
        if isinstance(error, InvalidKey):
            remedy = "rename or move that object"
        raise BucketUnavailable(f"{name}: {error}; {remedy}") from error
    except ForkedProcess as error:
        raise RequestError(
            f"{name}: {error}; open the data before the fork, or start worker processes with the method spawn"
        ) from error
    except BucketError as error:
        raise TransientError(f"{name}: {error}; run the same command again") from error
