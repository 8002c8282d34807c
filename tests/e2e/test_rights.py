"""Each chart is installed, upgraded and uninstalled by an account that has only the rights of examples/roles.yaml."""

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
    **{stage: (["data"], f"charts/dataset-{stage} {DATA} --set {','.join(REQUIRED[stage])}") for stage in STAGES},
    "pipeline": (
        ["data", "pipeline"],
        f"charts/dataset-pipeline {DATA} --set dataset.root=a,dataset.repo=a/b,preprocess.tokenizer.name=a/b",
    ),
    "pytorchjob": (["data", "training"], f"{TRAINING} --set dataset.buildIndex.enabled=true"),
    "storage": (["storage"], "charts/shared-storage --set pvc.name=asked,existing.storageClassName=none"),
}
CHANGED = dict.fromkeys((*STAGES, "pipeline"), " --set workers=2")
CHANGED |= {"pytorchjob": " --set training.iterations=2000", "storage": ""}


@pytest.fixture(scope="module")
def place(new_namespace: Callable[[str], AbstractContextManager[Namespace]]) -> Iterator[Namespace]:
    """Create a namespace with shared storage and the Roles."""
    with new_namespace("rights") as namespace:
        namespace.make_storage()
        namespace.admin.check("kubectl apply -f examples/roles.yaml")
        yield namespace


def make_account(place: Namespace, name: str, roles: list[str], directory: Path) -> Account:
    """Create an account with some of the Roles and no other right."""
    place.admin.check(f"kubectl create serviceaccount {name}")
    for role in roles:
        binding = f"kubectl create rolebinding {name}-{role} --role=tokenmill-{role}"
        place.admin.check(f"{binding} --serviceaccount={place.name}:{name}")
    token = place.admin.check(f"kubectl create token {name} --duration=1h").strip()
    return Account(kubeconfig_for(place.admin, place.name, token, directory / f"{name}.json"), place.user.directory)


@pytest.mark.parametrize("program", ["helm", "helm4"])
@pytest.mark.parametrize("case", CHARTS)
def test_a_chart_needs_only_the_rights_of_its_roles(place: Namespace, case: str, program: str, tmp_path: Path) -> None:
    roles, line = CHARTS[case]
    release = f"{case}-{program}"
    line = line.replace("pvc.name=asked", f"pvc.name=asked-{program}")
    account = make_account(place, release, roles, tmp_path)
    assert "STATUS: deployed" in account.check(f"{program} install {release} {line}")
    account.check(f"{program} upgrade {release} {line}")
    account.check(f"{program} upgrade {release} {line}{CHANGED[case]}")
    if case != "storage":
        account.check("kubectl describe pods")
        account.check(f"{program} rollback {release} 2")
    account.check(f"{program} uninstall {release} --wait --timeout 2m", timeout=200)


def test_an_engine_needs_no_right_of_the_other_engine(place: Namespace, tmp_path: Path) -> None:
    """A user of JobSets may not read PyTorchJobs, and the reverse; for both the other engine is refused."""
    place.admin.check(
        "kubectl create role jobset-training --verb=get,list,watch,create,patch,delete"
        " --resource=configmaps,services,deployments.apps,replicasets.apps"
    )
    account = make_account(place, "jobset", ["data", "pipeline"], tmp_path)
    place.admin.check(
        f"kubectl create rolebinding jobset-more --role=jobset-training --serviceaccount={place.name}:jobset"
    )
    account.check(f"helm install by-jobset {TRAINING} --set engine=jobset")
    ended = account.run(f"helm upgrade by-jobset {TRAINING}")
    assert ended.code and "runs as a JobSet: engine=pytorchjob" in ended.err, ended.err
    account.check("helm uninstall by-jobset --wait --timeout 2m", timeout=200)


def test_missing_read_rights_are_reported(place: Namespace, tmp_path: Path) -> None:
    place.admin.check(
        "kubectl create role jobs-alone --verb=get,list,watch,create,patch,delete --resource=jobs.batch,pods"
    )
    place.admin.check("kubectl create role helm-alone --verb=get,list,create,update,delete --resource=secrets")
    place.admin.check("kubectl create role root --verb=get --resource=configmaps --resource-name=kube-root-ca.crt")
    account = make_account(place, "blind", [], tmp_path)
    for role in ("jobs-alone", "helm-alone", "root"):
        place.admin.check(f"kubectl create rolebinding blind-{role} --role={role} --serviceaccount={place.name}:blind")
    line = f"charts/dataset-extract {DATA} --set dataset.inputPath=a"
    assert "forbidden" in account.run(f"helm install blind {line}").err
    account.check(f"helm install blind {line} --set checkCluster=false")
    account.check("helm uninstall blind --wait --timeout 2m", timeout=200)
