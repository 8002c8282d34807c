"""Every chart with its overlays: a real API server accepts the objects in a restricted namespace."""

from itertools import cycle
from pathlib import Path

import pytest

from e2e.cluster import CLAIM, ROOT, Namespace
from support.rendering import NEEDED, REQUIRED, STAGES, applicable_overlays, corpora_on_hardware, overlays

pytestmark = pytest.mark.e2e

DRY_RUN = "kubectl apply --dry-run=server -f -"


@pytest.mark.parametrize("stage", STAGES)
def test_the_server_accepts_a_stage(namespace: Namespace, stage: str) -> None:
    pairs: list[tuple[Path, ...]] = [(), *corpora_on_hardware()]
    for pair in pairs:
        line = f"helm template one charts/dataset-{stage} --set storage.pvcName={CLAIM}"
        line += "".join(f" -f {file.relative_to(ROOT)}" for file in pair)
        line += "".join(f" --set {value}" for value in (NEEDED if pair else REQUIRED)[stage])
        applied = namespace.user.run(DRY_RUN, namespace.user.check(line))
        assert applied.code == 0, f"{line}\n{applied.err}"
        assert "would violate PodSecurity" not in applied.err
        assert "job.batch/" in applied.out and "pod/" in applied.out


@pytest.mark.parametrize("engine", ["pytorchjob", "jobset"])
def test_the_server_accepts_a_run(namespace: Namespace, engine: str) -> None:
    for model, cluster in zip(
        overlays("models"), cycle(applicable_overlays("megatron-training", "clusters")), strict=False
    ):
        line = f"helm template run charts/megatron-training --set storage.pvcName={CLAIM},engine={engine}"
        line += "".join(f" -f {file.relative_to(ROOT)}" for file in (model, cluster))
        line += " --set dataset.buildIndex.enabled=true"
        line += " --set training.nodes=128" if cluster.stem == "local" else ""
        applied = namespace.admin.run(DRY_RUN, namespace.admin.check(line))
        assert applied.code == 0, f"{line}\n{applied.err}"
        assert f"{engine}." in applied.out and "job.batch/run-index" in applied.out


@pytest.mark.parametrize(
    "settings",
    [
        "backend=existing",
        "backend=existing --set existing.volumeName=one",
        "backend=local --set local.path=/srv,local.nodeName=n",
    ],
)
def test_the_server_accepts_storage(namespace: Namespace, settings: str) -> None:
    rendered = namespace.admin.check(f"helm template one charts/shared-storage --set pvc.name=other --set {settings}")
    assert "persistentvolumeclaim/other" in namespace.admin.check(DRY_RUN, rendered)


def all_options() -> str:
    """Return settings that render each optional part of a stage's chart."""
    more = {
        "workers": "7",
        "processes": "2",
        "image.tag": "20260422",
        "image.digest": f"sha256:{64 * '0'}",
        "networkPolicy.enabled": "true",
        "storage.outputPvcName": "other",
        "storage.subPath": "a/b",
        "storage.outputSubPath": "c",
        "dataset.outputPath": "out",
        "hub.tokenSecret.name": "token",
        "environment.caBundle.configMap": "ca",
        "job.naming": "hash",
        "job.maxFailedIndexes": "3",
        "job.activeDeadlineSeconds": "100",
        "job.ttlSecondsAfterFinished": "100",
        "serviceAccount.create": "true",
        "kueue.queueName": "queue",
        "kueue.priorityClass": "low",
        "kueue.minWorkers": "2",
        "priorityClassName": "system-cluster-critical",
        "schedulerName": "mine",
        "nodeSelector.pool": "cpu",
        "imagePullSecrets[0].name": "registry",
        "podLabels.team": "data",
        "extraEnv[0].name": "A",
        "extraEnv[0].value": "b",
    }
    strings = {r"serviceAccount.annotations.eks\.amazonaws\.com/role-arn": "arn:aws:iam::1:role/a"}
    strings |= {r"podAnnotations.karpenter\.sh/do-not-disrupt": "true"}
    return " ".join(
        [f"--set '{key}={value}'" for key, value in more.items()]
        + [f"--set-string '{key}={value}'" for key, value in strings.items()]
        + ['--set podSecurityContext.runAsUser=null --set-json \'tolerations=[{"operator":"Exists"}]\'']
    )


@pytest.mark.parametrize("stage", STAGES[1:])
def test_the_server_accepts_all_options(namespace: Namespace, stage: str) -> None:
    namespace.user.run("kubectl create serviceaccount one")  # the pod of `helm test` needs it
    line = f"helm template one charts/dataset-{stage} --set storage.pvcName={CLAIM},{','.join(REQUIRED[stage])}"
    applied = namespace.user.run(DRY_RUN, namespace.user.check(f"{line} {all_options()}"))
    assert applied.code == 0, applied.err
    assert "would violate PodSecurity" not in applied.err
    assert "unknown field" not in applied.err
    assert applied.out.count("networkpolicy.networking.k8s.io/") == 2
