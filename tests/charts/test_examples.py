"""examples/ without a cluster: three ways to install the same two stages, all accepted by the charts."""

import json
import os
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from support.rendering import (
    ROOT,
    TOOLS,
    ReleaseOfChart,
    argocd_releases,
    arguments,
    documents_of,
    flux_releases,
    helm,
    parse,
    validate_manifests,
)
from tokenmill import __version__

EXAMPLES = ROOT / "examples"
STAGES = ("download", "preprocess")


def job(chart: str, release: str, files: list[str], **job_values: Any) -> dict[str, Any]:
    """Render a stage with the values of examples/, and return its Job."""
    flags = [part for file in files for part in ("-f", (EXAMPLES / file).resolve(strict=True))]
    more = ["--set-json", f"job={json.dumps(job_values)}"]
    done = helm("template", release, (EXAMPLES / chart).resolve(strict=True), *flags, *(more if job_values else []))
    assert done.returncode == 0, done.stderr
    (rendered,) = [document for document in yaml.safe_load_all(done.stdout) if document["kind"] == "Job"]
    return rendered


def by_script(stage: str) -> dict[str, Any]:
    """Return the Job that deploy.sh creates for a stage."""
    files = ["../values/datasets/slimpajama.yaml", "values/all.yaml", f"values/{stage}.yaml"]
    return job(f"../charts/dataset-{stage}", f"slimpajama-{stage}", files)


def helmfile() -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Return the content of helmfile.yaml, and its releases with their template applied."""
    content = yaml.safe_load((EXAMPLES / "helmfile.yaml").read_text())
    releases = []
    for release in content["releases"]:
        text = yaml.safe_dump(content["templates"]["stage"] | release)
        filled = text.replace("{{ .Release.Labels.stage }}", release["labels"]["stage"])
        releases.append(yaml.safe_load(filled.replace("{{ .Release.Name }}", release["name"])))
    return content, releases


@pytest.mark.parametrize("stage", STAGES)
def test_the_commands_accept_the_arguments_of_the_script(stage: str) -> None:
    parsed = parse(arguments(by_script(stage)))
    assert parsed["workers"] == {"download": 2, "preprocess": 4}[stage]


def test_helmfile_installs_the_jobs_of_the_script() -> None:
    content, releases = helmfile()
    assert [release["labels"]["stage"] for release in releases] == list(STAGES)
    for before, release in zip([None, *releases], releases, strict=False):
        assert job(release["chart"], release["name"], release["values"]) == by_script(release["labels"]["stage"])
        assert release.get("needs") == (before and [before["name"]])
        (hook,) = release["hooks"]
        assert hook["events"] == ["postsync"] and hook["args"] == [release["name"]]
        assert (EXAMPLES / hook["command"]).stat().st_mode & 0o111
    assert content["helmDefaults"]["skipDeps"] is True, "helm dependency build leaves an archive next to the link"


def rendered(release: ReleaseOfChart, tmp_path: Path) -> list[dict[str, Any]]:
    """Render the release of an example with its values."""
    (tmp_path / "values.yaml").write_text(yaml.safe_dump(release.values))
    flags = [part for file in [*release.files, tmp_path / "values.yaml"] for part in ("-f", file)]
    done = helm("template", "--skip-tests", release.name, ROOT / "charts" / release.chart, *flags)
    assert done.returncode == 0, done.stderr
    return documents_of(done.stdout)


def test_argo_cd_applies_the_jobs_of_the_script(tmp_path: Path) -> None:
    waves = []
    for stage, release in zip(STAGES, argocd_releases(), strict=True):
        (applied,) = rendered(release, tmp_path)
        expected = by_script(stage)
        assert release.version == __version__
        assert applied["spec"] == expected["spec"]
        hashed = f"{expected['metadata']['name']}-{expected['metadata']['annotations']['tokenmill/spec'][:8]}"
        assert applied["metadata"]["name"] == hashed
        waves.append(int(applied["metadata"]["annotations"]["argocd.argoproj.io/sync-wave"]))
    assert waves == sorted(set(waves))


def test_flux_installs_the_jobs_of_the_script_and_then_a_run(tmp_path: Path) -> None:
    *data, run = flux_releases()
    for stage, release in zip(STAGES, data, strict=True):
        assert rendered(release, tmp_path) == [by_script(stage)]
    assert "PyTorchJob" in [document["kind"] for document in rendered(run, tmp_path)]
    names = [release.name for release in [*data, run]]
    assert [release.needs for release in [*data, run]] == [[], *([name] for name in names[:-1])]
    assert {release.version for release in [*data, run]} == {__version__}


def test_flux_accepts_its_objects() -> None:
    validate_manifests(*((EXAMPLES / "flux" / name).read_text() for name in ("charts.yaml", "releases.yaml")))


def test_flux_builds_its_example() -> None:
    """Flux's own build has no restriction of the directories from which it loads files."""
    kubectl = shutil.which("kubectl")
    if not kubectl:
        pytest.skip("kubectl is not on PATH")
    line = [kubectl, "kustomize", "--load-restrictor", "LoadRestrictionsNone", EXAMPLES / "flux"]
    done = subprocess.run(line, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    objects = documents_of(done.stdout)
    assert {document["metadata"]["namespace"] for document in objects} == {"training"}
    (values,) = [document["data"] for document in objects if document["kind"] == "ConfigMap"]
    assert values["dataset.yaml"] == (ROOT / "values/datasets/slimpajama.yaml").read_text()


def test_flux_repeats_a_stage_but_never_a_run() -> None:
    """A retry upgrades the release. It must not uninstall or roll back, and a failed run must not occupy GPUs again."""
    *data, run = [document["spec"] for document in yaml.safe_load_all((EXAMPLES / "flux/releases.yaml").read_text())]
    for action in ("install", "upgrade"):
        assert all(spec[action]["strategy"]["name"] == "RetryOnFailure" for spec in data)
        assert run[action] == {
            "disableWait": True,
            "strategy": {"name": "RemediateOnFailure"},
            "remediation": {"retries": 0},
        }
    assert all(spec["test"]["enable"] for spec in data)
    assert run["driftDetection"]["mode"] == "warn"


JOBSET, PYTORCHJOB = "jobset.x-k8s.io_JobSet", "kubeflow.org_PyTorchJob"


def conditions(**states: str) -> dict[str, Any]:
    """Return the status of a PyTorchJob."""
    return {"conditions": [{"type": kind, "status": state, "message": kind} for kind, state in states.items()]}


HEALTH = {
    "jobset-new": (JOBSET, None, "Progressing"),
    "jobset-completed": (JOBSET, {"terminalState": "Completed"}, "Healthy"),
    "jobset-failed": (JOBSET, {"terminalState": "Failed"}, "Degraded"),
    "pytorchjob-new": (PYTORCHJOB, None, "Progressing"),
    "pytorchjob-running": (PYTORCHJOB, conditions(Created="True", Running="True"), "Progressing"),
    "pytorchjob-restarting": (PYTORCHJOB, conditions(Running="False", Restarting="True"), "Progressing"),
    "pytorchjob-succeeded": (PYTORCHJOB, conditions(Running="False", Succeeded="True"), "Healthy"),
    "pytorchjob-failed": (PYTORCHJOB, conditions(Created="True", Failed="True"), "Degraded"),
    "pytorchjob-suspended": (PYTORCHJOB, conditions(Created="True", Suspended="True"), "Suspended"),
    "pytorchjob-resumed": (PYTORCHJOB, conditions(Suspended="False", Running="True"), "Progressing"),
}


@pytest.mark.parametrize("case", HEALTH)
def test_argo_cd_shows_the_health_of_a_workload(case: str) -> None:
    kind, status, health = HEALTH[case]
    checks = yaml.safe_load((EXAMPLES / "argocd-cm.yaml").read_text())["data"]
    program = f"(function()\n{checks[f'resource.customizations.health.{kind}']}\nend)()"
    state = "nil" if status is None else lua(status)
    script = f"obj = {{spec = {{}}, status = {state}}}\nprint({program}.status)"
    done = subprocess.run([TOOLS / "glua", "-e", script], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout.strip()) == (0, health), done.stderr


def lua(value: Any) -> str:
    """Return a value of JSON as a Lua expression."""
    if isinstance(value, dict):
        return "{" + ", ".join(f"[{json.dumps(key)}] = {lua(item)}" for key, item in value.items()) + "}"
    if isinstance(value, list):
        return "{" + ", ".join(map(lua, value)) + "}"
    return json.dumps(value)


@pytest.mark.parametrize("option", ["-n", "-nteam", "--namespace=team", "--kube-context", "--kubeconfig=x"])
def test_the_script_refuses_options_that_kubectl_would_not_get(option: str) -> None:
    line = ["sh", EXAMPLES / "deploy.sh", "--set", "workers=1", option, "team"]
    done = subprocess.run(line, capture_output=True, text=True, check=False)
    message = f"{option} applies only to helm, not to kubectl: set NAMESPACE, or KUBECONFIG and its context\n"
    assert (done.returncode, done.stderr) == (2, message)


@pytest.mark.parametrize("script", ["deploy.sh", "wait.sh"])
def test_a_script_is_valid_for_any_shell(script: str) -> None:
    done = subprocess.run(["sh", "-n", EXAMPLES / script], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert (EXAMPLES / script).stat().st_mode & 0o111


def run_deploy(tmp_path: Path, *options: str) -> tuple[subprocess.CompletedProcess[str], dict[str, dict[str, Any]]]:
    """Run the script with a Helm that only renders, and with complete Jobs; return the process and the Jobs."""
    (tmp_path / "bin").mkdir(exist_ok=True)
    programs = {
        "helm": f'[ "$1" = test ] || {{ shift 2; exec {TOOLS}/helm template --skip-tests "$@" >{tmp_path}/$1.yaml; }}',
        "kubectl": "echo job Complete",
    }
    for name, body in programs.items():
        (tmp_path / "bin" / name).write_text(f"#!/bin/sh\n{body}\n")
        (tmp_path / "bin" / name).chmod(0o755)
    environment = {"PATH": f"{tmp_path / 'bin'}:{os.environ['PATH']}", "STAGES": "download extract preprocess"}
    rest = {"VALUES": str(tmp_path / "values")}
    (tmp_path / "values").mkdir(exist_ok=True)
    for name in ("all", "download", "extract", "preprocess"):
        text = "storage: {pvcName: claim}" if name == "all" else ""
        (tmp_path / "values" / f"{name}.yaml").write_text(text)
    line = ["sh", str(EXAMPLES / "deploy.sh"), *options]
    done = subprocess.run(line, env=environment | rest, capture_output=True, text=True, check=False)
    files = tmp_path.glob("slimpajama-*.yaml")
    return done, {file.stem.rpartition("-")[2]: yaml.safe_load(file.read_text()) for file in files}


def test_a_setting_of_one_stage_reaches_the_stages_that_have_it(tmp_path: Path) -> None:
    done, jobs = run_deploy(
        tmp_path,
        *("--set", "tokenizer.name=Qwen/Qwen3-8B-Base,workers=3", "--set=dataset.targetFiles=7"),
        *(
            "--set",
            "dataset.include={a/*,b/*},dataset.connections=2,job.maxFailedIndexes=1",
            "--set-string",
            "podLabels.team=a",
        ),
        *(
            "--set-json",
            'nodeSelector={"a":"x","b":"y"}',
            "--set-literal",
            "tokenizer.revision=a,b=c",
            "--timeout",
            "5m",
        ),
    )
    assert done.returncode == 0, done.stderr
    commands = {stage: " ".join(arguments(job)) for stage, job in jobs.items()}
    assert all(job["spec"]["completions"] == 3 and job["spec"]["maxFailedIndexes"] == 1 for job in jobs.values())
    pods = [job["spec"]["template"] for job in jobs.values()]
    assert all(pod["spec"]["nodeSelector"] == {"a": "x", "b": "y"} for pod in pods) and len(pods) == 3
    assert all(pod["metadata"]["labels"]["team"] == "a" for pod in pods)
    assert "--tokenizer=Qwen/Qwen3-8B-Base" in commands["preprocess"] and "--target-files=7" in commands["preprocess"]
    assert "--tokenizer-revision=a,b=c" in commands["preprocess"]
    assert "--include=a/* --include=b/*" in commands["download"]
    assert "--connections=2" in commands["download"] and "--connections" not in commands["extract"]


@pytest.mark.parametrize(
    "setting", ["tokeniser.name=x", "workers=2,dataset.targetfiles=3", "dataset.nothing=1", "model.size=13b"]
)
def test_a_setting_of_no_stage_is_refused_before_the_installation(setting: str, tmp_path: Path) -> None:
    done, jobs = run_deploy(tmp_path, "--set", setting)
    assert (done.returncode, jobs) == (2, {})
    assert f"--set {setting}: no stage of download extract preprocess has this setting" in done.stderr
