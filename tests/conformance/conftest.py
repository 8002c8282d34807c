"""Fixtures of the conformance tests: the real command line and the bundled inputs."""

import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

TOKENIZER_FILES = (Path(".tokenmill") / "preprocess" / "encoders", Path("tokenizer"))
"""Results of the parity gate and the resolved tokenizer; a run that has these files does not run the gate again."""


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
