"""What the conformance tests share: the real command line and the bundled inputs."""

import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

SETTLED = (Path(".tokenmill") / "preprocess" / "encoders", Path("tokenizer"))
"""Where a run keeps what it found of its tokenizer; a run that finds it there need not judge the encoders again."""


@pytest.fixture(scope="session")
def preprocess(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., None]:
    """Run `tokenmill preprocess` as a user does, in a process of its own; it must succeed.

    A tokenizer is judged in the first run that has it, with the encoder that it asks for, which takes
    seconds; later ones begin with what that run kept.
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
        for part in SETTLED:
            shutil.copytree(output / part, kept / tokenizer.name / part, dirs_exist_ok=True)

    return run
