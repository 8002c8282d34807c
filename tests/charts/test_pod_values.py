"""Values that the API server would refuse, or that contain secrets: refused before Helm creates a release."""

import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import yaml

from support.rendering import (
    HELMS,
    REQUIRED,
    ROOT,
    STAGES,
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
ACCEPTED = ("2Gi", "2G", "1.5Ti", "1000000000", "1e9", ".5Gi", "2k")


def stage(program: str = "helm", **values: Any) -> tuple[int, str]:
    """Render a stage's chart with values as JSON."""
    flags = [part for key, value in values.items() for part in ("--set-json", f"{key}={json.dumps(value)}")]
    done = helm("template", "release", ROOT / "charts/dataset-extract", *STAGE, *flags, program=program)
    return done.returncode, done.stdout + done.stderr


SIZES = ("scratch.sizeLimit", "scratch.request", "resources.limits.memory", "resources.requests.ephemeral-storage")
TRAINING_SIZES = ("shmSize", "network.hugepages2Mi", "tensorboard.resources.limits.memory")
TRAINING_SIZES += (
    "dataset.buildIndex.resources.requests.memory",
    "checkpoint.import.resources.limits.memory",
    "scratch.sizeLimit",
    "resources.limits.hugepages-1Gi",
)


@pytest.mark.parametrize("text", BYTES)
def test_an_invalid_quantity_is_refused_for_every_key(text: str) -> None:
    for chart, keys in {
        "dataset-extract": SIZES,
        "dataset-pipeline": (*SIZES, "preprocess.scratch.sizeLimit", "download.resources.limits.memory"),
        "megatron-training": TRAINING_SIZES,
        "shared-storage": ("pvc.size",),
    }.items():
        for key in keys:
            if text == "" and key in ("network.hugepages2Mi", "pvc.size"):
                continue  # these keys may be empty
            done = helm("template", "r", ROOT / "charts" / chart, "--set-json", f"{key}={json.dumps(text)}")
            assert done.returncode and key.rpartition(".")[2] in done.stderr, (chart, key, done.stdout[-200:])


@pytest.mark.parametrize("program", HELMS)
def test_every_form_of_a_quantity_is_accepted(program: str) -> None:
    for text in ACCEPTED:
        validate_manifests(
            render_text("extract", program=program, **{"scratch.sizeLimit": text, "resources.requests.memory": "1k"})
        )
    for cpu in ("250m", "1.5", 2, 0.5, "100u"):
        code, output = stage(program, **{"resources.requests.cpu": cpu})
        assert code == 0, output


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "request above limit": ({"resources.requests.memory": "3Gi"}, "requests memory=3Gi, above its limit 2Gi"),
    "in other units": ({"resources": {"requests": {"cpu": "2001m"}, "limits": {"cpu": 2}}}, "above its limit 2"),
    "exponent": ({"resources.requests.memory": "1e10"}, "requests memory=1e10, above its limit 2Gi"),
    "device": ({"resources": {"requests": {"a.b/c": 1}, "limits": {"a.b/c": 2}}}, "cannot be overcommitted"),
    "volume twice": (
        {"extraVolumes": [{"name": "data", "emptyDir": {}}]},
        '"data" is already the name of another volume',
    ),
    "no volume": ({"extraVolumeMounts": [{"name": "x", "mountPath": "/x"}]}, 'there is no volume "x"'),
    "place taken": (
        {"extraVolumeMounts": [{"name": "data", "mountPath": "/data"}]},
        "another volume is already mounted at /data",
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
def test_invalid_values_are_refused_before_a_revision_exists(case: str, program: str) -> None:
    values, message = REFUSED[case]
    code, output = stage(program, **values)
    assert code and message in output, output


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
    code, output = stage(**{"extraEnv": [{"name": name, "value": value}]})
    assert code and f"the value of {name} looks like a secret" in output and "secretKeyRef" in output
    assert len(value) < 6 or value not in output
    done = run_training_render(**{f"environmentVariables.{name}": value.replace(",", "\\,")})
    assert done.returncode and f"environmentVariables: the value of {name} looks like a secret" in done.stderr


def test_values_that_only_resemble_secrets_and_references_are_accepted() -> None:
    for name, value in PLAIN.items():
        code, output = stage(**{"extraEnv": [{"name": name, "value": value}]})
        assert code == 0, output
    reference = {"secretKeyRef": {"name": "hub", "key": "token"}}
    code, output = stage(**{"extraEnv": [{"name": "HF_TOKEN", "valueFrom": reference}]})
    assert code == 0, output


# -- scratch


def scratch(documents: list[Any]) -> list[tuple[dict[str, Any], str | None]]:
    """Return each pod's scratch volume, and its request of the node's disk."""
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
def test_scratch_requests_its_size_of_the_node_s_disk(program: str) -> None:
    for volume, request in scratch(render("extract", program=program, **{"scratch.sizeLimit": "20Gi"})):
        assert (volume["emptyDir"], request) == ({"sizeLimit": "20Gi"}, "20Gi")
    for _, request in scratch(render("extract", program=program, **{"scratch.request": "3Gi"})):
        assert request == "3Gi"
    resources = {"resources.requests.ephemeral-storage": "5Gi"}
    assert {request for _, request in scratch(render("extract", program=program, **resources))} == {"5Gi"}
    resources = {"resources.limits.ephemeral-storage": "1Gi"}  # Kubernetes then requests the same amount
    assert {request for _, request in scratch(render("extract", program=program, **resources))} == {None}


@pytest.mark.parametrize("program", HELMS)
def test_scratch_with_a_storage_class_is_a_separate_volume(program: str) -> None:
    settings = {"scratch.storageClassName": "managed-csi", "scratch.sizeLimit": "300Gi"}
    text = render_text("preprocess", program=program, **settings)
    validate_manifests(text)
    for volume, request in scratch(documents_of(text)):
        spec = volume["ephemeral"]["volumeClaimTemplate"]["spec"]
        assert spec["storageClassName"] == "managed-csi" and spec["resources"] == {"requests": {"storage": "300Gi"}}
        assert request is None and "emptyDir" not in volume
    for volume, request in scratch(training(program=program, **settings)):
        assert volume["ephemeral"] and request is None


def test_a_render_for_apply_has_no_helm_tests() -> None:
    for chart, settings in {
        "dataset-extract": STAGE[1],
        "dataset-pipeline": "storage.pvcName=c,dataset.root=d,dataset.repo=a/b,preprocess.tokenizer.name=a/b",
        "megatron-training": "storage.pvcName=c",
    }.items():
        for program in HELMS:
            done = helm("template", "r", ROOT / "charts" / chart, "--skip-tests", "--set", settings, program=program)
            kinds = {document["kind"] for document in documents_of(done.stdout)}
            assert kinds and "Pod" not in kinds, done.stderr


def node_affinity(*requirements: dict[str, Any]) -> dict[str, Any]:
    term = {"nodeSelectorTerms": [{"matchExpressions": list(requirements)}]}
    return {"nodeAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": term}}


def pod_affinity(**term: Any) -> dict[str, Any]:
    weighted = {"weight": 1, "podAffinityTerm": {"topologyKey": "zone"} | term}
    return {"podAntiAffinity": {"preferredDuringSchedulingIgnoredDuringExecution": [weighted]}}


SPREAD = {"maxSkew": 1, "topologyKey": "zone", "whenUnsatisfiable": "DoNotSchedule"}
PLACEMENTS_REFUSED: list[tuple[str, Any, str]] = [
    ("affinity", node_affinity({"key": "pool", "operator": "in", "values": ["gpu"]}), "operator"),
    ("affinity", node_affinity({"key": "a b", "operator": "In", "values": ["gpu"]}), "key"),
    ("affinity", node_affinity({"key": "pool", "operator": "In"}), "values"),
    ("affinity", node_affinity({"key": "pool", "operator": "Exists", "values": ["gpu"]}), "values"),
    ("affinity", node_affinity({"key": "pool", "operator": "Gt", "values": ["gpu"]}), "values"),
    ("affinity", {"nodeAffinty": {}}, "nodeAffinty"),
    ("affinity", pod_affinity(topologyKey=""), "topologyKey"),
    ("affinity", pod_affinity(labelSelector={"matchExpressions": [{"key": "a", "operator": "Gt"}]}), "operator"),
    ("affinity", pod_affinity(labelSelector={"matchlabels": {}}), "matchlabels"),
    ("tolerations", [{"key": "a b"}], "key"),
    ("tolerations", [{"key": "a", "operator": "Exists", "value": "b"}], "value"),
    ("tolerations", [{"operator": "Equal", "value": "b"}], "key"),
    ("tolerations", [{"key": "a", "effect": "NoSchedule", "tolerationSeconds": 3}], "effect"),
    ("topologySpreadConstraints", [SPREAD | {"labelSelector": {"app": "a"}}], "app"),
    ("topologySpreadConstraints", [SPREAD | {"topologykey": "a"}], "topologykey"),
]
PLACEMENTS_ACCEPTED: list[tuple[str, Any]] = [
    ("affinity", node_affinity({"key": "a.b/pool", "operator": "In", "values": ["gpu", ""]})),
    (
        "affinity",
        node_affinity({"key": "pool", "operator": "DoesNotExist"}, {"key": "n", "operator": "Lt", "values": ["7"]}),
    ),
    ("affinity", pod_affinity(labelSelector={"matchLabels": {"a": "b"}}, namespaces=["n"], namespaceSelector={})),
    (
        "tolerations",
        [{"operator": "Exists"}, {"key": "a"}, {"key": "a", "effect": "NoExecute", "tolerationSeconds": 3}],
    ),
    ("topologySpreadConstraints", [SPREAD | {"labelSelector": {"matchLabels": {"a": "b"}}, "minDomains": 2}]),
]


def test_a_placement_that_the_api_server_would_refuse_is_refused_for_every_pod() -> None:
    charts = {"dataset-extract": ("",), "dataset-pipeline": ("", "preprocess."), "megatron-training": ("", "master.")}
    for name, value, word in PLACEMENTS_REFUSED:
        for chart, prefixes in charts.items():
            more = (
                ("tensorboard.", "dataset.buildIndex.") if (chart, name) == ("megatron-training", "tolerations") else ()
            )
            for prefix in (*prefixes, *more):
                if prefix == "master." and name == "topologySpreadConstraints":
                    continue
                flag = f"{prefix}{name}={json.dumps(value)}"
                done = helm("template", "r", ROOT / "charts" / chart, "--set-json", flag)
                assert done.returncode and word in done.stderr, (chart, flag, done.stderr[-300:])


@pytest.mark.parametrize("program", HELMS)
def test_every_form_of_a_placement_is_accepted(program: str) -> None:
    for name, value in PLACEMENTS_ACCEPTED:
        flag = f"{name}={json.dumps(value)}"
        done = helm("template", "r", ROOT / "charts/dataset-extract", *STAGE, "--set-json", flag, program=program)
        assert done.returncode == 0, done.stderr
        validate_manifests(done.stdout)


OPERATOR = ("--api-versions", "monitoring.coreos.com/v1")


def object_keys(values: dict[str, Any], path: tuple[str, ...] = ()) -> Iterator[str]:
    """Yield each key whose default is an object, at any depth."""
    for key, value in values.items():
        if isinstance(value, dict):
            yield ".".join((*path, key.replace(".", r"\.")))
            yield from object_keys(value, (*path, key))


def test_null_for_an_object_is_accepted_or_refused_with_its_name() -> None:
    """A template that reads a key of null ends in a trace of the template, which helps no user."""
    needed = ["--set", "storage.pvcName=c"]
    own = {
        "monitoring": [],
        "shared-storage": ["--set", "backend=local,local.path=/srv,local.nodeName=n"],
        "dataset-pipeline": [
            *needed,
            "--set",
            "dataset.root=x,dataset.repo=a/b,chat.enabled=true,pack.enabled=true,transform.enabled=true",
        ],
        "megatron-training": needed,
    }
    own["dataset-pipeline"] += ["--set", "preprocess.tokenizer.name=a/b,chat.tokenizer.name=a/b"]
    own |= {f"dataset-{stage}": [*needed, "--set", ",".join(REQUIRED[stage])] for stage in STAGES}
    cases = []
    for chart, arguments in own.items():
        values = yaml.safe_load((ROOT / "charts" / chart / "values.yaml").read_text())
        cases += [(chart, key, arguments) for key in object_keys(values)]

    def find_trace(case: tuple[str, str, list[str]]) -> str:
        chart, key, arguments = case
        null = ["--set", f"{key}=null", *OPERATOR]
        done = helm("template", "r", ROOT / "charts" / chart, *arguments, *null)
        trace = "executing" in done.stderr or "error calling" in done.stderr
        named = not done.returncode or key.rpartition(".")[2] in done.stderr
        return f"{chart} {key}: {done.stderr[-300:]}" if trace or not named else ""

    with ThreadPoolExecutor(2) as pool:
        assert list(filter(None, pool.map(find_trace, cases))) == []
