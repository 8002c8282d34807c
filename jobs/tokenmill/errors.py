"""What can go wrong, sorted by what the person or the cluster should do next.

The process's exit code is the contract with Kubernetes: 0 all of it done, 2 the request or the input
is wrong and a retry cannot help, 143 stopped by SIGTERM with work left, anything else is worth a retry.
A bug is none of these and keeps its traceback (exit code 1).
"""

WITH_REPLACE = "--replace (in a chart: --set replace=true)"
"""How messages name the option that lets a plan be replaced."""

WITH_HASHES = "--verify-hashes (in a chart: --set verifyHashes=true)"
"""How messages name the option that finds damaged files of the right size, and has them made anew."""


class TokenmillError(Exception):
    """Base of every error that ends in a message instead of a traceback; worth a retry."""

    exit_code = 1


class RequestError(TokenmillError):
    """The request, the input or the machine is wrong: what, where, and what to do; a retry cannot help."""

    exit_code = 2


class MachineError(RequestError):
    """The file system refuses every unit alike (full, read-only): the rest of the share is not tried."""


class InputError(RequestError):
    """An input file is damaged or holds what cannot be taken; names the file and the place."""


class TransientError(TokenmillError):
    """A remote or local failure that another attempt may not meet."""


class Superseded(TokenmillError):
    """The plan on disk is no longer the one this worker began with; its unit must not be committed."""


class Stopped(TokenmillError):
    """SIGTERM or Ctrl-C arrived: the unit is abandoned where it can be resumed."""

    exit_code = 143
