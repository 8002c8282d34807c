"""The values of the charts for a command line: the inverse of the charts' templates `command/_command.tpl`.

Each Option declares its key in the values of its stage's chart. In the values of charts/dataset-pipeline, the key is in
the section of the stage, unless all stages share it. The tests render each option, and compare the command of the pod
with the original one.
"""

import json
from collections.abc import Callable, Mapping
from pathlib import Path, PurePosixPath
from typing import Any, NamedTuple

from tokenmill.core.files.user_path import read_named_file
from tokenmill.core.typed_json import decode_json
from tokenmill.errors import RequestError
from tokenmill.submit.call import Call, OptionValue

ChartKeys = Callable[[str], Mapping[str, str]]
"""Returns the key of each option of a stage in the values of the stage's chart, by flag without dashes."""

REFUSED = {
    "endpoint": "set HF_ENDPOINT in the ConfigMap tokenmill-environment instead",
    "scratch": "remove it: the pods have scratch space, whose size scratch.sizeLimit sets",
    "encoder-patience": "remove it: the charts have no value for it",
    "connections": "remove it: the charts have a value for downloads alone",
    "deadline": "remove it: the charts have a value for downloads alone",
    "stall-seconds": "remove it: the charts have a value for downloads alone",
    "txt-document": "remove it: the stage reads records",
    "notify-template": "set notify.template in the values of the profile instead",
    "notify-url-file": "set notify.urlSecret in the values of the profile instead",
    "metrics-push": "set metrics.pushgateway in the values of the profile instead",
}
"""Options without a value in the charts of some stages, each with the remedy."""

_SHARED = {"root", "source", "revision", "include", "exclude", "split", "prefer", "keys", "format", "txtDocument"}
_SHARED |= {"zstdWindow", "messages", "tools", "roleMap", "chatTemplate", "packSize"}
"""Keys of `dataset` that all stages of charts/dataset-pipeline share."""

Values = dict[str, Any]
"""Values of a chart: a tree of sections."""


class Mount(NamedTuple):
    """The directory at which the pods mount the PVC."""

    path: str

    def relative(self, path: str, parameter: str) -> str:
        """Return a path relative to the PVC.

        Raises:
            RequestError: the path is not below the mount.
        """
        whole = PurePosixPath(self.path) / path
        if ".." in whole.parts or not whole.is_relative_to(self.path) or whole == PurePosixPath(self.path):
            raise RequestError(
                f"{parameter} {path}: on Kubernetes a path is one in the pods; write a directory below {self.path}, at "
                "which they mount the PVC"
            )
        return str(whole.relative_to(self.path))


def stage_values(call: Call, mount: Mount, keys: ChartKeys) -> Values:
    """Return the values of a stage's own chart for a call of the stage.

    Raises:
        RequestError: an option or an argument has no value.
    """
    values = _option_values(keys(call.command), call.options, mount)
    arguments = list(call.arguments)
    if call.command == "download" or "://" in arguments[0]:
        _set(values, "dataset.source", arguments[0])
        if call.command != "download":
            _set(values, "dataset.stream", value=True)
    else:
        if call.command == "pack" and arguments[0].endswith(".json"):
            raise RequestError(
                f"INPUT {arguments[0]}: a blend is a file of this machine; set dataset.blend in a values file, and "
                "install charts/dataset-pack"
            )
        _set(values, "dataset.inputPath", mount.relative(arguments[0], "INPUT"))
    if len(arguments) > 1:
        _set(values, "dataset.outputPath", mount.relative(arguments[1], "OUTPUT"))
    return values


def run_values(call: Call, mount: Mount, keys: ChartKeys) -> Values:
    """Return the values of charts/dataset-pipeline for a call of `run`."""
    options = dict(call.options)
    files = int(str(options.pop("concatenate", 0)))
    extract = bool(options.pop("extract", False)) or files > 0
    values: Values = {"dataset": {"source": call.arguments[0], "root": mount.relative(call.arguments[1], "OUTPUT")}}
    stages = ["download", *(["extract"] if extract else []), *(["concatenate"] if files else []), "preprocess"]
    if files:
        _set(values, "concatenate.dataset.targetFiles", files)
    _divide(values, options, stages, mount, keys)
    return values


def sft_values(call: Call, mount: Mount, keys: ChartKeys) -> Values:
    """Return the values of charts/dataset-pipeline for a call of `sft`."""
    options, source = dict(call.options), call.arguments[0]
    output = mount.relative(call.arguments[1], "OUTPUT")
    download = bool(options.pop("download", False))
    values: Values = {"dataset": {"root": output}, "preprocess": {"enabled": False}}
    _set(values, "chat.dataset.outputPath", f"{output}/chat")
    _set(values, "pack.dataset.outputPath", f"{output}/packed")
    _set(values, "pack.dataset.inputPath", f"{output}/chat")
    _set(values, "pack.rows.overLong", "drop")
    if (packed := options.pop("packed-format", None)) is not None:
        _set(values, "pack.shards.format", packed)
    if download:
        _set(values, "download.dataset.outputPath", f"{output}/source")
        _set(values, "chat.dataset.inputPath", f"{output}/source")
    elif "://" in source:
        _set(values, "chat.dataset.stream", value=True)
    elif source.endswith(".json"):
        raise RequestError(
            f"INPUT {source}: a blend is a file of this machine; install charts/dataset-chat for each dataset, and "
            "charts/dataset-pack with dataset.blend"
        )
    else:
        _set(values, "chat.dataset.inputPath", mount.relative(source, "INPUT"))
    if "://" in source:
        _set(values, "dataset.source", source)
    _divide(values, options, [*(["download"] if download else []), "chat", "pack"], mount, keys)
    return values


def _divide(
    values: Values, options: Mapping[str, OptionValue], stages: list[str], mount: Mount, keys: ChartKeys
) -> None:
    """Set the options of a pipeline's command in the sections of the stages that have them."""
    for stage in ("download", "extract", "concatenate", "transform", "preprocess", "chat", "pack"):
        if stage in ("download", "preprocess") or stage in stages:
            _set(values, f"{stage}.enabled", value=stage in stages)
    known: set[str] = set()
    for stage in stages:
        stage_keys = keys(stage)
        names = set(stage_keys)
        if stage not in ("download", stages[0]):  # later stages read all files of the stage before them
            names -= {"sample", "revision"}
        if stage == "pack":
            names -= {"over-long", "format"}  # those of `sft` are options of chat
        if stage == "concatenate":
            names -= {"target-files"}  # that of `run` is an option of preprocess
        own = {name: value for name, value in options.items() if name in names}
        known |= own.keys()
        section = _option_values(stage_keys, own, mount)
        shared = {key: section["dataset"].pop(key) for key in list(section.get("dataset", {})) if key in _SHARED}
        values["dataset"].update(shared)
        for key in ("replace", "verifyHashes"):
            if key in section:
                values[key] = section.pop(key)
        _merge(values.setdefault(stage, {}), section)
    if unknown := options.keys() - known:
        name = sorted(unknown)[0]
        raise RequestError(f"--{name} has no value in the charts: {REFUSED.get(name, 'remove it')}")


def _option_values(keys: Mapping[str, str], options: Mapping[str, OptionValue], mount: Mount) -> Values:
    values: Values = {}
    for name, value in options.items():
        if name not in keys:
            raise RequestError(f"--{name} has no value in the charts: {REFUSED.get(name, 'remove it')}")
        if name == "tokenizer":
            _set_tokenizer(values, str(value), mount)
            continue
        convert = _CONVERSIONS.get(name)
        _set(values, keys[name], convert(value, mount) if convert else value)
        if name == "transform":
            module = Path(f"{str(value).partition(':')[0]}.py")
            if ":" in str(value) and module.is_file():
                _set(values, "function.source", read_named_file(module, "--transform").decode())
    return values


def _set_tokenizer(values: Values, tokenizer: str, mount: Mount) -> None:
    """Set the tokenizer: a directory in the pods, or a name on the Hub."""
    if PurePosixPath(tokenizer).is_relative_to(mount.path):
        _set(values, "tokenizer.path", mount.relative(tokenizer, "--tokenizer"))
    elif tokenizer.startswith(("/", ".")) or tokenizer.count("/") > 1:
        raise RequestError(
            f"--tokenizer {tokenizer}: on Kubernetes a tokenizer is a name on the Hub, or a directory below "
            f"{mount.path}; copy it to the PVC"
        )
    else:
        _set(values, "tokenizer.name", tokenizer)


def _read_template(template: str, mount: Mount) -> str:
    """Return a chat template as its value: a name, a file on the PVC, or the text of a file of this machine."""
    if not template.endswith(".jinja"):
        return template
    if PurePosixPath(template).is_relative_to(mount.path):
        return mount.relative(template, "--chat-template")
    try:
        return read_named_file(Path(template), "--chat-template").decode()
    except OSError as error:
        raise RequestError(f"cannot read --chat-template {template}: {error.strerror}; correct the path") from None


def _parse_pairs(parts: Any) -> dict[str, str]:
    return dict(part.split("=", 1) for part in parts)


_CONVERSIONS: dict[str, Callable[[OptionValue, Mount], Any]] = {
    "keys": lambda value, _: str(value).split(","),
    "role-map": lambda value, _: _parse_pairs(str(value).split(",")),
    "set": lambda value, _: _parse_pairs(value),
    "chat-template": lambda value, mount: _read_template(str(value), mount),
}
"""The options whose value in the charts has another form than on the command line."""


def train_values(settings: Mapping[str, Any], mount: Mount) -> Values:
    """Return the values of charts/megatron-training for the content of a settings file.

    The file has the names of the values, except where the chart composes paths.
    """
    remaining = dict(settings)
    model = dict(remaining.pop("model"))
    model.pop("name", None)
    checkpoint, dataset = dict(remaining.pop("checkpoint")), dict(remaining.pop("dataset"))
    values: Values = {"model": {"size": "custom", "custom": model}, "storage": {}, "dataset": {}}
    _set(values, "storage.checkpointPath", mount.relative(checkpoint.pop("path"), "checkpoint.path"))
    if (logs := (remaining.pop("logs", None) or {}).get("path")) is not None:
        _set(values, "storage.logsPath", mount.relative(logs, "logs.path"))
    values["training"] = dict(remaining.pop("training"))
    if (phases := values["training"].get("phases")) is not None:
        _set(values, "training.phases", _relative_phases(phases, mount))
    if "saveInterval" in checkpoint:
        _set(values, "training.saveInterval", checkpoint.pop("saveInterval"))
    if (load := checkpoint.pop("loadPath", None)) is not None:
        _set(values, "checkpoint.loadPath", mount.relative(load, "checkpoint.loadPath"))
    _merge(values.setdefault("checkpoint", {}), checkpoint)
    if (path := dataset.pop("path", None)) is not None:
        _set(values, "storage.datasetPath", mount.relative(path, "dataset.path"))
    if (cache := dataset.pop("cachePath", None)) is not None:
        _set(values, "dataset.cachePath", mount.relative(cache, "dataset.cachePath"))
    if (blend := dataset.pop("blend", None)) is not None:
        file = mount.relative(blend, "dataset.blend") if isinstance(blend, str) else None
        _set(values, "dataset.blend", file or {key: _relative_parts(parts, mount) for key, parts in blend.items()})
    _merge(values["dataset"], dataset)
    if (sft := remaining.pop("sft", None)) is not None:
        tokenizer = mount.relative(sft["tokenizerPath"], "sft.tokenizerPath")
        values["sft"] = {"enabled": True, "promptFormat": sft["promptFormat"], "tokenizerPath": tokenizer}
    if (again := remaining.pop("runAgain", "")) != "":
        _set(values, "job.runAgain", again)
    remaining.pop("release", None)
    return {**values, **remaining}


def _relative_phases(phases: Any, mount: Mount) -> Any:
    if isinstance(phases, str):
        return mount.relative(phases, "training.phases")
    return [{**phase, "blend": _relative_parts(phase["blend"], mount)} for phase in phases]


def _relative_parts(parts: Any, mount: Mount) -> Any:
    if not isinstance(parts, list):
        return parts
    return [{**part, "path": mount.relative(part["path"], "dataset.blend")} for part in parts]


def read_settings_file(path: Path) -> Mapping[str, Any]:
    """Return the content of a settings file, which `train.settings.read_settings` has checked."""
    content: Mapping[str, Any] = decode_json(read_named_file(path, "the settings"))
    return content


def to_text(values: Values) -> str:
    """Return values as JSON, which Helm reads as YAML. It quotes all texts: to Helm, an unquoted n is a truth value."""
    return json.dumps(values, indent=2, ensure_ascii=False)


def _set(values: Values, place: str, value: Any) -> None:
    *sections, key = place.split(".")
    for section in sections:
        values = values.setdefault(section, {})
    values[key] = value


def _merge(target: Values, more: Mapping[str, Any]) -> None:
    """Add values to a tree; values of the tree that `more` also has are replaced."""
    for key, value in more.items():
        if isinstance(value, dict) and isinstance(target.get(key), dict):
            _merge(target[key], value)
        else:
            target[key] = value
