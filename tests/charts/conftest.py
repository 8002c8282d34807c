"""Fixtures for the tests of several charts."""

from pathlib import Path

import pytest

from support.generation import copy_of_sources


@pytest.fixture
def copy(tmp_path: Path) -> Path:
    """Return a copy of the charts' sources and products, which the test may change."""
    return copy_of_sources(tmp_path)
