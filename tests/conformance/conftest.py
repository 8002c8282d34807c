"""Fixtures of the conformance tests: the real command line, the bundled inputs, and Megatron-LM's Python."""

import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

TOKENIZER_FILES = (Path(".tokenmill") / "preprocess" / "encoders", Path("tokenizer"))
"""Results of the parity gate and the resolved tokenizer; a run that has these files does not run the gate again."""

HERE = Path(__file__).parent


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Keep the tests of a file on one worker of pytest, which makes their fixtures once (`--dist loadgroup`)."""
    for item in items:
        if HERE in item.path.parents and not item.get_closest_marker("xdist_group"):
            item.add_marker(pytest.mark.xdist_group(item.path.relative_to(HERE).as_posix()))


@pytest.fixture(scope="session", autouse=True)
def single_threads() -> None:
    """Let torch compute with one thread in each process: on few processors, more threads wait for each other."""
    os.environ.setdefault("OMP_NUM_THREADS", "1")


@pytest.fixture(scope="session")
def megatron_python() -> str:
    """Return the Python with megatron-core that `make conformance` names; without it, the test fails."""
    path = os.environ.get("TOKENMILL_MEGATRON_PYTHON")
    if not path:
        pytest.fail("TOKENMILL_MEGATRON_PYTHON is not set to a Python with megatron-core: run make conformance")
    return path


@pytest.fixture(scope="session")
def megatron_fork(megatron_python: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[str]]:
    """Return a command that runs a program as this Python does, in a fork of a process that has imported Megatron-LM.

    A checkout of Megatron-LM, TOKENMILL_MEGATRON_LM, has other modules; then the command is this Python.
    """
    if os.environ.get("TOKENMILL_MEGATRON_LM"):
        yield [megatron_python]
        return
    program = str(HERE / "fork_with_megatron.py")
    path = tmp_path_factory.mktemp("fork") / "socket"
    server = subprocess.Popen(
        [megatron_python, "-W", "ignore", program, str(path)],
        env={**os.environ, "CUDA_VISIBLE_DEVICES": "", "HF_HUB_OFFLINE": "1"},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert server.stdin and server.stdout
    assert server.stdout.readline() == "ready\n"
    try:
        yield [sys.executable, program, "--run", str(path)]
    finally:
        server.stdin.close()
        server.wait(30)
        server.stdout.close()


@pytest.fixture(scope="session")
def preprocess(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., None]:
    """Return a function that runs `tokenmill preprocess` as a subprocess, which must succeed.

    The first run of a tokenizer runs the parity gate, with the encoder that it requests; this takes seconds. Later runs
    start with its results.
    """
    kept = tmp_path_factory.mktemp("settled")
    environment = {key: value for key, value in os.environ.items() if key != "JOB_COMPLETION_INDEX"}

    def run(source: Path, output: Path, tokenizer: Path, *options: str) -> None:
        if (kept / tokenizer.name).exists() and not output.exists():
            shutil.copytree(kept / tokenizer.name, output)
        command = ["preprocess", str(source), str(output), "--tokenizer", str(tokenizer), *options]
        result = subprocess.run(
            [sys.executable, "-m", "tokenmill", *command],
            env=environment,
            capture_output=True,
            text=True,
            timeout=900,
            check=False,
        )
        assert result.returncode == 0, f"{' '.join(command)}\n{result.stdout}\n{result.stderr}"
        for part in TOKENIZER_FILES:
            shutil.copytree(output / part, kept / tokenizer.name / part, dirs_exist_ok=True)

    return run
