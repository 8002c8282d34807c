"""Faults of a run under Kubeflow Trainer 2, whose pods end and start together: only unsaved iterations are lost."""

from collections.abc import Callable

import pytest

from e2e.cluster import Namespace, wait_for
from e2e.training import Training, make_dataset

pytestmark = pytest.mark.e2e

EVERY_5 = "--set training.saveInterval=5"


@pytest.fixture(scope="module")
def place(
    require_api: Callable[[str], None], namespace: Namespace, tmp_path_factory: pytest.TempPathFactory
) -> Namespace:
    """Return the module's namespace with a finished dataset on its volume."""
    require_api("trainer.kubeflow.org")
    make_dataset(namespace, tmp_path_factory.mktemp("dataset"))
    return namespace


def pod_ids(run: Training) -> set[str]:
    """Return the uids of the pods of a run that are not being deleted."""
    return {p["metadata"]["uid"] for p in run.pods() if "deletionTimestamp" not in p["metadata"]}


def wait_for_new_pods(run: Training, before: set[str]) -> None:
    """Wait until both pods of a run are other ones than before."""
    assert wait_for(lambda: len(pod_ids(run)) == 2 and before.isdisjoint(pod_ids(run)), 120), run.describe()


@pytest.mark.every_change
def test_a_trainjob_survives_faults_and_changes(place: Namespace) -> None:
    """An unchanged upgrade, a forced deletion, an eviction and a changed upgrade, one after the other."""
    run = Training(place, "faults", "trainjob")
    run.install(100_000, EVERY_5, step=0.2)
    run.wait_for_iteration(5)
    before, pods = run.run()["metadata"]["uid"], pod_ids(run)
    run.account.check(f"helm upgrade {run.command(100_000, EVERY_5, step=0.2)}")
    assert run.run()["metadata"]["uid"] == before
    assert pod_ids(run) == pods, "an upgrade with the same values restarts nothing"

    saved = run.iteration()
    run.namespace.kill(run.pods()[-1]["metadata"]["name"])
    wait_for_new_pods(run, pods)
    run.wait_for_iteration(saved + 6)

    pods = pod_ids(run)
    run.evict(run.pods()[0]["metadata"]["name"])
    wait_for_new_pods(run, pods)
    pods = pod_ids(run)
    target = run.iteration() + 20
    run.account.check(f"helm upgrade {run.command(target, EVERY_5, step=0.05)}")
    assert run.run()["metadata"]["uid"] != before
    wait_for_new_pods(run, pods)
    run.succeed()
    run.assert_exact(run.iteration())
    run.account.check("helm uninstall faults")
    assert wait_for(lambda: not run.pods())
