"""What holds for all tests."""

import os
import resource
import tempfile
from collections.abc import Generator, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, settings

settings.register_profile("untimed", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("untimed")  # a busy machine may take 0.4 s for what takes 10 ms


@pytest.fixture(scope="session", autouse=True)
def scratch_that_goes(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Let what killed processes leave behind lie below pytest's own directory, which pytest removes."""
    os.environ["TMPDIR"] = tempfile.tempdir = str(tmp_path_factory.mktemp("scratch"))


@pytest.fixture(scope="session", autouse=True)
def cache_of_the_session(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Settle and judge a tokenizer once a session, and nothing in the user's own cache."""
    os.environ["XDG_CACHE_HOME"] = str(tmp_path_factory.mktemp("cache"))


TESTS = Path(__file__).parent
SLOW_DIRECTORIES = ("charts", "conformance", "recovery")
"""Whose tests all start Helm, compare whole corpora, or kill runs of the command line."""
FAST_SECONDS = 3.0
"""CPU seconds of a test without the marker `slow`, its children's included; its fixtures may take as many again."""


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark the tests of slow directories."""
    for item in items:
        if item.path.relative_to(TESTS).parts[0] in SLOW_DIRECTORIES:
            item.add_marker(pytest.mark.slow)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_setup(item: pytest.Item) -> Iterator[None]:
    """Hold the fixtures of a fast test to their bound."""
    yield from held_to_bound(item)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Iterator[None]:
    """Hold a fast test to its bound."""
    yield from held_to_bound(item)


def held_to_bound(item: pytest.Item) -> Generator[None, Any, Any]:
    """Fail a test that `make check` would run and that takes longer than it may; CPU time, as a machine may be busy."""
    before = cpu_seconds()
    result = yield
    spent = cpu_seconds() - before
    if spent > FAST_SECONDS and not any(item.get_closest_marker(name) for name in ("slow", "conformance", "e2e")):
        pytest.fail(
            f"{spent:.1f} s of CPU is more than a fast test's {FAST_SECONDS:.0f} s: mark it with pytest.mark.slow"
        )
    return result


def cpu_seconds() -> float:
    """Return the CPU time of this process and of its children that have ended."""
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(usage.ru_utime + usage.ru_stime for usage in used)
