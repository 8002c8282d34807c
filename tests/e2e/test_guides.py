"""The guides of AKS and of EKS from the first line to the last, as docs/aks.md and docs/eks.md translate them.

The lines are taken out of the documents. What this cluster cannot do as it stands is in the tables here, each with its
reason; every other line is typed.
"""

import json
import os
import random
import shutil
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import pytest
import yaml

from e2e.cluster import Namespace, clone, exit_code, node_name
from e2e.corpus import TOKENIZER, assert_same, content, serve
from e2e.guide import Instead, LeftOut, Reader, blocks, documents

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
        "a directory of the node in place of Azure's storage",
    ),
    LeftOut("-f values/storage/blob.yaml", "it would be a second claim of the same name"),
    LeftOut("dataset.fullDataset=true", "the other one of two lines: the sample is taken"),
    Instead(
        "-f values/clusters/aks-nd-h100-v5.yaml", "-f values/clusters/local.yaml -f here.yaml", "no GPU, no InfiniBand"
    ),
    Instead("training.gpusPerNode=8", "training.gpusPerNode=1", "two CPUs for all processes"),
    LeftOut('model.size="175b"', "there are no 256 GPUs, and the quick test has the name"),
    LeftOut('model.size="custom"', "the quick test has the name"),
    LeftOut("kubectl top", "the cluster has no metrics server"),
]
EKS = [
    *EVERYWHERE,
    Instead(
        "-f values/storage/fsx.yaml --set fsx.subnetId=subnet-0123456789abcdef0"
        " --set 'fsx.securityGroupIds={sg-0123456789abcdef0}'",
        '-f values/storage/local.yaml --set local.path="$VOLUME" --set local.nodeName="$NODE"',
        "a directory of the node in place of FSx",
    ),
    LeftOut("open-volume", "root is refused in this namespace, and the directory is open to all"),
    Instead("HF_TOKEN=hf_...", "HF_TOKEN=hf_planted", "the Hub's that is asked here"),
    Instead("-f values/clusters/eks-p4d.yaml", "-f values/clusters/local.yaml", "no GPU, no EFA"),
    Instead("-f blend.yaml", "-f blend.yaml -f here.yaml", "a small model on two CPUs"),
    Instead("training.iterations=10000", "training.iterations=20", "it is to end"),
]
TRAINER: dict[str, Any] = {
    "environmentVariables": {"TRAINER_GLOO": "1"},
    "resources": {"requests": {"cpu": "50m", "memory": "200Mi"}, "limits": {"memory": "2Gi"}},
    "training": {"logInterval": 1},
    "job": {"cleanPodPolicy": "None"},
}
"""here.yaml: the tests' trainer in the place of Megatron-LM, in pods that can be followed after their end, too."""
FEW_DOCUMENTS = {"dataset": {"split": "60,20,20"}}
"""The smallest of the sample's pairs has six."""
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
    """Return the headings of a document that have something to type, in their order."""
    return list(dict.fromkeys(block.heading for block in blocks(documents()[name])))


def opened(
    name: str,
    namespace: Namespace,
    directory: Path,
    here: dict[str, Any],
    hub: Callable[[], None],
    environment: dict[str, str],
) -> Reader:
    """Return who reads a document in a clone of the tree, where a Hub appears once there is storage."""
    clone(directory)
    (directory / "here.yaml").write_text(yaml.safe_dump(here))
    environment |= {
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
        "VOLUME": str(namespace.data),
        "NODE": node_name(namespace.admin),
    }
    storage = {"aks": "Verify Deployment", "eks": "Prerequisites"}[name]
    return Reader(documents()[name], namespace, directory, {"aks": AKS, "eks": EKS}[name], environment, {storage: hub})


@pytest.fixture(scope="module")
def aks(
    new_namespace: Callable[[str], AbstractContextManager[Namespace]],
    hub_files: Path,
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[Reader]:
    """Return who has the AKS guide."""
    with new_namespace("guide-aks") as made:
        here = TRAINER | FEW_DOCUMENTS
        yield opened("aks", made, tmp_path_factory.mktemp("aks"), here, lambda: made.start_hub(hub_files), {})


@pytest.fixture(scope="module")
def eks(
    new_namespace: Callable[[str], AbstractContextManager[Namespace]], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Reader]:
    """Return who has the EKS workshop, with their own corpus in the directory and a token that the Hub wants."""
    directory, served = tmp_path_factory.mktemp("eks"), tmp_path_factory.mktemp("llama")
    write_llama(served / "models" / LLAMA)
    (directory / "techpulse_corpus.jsonl").write_text(own_corpus(50_000))
    (directory / "domains").mkdir()
    for name, size in (("news_articles", 4000), ("tech_docs", 3000), ("forums", 2000)):
        (directory / "domains" / f"{name}.jsonl").write_text(own_corpus(size))
    with new_namespace("guide-eks") as made, serve(served, token="hf_planted") as outside:

        def hub() -> None:
            made.user.does("kubectl create secret generic served --from-literal=token=hf_planted")
            made.start_hub(served, claim="fsx-shared-pvc", token_secret="served")

        yield opened("eks", made, directory, TRAINER | SMALL, hub, {"HF_ENDPOINT": outside.endpoint})


def write_llama(directory: Path) -> None:
    """Write a tokenizer with as many entries as Llama 3.1's, and its token for the end of a text."""
    shutil.copytree(TOKENIZER, directory)
    tokenizer = json.loads((directory / "tokenizer.json").read_text())
    vocabulary = tokenizer["model"]["vocab"]
    vocabulary |= {f"<entry {number}>": number for number in range(len(vocabulary), 128_256)}
    text = json.dumps(tokenizer).replace("<|endoftext|>", "<|end_of_text|>")
    (directory / "tokenizer.json").write_text(text)
    config = directory / "tokenizer_config.json"
    config.write_text(config.read_text().replace("<|endoftext|>", "<|end_of_text|>"))


def own_corpus(documents: int) -> str:
    """Return JSONL as the workshop has it."""
    dice = random.Random(documents)
    words = ["the", "GPU", "of", "a", "cluster", "in", "to", "memory", "and", "is"]
    records = (
        {"text": " ".join(dice.choices(words, k=8)), "title": str(number), "source": "techpulse", "quality_score": 0.9}
        for number in range(documents)
    )
    return "".join(json.dumps(record) + "\n" for record in records)


@pytest.mark.parametrize("name", ["aks", "eks"])
def test_the_tables_name_what_the_documents_say(name: str) -> None:
    said = [command.text for block in blocks(documents()[name]) for command in block.commands]
    for each in {"aks": AKS, "eks": EKS}[name]:
        assert any(each.said in text for text in said), f"nothing in {name}.md has {each.said!r}"


@pytest.mark.parametrize("heading", headings("aks"))
def test_the_aks_guide(aks: Reader, heading: str) -> None:
    aks.read_to(heading)


@pytest.mark.parametrize("heading", headings("eks"))
def test_the_eks_workshop(eks: Reader, heading: str) -> None:
    eks.read_to(heading)


@pytest.fixture
def prepared(aks: Reader) -> Namespace:
    """Return the AKS reader's namespace when the data is there."""
    aks.read_to("Verify preprocessing completion")
    return aks.namespace


def test_the_outputs_lie_where_the_guide_has_them(prepared: Namespace) -> None:
    assert len(list((prepared.data / "slimpajama").glob("*.zst"))) == 100
    assert len(list((prepared.data / "slimpajama" / "preprocessed").glob("*.bin"))) == 72


def test_the_bytes_are_those_of_a_run_on_one_machine(prepared: Namespace, undisturbed: Path) -> None:
    assert_same(content(prepared.data / "slimpajama"), content(undisturbed))


@pytest.mark.parametrize("job", JOBS.values())
def test_pods_have_no_token_and_no_root_to_write_to(prepared: Namespace, job: str) -> None:
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
    prepared.user.does(f"helm test {release} --timeout 120s")
    assert prepared.logs(JOBS[release] + "-verify").endswith("no problems\n")


def test_uninstalling_leaves_the_data(prepared: Namespace) -> None:
    before = content(prepared.data / "slimpajama")
    for release in JOBS:
        prepared.user.does(f"helm uninstall {release} --wait --timeout 60s")
    left = {job["metadata"]["name"] for job in prepared.user.get("jobs")["items"]}
    assert not left & set(JOBS.values())
    assert_same(content(prepared.data / "slimpajama"), before)
