"""What the conformance tests share: the real command line and the bundled inputs."""

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def preprocess() -> Callable[..., None]:
    """Run `tokenmill preprocess` as a user does, in a process of its own; it must succeed."""
    environment = {key: value for key, value in os.environ.items() if key != "JOB_COMPLETION_INDEX"}

    def run(source: Path, output: Path, tokenizer: Path, *options: str) -> None:
        command = ["preprocess", str(source), str(output), "--tokenizer", str(tokenizer), *options]
        result = subprocess.run(
            [sys.executable, "-m", "tokenmill", *command],
            env=environment,
            capture_output=True,
            text=True,
            timeout=300,
            check=False,
        )
        assert result.returncode == 0, f"{' '.join(command)}\n{result.stdout}\n{result.stderr}"

    return run
