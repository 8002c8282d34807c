"""Import and export of a model on a cluster: a run waits for its weights, and its result is a model again."""

import json
import math
import shutil
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest

from e2e.cluster import ROOT, Namespace, wait_for
from e2e.training import TOKENIZER, Training, make_dataset
from support.commandline import tokenmill

pytestmark = pytest.mark.e2e

LAYERS, HIDDEN, HEADS, INTERMEDIATE = 2, 64, 4, 128
SMALL = '{"requests":{"cpu":"50m","memory":"200Mi"},"limits":{"memory":"1Gi"}}'
RESOURCES = f"--set-json 'checkpoint.import.resources={SMALL}' --set-json 'checkpoint.export.resources={SMALL}'"
EVERY_5 = "--set training.saveInterval=5"


class StoredTensor(NamedTuple):
    """A tensor of a file of weights: its type, its shape and its bytes."""

    dtype: str
    shape: tuple[int, ...]
    data: bytes


def write_llama(directory: Path) -> dict[str, StoredTensor]:
    """Write a small model of the architecture of Llama in Hugging Face's format, and return its tensors."""
    directory.mkdir(parents=True)
    vocabulary = 1 + max(json.loads((TOKENIZER / "tokenizer.json").read_text())["model"]["vocab"].values())
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (vocabulary, HIDDEN)}
    for layer in range(LAYERS):
        prefix = f"model.layers.{layer}"
        shapes |= {f"{prefix}.self_attn.{name}_proj.weight": (HIDDEN, HIDDEN) for name in "qkvo"}
        shapes |= {f"{prefix}.mlp.{name}_proj.weight": (INTERMEDIATE, HIDDEN) for name in ("gate", "up")}
        shapes |= {f"{prefix}.mlp.down_proj.weight": (HIDDEN, INTERMEDIATE)}
        shapes |= {f"{prefix}.{name}_layernorm.weight": (HIDDEN,) for name in ("input", "post_attention")}
    shapes |= {"model.norm.weight": (HIDDEN,), "lm_head.weight": (vocabulary, HIDDEN)}
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": HIDDEN,
        "intermediate_size": INTERMEDIATE,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": HEADS,
        "num_key_value_heads": HEADS,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "max_position_embeddings": 64,
        "vocab_size": vocabulary,
        "tie_word_embeddings": False,
        "torch_dtype": "float32",
    }
    (directory / "config.json").write_text(json.dumps(config))
    for file in TOKENIZER.glob("*.json"):
        shutil.copy(file, directory)
    dice = np.random.default_rng(33)
    tensors = {
        name: StoredTensor("F32", shape, dice.standard_normal(shape, np.float32).tobytes())
        for name, shape in shapes.items()
    }
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for name, tensor in tensors.items():
        end = offset + len(tensor.data)
        header[name] = {"dtype": tensor.dtype, "shape": tensor.shape, "data_offsets": [offset, end]}
        offset = end
    encoded = json.dumps(header).encode()
    encoded += b" " * (-len(encoded) % 8)
    content = b"".join(tensor.data for tensor in tensors.values())
    (directory / "model.safetensors").write_bytes(len(encoded).to_bytes(8, "little") + encoded + content)
    return tensors


def read_tensors(directory: Path) -> dict[str, StoredTensor]:
    """Return the tensors of all files of weights of a model."""
    tensors = {}
    for file in sorted(directory.glob("*.safetensors")):
        content = file.read_bytes()
        start = 8 + int.from_bytes(content[:8], "little")
        for name, entry in json.loads(content[8:start]).items():
            if name != "__metadata__":
                first, end = (start + offset for offset in entry["data_offsets"])
                assert end - first == 4 * math.prod(entry["shape"])
                tensors[name] = StoredTensor(entry["dtype"], tuple(entry["shape"]), content[first:end])
    return tensors


@pytest.fixture(scope="module")
def model(namespace: Namespace, tmp_path_factory: pytest.TempPathFactory) -> dict[str, StoredTensor]:
    """Put a dataset and a model on the volume, and return the model's tensors."""
    make_dataset(namespace, tmp_path_factory.mktemp("dataset"))
    return write_llama(namespace.data / "llama")


@pytest.fixture(scope="module")
def settings(namespace: Namespace, model: dict[str, StoredTensor], tmp_path_factory: pytest.TempPathFactory) -> str:
    """Return the values of runs of this model, whose settings an import on this machine wrote."""
    assert model
    imported = tmp_path_factory.mktemp("laptop") / "imported"
    ended = tokenmill("checkpoint", "import", namespace.data / "llama", imported, timeout=120)
    assert ended.code == 0, ended.err
    return f"-f {imported / 'model.yaml'} {RESOURCES} --set checkpoint.import.enabled=true {EVERY_5}"


def is_waiting(run: Training) -> bool:
    """Return whether all pods of a run wait for the import."""
    pods = run.pods()
    states = [
        status["state"]
        for pod in pods
        for status in pod["status"].get("initContainerStatuses", [])
        if status["name"] == "wait-for-import"
    ]
    return bool(states) and len(states) == len(pods) and all("running" in state for state in states)


def replace_last_checkpoint(namespace: Namespace, source: str, target: str) -> None:
    """Put a copy of the imported model in the place of a checkpoint of the small trainer, which writes no model."""
    pod = (ROOT / "docs/look.yaml").read_text().replace("mountPath: /data, readOnly: true", "mountPath: /data")
    namespace.user.check("kubectl apply -f -", pod)
    namespace.user.check("kubectl wait --for=condition=Ready pod/look --timeout=90s")
    program = f"import shutil; shutil.rmtree('/data/{target}'); shutil.copytree('/data/{source}', '/data/{target}')"
    namespace.user.check(f'kubectl exec look -- python -c "{program}"')


@pytest.mark.every_change
def test_a_run_waits_for_its_weights_and_becomes_a_model(
    namespace: Namespace, model: dict[str, StoredTensor], settings: str
) -> None:
    """A failed import is corrected while the run waits; the export leaves the run that has ended alone."""
    run = Training(namespace, "cpt")
    run.install(20, settings, "--set checkpoint.import.source=/data/no-such-model")
    namespace.wait_for_job("cpt-import", "Failed")
    assert "/data/no-such-model" in namespace.logs(namespace.pods("cpt-import")[-1]["metadata"]["name"])
    assert len(namespace.pods("cpt-import")) == 1, "exit code 2: a retry cannot help"
    assert wait_for(lambda: len(run.pods()) == 2 and is_waiting(run)), run.describe()
    before = run.run()["metadata"]["uid"]

    settings += " --set checkpoint.import.source=/data/llama"
    namespace.admin.check(f"helm upgrade {run.command(20, settings)}")
    namespace.wait_for_job("cpt-import")
    imported = namespace.data / "imported" / "cpt"
    assert (imported / "latest_checkpointed_iteration.txt").read_text().strip() == "release"
    run.succeed()
    run.assert_exact(20)
    assert run.run()["metadata"]["uid"] == before, "another source of the import does not change the run"

    replace_last_checkpoint(namespace, "imported/cpt/release", "checkpoints/cpt-custom/iter_0000020")
    pods = {pod["metadata"]["uid"] for pod in run.pods()}
    exporting = " --set checkpoint.export.enabled=true"
    namespace.admin.check(f"helm upgrade {run.command(20, settings + exporting)}")
    namespace.wait_for_job("cpt-export")
    assert run.run()["metadata"]["uid"] == before
    assert {pod["metadata"]["uid"] for pod in run.pods()} == pods
    exported = namespace.data / "exported" / "cpt"
    assert read_tensors(exported) == model
    for name in ("config.json", "generation_config.json", "tokenizer.json", "README.md"):
        assert (exported / name).is_file(), name
    assert json.loads((exported / "config.json").read_text())["architectures"] == ["LlamaForCausalLM"]


def test_a_jobset_waits_too_and_an_export_without_a_checkpoint_fails_at_once(
    namespace: Namespace, model: dict[str, StoredTensor], settings: str
) -> None:
    assert model
    run = Training(namespace, "waits", "jobset")
    exporting = "--set checkpoint.export.enabled=true,checkpoint.import.waitMinutes=10"
    run.install(20, settings, exporting, "--set checkpoint.import.source=/data/no-such-model")
    namespace.wait_for_job("waits-import", "Failed")
    namespace.wait_for_job("waits-export", "Failed")
    assert wait_for(lambda: is_waiting(run)), run.describe()
    settings += " --set checkpoint.import.source=/data/llama"
    namespace.admin.check(f"helm upgrade {run.command(20, settings, '--set checkpoint.import.waitMinutes=10')}")
    run.succeed()
    run.assert_exact(20)


def test_a_run_without_its_import_fails_for_good_after_the_wait(
    namespace: Namespace, model: dict[str, StoredTensor], settings: str
) -> None:
    assert model
    run = Training(namespace, "without")
    unimported = "--set checkpoint.import.source=/data/no-such-model,checkpoint.import.waitMinutes=0"
    run.install(20, settings, unimported)
    run.wait("Failed", timeout=120)
    assert any("/data/imported/without" in message for message in run.messages()), run.describe()
