"""Generate what charts share or repeat: `make charts`.

Values and schema of a stage's chart: its own part, then what charts/common holds for all of them. The schema of the
training chart: its own part, what charts/common holds for all pods, and the sections of the settings file, whose types
have their home in tokenmill.training.settings. What the storage chart says of checkpoints: the figures of
tokenmill.training.storage. READMEs: from the comments in values.yaml, by helm-docs.

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

from tokenmill.training import model, settings, storage
from tokenmill.training.memory import checkpoint_bytes

ROOT = Path(__file__).parents[1]
CHARTS = ROOT / "charts"
STAGES = ("download", "extract", "concatenate", "preprocess")
TRAINING = CHARTS / "megatron-training"
MARKER = "# The rest is the same in every stage's chart: change charts/common/*.values.yaml, then `make charts`.\n"
POD_MARKER = (
    "# The rest is the same in every chart that runs pods: change charts/common/pod.values.yaml, then `make charts`.\n"
)
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
    own["properties"] |= parts
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
    yield TRAINING / "values.yaml", training_values()
    yield TRAINING / "values.schema.json", training_schema()
    yield CHARTS / "shared-storage/figures.json", figures()
    for template in sorted(CHARTS.glob("*/README.md.gotmpl")):
        yield template.parent / "README.md", readme(template.parent)


def main() -> int:
    """Write the files, or say which of them are not fresh."""
    check = "--check" in sys.argv[1:]
    stale = []
    for path, text in generated():
        if not path.exists() or path.read_text() != text:
            stale.append(str(path.relative_to(ROOT)))
            if not check:
                path.write_text(text)
    if check and stale:
        sys.stderr.write(f"not fresh, run make charts: {', '.join(stale)}\n")
    return int(check and bool(stale))


if __name__ == "__main__":
    sys.exit(main())
