"""Fixtures of the tests with a real Slurm."""

from collections.abc import Iterator

import pytest

from support.slurm import Slurm, running_slurm


@pytest.fixture(scope="session")
def slurm() -> Iterator[Slurm]:
    """Run a Slurm for all tests of this process."""
    with running_slurm() as running:
        yield running
