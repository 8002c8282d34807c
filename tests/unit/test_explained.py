"""Errors of the operating system: the message, and the exit code that shows whether a retry can help."""

import errno
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from tokenmill.core.files.explain import explain_os_errors
from tokenmill.core.files.named_file import naming, open_file
from tokenmill.errors import MachineError, RequestError, TokenmillError, TransientError

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
    errno.EUCLEAN: (1, "check the file system of /out if the error occurs again"),
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
    if number == errno.EUCLEAN:
        return
    # `write` raises its errors without a path.
    with pytest.raises(TokenmillError, match="/out"), explain_os_errors(Path("/out")):
        raise OSError(number, os.strerror(number))


def test_a_full_directory_for_temporary_files_is_named_and_not_the_output(tmp_path: Path) -> None:
    scratch = Path(tempfile.gettempdir()) / "tokenmill-x" / "tokenizer.json"
    with pytest.raises(MachineError, match="which TMPDIR names") as caught, explain_os_errors(Path("/out")):
        raise OSError(errno.ENOSPC, "No space left on device", str(scratch))
    assert "/out" not in str(caught.value)
    candidates = "No usable temporary directory found in ['/tmp', '/var/tmp']"
    with pytest.raises(RequestError, match="set TMPDIR to another directory") as caught, explain_os_errors(Path("/o")):
        raise FileNotFoundError(errno.ENOENT, candidates)
    assert "removed" not in str(caught.value)


def test_a_file_names_itself_and_the_operation(tmp_path: Path) -> None:
    full = Path("/dev/full")
    with pytest.raises(MachineError, match="no space left writing /dev/full"), explain_os_errors(tmp_path):
        open_file(full, "r+b", buffering=0).write(b"x")
    message = f"cannot read {tmp_path}: "
    with pytest.raises(RequestError, match=message), explain_os_errors(Path("/out")), naming("read", tmp_path):
        raise IsADirectoryError(errno.EISDIR, "Is a directory")
    with pytest.raises(MachineError, match="no space left writing /dev/full"), explain_os_errors(tmp_path):
        full.write_bytes(b"x")


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


def test_a_closed_standard_output_is_no_error() -> None:
    command = f"exec {sys.executable} -m tokenmill fit --model 125m --gpus 8 --gpu-memory 80 >&-"
    ended = subprocess.run(["bash", "-c", command], stderr=subprocess.PIPE, text=True, timeout=200, check=False)
    assert (ended.returncode, ended.stderr) == (0, "")


@pytest.mark.parametrize("unbuffered", ["", "1"])
@pytest.mark.parametrize("arguments", ["--help", "fit --model 125m --gpus 8 --gpu-memory 80"])
def test_a_full_standard_output_is_named(arguments: str, unbuffered: str) -> None:
    command = [sys.executable, "-m", "tokenmill", *arguments.split()]
    environment = os.environ | {"PYTHONUNBUFFERED": unbuffered}
    with Path("/dev/full").open("w") as full:
        ended = subprocess.run(
            command, env=environment, stdout=full, stderr=subprocess.PIPE, text=True, timeout=200, check=False
        )
    assert ended.returncode == 2
    assert ended.stderr.startswith("error: no space left writing standard output; free space on its volume ")
