"""The training chart without a cluster: `tokenmill train` reads the mounted settings of all combinations."""

import json
import shlex
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from itertools import cycle, product
from pathlib import Path
from typing import Any

import msgspec
import pytest
import yaml

from support.commandline import tokenmill
from support.memory import total_bytes
from support.mill import Mill
from support.rendering import (
    HELMS,
    ROOT,
    applicable_overlays,
    documents_of,
    helm,
    overlays,
    run_suite_with_hash,
    run_training_render,
    training,
    validate_manifests,
)
from support.training_chart import (
    CHART,
    ENGINES,
    KINDS,
    VALUES,
    check_flags,
    compose_arguments,
    container,
    find_document,
    read,
    settings_of,
    templates,
)
from tokenmill.fit import layout
from tokenmill.models import model
from tokenmill.train import settings
from tokenmill.train.data.prompts import FORMATS
from tokenmill.train.frameworks import find_framework_problems, find_program


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("program", HELMS)
def test_every_model_runs_on_every_cluster(program: str, engine: str, tmp_path: Path) -> None:
    models, clusters = overlays("models"), applicable_overlays("megatron-training", "clusters")
    # Helm 4 renders each file only once.
    cases = list(product(models, clusters) if program == "helm" else zip(models, cycle(clusters), strict=False))

    def rendered(files: tuple[Path, Path]) -> str:
        # With one process per pod, the nodes of the recipes have too few processes.
        more = {"training.nodes": 128} if files[1].stem == "local" else {}
        done = run_training_render(*files, program=program, engine=engine, **more)
        assert done.returncode == 0, done.stderr
        return done.stdout

    with ThreadPoolExecutor(2) as pool:
        renders = list(pool.map(rendered, cases))
    for files, text in zip(cases, renders, strict=True):
        documents = documents_of(text)
        run_settings = read(documents, tmp_path)
        assert run_settings.model.name == files[0].stem
        layout_of_run = run_settings.layout()
        assert [*layout.find_argument_errors(layout_of_run), *layout.find_runtime_errors(layout_of_run)] == [], files
        check_flags(compose_arguments(run_settings))
        pod = container(documents)
        assert pod["args"] == ["train", "/etc/tokenmill-training/settings.json"]
        assert find_document(documents, KINDS[engine])["metadata"]["name"] == "megatron-training"
    validate_manifests(*renders)
    if engine == "trainjob":
        validate_manifests(
            *(json.dumps(jobset_of(find_document(documents_of(text), "TrainingRuntime"))) for text in renders)
        )


def jobset_of(runtime: dict[str, Any]) -> dict[str, Any]:
    """Return the JobSet that Kubeflow Trainer makes of a runtime, whose template is the spec of a JobSet."""
    spec = runtime["spec"]["template"]["spec"]
    return {"apiVersion": "jobset.x-k8s.io/v1alpha2", "kind": "JobSet", "metadata": {"name": "run"}, "spec": spec}


def test_every_preset_has_a_recipe() -> None:
    assert {file.stem for file in overlays("models")} == set(model.preset_names())


GUIDE = {
    "quick": (
        """helm install megatron-training charts/megatron-training --set image.tag=latest --set model.size="375m"
        --set training.nodes=2 --set training.gpusPerNode=8 --set training.iterations=100
        --set training.globalBatchSize=32 --set storage.pvcName="shared-storage-pvc"
        --set storage.datasetPath="slimpajama/preprocessed" """,
        {"size": "375m", "world": 16, "iterations": 100, "batch": 32, "save": 10},
    ),
    "175b": (
        """helm install megatron-training charts/megatron-training --set image.tag=latest --set model.size="175b"
        --set training.nodes=64 --set training.gpusPerNode=8 --set training.iterations=10000
        --set training.globalBatchSize=8192 --set training.saveInterval=1000 --set training.evalInterval=1000
        --set storage.pvcName="shared-storage-pvc" --set storage.datasetPath="slimpajama/preprocessed"
        --set storage.checkpointPath="checkpoints/gpt175b" --set storage.logsPath="logs/gpt175b" """,
        {"size": "175b", "world": 512, "iterations": 10000, "batch": 8192, "save": 1000},
    ),
    "custom": (
        """helm install megatron-training charts/megatron-training --set image.tag=latest --set model.size="custom"
        --set model.custom.numLayers=24 --set model.custom.hiddenSize=1024 --set model.custom.numAttentionHeads=16
        --set model.custom.seqLength=2048 --set model.custom.tensorModelParallelSize=1
        --set model.custom.pipelineModelParallelSize=1 --set training.nodes=4
        --set storage.pvcName="shared-storage-pvc" """,
        {"size": "custom", "world": 32, "iterations": 1000, "batch": 512, "save": 100},
    ),
    "SHARP": (
        """helm install megatron-training charts/megatron-training --set model.size="175b" --set training.useSharp=1
        --set training.nodes=32 --set storage.pvcName="shared-storage-pvc" """,
        {"size": "175b", "world": 256, "iterations": 1000, "batch": 4096, "save": 100},
    ),
}
"""The lines of the AKS guide, and the settings that result from them."""


@pytest.mark.parametrize("program", HELMS)
@pytest.mark.parametrize("name", GUIDE)
def test_the_guide_s_lines_work_unchanged(name: str, program: str, tmp_path: Path) -> None:
    line, expected = GUIDE[name]
    arguments = shlex.split(line)[2:]
    done = helm("template", *arguments, program=program)
    assert done.returncode == 0, done.stderr
    documents = list(yaml.safe_load_all(done.stdout))
    run_settings = read(documents, tmp_path)
    run = run_settings.training
    assert {
        "size": run_settings.model.name,
        "world": run_settings.world_size,
        "iterations": run.iterations,
        "batch": run.global_batch_size,
        "save": run_settings.checkpoint.save_interval,
    } == expected
    assert layout.find_argument_errors(run_settings.layout()) == []
    assert ("--use-sharp" in compose_arguments(run_settings)) is (name == "SHARP")
    assert find_document(documents, "PyTorchJob")["metadata"]["name"] == "megatron-training"
    assert find_document(documents, "Service")["metadata"]["name"] == "tensorboard"
    if name == "175b":
        assert run_settings.checkpoint.path == "/data/checkpoints/gpt175b"
        assert run_settings.logs.path == "/data/logs/gpt175b"
    else:
        assert run_settings.checkpoint.path == f"/data/checkpoints/megatron-training-{run_settings.model.name}"
    assert run_settings.dataset.path == "/data/slimpajama/preprocessed"
    tag = "0.1.0" if name == "SHARP" else "latest"
    assert container(documents)["image"] == f"localhost/tokenmill-training:{tag}"


def test_64_nodes_are_a_master_and_63_workers_of_8_gpus() -> None:
    documents = training(**{"model.size": "175b", "training.nodes": 64})
    job = find_document(documents, "PyTorchJob")["spec"]
    replicas = job["pytorchReplicaSpecs"]
    assert {kind: replica["replicas"] for kind, replica in replicas.items()} == {"Master": 1, "Worker": 63}
    assert {replica["restartPolicy"] for replica in replicas.values()} == {"ExitCode"}
    assert job["nprocPerNode"] == "8"
    for replica in replicas.values():
        assert replica["template"]["metadata"]["labels"]["job-name"] == "megatron-training"
        (pod,) = replica["template"]["spec"]["containers"]
        assert pod["name"] == "pytorch"
        assert pod["resources"]["limits"]["nvidia.com/gpu"] == 8
    assert "Worker" not in find_document(training(), "PyTorchJob")["spec"]["pytorchReplicaSpecs"]


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("program", HELMS)
def test_the_same_values_give_the_same_bytes(program: str, engine: str) -> None:
    settings = {"engine": engine, "training.nodes": 2, "dataset.buildIndex.enabled": "true"}
    assert (
        run_training_render(program=program, **settings).stdout
        == run_training_render(program=program, **settings).stdout
        != ""
    )


@pytest.mark.parametrize("engine", ENGINES)
def test_the_environment_is_the_same_for_every_engine(engine: str) -> None:
    documents = training(
        engine=engine, release="run", **{"training.nodes": 3, "environmentVariables.NCCL_IB_HCA": "mlx5"}
    )
    environment = {variable["name"]: variable["value"] for variable in container(documents)["env"]}
    run = find_document(documents, KINDS[engine])["metadata"]["annotations"]["tokenmill/spec"]
    assert environment["TOKENMILL_NODES"] == "3"
    assert environment["TOKENMILL_RUN"] == run
    assert environment["NCCL_IB_HCA"] == "mlx5"
    if engine == "pytorchjob":
        assert "MASTER_ADDR" not in environment, "the operator sets it"
    else:
        assert environment["MASTER_ADDR"] == f"run-node-0-0.run-{run[:8]}"
        assert environment["MASTER_PORT"] == "29500"


def test_a_variable_has_one_value() -> None:
    variables = {"environmentVariables.HOME": "/a", "environmentVariables.USER": "b", "environmentVariables.X": "c"}
    more = {"extraEnv[0].name": "X", "extraEnv[0].value": "d", "extraEnv[1].name": "TMPDIR", "extraEnv[1].value": "/e"}
    environment = container(training(**variables, **more))["env"]
    values = {variable["name"]: variable["value"] for variable in environment}
    assert len(values) == len(environment)
    assert {name: values[name] for name in ("HOME", "USER", "X", "TMPDIR")} == {
        "HOME": "/a",
        "USER": "b",
        "X": "d",
        "TMPDIR": "/e",
    }


def test_a_jobset_starts_and_fails_as_a_whole() -> None:
    spec = find_document(training(engine="jobset", **{"training.nodes": 3}), "JobSet")["spec"]
    (node,) = spec["replicatedJobs"]
    job = node["template"]["spec"]
    assert (node["name"], node["replicas"]) == ("node", 1)
    assert (job["completionMode"], job["completions"], job["parallelism"]) == ("Indexed", 3, 3)
    assert job["backoffLimit"] == 0, "a lost pod is a lost gang"
    (rule,) = job["podFailurePolicy"]["rules"]
    assert rule["action"] == "FailJob"
    assert rule["onExitCodes"] == {"containerName": "node", "operator": "In", "values": [*range(1, 128)]}
    assert job["template"]["spec"]["restartPolicy"] == "Never"
    assert "job-name" not in job["template"]["metadata"]["labels"], "the Job controller sets it, and refuses others"
    assert spec["failurePolicy"] == {
        "maxRestarts": 1000,
        "restartStrategy": "BlockingRecreate",
        "rules": [{"name": "permanent", "action": "FailJobSet", "onJobFailureReasons": ["PodFailurePolicy"]}],
    }
    assert spec["network"]["enableDNSHostnames"] is True
    assert "suspend" not in spec


def test_a_trainjob_s_runtime_exists_before_it() -> None:
    documents = training(engine="trainjob", **{"training.nodes": 3})
    runtime = find_document(documents, "TrainingRuntime")
    assert runtime["metadata"]["annotations"]["helm.sh/hook"].startswith("pre-install,")
    assert runtime["spec"]["mlPolicy"] == {"numNodes": 3}
    (node,) = runtime["spec"]["template"]["spec"]["replicatedJobs"]
    assert node["template"]["metadata"]["labels"] == {"trainer.kubeflow.org/trainjob-ancestor-step": "trainer"}
    job = find_document(documents, "TrainJob")["spec"]
    assert job["runtimeRef"]["name"] == runtime["metadata"]["name"]
    assert job["trainer"] == {"numNodes": 3}


def assert_restricted(pod: dict[str, Any]) -> None:
    """Check a pod against the restricted Pod Security Standard."""
    spec = pod["spec"]
    assert spec["automountServiceAccountToken"] is False
    assert spec["securityContext"]["runAsNonRoot"] is True
    assert spec["securityContext"]["runAsUser"] == 1000
    assert spec["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
    assert not {"hostNetwork", "hostPID", "hostIPC"} & spec.keys()
    for item in spec["containers"]:
        assert item["securityContext"] == {
            "allowPrivilegeEscalation": False,
            "readOnlyRootFilesystem": True,
            "capabilities": {"drop": ["ALL"]},
        }
        assert not any("hostPort" in port for port in item.get("ports", []))
        assert {"requests", "limits"} <= item["resources"].keys()
    assert {key for volume in spec["volumes"] for key in volume} <= {
        "name",
        "emptyDir",
        "configMap",
        "persistentVolumeClaim",
    }


@pytest.mark.parametrize("engine", ENGINES)
def test_every_pod_fits_the_restricted_standard_and_has_no_secret(engine: str) -> None:
    settings = {"engine": engine, "training.nodes": 2, "dataset.buildIndex.enabled": "true"}
    documents = training(ROOT / "values/clusters/aks-nd-h100-v5.yaml", **settings)
    others = [document["spec"]["template"] for document in documents if document["kind"] in ("Deployment", "Job")]
    pods = [*templates(documents), *others, find_document(documents, "Pod")]
    assert len(pods) == (5 if engine == "pytorchjob" else 4)
    for pod in pods:
        assert_restricted(pod)
        assert "secret" not in json.dumps(pod).lower()


def test_network_privileges_are_added_only_on_request() -> None:
    documents = training(**{"network.ipcLock": "true", "network.hostNetwork": "true"})
    spec = next(templates(documents))["spec"]
    assert spec["containers"][0]["securityContext"]["capabilities"] == {"drop": ["ALL"], "add": ["IPC_LOCK"]}
    assert (spec["hostNetwork"], spec["dnsPolicy"]) == (True, "ClusterFirstWithHostNet")
    board = find_document(documents, "Deployment")["spec"]["template"]["spec"]
    assert "hostNetwork" not in board
    assert board["containers"][0]["securityContext"]["capabilities"] == {"drop": ["ALL"]}


DEVICES = {
    "aks-nd-a100-v4": {"rdma/ib": 8},
    "aks-nd-h100-v5": {"rdma/ib": 8},
    "aks-nd-h200-v5": {"rdma/ib": 8},
    "eks-p4d": {"vpc.amazonaws.com/efa": 4, "hugepages-2Mi": "5120Mi"},
    "eks-p4de": {"vpc.amazonaws.com/efa": 4, "hugepages-2Mi": "5120Mi"},
    "eks-p5": {"vpc.amazonaws.com/efa": 32, "hugepages-2Mi": "5120Mi"},
    "eks-p5e": {"vpc.amazonaws.com/efa": 32, "hugepages-2Mi": "5120Mi"},
    "eks-p5en": {"vpc.amazonaws.com/efa": 16, "hugepages-2Mi": "5120Mi"},
    "eks-p6-b200": {"vpc.amazonaws.com/efa": 8, "hugepages-2Mi": "5120Mi"},
    "local": None,
}


UNWANTED = {
    *("FI_EFA_USE_DEVICE_RDMA", "FI_EFA_FORK_SAFE", "FI_EFA_ENABLE_SHM_TRANSFER", "FI_PROVIDER", "NCCL_PROTO"),
    *("RDMAV_FORK_SAFE", "NCCL_MIN_CHANNELS", "NCCL_MIN_NCHANNELS", "NCCL_BUFFSIZE", "NCCL_ALGO", "NCCL_PXN_DISABLE"),
    *("TORCH_DISTRIBUTED_DEBUG", "NCCL_COLLNET_ENABLE"),
}
"""Obsolete or harmful variables: the defaults of current NCCL and libfabric are better; Megatron-LM sets the last."""


HARDWARE = [file for file in applicable_overlays("megatron-training", "clusters") if "spot" not in file.stem]
"""The clusters' overlays that describe a kind of node; those for spot nodes only place the pods."""


@pytest.mark.parametrize("file", HARDWARE, ids=lambda file: file.stem)
def test_a_cluster_s_devices_have_equal_requests_and_limits(file: Path) -> None:
    documents = training(file)
    pod = container(documents)
    devices = DEVICES[file.stem]
    if devices is None:
        assert not any("/" in name for name in pod["resources"]["limits"])
        return
    for resources in (pod["resources"]["requests"], pod["resources"]["limits"]):
        assert {name: resources[name] for name in devices} == devices
        assert resources["nvidia.com/gpu"] == 8
        assert resources["memory"]
    names = {variable["name"] for variable in pod["env"]}
    assert not names & UNWANTED
    assert names >= {"TORCH_NCCL_TRACE_BUFFER_SIZE", "TORCH_NCCL_DUMP_ON_TIMEOUT", "NCCL_RAS_ENABLE"}
    if "vpc.amazonaws.com/efa" in devices:
        assert not any(name.startswith(("UCX_", "SHARP_", "NCCL_IB_")) for name in names)
    shm = next(volume for volume in next(templates(documents))["spec"]["volumes"] if volume["name"] == "shm")
    assert shm["emptyDir"] == {"medium": "Memory", "sizeLimit": "64Gi"}


@pytest.mark.parametrize("value", ["0", "1", "true", "false"])
@pytest.mark.parametrize("option", ["--set", "--set-string"])
def test_sharp_is_enabled_by_every_form_of_the_value(option: str, value: str, tmp_path: Path) -> None:
    settings = ("--set", "storage.pvcName=c", option, f"training.useSharp={value}")
    done = helm("template", "run", CHART, *settings)
    assert done.returncode == 0, done.stderr
    assert read(list(yaml.safe_load_all(done.stdout)), tmp_path).training.use_sharp is (value in ("1", "true"))


@pytest.mark.parametrize("program", HELMS)
def test_any_field_of_a_preset_can_be_replaced(program: str, tmp_path: Path) -> None:
    values = {
        "model.size": "llama3-8b",
        "model.custom.untieEmbeddings": "false",
        "model.custom.attentionDropout": "0",
        "model.custom.normEpsilon": "1e-06",
        "model.custom.numLayers": "16",
        "training.learningRate": "0.00003",
        "training.seed": "0",
        "training.iterations": "1000000",
        "gpu.memoryGib": "39.4",
        "supervision.hangMinutes": "2.5",
        "training.maxEpochs": "0.5",
        "dataset.allowChange": "true",
        "extraArgs": "{--lr-wsd-decay-iters,1000000,--no-one-logger}",
        "job.runAgain": "20261122",
    }
    run_settings = read(training(program=program, **values), tmp_path)
    assert run_settings.model.untie_embeddings is False
    assert (run_settings.model.num_layers, run_settings.model.attention_dropout, run_settings.model.norm_epsilon) == (
        16,
        0.0,
        1e-6,
    )
    assert run_settings.model.hidden_size == 4096
    assert (run_settings.training.learning_rate, run_settings.training.seed, run_settings.training.iterations) == (
        0.00003,
        0,
        1_000_000,
    )
    assert (run_settings.gpu.memory_gib, run_settings.supervision.hang_minutes) == (39.4, 2.5)
    assert run_settings.extra_args == ["--lr-wsd-decay-iters", "1000000", "--no-one-logger"]
    assert run_settings.run_again == "20261122"
    assert (run_settings.training.max_epochs, run_settings.dataset.allow_change) == (0.5, True)
    assert read(training(program=program), tmp_path).dataset.allow_change is False


def test_a_blend_has_paths_on_the_volume(tmp_path: Path) -> None:
    values = {
        "dataset.blend.all[0].path": "a",
        "dataset.blend.all[0].weight": "0.25",
        "dataset.blend.all[1].path": "b/c",
        "dataset.blend.by": "given",
    }
    dataset = read(training(**values), tmp_path).dataset
    assert dataset.path is None
    assert dataset.blend is not None
    assert dataset.blend.by == "given"
    assert [(part.path, part.weight) for part in dataset.blend.all] == [("/data/a", 0.25), ("/data/b/c", None)]


def test_phases_and_blend_files_have_paths_on_the_volume(tmp_path: Path) -> None:
    values = {
        "training.phases[0].iterations": 10,
        "training.phases[0].blend[0].path": "a",
        "training.phases[0].blend[0].weight": "0.25",
        "training.phases[0].blend[1].path": "b/c",
        "training.phases[0].blend[1].weight": 0,
        "training.phases[1].tokens": 2000000000000,
        "training.phases[1].seed": 7,
        "training.phases[1].blend[0].path": "a",
        "training.phases[1].blend[0].weight": 1,
        "training.phases[1].blend[0].max_epochs": 2,
    }
    read_settings = read(training(**values), tmp_path)
    phases = read_settings.training.phases
    assert isinstance(phases, list) and read_settings.dataset.path is None
    assert [(part.path, part.weight) for part in phases[0].blend] == [("/data/a", 0.25), ("/data/b/c", 0)]
    assert (phases[1].tokens, phases[1].seed, phases[1].blend[0].max_epochs) == (2e12, 7, 2)
    assert read(training(**{"training.phases": "x/phases.yaml"}), tmp_path).training.phases == "/data/x/phases.yaml"
    assert read(training(**{"dataset.blend": "x/blend.json"}), tmp_path).dataset.blend == "/data/x/blend.json"
    assert not run_training_render(**{"dataset.buildIndex.enabled": "true"}, **values).returncode
    refused = run_training_render(**{"dataset.blend": "x/blend.json"}, **values)
    assert refused.returncode and "training.phases names the datasets of each phase" in refused.stderr
    for change in ({"training.phases[0].wieght": 1}, {"training.phases[0].blend[0].path": "../x"}):
        assert run_training_render(**values | change).returncode


FITTED = {
    **{name: ["--model", name, "--gpus", 256] for name in ("375m", "175b", "mixtral-8x7b")},
    "odd nodes": ["--model", "13b", "--gpus", 18, "--gpus-per-node", 6, "--iterations", 7],
    "changed": [
        *["--model", "llama3-8b", "--gpus", 16, "--seq-length", 32768, "--set", "normEpsilon=1e-6"],
        *["--set", "attentionDropout=0.25", "--set", "untieEmbeddings=false", "--set", "learningRate=0.00000125"],
    ],
}


@pytest.mark.parametrize("name", FITTED)
def test_the_values_of_fit_give_the_layout_that_it_lists(name: str, tmp_path: Path) -> None:
    file = tmp_path / "fit.yaml"
    speed = ["--gpu-memory", 80, "--write-bandwidth", 5, "--peak-tflops", 989]
    ended = tokenmill("fit", *FITTED[name], *speed, "--values", file, "--json")
    assert ended.code == 0, ended.err
    best = ended.result["layouts"][0]
    for program in HELMS:
        run_settings = read(training(file, program=program), tmp_path)
        layout_of_run = run_settings.layout()
        assert [*layout.find_argument_errors(layout_of_run), *layout.find_runtime_errors(layout_of_run)] == []
        for field in ("tensor", "pipeline", "context", "expert", "virtual_stages", "micro_batch", "recompute"):
            assert getattr(layout_of_run, field) == best[field], field
        assert (layout_of_run.global_batch, layout_of_run.world) == (ended.result["global_batch"], ended.result["gpus"])
        assert (run_settings.gpu.memory_gib, run_settings.gpu.peak_tflops) == (80, 989)
        assert total_bytes(layout_of_run) == pytest.approx(best["total_bytes"])
        check_flags(compose_arguments(run_settings))
        if name == "changed":
            changed = (
                run_settings.model.norm_epsilon,
                run_settings.model.attention_dropout,
                run_settings.model.learning_rate,
            )
            assert changed == (1e-6, 0.25, 0.00000125) and run_settings.model.rotary_base == 500_000


def test_the_values_of_blend_have_paths_on_the_volume(tmp_path: Path) -> None:
    volume, file = tmp_path / "volume", tmp_path / "blend.yaml"
    volume.mkdir()
    output = Mill(volume).make("1e5", {"a": 600, "b": 600})  # a number for Helm, unless it is quoted
    ended = tokenmill("blend", file, "1e5=3", output / "b_text_document", "--values", "--root", volume)
    assert ended.code == 2 and "b_text_document is in" in ended.err
    ended = tokenmill("blend", file, output, "--validation", "1e5/b_text_document", "--values", "--root", volume)
    assert ended.code == 0, ended.err
    for program in HELMS:
        dataset = read(training(file, program=program), tmp_path).dataset
        assert dataset.path is None and dataset.blend is not None
        assert [part.path for part in dataset.blend.train] == ["/data/1e5"]
        assert [part.path for part in dataset.blend.validation] == ["/data/1e5/b_text_document"]


@pytest.mark.parametrize("program", HELMS)
def test_a_run_fine_tunes_on_conversations(program: str, tmp_path: Path) -> None:
    assert read(training(program=program), tmp_path).sft is None
    values = {"sft.enabled": "true", "sft.promptFormat": "nemotron-nano-v2", "sft.tokenizerPath": "tokenizers/nemotron"}
    documents = training(program=program, **values, **{"storage.datasetPath": "chats/transformed"})
    run_settings = read(documents, tmp_path)
    assert run_settings.sft == settings.Sft(
        prompt_format="nemotron-nano-v2", tokenizer_path="/data/tokenizers/nemotron"
    )
    assert run_settings.dataset.path == "/data/chats/transformed"
    composed = compose_arguments(run_settings)
    check_flags(composed)
    assert "--sft" in composed and "SFTTokenizer" in composed
    schema = json.loads((CHART / "values.schema.json").read_text())["properties"]["sft"]["properties"]
    formats = schema["promptFormat"]["enum"]
    assert {*FORMATS, "default", None} == {*formats}
    assert VALUES["sft"].keys() == {"enabled", "promptFormat", "tokenizerPath"}


def test_checkpoints_may_have_a_separate_claim(tmp_path: Path) -> None:
    values = {"storage.checkpointPvcName": "fast", "storage.checkpointSubPath": "team", "checkpoint.loadPath": "old"}
    documents = training(release="run", **values)
    run_settings = read(documents, tmp_path)
    assert run_settings.checkpoint.path == "/checkpoints/checkpoints/run-375m"
    assert run_settings.checkpoint.load_path == "/checkpoints/old"
    assert run_settings.logs.path == "/checkpoints/logs/run"
    assert run_settings.dataset.cache_path is None, "the cache is below the checkpoints: the data's claim is read-only"
    mounts = {mount["name"]: mount for mount in container(documents)["volumeMounts"] if mount["name"] != "scratch"}
    assert mounts["data"] == {"name": "data", "mountPath": "/data", "readOnly": True}
    assert mounts["checkpoints"] == {"name": "checkpoints", "mountPath": "/checkpoints", "subPath": "team"}
    (board,) = [document for document in documents if document["kind"] == "Deployment"]
    assert board["spec"]["template"]["spec"]["containers"][0]["volumeMounts"][1:] == [
        {"name": "checkpoints", "mountPath": "/checkpoints", "subPath": "team", "readOnly": True}
    ]


def test_only_changes_that_need_another_run_change_the_hash() -> None:
    def spec(**values: Any) -> str:
        digest: str = find_document(training(**values), "PyTorchJob")["metadata"]["annotations"]["tokenmill/spec"]
        return digest

    same = {"tensorboard.enabled": "false", "job.ttlSecondsAfterFinished": 9, "job.cleanPodPolicy": "All"}
    same |= {"dataset.buildIndex.enabled": "true", "gang.minAvailable": 1, "serviceAccount.annotations.a": "b"}
    same |= {"checkpoint.export.enabled": "true", "checkpoint.export.iteration": 9, "checkpoint.import.path": "x"}
    assert {spec(**{key: value}) for key, value in same.items()} == {spec()}
    other = {"training.nodes": 2, "training.iterations": 2, "image.tag": "x", "job.runAgain": 2, "kueue.queueName": "q"}
    other |= {"environmentVariables.NCCL_DEBUG": "INFO", "model.custom.numLayers": 2, "extraArgs": "{--x}"}
    other |= {"kueue.priorityClass": "low"}
    hashes = {spec(**{key: value}) for key, value in other.items()}
    assert len(hashes) == len(other) and spec() not in hashes
    assert spec(**{"kueue.priorityClass": "high"}) == spec(**{"kueue.priorityClass": "low"})


def test_an_upgrade_with_the_same_values_keeps_a_run_unless_it_failed(tmp_path: Path) -> None:
    documents = training(release="run", **{"storage.pvcName": "claim", "tensorboard.enabled": "false"})
    run = find_document(documents, "PyTorchJob")["metadata"]["annotations"]["tokenmill/spec"]
    suite = ROOT / "tests/charts/suites/megatron-training/same.yaml"
    assert "4 passed, 4 total" in run_suite_with_hash(CHART, suite, run, tmp_path)


def test_helm_test_needs_a_response_of_a_server() -> None:
    (pod,) = find_document(training(), "Pod")["spec"]["containers"]
    assert pod["command"] == ["python3"]
    flag, program, url = pod["args"]
    with ThreadingHTTPServer(("127.0.0.1", 0), SimpleHTTPRequestHandler) as server:
        threading.Thread(target=server.serve_forever).start()
        try:
            address = url.replace("tensorboard:6006/data/environment", f"127.0.0.1:{server.server_port}/")
            command = [sys.executable, flag, program, address]
            done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
        finally:
            server.shutdown()
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith(address)


def test_the_settings_have_a_unique_name_and_never_change() -> None:
    def name(**values: Any) -> Any:
        documents = training(**values)
        config_map = settings_of(documents)
        volumes = {volume["name"]: volume for volume in next(templates(documents))["spec"]["volumes"]}
        assert volumes["settings"]["configMap"] == {"name": config_map["metadata"]["name"], "optional": True}
        assert config_map["immutable"] is True
        return config_map["metadata"]["name"]

    assert name(**{"image.tag": "other"}) == name() != name(**{"training.seed": 2})


def test_another_framework_is_a_setting_of_the_run(tmp_path: Path) -> None:
    values = {"model.size": "llama3-8b", "parallelism.tensorModelParallelSize": 1, "trainer.framework": "fsdp"}
    recipe = {"training.decayStyle": "constant", "training.warmupIterations": 0}
    run_settings = read(training(**values, **recipe), tmp_path)
    assert find_framework_problems(run_settings) == []
    assert str(find_program(run_settings)) == "/opt/tokenmill/frameworks/fsdp.py"
    assert find_program(read(training(), tmp_path)).name == "pretrain_gpt.py"


def test_values_and_schema_contain_every_setting() -> None:
    schema = json.loads((CHART / "values.schema.json").read_text())["properties"]
    sections = {
        "training": settings.Training,
        "parallelism": settings.Parallelism,
        "supervision": settings.Supervision,
        "trainer": settings.Trainer,
        "checkpoint": settings.CheckpointSettings,
    }
    elsewhere = {"checkpoint": {"path", "saveInterval"}}
    for name, section in sections.items():
        fields = {field.encode_name: field for field in msgspec.structs.fields(section)}
        keys = fields.keys() - elsewhere.get(name, set())
        assert keys <= VALUES[name].keys(), name
        assert VALUES[name].keys() <= schema[name]["properties"].keys()
        for key in keys:
            field, value = fields[key], VALUES[name][key]
            if field.default_factory is msgspec.NODEFAULT:
                assert value == field.default, f"{name}.{key} has another default in the chart"
    custom = schema["model"]["properties"]["custom"]["properties"]
    assert custom.keys() == {field.encode_name for field in msgspec.structs.fields(model.Model)}
    assert custom["numLayers"]["description"] == "Transformer layers", "values.yaml does not contain these keys"


def test_datasets_in_buckets_keep_their_addresses(tmp_path: Path) -> None:
    one = read(training(**{"storage.datasetPath": "s3://bucket/tokens"}), tmp_path)
    assert one.dataset.path == "s3://bucket/tokens"
    blend = {"dataset.blend.all[0].path": "gs://bucket/a", "dataset.blend.all[1].path": "b"}
    several = read(training(**blend), tmp_path).dataset.blend
    assert isinstance(several, settings.Blend)
    assert [part.path for part in several.all] == ["gs://bucket/a", "/data/b"]
