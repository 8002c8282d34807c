"""A chart's schema describes every key, with the text of the comments in values.yaml."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from support.generation import edit, generate
from support.rendering import ROOT

CHARTS = sorted(path.parent.name for path in (ROOT / "charts").glob("*/values.schema.json"))
KUBERNETES_OBJECTS = {"resources", "podSecurityContext", "imagePullSecrets", "tolerations", "topologySpreadConstraints"}
KUBERNETES_OBJECTS |= {"extraEnv", "extraVolumes", "extraVolumeMounts", "egress", "dns"}
"""Keys with objects of Kubernetes, whose own keys the Kubernetes reference describes."""


def schema_of(chart: str, root: Path = ROOT) -> dict[str, Any]:
    schema: dict[str, Any] = json.loads((root / f"charts/{chart}/values.schema.json").read_text())
    return schema


def descriptions(schema: dict[str, Any], path: str = "") -> Iterator[tuple[str, str]]:
    """Yield each key of a schema with its description, at any depth and in the items of lists."""
    for key, value in schema.get("properties", {}).items():
        yield f"{path}{key}", value.get("description", "")
        if key not in KUBERNETES_OBJECTS:
            yield from descriptions(value, f"{path}{key}.")
            yield from descriptions(value.get("items", {}), f"{path}{key}[].")


@pytest.mark.parametrize("chart", CHARTS)
def test_every_key_is_described(chart: str) -> None:
    texts = dict(descriptions(schema_of(chart)))
    assert not [key for key, text in texts.items() if len(text) < 8]
    assert not [key for key, text in texts.items() if text.startswith(("--", "(")) or "\n" in text]
    own = {"monitoring": "alerts.stalledSeconds", "shared-storage": "pvc.name"}.get(chart, "image.repository")
    assert {"global", own} <= texts.keys()


@pytest.mark.parametrize(
    ("chart", "key", "text"),
    [
        (
            "dataset-download",
            "dataset.keys",
            "Keys of the text in a record; a pair for each",
        ),  # of another stage's values
        ("dataset-extract", "environment.caBundle.key", "Key of the certificates"),
        ("dataset-preprocess", "dataset.fromStage", "Read this stage's output instead"),  # begins with (string)
        ("dataset-preprocess", "tokenizer", "The tokenizer, and the tokens that it adds"),  # a section
        ("dataset-pipeline", "preprocess.tokenizer.eodToken", "Token to use as EOD instead"),
        ("dataset-pipeline", "extract.storage.pvcName", "Claim that holds the data"),  # of all stages
        ("dataset-pipeline", "concatenate", "Join a corpus's JSONL files"),  # of Chart.yaml
        ("megatron-training", "model.custom.numLayers", "Transformer layers"),  # of the settings
        ("megatron-training", "dataset.blend.train[].weight", "Weight of this dataset"),
        ("megatron-training", "checkpoint.import.tokenSecret.key", "Key of the token in that Secret"),
        ("megatron-training", "checkpoint.export", "Job that converts a checkpoint to a model of Hugging Face"),
        ("megatron-training", "shmSize", "Size of /dev/shm"),
        ("megatron-training", "training", "Length, batch and optimizer of the run"),
        ("shared-storage", "blob.blockCache.prefetch", "Blocks to read ahead of each open file; 11, the minimum"),
        ("shared-storage", "amlfs", "Azure Managed Lustre, by azurelustre.csi.azure.com"),
    ],
)
def test_a_description_is_the_comment_of_its_key(chart: str, key: str, text: str) -> None:
    assert dict(descriptions(schema_of(chart)))[key].startswith(text)


@pytest.mark.parametrize(
    ("source", "comment", "key", "reached"),
    [
        ("dataset-preprocess", "  # -- End each document with EOD", "tokenizer.appendEod", ["preprocess", "pipeline"]),
        ("common/stage", "# -- Pods that share the work:.*", "workers", ["download", "extract", "pipeline"]),
        ("common/stage", "# Admission by Kueue", "kueue", ["concatenate", "pipeline"]),
    ],
)
def test_a_changed_or_removed_comment_reaches_every_schema(
    copy: Path,
    source: str,
    comment: str,
    key: str,
    reached: list[str],
) -> None:
    file = copy / f"charts/{source}{'.' if '/' in source else '/'}values.yaml"
    indent = comment.partition("#")[0]
    edit(file, f"^{comment}$", f"{indent}# -- (int) Other words,\n{indent}# on two lines")
    stale = generate(copy, "--check").stderr
    assert generate(copy).returncode == 0

    def described(stage: str) -> str:
        section = "preprocess." if stage == "pipeline" and key.startswith("tokenizer") else ""
        return dict(descriptions(schema_of(f"dataset-{stage}", copy)))[f"{section}{key}"]

    for stage in reached:
        assert f"charts/dataset-{stage}/values.schema.json" in stale
        assert described(stage) == "Other words, on two lines"
    edit(file, f"^{indent}# -- \\(int\\) Other words,\n{indent}# on two lines\n")
    assert generate(copy).returncode == 0
    assert [described(stage) for stage in reached] == [""] * len(reached)
