"""Settings, fixtures and limits of all tests."""

import os
import resource
import tempfile
from collections.abc import Generator, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, settings

from support.sweep import SEED

settings.register_profile("untimed", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("untimed")  # a busy machine may take 0.4 s for a test of 10 ms


@pytest.fixture(scope="session", autouse=True)
def temporary_scratch(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Put the temporary files of killed processes below pytest's own directory, which pytest removes."""
    os.environ["TMPDIR"] = tempfile.tempdir = str(tmp_path_factory.mktemp("scratch"))


@pytest.fixture(scope="session", autouse=True)
def session_cache(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Resolve and check a tokenizer once for all workers of pytest, and keep the user's own cache unchanged."""
    base = tmp_path_factory.getbasetemp()
    cache = (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / "cache"
    cache.mkdir(mode=0o700, exist_ok=True)
    os.environ["XDG_CACHE_HOME"] = str(cache)


os.environ.setdefault("GOGC", "off")
os.environ.setdefault("GOMEMLIMIT", "512MiB")
"""Helm and kubectl end within a second: without garbage collection, they take a quarter less CPU time."""

TESTS = Path(__file__).parent
SLOW_DIRECTORIES = ("charts", "conformance", "recovery")
"""Directories of tests that start Helm, compare complete corpora, or kill runs of the command line."""
FAST_SECONDS = 6.0
"""CPU seconds of a test without the marker `slow`, with its child processes; its fixtures may take as many.

The limit is twice what the slowest fast tests take on two idle cores, because CPU time depends on the machine."""


def pytest_report_header() -> str:
    """Name the seed that repeats the drawn cases of this commit."""
    return f"drawn cases: TOKENMILL_KILL_SEED={SEED}"


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark the tests of slow directories."""
    for item in items:
        if item.path.relative_to(TESTS).parts[0] in SLOW_DIRECTORIES:
            item.add_marker(pytest.mark.slow)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_setup(item: pytest.Item) -> Iterator[None]:
    """Limit the CPU time of a fast test's fixtures."""
    yield from limit_cpu_time(item)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Iterator[None]:
    """Limit the CPU time of a fast test."""
    yield from limit_cpu_time(item)


@pytest.hookimpl(trylast=True)
def pytest_configure(config: pytest.Config) -> None:
    """Print the names of failed tests at once, in the process that prints."""
    if reporter := config.pluginmanager.get_plugin("terminalreporter"):
        config.pluginmanager.register(FailureNames(reporter))


class FailureNames:
    """Print the name of each failed test when it has failed: a run that is ended early prints no summary."""

    def __init__(self, reporter: pytest.TerminalReporter) -> None:
        self._reporter = reporter

    @pytest.hookimpl(trylast=True)
    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed:
            self._reporter.write_line(f" {report.nodeid} ({report.when}, {report.duration:.0f} s)")


def limit_cpu_time(item: pytest.Item) -> Generator[None, Any, Any]:
    """Fail a fast test above its limit, which is CPU time because a machine may be busy."""
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
    usages = [resource.getrusage(process) for process in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(usage.ru_utime + usage.ru_stime for usage in usages)
