"""Fixtures of the end-to-end tests, which run against the cluster of KUBECONFIG: `make e2e`.

The node must have the jobs image, and see a directory of this machine under the same path. If the cluster's node is
another machine or a container, TOKENMILL_E2E_PATH specifies such a directory.
"""

import os
import re
import shutil
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path

import pytest

from e2e.cluster import Account, Namespace, begin_removal, clone, end_removal, has_api, make_namespace, node_name
from e2e.corpus import run_locally, serve, write_hub

HERE = Path(__file__).parent
ENGINES = {
    "pytorchjob": "kubeflow.org",
    "jobset": "jobset.x-k8s.io",
    "trainjob": "trainer.kubeflow.org",
}
"""The API group of each engine."""
LONGEST = (
    "test_training",
    "test_chat",
    "test_disruption",
    "test_trainjob",
    "test_rollback",
    "test_guides",
    "test_kueue",
    "test_upgrade",
    "test_dry_run",
    "test_pipeline_chart",
)
"""Modules of more than two minutes, the longest first. At the end of a run, no process waits for one of them."""


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Sort the modules by their duration, for `--no-loadscope-reorder`."""
    order = {name: position for position, name in enumerate(LONGEST)}
    items.sort(key=lambda item: order.get(item.path.stem, len(LONGEST)) if item.path.parent == HERE else len(LONGEST))


@pytest.fixture(scope="session")
def caller(tmp_path_factory: pytest.TempPathFactory) -> Account:
    """Return the account that runs the tests, in a clone of the tree."""
    missing = [name for name in ("kubectl", "helm") if shutil.which(name) is None]
    if "KUBECONFIG" not in os.environ or missing:
        pytest.exit(f"the end-to-end tests need KUBECONFIG, and {', '.join(missing) or 'kubectl and helm'} on PATH", 2)
    account = Account(Path(os.environ["KUBECONFIG"]), clone(tmp_path_factory.mktemp("clone")))
    try:
        node_name(account)
    except AssertionError as problem:
        pytest.exit(str(problem), 2)  # no test could pass, and each test would wait for its timeout
    return account


@pytest.fixture(scope="session")
def require_api(caller: Account) -> Callable[[str], None]:
    """Return a function that skips the test if the cluster has no objects of an API group."""
    groups: dict[str, bool] = {}

    def require(group: str) -> None:
        if group not in groups:
            groups[group] = has_api(caller, group)
        if not groups[group]:
            pytest.skip(f"this cluster has no API {group}")

    return require


@pytest.fixture
def engine(request: pytest.FixtureRequest, require_api: Callable[[str], None]) -> str:
    """Return the engine that the test is parametrized with, if the cluster has it."""
    name: str = request.param
    require_api(ENGINES[name])
    return name


@pytest.fixture(scope="session")
def leaving(caller: Account) -> Iterator[list[Namespace]]:
    """Collect the namespaces to remove, and wait for them at the end: each removal takes ten seconds."""
    namespaces: list[Namespace] = []
    yield namespaces
    for namespace in namespaces:
        end_removal(namespace)


@pytest.fixture(scope="session")
def new_namespace(
    caller: Account, leaving: list[Namespace], tmp_path_factory: pytest.TempPathFactory
) -> Callable[[str], AbstractContextManager[Namespace]]:
    """Return a context manager that creates a namespace with this prefix, and removes it at its end."""

    @contextmanager
    def make(name: str) -> Iterator[Namespace]:
        name = f"{name}-{os.urandom(3).hex()}"
        base = os.environ.get("TOKENMILL_E2E_PATH")
        data = (Path(base) if base else tmp_path_factory.mktemp("node")) / name
        namespace = make_namespace(name, caller, data, tmp_path_factory.mktemp("kubeconfig"))
        leaving.append(namespace)
        try:
            yield namespace
        finally:
            begin_removal(namespace)

    return make


@pytest.fixture(scope="module")
def namespace(
    new_namespace: Callable[[str], AbstractContextManager[Namespace]], request: pytest.FixtureRequest
) -> Iterator[Namespace]:
    """Create a namespace with shared storage for a module."""
    with new_namespace(re.sub("[^a-z0-9]+", "-", request.module.__name__.rpartition(".")[2])) as namespace:
        namespace.make_storage()
        yield namespace


@pytest.fixture(scope="session")
def hub_files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write the files of the test Hub."""
    return write_hub(tmp_path_factory.mktemp("hub"))


@pytest.fixture(scope="module")
def with_hub(namespace: Namespace, hub_files: Path) -> Namespace:
    """Return the module's namespace with a Hub in it."""
    namespace.start_hub(hub_files)
    return namespace


@pytest.fixture(scope="session")
def undisturbed(hub_files: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the output of a local run of the four stages, which no test changes."""
    with serve(hub_files) as hub:
        return run_locally(hub, tmp_path_factory.mktemp("local") / "slimpajama")
