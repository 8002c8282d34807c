"""The guides of AKS and EKS from the first line to the last, in the translations in tests/e2e/guides.

docs/observe.md is read the same way.

The tests read the commands from the documents. The tables below list the commands that this cluster cannot run
unchanged, each with its reason. Every other command is run.
"""

import json
import math
import os
import random
import shutil
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest
import yaml

from e2e.cluster import Namespace, clone, exit_code, node_name
from e2e.corpus import TOKENIZER, assert_same, content, serve
from e2e.guide import Instead, LeftOut, Reader, blocks, documents
from tokenmill.checkpoints.convert.huggingface import build_config
from tokenmill.checkpoints.convert.safetensors import encode_header
from tokenmill.checkpoints.families import FAMILIES
from tokenmill.models.model import load_preset

pytestmark = pytest.mark.e2e

EVERYWHERE = [
    Instead("REGISTRY=registry.example.com/team", "REGISTRY=localhost", "the node has the images"),
    LeftOut("make image", "the node has the images"),
    LeftOut("docker push", "the node has the images"),
    LeftOut("kubectl apply --server-side -k", "the cluster has the operator, and does not reach GitHub"),
    Instead("sleep 5", "sleep 1", "these Jobs end in seconds"),
    Instead(" 6006:6006", " :6006", "this machine's port may be taken"),
]
AKS = [
    *EVERYWHERE,
    Instead(
        '-f values/storage/amlfs.yaml --set amlfs.skuName="AMLFS-Durable-Premium-125"'
        " --set amlfs.storageCapacityTiB=16",
        '-f values/storage/local.yaml --set local.path="$VOLUME" --set local.nodeName="$NODE"',
        "a directory of the node instead of Azure's storage",
    ),
    LeftOut("-f values/storage/blob.yaml", "it would be a second claim of the same name"),
    LeftOut("dataset.fullDataset=true", "the alternative to the line with the sample, which is run"),
    Instead(
        "-f values/clusters/aks-nd-h100-v5.yaml", "-f values/clusters/local.yaml -f here.yaml", "no GPU, no InfiniBand"
    ),
    Instead("training.gpusPerNode=8", "training.gpusPerNode=1", "two CPUs for all processes"),
    LeftOut('model.size="175b"', "there are no 256 GPUs, and the quick test uses the release name"),
    LeftOut('model.size="custom"', "the quick test uses the release name"),
    LeftOut("kubectl top", "the cluster has no metrics server"),
]
EKS = [
    *EVERYWHERE,
    Instead(
        "-f values/storage/fsx.yaml --set fsx.subnetId=subnet-0123456789abcdef0"
        " --set 'fsx.securityGroupIds={sg-0123456789abcdef0}'",
        '-f values/storage/local.yaml --set local.path="$VOLUME" --set local.nodeName="$NODE"',
        "a directory of the node instead of FSx",
    ),
    LeftOut("open-volume", "root is refused in this namespace, and the directory is open to all"),
    Instead("HF_TOKEN=hf_...", "HF_TOKEN=hf_planted", "the token of the test Hub"),
    Instead("-f values/clusters/eks-p4d.yaml", "-f values/clusters/local.yaml", "no GPU, no EFA"),
    Instead("-f blend.yaml", "-f blend.yaml -f here.yaml", "a small model on two CPUs"),
    Instead("training.iterations=10000", "training.iterations=20", "the run must end soon"),
    LeftOut("checkpoint.export.enabled=true", "the small trainer saves no weights; test_checkpoint_jobs.py exports"),
    LeftOut("job/megatron-training-export", "there is no export"),
    LeftOut("kubectl cp look:/data/exported", "there is no export"),
]
OBSERVE = [
    LeftOut("kind ", "the cluster exists"),
    LeftOut("make image", "the node has the images"),
    LeftOut("oci://ghcr.io", "the cluster does not reach GitHub; test_metrics.py has a Prometheus"),
    LeftOut("kube-prometheus-stack-grafana", "there is no Grafana"),
    Instead(
        "--tokenizer TOKENIZER", "--tokenizer jobs/tokenmill/pipelines/sample/tokenizer", "the document leaves it open"
    ),
    Instead(
        "--set 'pvc.accessModes={ReadWriteOnce}'",
        '-f values/storage/local.yaml --set local.path="$VOLUME" --set local.nodeName="$NODE"',
        "the cluster has no StorageClass",
    ),
]
TABLES = {"aks": AKS, "eks": EKS, "observe": OBSERVE}
TRAINER: dict[str, Any] = {
    "environmentVariables": {"TRAINER_GLOO": "1"},
    "resources": {"requests": {"cpu": "50m", "memory": "200Mi"}, "limits": {"memory": "2Gi"}},
    "training": {"logInterval": 1},
    "job": {"cleanPodPolicy": "None"},
}
"""Content of here.yaml: the tests' trainer instead of Megatron-LM, in pods whose logs stay after their end."""
FEW_DOCUMENTS = {"dataset": {"split": "60,20,20"}}
"""A split for the sample, whose smallest pair has six documents."""
SMALL = {
    "model": {"custom": {"numLayers": 2, "hiddenSize": 64, "numAttentionHeads": 4, "numQueryGroups": 2}},
    "parallelism": {"tensorModelParallelSize": 1, "pipelineModelParallelSize": 1, "sequenceParallel": False},
    "training": {"logInterval": 1, "nodes": 2, "gpusPerNode": 1, "saveInterval": 10},
}
LLAMA = "meta-llama/Llama-3.1-8B"
JOBS = {
    "dataset-prep": "dataset-prep",
    "dataset-extract": "dataset-extract-extract",
    "dataset-concat": "dataset-concat-concatenate",
    "dataset-preprocess": "dataset-preprocess-preprocess",
}


def headings(name: str) -> list[str]:
    """Return the headings of a document that have commands, in their order."""
    return list(dict.fromkeys(block.heading for block in blocks(documents()[name])))


def open_reader(
    name: str,
    namespace: Namespace,
    directory: Path,
    values: dict[str, Any],
    hub: Callable[[], None],
    environment: dict[str, str],
) -> Reader:
    """Return a reader of a document in a clone of the tree; the test Hub starts when there is storage."""
    clone(directory)
    (directory / "here.yaml").write_text(yaml.safe_dump(values))
    environment |= {
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
        "VOLUME": str(namespace.data),
        "NODE": node_name(namespace.admin),
    }
    storage = {
        "aks": "Verify Deployment",
        "eks": "Prerequisites",
        "observe": "From nothing to the first dashboard on kind",
    }[name]
    return Reader(documents()[name], namespace, directory, TABLES[name], environment, {storage: hub})


@pytest.fixture(scope="module")
def aks(
    new_namespace: Callable[[str], AbstractContextManager[Namespace]],
    hub_files: Path,
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[Reader]:
    """Return a reader of the AKS guide."""
    with new_namespace("guide-aks") as namespace:
        values = TRAINER | FEW_DOCUMENTS
        yield open_reader(
            "aks", namespace, tmp_path_factory.mktemp("aks"), values, lambda: namespace.start_hub(hub_files), {}
        )


@pytest.fixture(scope="module")
def eks(
    new_namespace: Callable[[str], AbstractContextManager[Namespace]], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Reader]:
    """Return a reader of the EKS workshop, with a corpus in the directory and a Hub that requires a token."""
    directory, served = tmp_path_factory.mktemp("eks"), tmp_path_factory.mktemp("llama")
    write_llama(served / "models" / LLAMA)
    (directory / "techpulse_corpus.jsonl").write_text(own_corpus(50_000))
    (directory / "domains").mkdir()
    for name, size in (("news_articles", 4000), ("tech_docs", 3000), ("forums", 2000)):
        (directory / "domains" / f"{name}.jsonl").write_text(own_corpus(size))
    with new_namespace("guide-eks") as namespace, serve(served, token="hf_planted") as outside:

        def hub() -> None:
            namespace.user.check("kubectl create secret generic served --from-literal=token=hf_planted")
            namespace.start_hub(served, claim="fsx-shared-pvc", token_secret="served")

        yield open_reader("eks", namespace, directory, TRAINER | SMALL, hub, {"HF_ENDPOINT": outside.endpoint})


def write_llama(directory: Path) -> None:
    """Write a tokenizer with the number of entries of Llama 3.1's, and its end-of-text token."""
    shutil.copytree(TOKENIZER, directory)
    tokenizer = json.loads((directory / "tokenizer.json").read_text())
    vocabulary = tokenizer["model"]["vocab"]
    vocabulary |= {f"<entry {number}>": number for number in range(len(vocabulary), 128_256)}
    text = json.dumps(tokenizer).replace("<|endoftext|>", "<|end_of_text|>")
    (directory / "tokenizer.json").write_text(text)
    write_weights(directory)
    config = directory / "tokenizer_config.json"
    config.write_text(config.read_text().replace("<|endoftext|>", "<|end_of_text|>"))


def write_weights(directory: Path) -> None:
    """Write weights of zeros, of Llama 3.1 with the small sizes of this test."""
    small = SMALL["model"]["custom"]
    model = load_preset("llama3-8b", **small, ropeScalingFactor=8.0, embeddingRows=128_256)
    pieces = FAMILIES["llama"].list_pieces(model, 128_256)
    tensors = {tensor.name: tensor for piece in pieces for tensor in piece.tensors}
    header = encode_header({name: ("BF16", tensor.shape) for name, tensor in tensors.items()})
    size = sum(2 * math.prod(tensor.shape) for tensor in tensors.values())
    (directory / "model.safetensors").write_bytes(header + bytes(size))
    config = build_config(model, 128_256, "bfloat16", eos=128_001, bos=128_000)
    (directory / "config.json").write_text(json.dumps(config))


def write_sample(directory: Path) -> None:
    """Write a Hub with the dataset of values/datasets/sample.yaml, and the chart's tokenizer."""
    shutil.copytree(TOKENIZER, directory / "models/openai-community/gpt2")
    file = directory / "datasets/Salesforce/wikitext/wikitext-2-raw-v1/train-00000-of-00001.parquet"
    file.parent.mkdir(parents=True)
    texts = [json.loads(line)["text"] for line in own_corpus(1000).splitlines()]
    pyarrow.parquet.write_table(pyarrow.table({"text": texts}), file)


def own_corpus(documents: int) -> str:
    """Return JSONL in the format of the workshop."""
    dice = random.Random(documents)
    words = ["the", "GPU", "of", "a", "cluster", "in", "to", "memory", "and", "is"]
    records = (
        {"text": " ".join(dice.choices(words, k=8)), "title": str(number), "source": "techpulse", "quality_score": 0.9}
        for number in range(documents)
    )
    return "".join(json.dumps(record) + "\n" for record in records)


@pytest.mark.parametrize("name", TABLES)
def test_the_tables_name_text_of_the_documents(name: str) -> None:
    texts = [command.text for block in blocks(documents()[name]) for command in block.commands]
    for change in TABLES[name]:
        assert any(change.original in text for text in texts), f"no command of {name}.md contains {change.original!r}"


@pytest.mark.every_change
@pytest.mark.parametrize("heading", headings("aks"))
def test_the_aks_guide(aks: Reader, heading: str) -> None:
    aks.read_to(heading)


@pytest.mark.parametrize("heading", headings("eks"))
def test_the_eks_workshop(eks: Reader, heading: str) -> None:
    eks.read_to(heading)


def test_the_way_to_the_first_dashboard(
    new_namespace: Callable[[str], AbstractContextManager[Namespace]], tmp_path: Path
) -> None:
    served = tmp_path / "hub"
    write_sample(served)
    with new_namespace("guide-observe") as namespace:
        clone = tmp_path / "clone"
        reader = open_reader("observe", namespace, clone, {}, lambda: namespace.start_hub(served), {})
        (reader.directory / "corpus").mkdir()
        (reader.directory / "corpus/0.jsonl").write_text(own_corpus(100))
        for heading in headings("observe"):
            reader.read_to(heading)


@pytest.fixture
def prepared(aks: Reader) -> Namespace:
    """Return the AKS reader's namespace after preprocessing."""
    aks.read_to("Verify preprocessing completion")
    return aks.namespace


def test_the_outputs_are_where_the_guide_has_them(prepared: Namespace) -> None:
    assert len(list((prepared.data / "slimpajama").glob("*.zst"))) == 100
    assert len(list((prepared.data / "slimpajama" / "preprocessed").glob("*.bin"))) == 72


@pytest.mark.every_change
def test_the_bytes_equal_those_of_a_local_run(prepared: Namespace, undisturbed: Path) -> None:
    assert_same(content(prepared.data / "slimpajama"), content(undisturbed))


@pytest.mark.parametrize("job", JOBS.values())
def test_pods_have_no_token_and_a_read_only_root(prepared: Namespace, job: str) -> None:
    pods = prepared.pods(job)
    assert pods
    for pod in pods:
        assert pod["spec"]["automountServiceAccountToken"] is False
        assert not [v for v in pod["spec"]["volumes"] if "projected" in v]
        assert pod["spec"]["securityContext"]["runAsUser"] == 1000
        for container in pod["spec"]["containers"]:
            assert container["securityContext"]["readOnlyRootFilesystem"] is True
            assert container["resources"]["requests"].keys() >= {"cpu", "memory"}
        assert exit_code(pod) == 0


@pytest.mark.parametrize("release", JOBS)
def test_helm_test_verifies_the_output(prepared: Namespace, release: str) -> None:
    prepared.user.check(f"helm test {release} --timeout 120s")
    assert prepared.logs(JOBS[release] + "-verify").endswith("no problems\n")


def test_uninstalling_leaves_the_data(prepared: Namespace) -> None:
    before = content(prepared.data / "slimpajama")
    for release in JOBS:
        prepared.user.check(f"helm uninstall {release} --wait --timeout 60s")
    left = {job["metadata"]["name"] for job in prepared.user.get("jobs")["items"]}
    assert not left & set(JOBS.values())
    assert_same(content(prepared.data / "slimpajama"), before)
