"""Every chart with every overlay meant for it, as a real API server takes it in a restricted namespace."""

from itertools import cycle
from pathlib import Path

import pytest

from e2e.cluster import CLAIM, ROOT, Namespace
from support.rendering import STAGES, applicable_overlays, corpora_on_hardware, overlays

pytestmark = pytest.mark.e2e

FREE = "kubectl apply --dry-run=server -f -"


@pytest.mark.parametrize("stage", STAGES)
def test_the_server_takes_a_stage(namespace: Namespace, stage: str) -> None:
    pairs: list[tuple[Path, ...]] = [(), *corpora_on_hardware()]
    for pair in pairs:
        line = f"helm template one charts/dataset-{stage} --set storage.pvcName={CLAIM}"
        line += "".join(f" -f {file.relative_to(ROOT)}" for file in pair)
        if not pair:
            line += f" --set dataset.{'outputPath' if stage == 'download' else 'inputPath'}=corpus"
        taken = namespace.user.run(FREE, namespace.user.does(line))
        assert taken.code == 0, f"{line}\n{taken.err}"
        assert "would violate PodSecurity" not in taken.err
        assert "job.batch/" in taken.out and "pod/" in taken.out


@pytest.mark.parametrize("engine", ["pytorchjob", "jobset"])
def test_the_server_takes_a_training_run(namespace: Namespace, engine: str) -> None:
    for model, cluster in zip(overlays("models"), cycle(applicable_overlays("megatron-training", "clusters")), strict=False):
        line = f"helm template run charts/megatron-training --set storage.pvcName={CLAIM},engine={engine}"
        line += "".join(f" -f {file.relative_to(ROOT)}" for file in (model, cluster))
        line += " --set dataset.buildIndex.enabled=true"
        line += " --set training.nodes=128" if cluster.stem == "local" else ""
        taken = namespace.admin.run(FREE, namespace.admin.does(line))
        assert taken.code == 0, f"{line}\n{taken.err}"
        assert f"{engine}." in taken.out and "job.batch/run-index" in taken.out


@pytest.mark.parametrize(
    "settings",
    [
        "backend=existing",
        "backend=existing --set existing.volumeName=one",
        "backend=local --set local.path=/srv,local.nodeName=n",
    ],
)
def test_the_server_takes_the_storage(namespace: Namespace, settings: str) -> None:
    rendered = namespace.admin.does(f"helm template one charts/shared-storage --set pvc.name=other --set {settings}")
    assert "persistentvolumeclaim/other" in namespace.admin.does(FREE, rendered)


def everything() -> str:
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
def test_the_server_takes_every_option_at_once(namespace: Namespace, stage: str) -> None:
    namespace.user.run("kubectl create serviceaccount one")  # the pod of `helm test` is refused without it
    line = f"helm template one charts/dataset-{stage} --set storage.pvcName={CLAIM} --set dataset.inputPath=corpus"
    taken = namespace.user.run(FREE, namespace.user.does(f"{line} {everything()}"))
    assert taken.code == 0, taken.err
    assert "would violate PodSecurity" not in taken.err
    assert "unknown field" not in taken.err
    assert taken.out.count("networkpolicy.networking.k8s.io/") == 2
