"""Generate what charts share or repeat: `make charts`.

Values and schema of a stage's chart: its own part, then what charts/common holds for all of them. The schema of the
training chart: its own part, what charts/common holds for all pods, and the sections of the settings file, whose types
have their home in tokenmill.training.settings. Those of the pipeline: a section for each stage, made of its own chart's
part, and what is the same for all. What the storage chart says of checkpoints: the figures of
tokenmill.training.planner.storage. What `tokenmill fit` knows of values/models. READMEs: from the comments in
values.yaml, by helm-docs.

    python tools/charts.py            write it
    python tools/charts.py --check    exit 1, naming the files, when something is not what would be written
"""

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import yaml
from fresh import write_or_check

from tokenmill.training import model, settings
from tokenmill.training.planner import storage
from tokenmill.training.planner.memory import checkpoint_bytes

ROOT = Path(__file__).parents[1]
CHARTS = ROOT / "charts"
STAGES = ("download", "extract", "concatenate", "preprocess")
TRAINING = CHARTS / "megatron-training"
MARKER = "# The rest is the same in every stage's chart: change charts/common/*.values.yaml, then `make charts`.\n"
POD_MARKER = (
    "# The rest is the same in every chart that runs pods: change charts/common/pod.values.yaml, then `make charts`.\n"
)
PIPELINE = CHARTS / "dataset-pipeline"
OFF = {"extract", "concatenate"}
"""Stages that a pipeline leaves out by default, since preprocess reads what download fetches."""
OF_A_SECTION = (
    *("workers", "replace", "verifyHashes", "storage", "resources", "scratch", "job", "verify"),
    *("podLabels", "podAnnotations", "priorityClassName", "schedulerName", "nodeSelector", "tolerations", "affinity"),
    *("topologySpreadConstraints", "extraEnv", "extraVolumes", "extraVolumeMounts"),
)
"""What is the same in every stage's chart and may yet differ from stage to stage of one release."""
OF_THE_RELEASE = {"naming", "onRollback", "annotations", "runAgain", "ttlSecondsAfterFinished"}
"""Keys of `job` that are about the JobSet, not about a stage's Job."""
PIPELINE_HEAD = """\
# Made by `make charts` of the stages' own charts, charts/dataset-*, and of charts/common/*.values.yaml: change those.
# What is a stage's alone stands in its section; there, any of `workers`, `resources`, `scratch`, `storage`, `job`, and
# of what says where pods run and what else they hold, counts before what is for all stages.
"""
NUMBER = "^[0-9.]+([eE]-?[0-9]+)?$"
POD = (CHARTS / "common/pod.values.yaml").read_text()


def values(chart: Path) -> str:
    """Return a stage chart's values.yaml."""
    own = (chart / "values.yaml").read_text().partition(MARKER)[0].rstrip()
    return f"{own}\n\n{MARKER}{(CHARTS / 'common/stage.values.yaml').read_text()}\n{POD}"


def training_values() -> str:
    """Return the training chart's values.yaml."""
    own = (TRAINING / "values.yaml").read_text().partition(POD_MARKER)[0].rstrip()
    return f"{own}\n\n{POD_MARKER}{POD}"


def schema(chart: Path) -> str:
    """Return a stage chart's schema; all of them take the keys of `dataset` that say what the corpus is.

    So one file in values/datasets serves all stages.
    """
    shared = json.loads((CHARTS / "common/stage.schema.json").read_text())
    own = json.loads((chart / "values.schema.json").read_text())
    own["properties"] |= shared["properties"]
    own["required"] = [*shared["required"], "dataset"]
    own["properties"]["dataset"]["properties"] |= shared["dataset"]
    return json.dumps(own, indent=2) + "\n"


def pipeline_values() -> str:
    """Return the pipeline's values.yaml: what says which corpus it is, a section for each stage, what is for all."""
    corpus: dict[str, list[str]] = {}
    sections = []
    for stage in STAGES:
        own = (CHARTS / f"dataset-{stage}/values.yaml").read_text().partition(MARKER)[0].rstrip()
        kept = ["# -- Run this stage", f"enabled: {str(stage not in OFF).lower()}"]
        for key, lines in entries(own):
            block, _, name = key.partition(".")
            if block == "dataset" and name in dataset_of_all():
                corpus.setdefault(name, lines)
            else:
                kept += lines
        kept += ["# -- (int) Pods that share this stage; `workers` of all when null", "workers: null"]
        kept += ["# -- Requests and limits of its pods, over `resources` of all", "resources: {}"]
        sections.append("\n".join([f"{stage}:", *(f"  {line}" for line in kept)]))
    dataset = "\n".join(["dataset:", *(line for key in dataset_of_all() for line in corpus[key])])
    return "\n\n".join(
        [PIPELINE_HEAD + dataset, *sections, (CHARTS / "common/stage.values.yaml").read_text() + "\n" + POD]
    )


def dataset_of_all() -> dict[str, Any]:
    """Return the schema of the keys of `dataset` that say what the corpus is, which all stages' charts take."""
    found: dict[str, Any] = json.loads((CHARTS / "common/stage.schema.json").read_text())["dataset"]
    return found


def entries(text: str) -> Iterator[tuple[str, list[str]]]:
    """Yield the lines of values with their keys, `dataset.repo`, two levels deep, and the comments above each."""
    lines: list[str] = []
    block = ""
    for line in text.splitlines():
        lines.append(line)
        if not line.lstrip().startswith("#"):
            key = line.partition(":")[0]
            block = block if line.startswith(" ") else key
            yield f"{block}.{key.strip()}" if line.startswith(" ") else key, lines
            lines = []


def pipeline_schema() -> str:
    """Return the pipeline's schema: that of each stage's own part in its section, closed like the whole."""
    shared = json.loads((CHARTS / "common/stage.schema.json").read_text())
    again = {key: partial(shared["properties"][key]) for key in OF_A_SECTION}
    again["job"]["properties"] = {k: v for k, v in again["job"]["properties"].items() if k not in OF_THE_RELEASE}
    again["workers"] = again["workers"] | {"type": ["integer", "null"]}
    sections = {}
    for stage in STAGES:
        chart = json.loads((CHARTS / f"dataset-{stage}/values.schema.json").read_text())["properties"]
        own = {key: partial(chart[key]) for key in chart if key not in shared["properties"]}
        dataset = {key: value for key, value in own["dataset"]["properties"].items() if key not in shared["dataset"]}
        own["dataset"]["properties"] = dataset
        parts = {"enabled": {"type": "boolean"}} | own | again
        sections[stage] = {
            "type": "object",
            "additionalProperties": False,
            "properties": parts,
            "required": ["enabled"],
        }
    dataset = {"type": "object", "additionalProperties": False, "properties": shared["dataset"]}
    whole = {
        "$schema": "http://json-schema.org/draft-07/schema#",
        "type": "object",
        "additionalProperties": False,
        "properties": {"dataset": dataset} | sections | shared["properties"],
        "required": ["dataset", *STAGES, *shared["required"]],
    }
    return json.dumps(whole, indent=2) + "\n"


def partial(schema: dict[str, Any]) -> dict[str, Any]:
    """Return a schema without what it requires: a section may say a part, and all stages' values say the rest."""
    found = {key: value for key, value in schema.items() if key != "required"}
    if "properties" in schema:
        found["properties"] = {key: partial(value) for key, value in schema["properties"].items()}
    return found


def training_schema() -> str:
    """Return the training chart's schema."""
    shared = json.loads((CHARTS / "common/stage.schema.json").read_text())["properties"]
    own = json.loads((TRAINING / "values.schema.json").read_text())
    taken = ["global", "common", "image", "imagePullSecrets", "kueue", "resources", "scratch", *yaml.safe_load(POD)]
    parts: dict[str, Any] = {key: shared[key] for key in taken}
    parts |= {
        "model": section(None, size={"type": ["string", "integer"]}, custom=section(model.Model)),
        "training": section(
            settings.Training,
            saveInterval=typed(int, may_be_zero=False),
            useSharp={"enum": [True, False, 0, 1, "0", "1", "true", "false"]},
        ),
        "parallelism": section(settings.Parallelism),
        "checkpoint": section(settings.Checkpoint, without=("path", "saveInterval")),
        "supervision": section(settings.Supervision),
        "trainer": section(settings.Trainer),
    }
    own["properties"] |= parts | {"shmSize": shared["shmSize"]}
    for part in (own["properties"]["dataset"]["properties"]["buildIndex"], own["properties"]["tensorboard"]):
        part["properties"]["resources"] = shared["resources"]
    own["properties"]["dataset"]["properties"]["blend"] = {**section(settings.Blend), "type": ["object", "null"]}
    return json.dumps(own, indent=2) + "\n"


def section(of: type[msgspec.Struct] | None, without: tuple[str, ...] = (), **more: Any) -> dict[str, Any]:
    """Return the schema of a part of the settings file, as values: null is what is not said."""
    found = {}
    for field in msgspec.structs.fields(of) if of else ():
        if field.encode_name not in without:
            found[field.encode_name] = typed(field.type, may_be_zero=field.name in settings.MAY_BE_ZERO)
    return {"type": "object", "additionalProperties": False, "properties": found | more}


def typed(annotation: Any, *, may_be_zero: bool) -> dict[str, Any]:
    """Return the schema of a field's type; `--set` gives a number with a point as a string."""
    info = msgspec.inspect
    kind = info.type_info(annotation)
    kinds = [each for each in getattr(kind, "types", [kind]) if not isinstance(each, info.NoneType)]
    lowest: dict[str, Any] = {"minimum": 0} if may_be_zero else {"exclusiveMinimum": 0}
    simple: dict[Any, dict[str, Any]] = {
        info.IntType: {"type": ["integer", "null"], **lowest},
        info.FloatType: {"type": ["number", "string", "null"], **lowest, "pattern": NUMBER},
        info.BoolType: {"type": ["boolean", "null"]},
        info.StrType: {"type": ["string", "null"]},
    }
    (one,) = kinds
    if isinstance(one, info.LiteralType):
        return {"enum": [*one.values, None]}
    if isinstance(one, info.ListType):
        item = one.item_type
        if isinstance(item, info.StructType):
            return {"type": "array", "items": section(item.cls)}
        whole = isinstance(item, info.IntType)
        return {"type": ["array", "null"], "items": {"type": "integer", "minimum": 0} if whole else {"type": "string"}}
    return simple[type(one)]


FIGURES = ("1.3b", "llama3-8b", "13b", "30b", "llama3-70b", "175b")
"""Models that the storage chart speaks of."""


def figures() -> str:
    """Return what charts/shared-storage knows of throughput, and of models on the nodes of values/models."""
    models = []
    for name in FIGURES:
        training = yaml.safe_load((ROOT / f"values/models/{name}.yaml").read_text())["training"]
        content = {"model": msgspec.to_builtins(model.preset(name)), "training": training | {"gpusPerNode": 8}}
        content |= {"release": "-", "checkpoint": {"path": "-"}, "dataset": {"path": "-"}}
        layout = settings.derived(msgspec.convert(content, settings.Settings)).layout()
        models.append({"name": name, "nodes": training["nodes"], "checkpointBytes": round(checkpoint_bytes(layout))})
    found = {
        "megabytesPerSecondPerTib": storage.PER_TIB,
        "blobGigabitsPerSecond": storage.BLOB_GBIT,
        "nodeHours": storage.NODE_HOURS,
        "corpusBytes": storage.CORPUS,
        "models": models,
    }
    return json.dumps(found, indent=2) + "\n"


def recipes() -> str:
    """Return the global batches of values/models, which `tokenmill fit` plans with."""
    files = sorted((ROOT / "values/models").glob("*.yaml"))
    return (
        json.dumps(
            {each.stem: yaml.safe_load(each.read_text())["training"]["globalBatchSize"] for each in files}, indent=2
        )
        + "\n"
    )


def readme(chart: Path) -> str:
    """Return a chart's README.md, made of its README.md.gotmpl and the comments in its values.yaml."""
    command = [ROOT / ".cache/bin/helm-docs", "--dry-run", "--log-level=warning", "--sort-values-order=file"]
    done = subprocess.run([*command, f"--chart-search-root={chart}"], capture_output=True, text=True, check=True)
    return done.stdout.strip() + "\n"


def generated() -> Iterator[tuple[Path, str]]:
    """Yield each generated file with what it should hold; a README is made after its values were written."""
    for stage in STAGES:
        chart = CHARTS / f"dataset-{stage}"
        yield chart / "values.yaml", values(chart)
        yield chart / "values.schema.json", schema(chart)
    yield PIPELINE / "values.yaml", pipeline_values()
    yield PIPELINE / "values.schema.json", pipeline_schema()
    yield TRAINING / "values.yaml", training_values()
    yield TRAINING / "values.schema.json", training_schema()
    yield CHARTS / "shared-storage/figures.json", figures()
    yield ROOT / "jobs/tokenmill/training/recipes.json", recipes()
    for template in sorted(CHARTS.glob("*/README.md.gotmpl")):
        yield template.parent / "README.md", readme(template.parent)


if __name__ == "__main__":
    sys.exit(write_or_check(generated()))
