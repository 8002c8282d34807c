"""Errors of the operating system: the message, and the exit code that shows whether a retry can help."""

import errno
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tokenmill.errors import MachineError, RequestError, TokenmillError, TransientError
from tokenmill.files.explain import explain_os_errors

MESSAGES = {
    errno.ENOTCONN: (1, "the process that serves the mount /proc has died"),
    errno.EBUSY: (1, "run the same command again"),
    errno.ENFILE: (1, "out of open files"),
    errno.EMFILE: (1, "out of open files"),
    errno.ENOMEM: (1, "out of memory"),
    errno.ENOLCK: (1, "run the same command again"),
    errno.EHOSTDOWN: (1, "run the same command again"),
    errno.EINVAL: (1, "mount it with other options"),
    errno.EFBIG: (2, "larger than its file system or the limit of this process"),
    errno.ESTALE: (1, "run the same command again"),
    errno.ENOSPC: (2, "no space left writing /proc/self/x; free space on /out, called so (or raise the quota)"),
}


@pytest.mark.parametrize("number", MESSAGES, ids=errno.errorcode.get)
def test_os_error_names_the_path_and_the_remedy(number: int) -> None:
    code, message = MESSAGES[number]
    with pytest.raises(TokenmillError) as caught, explain_os_errors(Path("/out"), "called so"):
        raise OSError(number, os.strerror(number), "/proc/self/x")
    assert message in str(caught.value) and "/proc/self/x" in str(caught.value)
    assert caught.value.exit_code == code
    assert isinstance(caught.value, RequestError if code == 2 else TransientError)
    # `write` raises its errors without a path.
    with pytest.raises(TokenmillError, match="/out"), explain_os_errors(Path("/out")):
        raise OSError(number, os.strerror(number))


def test_other_errors_are_unchanged() -> None:
    for error in (OSError("a library's own"), ValueError("x"), MachineError("y")):
        with pytest.raises(type(error)) as caught, explain_os_errors(Path("/out")):
            raise error
        assert caught.value is error


def test_file_above_the_limit_ends_with_2(tmp_path: Path) -> None:
    (tmp_path / "in").mkdir()
    (tmp_path / "in/a.jsonl").write_bytes(b'{"text": "x"}\n' * 5000)
    command = f"ulimit -f 16; exec {sys.executable} -m tokenmill extract {tmp_path}/in {tmp_path}/out --processes 1"
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, check=False)
    assert done.returncode == 2, done.stderr
    assert "ulimit -f" in done.stderr and "Traceback" not in done.stderr
