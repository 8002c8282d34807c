"""The batch script of a job of Slurm.

The file slurm_job.sh is the body of each script, and slurm_setup.sh checks the lines of the profile's setup. `SlurmJob`
writes the values before the body: the options of sbatch, and variables of the shell.

A script starts the command in a job step (`srun`), and starts it again after a failure. Slurm itself queues the job
again after a preemption or the loss of a node (`--requeue`). The script does so after the signal before the time limit,
and when a node of the job is being drained.

    exit code of the command    the script
    0, 2                        ends: the work is done, or a retry cannot help
    anything else               ends if Slurm is ending the job (scancel, preemption, a requeue);
                                queues the job again if the time limit is near or a node is being drained;
                                otherwise starts the command again

A training decides by the exit code of node 0 alone. Its own count of attempts ends it with exit code 2. A worker of a
data stage has a limited number of failures.
"""

import re
import shlex
from dataclasses import dataclass
from pathlib import Path

from tokenmill.errors import RequestError
from tokenmill.submit.call import Step
from tokenmill.submit.profile import Container, SlurmProfile

_REFUSED_CHARACTERS = re.compile(r"[\x00-\x1f\x7f-\x9f\u2028\u2029\ud800-\udfff]")
"""Control characters, other ends of lines, and the characters for bytes of a name that is not UTF-8."""
LOGS = "%x-%A_%a.log"
TRAINING_LOGS = "%x-%j.log"


@dataclass(frozen=True, kw_only=True)
class SlurmJob:
    """One job of a submission, and everything that its script depends on."""

    name: str
    step: Step
    profile: SlurmProfile
    directory: Path
    """The current directory of the command."""
    logs: Path
    program: tuple[str, ...]
    """The command that starts tokenmill."""
    nodes: int | None = None
    """Number of nodes of a training."""
    gpus: int = 0
    """GPUs of each node of a training, unless the profile sets them."""

    @property
    def script(self) -> str:
        """The batch script."""
        if "%" in str(self.logs):
            raise RequestError(
                f"the directory {self.logs} contains %, which sbatch would replace in the names of logs; rename it"
            )
        command = [*self._container_command(), *self._program, *self.step.command_line]
        for text in (*self._options(), *self.profile.setup, *self._step_options(), *command):
            _check_characters(text)
        lines = ["#!/bin/bash", *(f"#SBATCH {shlex.quote(option)}" for option in self._options())]
        lines += [f"# {self.step.stage}: the array `command` has the command of the user."]
        if self.profile.setup:
            lines += [_read("slurm_setup.sh"), *self.profile.setup, "trap - ERR"]
        lines += [f"export {name}={shlex.quote(value)}" for name, value in self.profile.environment.items()]
        worker = f' --worker-index="$SLURM_ARRAY_TASK_ID" --workers={self.step.workers}' if self.step.workers else ""
        lines += [
            f"kind={'training' if self.nodes else 'worker'}",
            f"logs={shlex.quote(str(self.logs))}",
            f"max_failures={self.profile.retries}",
            f"step=({shlex.join(['srun', *self._step_options()])})",
            f"command=({shlex.join(command)}{worker})",
        ]
        return "\n".join([*lines, _read("slurm_job.sh")])

    @property
    def _program(self) -> tuple[str, ...]:
        return tuple(self.profile.command) or (("tokenmill",) if self.profile.container else self.program)

    def _options(self) -> list[str]:
        profile = self.profile
        options = [f"--job-name={self.name}", f"--chdir={self.directory}"]
        if self.nodes:
            gpus = profile.gpus if profile.gpus is not None else str(self.gpus)
            options += [f"--nodes={self.nodes}", "--ntasks-per-node=1"]
            options += [] if gpus in ("", "0") else [f"--gpus-per-node={gpus}"]
        else:
            limit = f"%{profile.max_running}" if profile.max_running else ""
            options += [f"--array=0-{(self.step.workers or 1) - 1}{limit}", "--ntasks=1"]
        named = {
            "account": profile.account,
            "partition": profile.partition,
            "qos": profile.qos,
            "time": profile.time,
            "cpus-per-task": profile.cpus,
            "mem": profile.memory,
        }
        options += [f"--{name}={value}" for name, value in named.items() if value is not None]
        options += ["--requeue", f"--signal=B:USR1@{profile.stop_seconds}", "--open-mode=append"]
        return [*options, f"--output={self.logs / (TRAINING_LOGS if self.nodes else LOGS)}", *profile.options]

    def _step_options(self) -> list[str]:
        options = ["--ntasks-per-node=1", "--kill-on-bad-exit=0"] if self.nodes else ["--ntasks=1"]
        if self.profile.cpus:  # since 22.05 srun does not take it from the job
            options.append(f"--cpus-per-task={self.profile.cpus}")
        container = self.profile.container
        if container and container.runtime == "pyxis":
            options += [f"--container-image={container.image}", f"--container-workdir={self.directory}"]
            if container.mounts:
                options.append(f"--container-mounts={','.join(_mounts(container))}")
            options += container.options
        return options

    def _container_command(self) -> list[str]:
        container = self.profile.container
        if container is None or container.runtime != "apptainer":
            return []
        binds = [f"--bind={mount}" for mount in _mounts(container)]
        gpus = ["--nv"] if self.nodes and self.profile.gpus not in ("", "0") else []
        return ["apptainer", "exec", *gpus, *binds, f"--pwd={self.directory}", *container.options, container.image]


def _check_characters(text: str) -> None:
    """Refuse a text with which a line of the script would end, or that no script can contain (RequestError)."""
    if _REFUSED_CHARACTERS.search(text):
        raise RequestError(
            f"{text!r} contains a control character, which a script of Slurm cannot contain; rename the file or the "
            "directory, write the option in another way, or run the command without --on"
        )


def _mounts(container: Container) -> list[str]:
    return [mount if ":" in mount else f"{mount}:{mount}" for mount in container.mounts]


def _read(name: str) -> str:
    return Path(__file__).with_name(name).read_text()
