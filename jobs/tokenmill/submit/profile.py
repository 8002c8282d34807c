"""The profiles of `--on`: a TOML file with a table for each cluster.

    [gpu-cluster]
    on = "slurm"
    account = "llm"
    partition = "cpu"
    workers = 16

    [gpu-cluster.train]      # keys for one command
    partition = "gpu"

The names of the keys are those of `sbatch` and of the charts. `read_profile` returns the profile of a command, with the
keys of the command's own table.
"""

import re
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec

from tokenmill.core.files.user_path import read_named_file
from tokenmill.core.typed_json import convert_json
from tokenmill.errors import RequestError

LOCAL, SLURM, KUBERNETES = "local", "slurm", "kubernetes"
PROFILES_FILE = "tokenmill.toml"
COMMANDS = ("download", "extract", "concatenate", "transform", "preprocess", "chat", "pack", "verify", "train")
"""Names of the tables in a profile: the jobs that may have keys of their own."""
VARIABLE_NAME = re.compile("[A-Za-z_][A-Za-z0-9_]*")
Positive = Annotated[int, msgspec.Meta(ge=1)]
CONTROL_CHARACTERS = re.compile(r"[\x00-\x1f\x7f]")


class Table(msgspec.Struct, rename="kebab", forbid_unknown_fields=True, frozen=True, kw_only=True):
    """A table of the file, whose keys are in kebab-case."""


class Container(Table, frozen=True):
    """The image in which the jobs run, and the directories that it sees."""

    runtime: Literal["pyxis", "apptainer"]
    image: str
    mounts: list[str] = []
    """Directories as HOST:CONTAINER, or one path for both."""
    options: list[str] = []
    """More options of srun (pyxis) or of `apptainer exec`."""


class SlurmProfile(Table, frozen=True):
    """The resources of a job of Slurm; a key that is missing is left to the cluster's defaults."""

    account: str | None = None
    partition: str | None = None
    qos: str | None = None
    time: str | None = None
    workers: Positive = 1
    """Workers of a data stage, which are the tasks of an array."""
    max_running: Positive | None = None
    """Workers that may run at the same time."""
    cpus: Positive | None = None
    """CPUs of each worker, or of each node of a training."""
    memory: str | None = None
    """Memory of each node."""
    gpus: str | None = None
    """GPUs of each node of a training, such as 8 or h100:8. Default: training.gpusPerNode."""
    stop_seconds: Positive = 120
    """Seconds before the time limit at which a job stops and is queued again. A training needs the time of a save."""
    retries: Annotated[int, msgspec.Meta(ge=0)] = 10
    """Number of failures after which a worker is not started again. Stops, preemptions and lost nodes do not count."""
    setup: list[str] = []
    """Lines of shell that run before the command, such as `module load`."""
    environment: dict[str, str] = {}
    options: list[str] = []
    """More options of sbatch."""
    container: Container | None = None
    command: list[str] = []
    """Command that starts tokenmill. Default: this installation's, or `tokenmill` in a container."""


class KubernetesProfile(Table, frozen=True):
    """The cluster, the PVC and the charts of a release of Helm."""

    claim: str
    mount: str = "/data"
    """Directory at which the pods mount the PVC; the paths of the command line are below it."""
    namespace: str | None = None
    context: str | None = None
    charts: str = "charts"
    """Directory of the charts, or their OCI registry."""
    version: str | None = None
    """Version of the charts of a registry."""
    values: list[str] = []
    """Files of values, relative to the file of the profiles."""
    workers: Positive = 1
    timeout: str = "5m"
    """Time for Helm to create the objects; it does not wait for the end of the jobs."""


EXAMPLE = """
    [{name}]
    on = "kubernetes"
    claim = "shared-storage-pvc\""""
"""The shortest profile of a cluster, for messages."""

Profile = SlurmProfile | KubernetesProfile
_KINDS: dict[str, type[SlurmProfile] | type[KubernetesProfile]] = {SLURM: SlurmProfile, KUBERNETES: KubernetesProfile}


def read_profile(name: str, command: str, file: Path | None, directory: Path) -> Profile:
    """Return the profile of this name for a command; `slurm` and `kubernetes` need no table.

    `file` is the requested file; without one, tokenmill.toml in `directory` is read if it exists.

    Raises:
        RequestError: the file or the table does not exist, or has an unknown or invalid key.
    """
    path = file or directory / PROFILES_FILE
    tables = _read_tables(path, name, required=file is not None or name != SLURM)
    table = tables.get(name, {"on": name} if name in _KINDS else None)
    if table is None:
        known = ", ".join([LOCAL, *dict.fromkeys([*_KINDS, *tables])])
        raise RequestError(f"--on {name}: {path} has no table [{name}]; add it, or choose one of {known}")
    if not isinstance(table, dict):
        raise RequestError(f"{path}: {name} is not a table; write [{name}]")
    merged: dict[str, Any] = {key: value for key, value in table.items() if key not in COMMANDS}
    own = table.get(command, {})
    if not isinstance(own, dict):
        raise RequestError(f"{path}: {command} in [{name}] is not a table; write [{name}.{command}]")
    merged |= own
    kind = merged.pop("on", name)
    if kind not in _KINDS:
        raise RequestError(f'{path}: [{name}] has on = "{kind}"; set it to "{SLURM}" or "{KUBERNETES}"')
    for text in _texts(merged):
        if CONTROL_CHARACTERS.search(text):
            raise RequestError(f"{path}: [{name}] contains the text {text!r} with a control character; remove it")
    if kind == KUBERNETES and "claim" not in merged:
        raise RequestError(
            f"{path}: [{name}] has no claim, the name of the PVC of the data; add it:{EXAMPLE.format(name=name)}"
        )
    try:
        profile = convert_json(merged, _KINDS[kind])
    except msgspec.ValidationError as error:
        raise RequestError(f"{path}: invalid profile [{name}] for {command}: {error}; correct the table") from None
    for variable in profile.environment if isinstance(profile, SlurmProfile) else ():
        if not VARIABLE_NAME.fullmatch(variable):
            raise RequestError(f"{path}: [{name}] sets {variable!r}, which is not the name of a variable; correct it")
    if isinstance(profile, KubernetesProfile):
        return _resolve_paths(profile, path.parent)
    return profile


def _read_tables(path: Path, name: str, *, required: bool) -> dict[str, Any]:
    try:
        return tomllib.loads(read_named_file(path, "the profiles").decode())
    except FileNotFoundError:
        if not required:
            return {}
        raise RequestError(
            f"the file of profiles {path} does not exist; correct --on or --profiles, or write the file. For a "
            f"Kubernetes cluster, it needs three lines with the name of your PVC:{EXAMPLE.format(name=name)}"
        ) from None
    except OSError as error:
        raise RequestError(f"cannot read the profiles {path}: {error.strerror}; check its permissions") from None
    except ValueError as error:
        raise RequestError(f"the profiles {path} are not valid TOML: {error}; correct the file") from None


def _resolve_paths(profile: KubernetesProfile, directory: Path) -> KubernetesProfile:
    """Return the profile with absolute paths of files, which are relative to the directory of the profiles."""
    values = [str((directory / value).absolute()) for value in profile.values]
    remote = "://" in profile.charts
    charts = profile.charts.rstrip("/") if remote else str((directory / profile.charts).absolute())
    return msgspec.structs.replace(profile, values=values, charts=charts)


def _texts(value: object) -> list[str]:
    """Return all texts in a value of TOML, keys included."""
    if isinstance(value, str):
        return [value]
    if isinstance(value, Mapping):
        return [text for key, item in value.items() for text in (key, *_texts(item))]
    return [text for item in value for text in _texts(item)] if isinstance(value, list) else []
