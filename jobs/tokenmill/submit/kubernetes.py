"""Install the charts for a command, and read the states of the objects that they create.

Each object has the annotation `tokenmill/output` with the directory that it writes to. `read_states` selects by it.
"""

import json
import shlex
from collections.abc import Mapping
from pathlib import Path, PurePosixPath
from typing import Any, NamedTuple

from tokenmill.core.files.user_path import local_path
from tokenmill.core.json_lines import JsonEvent
from tokenmill.errors import RequestError
from tokenmill.submit.call import Call, make_name
from tokenmill.submit.profile import KubernetesProfile
from tokenmill.submit.programs import run_program
from tokenmill.submit.values import (
    ChartKeys,
    Mount,
    Values,
    read_settings_file,
    run_values,
    sft_values,
    stage_values,
    to_text,
    train_values,
)

OUTPUT_ANNOTATION = "tokenmill/output"
HELM_REMEDY = "install Helm 3 or 4, and put it on PATH"
KUBECTL_REMEDY = "install kubectl, and put it on PATH"
KINDS = ("trainjob.trainer.kubeflow.org", "jobset.jobset.x-k8s.io", "pytorchjob.kubeflow.org", "job.batch")
"""Kinds of the objects that run the pods of a chart, owners before the objects that they own."""


class Release(NamedTuple):
    """A release of Helm: its chart, and the values that come from the command line."""

    name: str
    chart: str
    profile: KubernetesProfile
    values: Values
    output: str
    """The directory in the pods that it writes to."""

    def command(self, *action: str) -> list[str]:
        """Return the command of Helm for an action; it reads the values of the command line from its input."""
        profile = self.profile
        chart = f"{profile.charts}/{self.chart}"
        options = [f"--version={profile.version}"] if profile.version else []
        options += _cluster_options(profile, "kube-context")
        options += [f"--values={file}" for file in [*profile.values, "-"]]
        return ["helm", *action, self.name, chart, *options]


def make_release(
    call: Call, profiles: Mapping[str, KubernetesProfile], workers: int | None, name: str | None, keys: ChartKeys
) -> Release:
    """Return the release for a call, with the profile of each of its steps.

    Raises:
        RequestError: an argument is not a path in the pods, or an option has no value in the charts.
    """
    first = next(iter(profiles.values()))
    mount = Mount(first.mount)
    if call.command == "train":
        from tokenmill.train.settings import read_settings

        settings = read_settings(Path(call.arguments[0]))
        output = str(local_path(settings.checkpoint.path, "checkpoint.path"))  # `status` looks for the run there
        values = train_values(read_settings_file(Path(call.arguments[0])), mount)
        chart, name = "megatron-training", name or settings.release
    elif call.command in ("run", "sft"):
        if "only" in call.options:
            raise RequestError(
                "--only: the chart of the pipeline runs all stages; remove it, or use the stage's command"
            )
        chart, output = "dataset-pipeline", call.arguments[1]
        values = (run_values if call.command == "run" else sft_values)(call, mount, keys)
        for stage, profile in profiles.items():
            if stage != "verify":
                values.setdefault(stage, {})["workers"] = workers or profile.workers
    else:
        chart, output = f"dataset-{call.command}", call.arguments[-1]
        values = stage_values(call, mount, keys)
        values["workers"] = workers or first.workers
    output = str(PurePosixPath(first.mount) / output)
    _add(values, "storage", {"pvcName": first.claim, "mountPath": first.mount})
    _add(values, "job", {"annotations": {OUTPUT_ANNOTATION: output}})
    return Release(name or _make_release_name(call, output), chart, first, values, output)


def _make_release_name(call: Call, output: str) -> str:
    name = make_name(Path(output))
    return name if call.command in ("run", "sft") else f"{name}-{call.command}"


def describe(release: Release) -> str:
    """Return the objects that `install` would create, after the command and the values as comments."""
    text = to_text(release.values)
    objects = run_program(release.command("template", "--skip-tests"), HELM_REMEDY, text) or ""
    header = [shlex.join(release.command("upgrade", "--install")), *text.splitlines()]
    return "".join(f"# {line}\n" for line in header) + objects


def install(release: Release, status: str) -> str:
    """Create or upgrade the release, and return what to do next; `status` is the command that shows the progress."""
    command = [*release.command("upgrade", "--install"), f"--timeout={release.profile.timeout}"]
    run_program(command, HELM_REMEDY, to_text(release.values))
    options = shlex.join(_cluster_options(release.profile, "kube-context"))
    return (
        f"release {release.name} of {release.chart} is installed and writes to {release.output}\n"
        f"status: {status}\n"
        f"notes:  helm get notes {release.name} {options}\n"
        f"cancel: helm uninstall {release.name} {options}\n"
    )


class ObjectState(JsonEvent, frozen=True, kw_only=True, tag="job"):
    """The state of an object that runs pods, as its operator reports it."""

    kind: str
    name: str
    output: str
    state: str
    details: str

    def __str__(self) -> str:
        """Describe the state in one line."""
        details = f", {self.details}" if self.details else ""
        return f"{self.kind}/{self.name} of Kubernetes: {self.state}{details}, writes to {self.output}"


def read_states(output: str, profile: KubernetesProfile) -> list[ObjectState]:
    """Return the states of the objects that write to a directory in the pods, or below it.

    Raises:
        RequestError: kubectl does not exist or cannot read Jobs; kinds that the cluster does not know are left out.
    """
    root = PurePosixPath(profile.mount) / output
    items: list[Mapping[str, Any]] = []
    for kind in KINDS:
        command = ["kubectl", "get", kind, "--output=json", *_cluster_options(profile, "context")]
        answer = run_program(command, KUBECTL_REMEDY, required=kind == KINDS[-1])
        items += json.loads(answer)["items"] if answer else []
    outputs: dict[str, str] = {}
    states = []
    for item in items:  # owners before the objects that they own
        metadata = item["metadata"]
        owner = next((reference["uid"] for reference in metadata.get("ownerReferences", [])), "")
        written = metadata.get("annotations", {}).get(OUTPUT_ANNOTATION) or outputs.get(owner, "")
        if written and PurePosixPath(written).is_relative_to(root):
            outputs[metadata["uid"]] = written
            states.append(_describe_object(item, written))
    return states


def _describe_object(item: Mapping[str, Any], output: str) -> ObjectState:
    status, spec = item.get("status", {}), item["spec"]
    conditions = {
        condition["type"]: condition for condition in status.get("conditions", []) if condition["status"] == "True"
    }
    ended = next((name for name in ("Complete", "Completed", "Succeeded", "Failed") if name in conditions), None)
    suspended = bool(spec.get("suspend") or spec.get("runPolicy", {}).get("suspend"))
    state = ended.lower() if ended else "suspended" if suspended else "active"
    details = []
    if item["kind"] == "Job":
        details.append(f"{status.get('succeeded', 0)} of {spec.get('completions', 1)} workers done")
        details += [f"{status['active']} active"] if status.get("active") else []
        details += [f"failed workers {status['failedIndexes']}"] if status.get("failedIndexes") else []
    if state == "failed" and conditions["Failed"].get("message"):
        details.append(conditions["Failed"]["message"])
    kind = item["kind"].lower()
    return ObjectState(kind=kind, name=item["metadata"]["name"], output=output, state=state, details=", ".join(details))


def _cluster_options(profile: KubernetesProfile, context_option: str) -> list[str]:
    options = [f"--{context_option}={profile.context}"] if profile.context else []
    return [*options, *([f"--namespace={profile.namespace}"] if profile.namespace else [])]


def _add(values: Values, section: str, more: Values) -> None:
    values[section] = {**more, **values.get(section, {})}
