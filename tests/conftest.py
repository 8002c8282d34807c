"""What holds for all tests."""

import os
import tempfile

import pytest
from hypothesis import HealthCheck, settings

settings.register_profile("untimed", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("untimed")  # a busy machine may take 0.4 s for what takes 10 ms


@pytest.fixture(scope="session", autouse=True)
def scratch_that_goes(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Let what killed processes leave behind lie below pytest's own directory, which pytest removes."""
    os.environ["TMPDIR"] = tempfile.tempdir = str(tmp_path_factory.mktemp("scratch"))
