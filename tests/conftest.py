"""What holds for all tests."""

import os
import tempfile

import pytest


@pytest.fixture(scope="session", autouse=True)
def scratch_that_goes(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Let what killed processes leave behind lie below pytest's own directory, which pytest removes."""
    os.environ["TMPDIR"] = tempfile.tempdir = str(tmp_path_factory.mktemp("scratch"))
