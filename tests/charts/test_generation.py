"""tools/charts.py on a copy of its sources: removed keys are removed from products, and unknown keys are not kept."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from support.generation import edit, generate
from support.rendering import READS, ROOT, STAGES, helm
from tokenmill.stages.registry import KINDS


def keys(copy: Path, chart: str, *path: str) -> set[str]:
    """Return the keys of a section of a chart's schema."""
    part = json.loads((copy / f"charts/{chart}/values.schema.json").read_text())
    for name in path:
        part = part["properties"][name]
    return set(part["properties"])


@pytest.mark.parametrize(
    ("source", "line", "reached"),
    [
        ("dataset-preprocess", "stream", ["dataset-preprocess/dataset", "dataset-pipeline/preprocess/dataset"]),
        ("dataset-download", "fullDataset", ["dataset-download/dataset", "dataset-pipeline/download/dataset"]),
        ("megatron-training", "allowChange", ["megatron-training/dataset"]),
        ("shared-storage", "nconnect", ["shared-storage/nfs"]),
    ],
)
def test_a_removed_key_is_removed_from_every_schema(copy: Path, source: str, line: str, reached: list[str]) -> None:
    assert all(line in keys(copy, *place.split("/")) for place in reached)
    edit(copy / f"charts/{source}/schema.yaml", rf"^ *{line}: .*\n")
    checked = generate(copy, "--check")
    assert checked.returncode == 1
    assert all(f"charts/{place.split('/')[0]}/values.schema.json" in checked.stderr for place in reached)
    assert generate(copy).returncode == 0
    assert not any(line in keys(copy, *place.split("/")) for place in reached)
    assert generate(copy, "--check").returncode == 0


def copy_package(copy: Path) -> Path:
    """Replace the link to the package by a copy, and return it."""
    (copy / "jobs").unlink()
    shutil.copytree(ROOT / "jobs", copy / "jobs", ignore=shutil.ignore_patterns("__pycache__"))
    return copy / "jobs/tokenmill"


def test_the_package_has_the_version_of_every_chart(copy: Path) -> None:
    edit(copy_package(copy) / "__init__.py", r'^__version__ = ".*"$', '__version__ = "7.8.9"')
    assert "charts/dataset-chat/Chart.yaml" in generate(copy, "--check").stderr
    assert generate(copy).returncode == 0
    for path in (copy / "charts").glob("*/Chart.yaml"):
        chart = yaml.safe_load(path.read_text())
        versions = [chart["version"], *(common["version"] for common in chart.get("dependencies", []))]
        assert {*versions, chart.get("appVersion", "7.8.9")} == {"7.8.9"}, path
    assert "team/megatron-training --version 7.8.9" in (copy / "values/README.md").read_text()


NEW_OPTION = """\
    emphasis: Annotated[
        float | None, Option("How strongly.", minimum=1, chart="tokenizer.emphasis")
    ] = None
"""


def test_an_option_with_its_key_is_two_manual_files(copy: Path) -> None:
    options = copy_package(copy) / "tokenize/options.py"
    edit(options, r"^    append_eod: Annotated", f"{NEW_OPTION}    append_eod: Annotated")
    assert "values.yaml has no tokenizer.emphasis, the key of --emphasis" in generate(copy).stderr
    chart = copy / "charts/dataset-preprocess"
    edit(
        chart / "values.yaml",
        r"^  eodToken: null\n",
        "  eodToken: null\n  # -- (float) How strongly\n  emphasis: null\n",
    )
    result = generate(copy)
    assert result.returncode == 0, result.stderr
    assert "emphasis" in (chart / "README.md").read_text()
    values = ["--set", "storage.pvcName=claim", "--set", "dataset.inputPath=a", "--set", "tokenizer.name=x"]
    assert "--emphasis=2.5" in helm("template", "r", chart, *values, "--set", "tokenizer.emphasis=2.5").stdout
    assert "emphasis" in helm("template", "r", chart, *values, "--set", "tokenizer.emphasis=much").stderr
    assert "emphasis" not in helm("template", "r", chart, *values).stdout
    pipeline = ["--set", "dataset.root=a,dataset.repo=a/b", "--set", "preprocess.tokenizer.emphasis=3", *values[:2]]
    pipeline += ["--set", "preprocess.tokenizer.name=x"]
    assert "--emphasis=3" in helm("template", "r", copy / "charts/dataset-pipeline", *pipeline).stdout


def test_a_key_removed_from_all_stages_is_removed_from_all_schemas(copy: Path) -> None:
    edit(copy / "charts/common/stage.schema.yaml", r"^  verifyHashes: .*\n")
    edit(copy / "charts/common/stage.schema.yaml", r"verifyHashes, ")
    tool = copy / "tools/charts.py"
    edit(tool, r'"verifyHashes", ')
    assert generate(copy).returncode == 0
    assert not any("verifyHashes" in keys(copy, f"dataset-{stage}") for stage in STAGES)
    assert "verifyHashes" not in keys(copy, "dataset-pipeline") | keys(copy, "dataset-pipeline", "extract")


@pytest.mark.parametrize(
    "chart", ["dataset-download", "dataset-pipeline", "dataset-preprocess", "megatron-training", "shared-storage"]
)
def test_a_key_without_a_source_is_reported_and_removed(copy: Path, chart: str) -> None:
    product = copy / f"charts/{chart}/values.schema.json"
    schema = json.loads(product.read_text())
    schema["properties"]["orphan"] = {"type": "string"}
    product.write_text(json.dumps(schema, indent=2) + "\n")
    checked = generate(copy, "--check")
    assert checked.returncode == 1 and f"charts/{chart}/values.schema.json" in checked.stderr
    assert generate(copy).returncode == 0 and "orphan" not in keys(copy, chart)


def test_a_missing_schema_is_made_again(copy: Path) -> None:
    products = {file: file.read_text() for file in copy.glob("charts/*/values.schema.json")}
    for file in products:
        file.unlink()
    assert generate(copy).returncode == 0
    assert {file: file.read_text() for file in products} == products


def test_the_list_of_stages_is_the_list_of_the_registry(copy: Path) -> None:
    assert [kind.name for kind in KINDS] == STAGES
    stages = copy / "charts/dataset-pipeline/stages.yaml"
    edit(stages, r"^- name: extract\n  reads: .*\n")
    assert "charts/dataset-pipeline/stages.yaml" in generate(copy, "--check").stderr
    assert generate(copy).returncode == 0
    assert [stage["name"] for stage in yaml.safe_load(stages.read_text())] == STAGES
    assert STAGES.index("chat") < STAGES.index("pack") and "chat" in READS["pack"] and "preprocess" not in READS["chat"]


BACK_END = """\
{{- define "shared-storage.tape.volume" -}}
{{ include "shared-storage.static" (dict "root" . "size" "1Ti" "mountOptions" list
      "spec" (dict "csi" (dict "driver" "tape.example" "volumeHandle" .Values.tape.reel))) }}
{{- end }}
{{- define "shared-storage.tape.rules" -}}
{{- include "shared-storage.validateRequired" (dict "root" . "section" "tape" "keys" (list "reel") "remedy" "Add it") }}
{{- end }}
{{- define "shared-storage.tape.warnings" }}
Warning: it is slow.
{{- end }}
{{- define "shared-storage.tape.properties" -}}
{{ dict "sizeKey" "tape.reel" "source" "the reel" "noMountOptions" "a tape has none" | toJson }}
{{- end }}
"""


def test_a_storage_back_end_is_a_template_and_its_section_of_values(copy: Path) -> None:
    chart = copy / "charts/shared-storage"
    (chart / "templates/_tape.tpl").write_text(BACK_END)
    with (chart / "values.yaml").open("a") as values:
        values.write('\ntape:\n  # -- Name of the reel\n  reel: ""\n')
    section = "  tape: {type: object, additionalProperties: false, properties: {reel: {type: string}}}\n"
    edit(chart / "schema.yaml", r"^  existing:\n", f"{section}  existing:\n")
    assert generate(copy).returncode == 0 and "tape" in keys(copy, "shared-storage")

    def rendered(*settings: str) -> subprocess.CompletedProcess[str]:
        return helm("template", "r", chart, *(part for setting in settings for part in ("--set", setting)))

    assert "driver: tape.example" in rendered("backend=tape", "tape.reel=a").stdout
    for settings, message in (
        (["backend=tape"], "backend=tape needs tape.reel.\nAdd it"),
        (["backend=tape", "tape.reel=a", "pvc.size=1Ti"], "whose size is tape.reel"),
        (["backend=tape", "tape.reel=a", "storage.mountOptions={soft}"], "a tape has none"),
        (["backend=tape", "tape.reel=a", "storage.parameters.a=b"], "backend=tape does not create one"),
        (["backend=tape", "tape.reel=a", "nfs.server=s"], "backend=tape does not read nfs.server"),
        (["backend=existing", "tape.reel=a"], "backend=existing does not read tape.reel"),
        (["backend=disk"], "the back ends are amlfs, blob, existing, fsx, local, nfs, tape."),
    ):
        assert message in rendered(*settings).stderr, settings


STAGE = {
    "Chart.yaml": """\
apiVersion: v2
name: dataset-toy
description: Do what no real stage does
type: application
version: 0.1.0
appVersion: "0.1.0"
dependencies:
  - name: common
    version: 0.1.0
    repository: file://../common
""",
    "values.yaml": """\
# The files to read, and where the output goes
dataset:
  # -- Directory on the volume to read
  inputPath: ""
  # -- (string) Directory on the volume to write to
  outputPath: null
  # -- (string) Read this stage's output instead of the furthest finished one's
  fromStage: null
# -- (int) Units done at a time in each pod; as many as its CPUs when null
processes: null
""",
    "schema.yaml": """\
properties:
  dataset:
    type: object
    additionalProperties: false
    properties:
      inputPath: {type: [string, 'null']}
      outputPath: {type: [string, 'null']}
      fromStage: {}
""",
    "README.md.gotmpl": '# {{ template "chart.name" . }}\n\n{{ template "chart.valuesSection" . }}\n',
    "templates/command/_command.tpl": """\
{{- define "dataset-toy.command" -}}
{{- dict "flags" (include "dataset-toy.options" . | fromJson) | toJson -}}
{{- end }}
""",
}

COMMAND = '''\
"""A command."""

from tokenmill.cli import options as o
from tokenmill.cli.groups import spread
from tokenmill.engine.options import RunOptions, WorkerOptions


@spread
def toy(
    input: o.Input,
    workers: WorkerOptions,
    run: RunOptions,
    from_stage: o.From = None,
    processes: o.Processes = None,
) -> None:
    """Do nothing."""
'''


def test_a_stage_s_chart_is_five_manual_files(copy: Path) -> None:
    package = copy_package(copy)
    (package / "cli/toy.py").write_text(COMMAND)
    entry = '    StageEntry(StageKind("toy", Files), "toyed", PREPROCESS_NEXT, optional=True),\n'
    edit(package / "stages/registry.py", r"^    StageEntry\(PREPROCESS", f"{entry}    StageEntry(PREPROCESS")
    chart = copy / "charts/dataset-toy"
    for name, text in STAGE.items():
        (chart / name).parent.mkdir(parents=True, exist_ok=True)
        (chart / name).write_text(text)
    assert "charts/dataset-toy/templates/stage.yaml" in generate(copy, "--check").stderr
    result = generate(copy)
    assert result.returncode == 0, result.stderr
    assert generate(copy, "--check").returncode == 0

    rendered_stage = helm("template", "r", chart, "--set", "storage.pvcName=claim", "--set", "dataset.inputPath=a")
    assert "- toy\n" in rendered_stage.stdout and "r-toy" in rendered_stage.stdout, rendered_stage.stderr
    refused = helm("template", "r", chart, "--set", "dataset.inputPath=a", "--set", "dataset.fromStage=preprocess")
    assert "fromStage" in refused.stderr
    pipeline = [
        "--set",
        "storage.pvcName=claim",
        "--set",
        "dataset.root=a,dataset.repo=a/b",
        "--set",
        "toy.enabled=true",
    ]
    rendered_pipeline = helm(
        "template", "r", copy / "charts/dataset-pipeline", *pipeline, "--set", "preprocess.tokenizer.name=x"
    )
    assert "name: toy" in rendered_pipeline.stdout, rendered_pipeline.stderr


PRESET = """\
# A model of nobody's.
numLayers: 2
hiddenSize: 64
numAttentionHeads: 2
seqLength: 1000
learningRate: 0.00001
recipe:
  nodes: 3
  globalBatchSize: 1512
  batchSource: as nobody did
"""


def test_a_preset_is_one_manual_file(copy: Path) -> None:
    (copy / "jobs").unlink()
    shutil.copytree(ROOT / "jobs", copy / "jobs", ignore=shutil.ignore_patterns("__pycache__"))
    presets, overlays = copy / "jobs/tokenmill/models/presets", copy / "values/models"
    (presets / "9m.yaml").write_text(PRESET)
    assert "values/models/9m.yaml" in generate(copy, "--check").stderr
    assert generate(copy).returncode == 0
    text = (overlays / "9m.yaml").read_text()
    assert (
        text.startswith("# 1.5 million tokens per iteration, as nobody did. ")
        and "1,512,000 tokens per iteration" in text
    )
    assert yaml.safe_load(text) == {
        "model": {"size": "9m"},
        "training": {"nodes": 3, "globalBatchSize": 1512, "learningRate": 0.00001},
    }
    flags = ("-f", overlays / "9m.yaml", "--set", "storage.pvcName=claim")
    done = helm("template", "release", copy / "charts/megatron-training", *flags)
    assert done.returncode == 0, done.stderr
    assert '"name":"9m"' in done.stdout.replace(" ", "").replace("\\", "") and "recipe" not in done.stdout
    command = [sys.executable, "-m", "tokenmill", "fit", "--model", "9m", "--gpus", "24", "--gpu-memory", "80"]
    environment = os.environ | {"PYTHONPATH": str(copy / "jobs")}
    planned = subprocess.run(command, capture_output=True, text=True, check=True, env=environment)
    assert "1,512 sequences = 1,512,000 tokens per iteration (from values/models/9m.yaml)" in planned.stdout
    (presets / "9m.yaml").unlink()
    assert "values/models/9m.yaml" in generate(copy, "--check").stderr
    assert generate(copy).returncode == 0 and not (overlays / "9m.yaml").exists()
