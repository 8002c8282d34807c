"""The errors that a user or Kubernetes can act on, and the exit code of each.

    TokenmillError       1    base class; a retry may help
    |-- RequestError     2    the request, the input or the machine is wrong; a retry cannot help
    |   |-- MachineError 2    the machine fails every unit (disk full, read-only file system)
    |   |-- TemplateLimit 2   a chat template exceeds a limit of time or memory
    |   `-- InputError   2    one input file is damaged or cannot be read
    |-- TransientError   1    a remote or local failure; the next attempt may succeed
    |-- Superseded       1    another run replaced the plan; the unit is not committed
    `-- Stopped        143    SIGTERM or Ctrl-C arrived while units were left
        `-- StoppedEarly 1    the same in the first minute of a pod

The command line catches a TokenmillError at one place, prints its message and exits with its code. The exit code is
the contract with Kubernetes: 0 when all work is done, 2 when a retry cannot help, 143 after SIGTERM, and any other code
when a retry may help. A bug is not a TokenmillError: Python prints its traceback and exits with 1.

Every message names the invalid subject, its value, the rule and the remedy.
"""

REPLACE_OPTION = "--replace (in a chart: --set replace=true)"
"""The text with which messages name the option that lets a run replace a plan."""

VERIFY_HASHES_OPTION = "--verify-hashes (in a chart: --set verifyHashes=true)"
"""The text with which messages name the option that finds damaged files of the right size and makes them again."""


def remake(command: str, *, same_size: bool = True) -> str:
    """Return the remedy for damaged files that a command of tokenmill made; missing files have another size."""
    if not same_size:
        return f"run {command} again, which makes only these files again"
    return f"run {command} again with {VERIFY_HASHES_OPTION}, which makes only the damaged files again"


class TokenmillError(Exception):
    """Base class of the errors that print a message instead of a traceback; a retry may help."""

    exit_code = 1


class RequestError(TokenmillError):
    """The request, the input or the machine is wrong, and a retry cannot help."""

    exit_code = 2


class MachineError(RequestError):
    """The file system fails every unit (full, read-only), so the worker does not try the rest of its share."""


class TemplateLimit(RequestError):
    """A chat template exceeded a limit of time or memory, so the worker does not try it with the rest of its share."""


class InputError(RequestError):
    """An input file is damaged or has unsupported content; the message names the file and the position."""


class TransientError(TokenmillError):
    """A remote or local failure happened that the next attempt may not meet."""


class Superseded(TokenmillError):
    """Another run replaced the plan with which this worker started; the worker must not commit its unit."""


class Stopped(TokenmillError):
    """SIGTERM or Ctrl-C arrived, and the worker stopped at a point from which a unit can resume."""

    exit_code = 143


class StoppedEarly(Stopped):
    """SIGTERM arrived soon after the start of a pod.

    Kubernetes repeats exit code 143 without a limit, so a pod that is always stopped at once must have another code.
    """

    exit_code = 1


def missing_package(scheme: str, extra: str) -> RequestError:
    """Return the error for an address whose client is not installed."""
    return RequestError(
        f"{scheme}:// requires a package that is not installed; run pip install '.[{extra}]' in the clone of tokenmill"
    )
