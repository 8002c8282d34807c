"""Values that the API server would refuse, or that nobody should give: refused before a release is made of them."""

import json
from typing import Any

import pytest

from support.rendering import (
    HELMS,
    ROOT,
    documents_of,
    helm,
    render,
    render_text,
    run_training_render,
    training,
    validate_manifests,
)
from support.representative import pod_specs

STAGE = ("--set", "storage.pvcName=claim,dataset.inputPath=corpus")
BYTES = ("2GB", "2 Gi", "512m", "2gi", "-1Gi", "Gi", "1e", "", "two")
TAKEN = ("2Gi", "2G", "1.5Ti", "1000000000", "1e9", ".5Gi", "2k")


def stage(program: str = "helm", **values: Any) -> tuple[int, str]:
    """Render a stage's chart with values as JSON."""
    flags = [part for key, value in values.items() for part in ("--set-json", f"{key}={json.dumps(value)}")]
    done = helm("template", "release", ROOT / "charts/dataset-extract", *STAGE, *flags, program=program)
    return done.returncode, done.stdout + done.stderr


SIZES = ("scratch.sizeLimit", "scratch.request", "resources.limits.memory", "resources.requests.ephemeral-storage")
OF_TRAINING = ("shmSize", "network.hugepages2Mi", "tensorboard.resources.limits.memory")
OF_TRAINING += ("dataset.buildIndex.resources.requests.memory", "scratch.sizeLimit", "resources.limits.hugepages-1Gi")


@pytest.mark.parametrize("text", BYTES)
def test_a_size_that_is_no_quantity_is_refused_wherever_it_stands(text: str) -> None:
    for chart, keys in {
        "dataset-extract": SIZES,
        "dataset-pipeline": (*SIZES, "preprocess.scratch.sizeLimit", "download.resources.limits.memory"),
        "megatron-training": OF_TRAINING,
        "shared-storage": ("pvc.size",),
    }.items():
        for key in keys:
            if text == "" and key in ("network.hugepages2Mi", "pvc.size"):
                continue  # which is none
            done = helm("template", "r", ROOT / "charts" / chart, "--set-json", f"{key}={json.dumps(text)}")
            assert done.returncode and key.rpartition(".")[2] in done.stderr, (chart, key, done.stdout[-200:])


@pytest.mark.parametrize("program", HELMS)
def test_a_quantity_is_taken_in_any_of_its_forms(program: str) -> None:
    for text in TAKEN:
        validate_manifests(render_text("extract", program=program, **{"scratch.sizeLimit": text, "resources.requests.memory": "1k"}))
    for cpu in ("250m", "1.5", 2, 0.5, "100u"):
        code, said = stage(program, **{"resources.requests.cpu": cpu})
        assert code == 0, said


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "request above limit": ({"resources.requests.memory": "3Gi"}, "requests memory=3Gi, above its limit 2Gi"),
    "in other units": ({"resources": {"requests": {"cpu": "2001m"}, "limits": {"cpu": 2}}}, "above its limit 2"),
    "exponent": ({"resources.requests.memory": "1e10"}, "requests memory=1e10, above its limit 2Gi"),
    "device": ({"resources": {"requests": {"a.b/c": 1}, "limits": {"a.b/c": 2}}}, "cannot be overcommitted"),
    "volume twice": ({"extraVolumes": [{"name": "data", "emptyDir": {}}]}, 'two volumes with the name "data"'),
    "no volume": ({"extraVolumeMounts": [{"name": "x", "mountPath": "/x"}]}, 'no volume has the name "x"'),
    "place taken": (
        {"extraVolumeMounts": [{"name": "data", "mountPath": "/data"}]},
        "two volumes are mounted at /data",
    ),
    "both": (
        {"extraEnv": [{"name": "A", "value": "b", "valueFrom": {"fieldRef": {}}}]},
        "A has both value and valueFrom",
    ),
    "toleration": ({"tolerations": [{"operator": "exists"}]}, "/tolerations/0/operator"),
    "effect": ({"tolerations": [{"effect": "NoRun"}]}, "/tolerations/0/effect"),
    "label": ({"podLabels": {"team": "a/b"}}, "/podLabels/team"),
    "label's key": ({"podLabels": {"-team": "a"}}, "-team"),
    "node": ({"nodeSelector": {"pool": "a b"}}, "/nodeSelector/pool"),
    "queue": ({"kueue.queueName": "my queue"}, "/kueue/queueName"),
    "account": ({"serviceAccount.name": "My_Account"}, "/serviceAccount/name"),
    "spread": ({"topologySpreadConstraints": [{"maxSkew": 1}]}, "/topologySpreadConstraints/0"),
    "variable": ({"extraEnv": [{"name": "A=B", "value": "c"}]}, "/extraEnv/0/name"),
}


@pytest.mark.parametrize("program", HELMS)
@pytest.mark.parametrize("case", REFUSED)
def test_what_the_api_server_would_refuse_is_refused_before_there_is_a_revision(case: str, program: str) -> None:
    values, message = REFUSED[case]
    code, said = stage(program, **values)
    assert code and message in said, said


SECRETS = {
    "HF_TOKEN": "abc",
    "WANDB_API_KEY": "0123456789",
    "wandb_api_key": "0a",
    "AWS_SECRET_ACCESS_KEY": "a/b+c",
    "AWS_ACCESS_KEY_ID": "X",
    "DB_PASSWORD": "12345678",
    "GITHUBTOKEN": "x",
    "AZURE_STORAGE_SAS_TOKEN": "sv=2024",
    "TOKEN_PROD": "x",
    "MY_PRIVATE_KEY": "x",
    "KEY": "x",
    "CREDENTIALS": "opaque",
    "HTTPS_PROXY": "http://user:pw@proxy:3128",
    "CONFIG": "AccountName=a;AccountKey=b",
    "ANYTHING": "hf_abcdefghijklmnop",
    "OTHER": "AKIAABCDEFGHIJKLMNOP",
    "PEM": "-----BEGIN RSA PRIVATE KEY-----",
    "SOURCE": "https://a.blob.core.windows.net/x?sv=1&sig=abc",
}
PLAIN = {
    "TOKENIZERS_PARALLELISM": "false",
    "HF_HUB_DISABLE_IMPLICIT_TOKEN": "1",
    "MAX_TOKENS": "2048",
    "TOKENIZER": "gpt2",
    "HF_TOKEN_PATH": "/scratch/token",
    "GOOGLE_APPLICATION_CREDENTIALS": "/etc/gcp/key.json",
    "AWS_WEB_IDENTITY_TOKEN_FILE": "/var/run/token",
    "SSH_PUBLIC_KEY": "ssh-ed25519 AAAA",
    "SECRET_NAME": "hub",
    "HTTPS_PROXY": "http://proxy:3128",
    "HF_TOKEN": "$(OTHER_VARIABLE)",
    "MONKEY": "banana",
    "KEYBOARD": "qwerty",
    "NO_PROXY": ".svc,10.0.0.0/8",
    "PASSWORD": "",
}


@pytest.mark.parametrize("name", SECRETS)
def test_a_secret_in_the_clear_is_refused_and_not_repeated(name: str) -> None:
    value = SECRETS[name]
    code, said = stage(**{"extraEnv": [{"name": name, "value": value}]})
    assert code and f"the value of {name} looks like a secret" in said and "secretKeyRef" in said
    assert len(value) < 6 or value not in said
    given = run_training_render(**{f"environmentVariables.{name}": value.replace(",", "\\,")})
    assert given.returncode and f"environmentVariables: the value of {name} looks like a secret" in given.stderr


def test_what_only_looks_like_a_secret_is_taken_and_so_is_a_reference() -> None:
    for name, value in PLAIN.items():
        code, said = stage(**{"extraEnv": [{"name": name, "value": value}]})
        assert code == 0, said
    reference = {"secretKeyRef": {"name": "hub", "key": "token"}}
    code, said = stage(**{"extraEnv": [{"name": "HF_TOKEN", "valueFrom": reference}]})
    assert code == 0, said


# -- scratch


def scratch(documents: list[Any]) -> list[tuple[dict[str, Any], str | None]]:
    """Return each pod's scratch volume, and what disk of the node it requests."""
    pods = list(pod_specs(documents))
    assert pods
    return [
        (
            next(volume for volume in pod["volumes"] if volume["name"] == "scratch"),
            pod["containers"][0]["resources"]["requests"].get("ephemeral-storage"),
        )
        for pod in pods
    ]


@pytest.mark.parametrize("program", HELMS)
def test_scratch_requests_the_disk_that_it_may_take(program: str) -> None:
    for volume, request in scratch(render("extract", program=program, **{"scratch.sizeLimit": "20Gi"})):
        assert (volume["emptyDir"], request) == ({"sizeLimit": "20Gi"}, "20Gi")
    for _, request in scratch(render("extract", program=program, **{"scratch.request": "3Gi"})):
        assert request == "3Gi"
    given = {"resources.requests.ephemeral-storage": "5Gi"}
    assert {request for _, request in scratch(render("extract", program=program, **given))} == {"5Gi"}
    given = {"resources.limits.ephemeral-storage": "1Gi"}  # then Kubernetes requests as much
    assert {request for _, request in scratch(render("extract", program=program, **given))} == {None}


@pytest.mark.parametrize("program", HELMS)
def test_scratch_is_a_volume_of_its_own_where_a_storage_class_is_named(program: str) -> None:
    settings = {"scratch.storageClassName": "managed-csi", "scratch.sizeLimit": "300Gi"}
    text = render_text("preprocess", program=program, **settings)
    validate_manifests(text)
    for volume, request in scratch(documents_of(text)):
        spec = volume["ephemeral"]["volumeClaimTemplate"]["spec"]
        assert spec["storageClassName"] == "managed-csi" and spec["resources"] == {"requests": {"storage": "300Gi"}}
        assert request is None and "emptyDir" not in volume
    for volume, request in scratch(training(program=program, **settings)):
        assert volume["ephemeral"] and request is None


def test_the_tests_of_helm_are_left_out_of_a_render_that_is_applied() -> None:
    for chart, settings in {
        "dataset-extract": STAGE[1],
        "dataset-pipeline": "storage.pvcName=c,dataset.root=d,dataset.repo=a/b",
        "megatron-training": "storage.pvcName=c",
    }.items():
        for program in HELMS:
            done = helm("template", "r", ROOT / "charts" / chart, "--skip-tests", "--set", settings, program=program)
            assert "Pod" not in {document["kind"] for document in documents_of(done.stdout)}, done.stderr
