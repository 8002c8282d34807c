"""Faults of a run under JobSet and TrainJob, whose pods end and start together: only unsaved iterations are lost."""

import pytest

from e2e.cluster import Namespace, wait_for
from e2e.training import Training, make_dataset

pytestmark = pytest.mark.e2e

EVERY_5 = "--set training.saveInterval=5"


@pytest.fixture(scope="module")
def place(namespace: Namespace, tmp_path_factory: pytest.TempPathFactory) -> Namespace:
    """Return the module's namespace with a finished dataset on its volume."""
    make_dataset(namespace, tmp_path_factory.mktemp("dataset"))
    return namespace


def pod_ids(run: Training) -> set[str]:
    """Return the uids of the pods of a run that are not being deleted."""
    return {p["metadata"]["uid"] for p in run.pods() if "deletionTimestamp" not in p["metadata"]}


def wait_for_new_pods(run: Training, before: set[str]) -> None:
    """Wait until both pods of a run are other ones than before."""
    assert wait_for(lambda: len(pod_ids(run)) == 2 and before.isdisjoint(pod_ids(run)), 120), run.describe()


@pytest.mark.parametrize("engine", ["jobset", "trainjob"], indirect=True)
def test_pods_that_start_together_survive_faults(place: Namespace, engine: str) -> None:
    """A killed program, a forced deletion, an eviction, an unchanged upgrade and a changed one, one after the other."""
    run = Training(place, f"faults-{engine}", engine)
    run.install(100_000, EVERY_5, step=0.2)
    run.wait_for_iteration(5)
    before, pods = run.run()["metadata"]["uid"], pod_ids(run)

    run.account.check(f"helm upgrade {run.command(100_000, EVERY_5, step=0.2)}")
    assert run.run()["metadata"]["uid"] == before
    assert pod_ids(run) == pods, "an upgrade with the same values restarts nothing"

    for fault in (run.kill, run.namespace.kill, run.evict):
        pods, saved = pod_ids(run), run.iteration()
        assert wait_for(lambda saved=saved: run.logged() > saved, 90), run.describe()
        fault(run.pods()[-1]["metadata"]["name"])
        wait_for_new_pods(run, pods)
        run.wait_for_iteration(max(saved, run.iteration()) + 1)

    pods = pod_ids(run)
    target = run.iteration() + 40
    run.account.check(f"helm upgrade {run.command(target, EVERY_5, step=0.05)}")
    assert run.run()["metadata"]["uid"] != before
    wait_for_new_pods(run, pods)
    run.succeed()
    run.assert_exact(run.iteration())
    run.account.check(f"helm uninstall {run.name}")
