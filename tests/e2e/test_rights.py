"""Each chart is installed, upgraded and uninstalled by somebody who has just the rights of examples/roles.yaml."""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path

import pytest

from e2e.cluster import CLAIM, Account, Namespace, kubeconfig_for
from support.rendering import REQUIRED, STAGES

pytestmark = pytest.mark.e2e

DATA = f"--set storage.pvcName={CLAIM}"
TRAINING = f"charts/megatron-training -f values/clusters/local.yaml {DATA}"
CHARTS = {
    **{stage: (["data"], f"charts/dataset-{stage} {DATA} --set {REQUIRED[stage][0]}") for stage in STAGES},
    "pipeline": (["data", "pipeline"], f"charts/dataset-pipeline {DATA} --set dataset.root=a,dataset.repo=a/b"),
    "pytorchjob": (["data", "training"], f"{TRAINING} --set dataset.buildIndex.enabled=true"),
    "storage": (["storage"], "charts/shared-storage --set pvc.name=asked,existing.storageClassName=none"),
}
CHANGED = dict.fromkeys((*STAGES, "pipeline"), " --set workers=2")
CHANGED |= {"pytorchjob": " --set training.iterations=2000", "storage": ""}


@pytest.fixture(scope="module")
def place(new_namespace: Callable[[str], AbstractContextManager[Namespace]]) -> Iterator[Namespace]:
    """Make a namespace with shared storage and the Roles."""
    with new_namespace("rights") as made:
        made.make_storage()
        made.admin.does("kubectl apply -f examples/roles.yaml")
        yield made


def who_may(place: Namespace, name: str, roles: list[str], directory: Path) -> Account:
    """Make an account with some of the Roles and no other right."""
    place.admin.does(f"kubectl create serviceaccount {name}")
    for role in roles:
        binding = f"kubectl create rolebinding {name}-{role} --role=tokenmill-{role}"
        place.admin.does(f"{binding} --serviceaccount={place.name}:{name}")
    token = place.admin.does(f"kubectl create token {name} --duration=1h").strip()
    return Account(kubeconfig_for(place.admin, place.name, token, directory / f"{name}.json"), place.user.directory)


@pytest.mark.parametrize("program", ["helm", "helm4"])
@pytest.mark.parametrize("case", CHARTS)
def test_a_chart_takes_no_right_but_those_of_its_roles(
    place: Namespace, case: str, program: str, tmp_path: Path
) -> None:
    roles, line = CHARTS[case]
    release = f"{case}-{program}"
    line = line.replace("pvc.name=asked", f"pvc.name=asked-{program}")
    account = who_may(place, release, roles, tmp_path)
    assert "STATUS: deployed" in account.does(f"{program} install {release} {line}")
    account.does(f"{program} upgrade {release} {line}")
    account.does(f"{program} upgrade {release} {line}{CHANGED[case]}")
    if case != "storage":
        account.does("kubectl describe pods")
        account.does(f"{program} rollback {release} 2")
    account.does(f"{program} uninstall {release} --wait --timeout 2m", timeout=200)


def test_the_other_engines_need_no_right_that_is_not_theirs(place: Namespace, tmp_path: Path) -> None:
    """A JobSet's user may not look at PyTorchJobs, nor a PyTorchJob's at JobSets; both are refused the other engine."""
    place.admin.does(
        "kubectl create role jobset-training --verb=get,list,watch,create,patch,delete"
        " --resource=configmaps,services,deployments.apps,replicasets.apps"
    )
    account = who_may(place, "jobset", ["data", "pipeline"], tmp_path)
    place.admin.does(
        f"kubectl create rolebinding jobset-more --role=jobset-training --serviceaccount={place.name}:jobset"
    )
    account.does(f"helm install by-jobset {TRAINING} --set engine=jobset")
    ended = account.run(f"helm upgrade by-jobset {TRAINING}")
    assert ended.code and "runs as a JobSet, and engine=pytorchjob" in ended.err, ended.err
    account.does("helm uninstall by-jobset --wait --timeout 2m", timeout=200)


def test_who_may_not_look_says_so(place: Namespace, tmp_path: Path) -> None:
    place.admin.does(
        "kubectl create role jobs-alone --verb=get,list,watch,create,patch,delete --resource=jobs.batch,pods"
    )
    place.admin.does("kubectl create role helm-alone --verb=get,list,create,update,delete --resource=secrets")
    place.admin.does("kubectl create role root --verb=get --resource=configmaps --resource-name=kube-root-ca.crt")
    account = who_may(place, "blind", [], tmp_path)
    for role in ("jobs-alone", "helm-alone", "root"):
        place.admin.does(f"kubectl create rolebinding blind-{role} --role={role} --serviceaccount={place.name}:blind")
    line = f"charts/dataset-extract {DATA} --set dataset.inputPath=a"
    assert "forbidden" in account.run(f"helm install blind {line}").err
    account.does(f"helm install blind {line} --set checkCluster=false")
    account.does("helm uninstall blind --wait --timeout 2m", timeout=200)
