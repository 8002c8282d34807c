"""JSON becomes typed records in several threads at once; a fault in native code is reported with its stacks."""

import signal
import sys
from subprocess import run
from typing import Any

import pytest
from msgspec import DecodeError, Struct

from tokenmill.core.typed_json import decode_json


class Record(Struct):
    """A record whose unknown keys are skipped."""

    name: str = ""


@pytest.mark.parametrize("kind", [Record, Any], ids=["record", "any"])
@pytest.mark.parametrize(
    "data", [b"{", b'{"a":' * 100_000, b'{"name": "\xff"}', b"\xff"], ids=["cut", "deep", "bytes", "byte"]
)
def test_all_invalid_json_raises_one_error(kind: Any, data: bytes) -> None:
    with pytest.raises(DecodeError):
        decode_json(data, kind)


FIRST_USE = """
import sys
from threading import Barrier, Thread
from msgspec import Struct, defstruct
from tokenmill.core.typed_json import convert_json, decode_json

sys.setswitchinterval(1e-7)  # threads change in the middle of the first use of a type
results = []

def use(kind, start):
    start.wait()
    results.append(convert_json({"a": {"b": 1}, "c": 2}, kind).c)
    results.append(decode_json(b'{"a": {"b": 1}, "c": 2}', kind).a.b)

for number in range(ROUNDS):
    inner = defstruct("Inner", [("b", int)])
    kind = defstruct("Outer", [("a", inner), ("c", int)])
    start = Barrier(2)
    threads = [Thread(target=use, args=(kind, start)) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
print(sum(results))
"""


def test_two_threads_use_a_type_for_the_first_time() -> None:
    """Preprocess reads records in threads; it ended with SIGSEGV when two of them were the first."""
    rounds = 2000
    result = run(
        [sys.executable, "-c", FIRST_USE.replace("ROUNDS", str(rounds))], capture_output=True, text=True, check=False
    )
    assert (result.returncode, result.stdout, result.stderr) == (0, f"{rounds * 6}\n", "")


FAULT = """
import os, signal
import tokenmill.cli
from tokenmill.__main__ import main

def read_a_null_pointer():
    os.kill(os.getpid(), signal.SIGSEGV)

tokenmill.cli.console = read_a_null_pointer
main()
"""


def test_a_fault_in_native_code_writes_the_stacks() -> None:
    result = run([sys.executable, "-c", FAULT], capture_output=True, text=True, check=False)
    assert result.returncode == -signal.SIGSEGV
    assert "Segmentation fault" in result.stderr and "in read_a_null_pointer" in result.stderr
