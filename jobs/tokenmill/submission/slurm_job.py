"""The batch script of a job of Slurm.

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

import shlex
from dataclasses import dataclass
from pathlib import Path

from tokenmill.errors import RequestError
from tokenmill.submission.call import Step
from tokenmill.submission.profile import Container, SlurmProfile

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
        lines = ["#!/bin/bash", *(f"#SBATCH {shlex.quote(option)}" for option in self._options())]
        lines += [f"# {self.step.stage}: the command of the user is in the last lines.", *self.profile.setup]
        lines += [f"export {name}={shlex.quote(value)}" for name, value in self.profile.environment.items()]
        body = _TRAINING if self.nodes else _WORKER
        replacements = {
            "RETRIES": str(self.profile.retries),
            "VERDICT": shlex.quote(f"{self.logs}/verdict-"),
            "SRUN": shlex.join(["srun", *self._step_options()]),
            "COMMAND": shlex.join([*self._container_command(), *self._program, *self.step.command_line]),
            "WORKER": ' --worker-index="$SLURM_ARRAY_TASK_ID"' + f" --workers={self.step.workers}"
            if self.step.workers
            else "",
        }
        for name, text in replacements.items():
            body = body.replace(f"@{name}@", text)
        return "\n".join(lines) + "\n" + body

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


def _mounts(container: Container) -> list[str]:
    return [mount if ":" in mount else f"{mount}:{mount}" for mount in container.mounts]


_CONTROL = """
stopping= failures=0
trap 'stopping=1; scancel --signal=USR1 "$job" 2>/dev/null' USR1  # before the time limit: the command saves and ends
trap 'stopping=1' TERM  # scancel or a preemption: the command has received the signal too
queue_again() {
  echo "tokenmill: $1: the job is queued again" >&2
  scontrol requeue "$job" && sleep 300
  exit 143
}
run() {
  "$@" &
  local pid=$!
  while wait "$pid"; code=$?; [ "$code" -gt 128 ] && kill -0 "$pid" 2>/dev/null; do :; done
}
"""

_DECIDE = """  state=$(squeue --noheader --jobs="$job" --format=%T) || state=RUNNING  # the controller is away
  [ "$state" = RUNNING ] || exit 143
  [ -z "$stopping" ] || queue_again "stopped with exit code $code"
  if sinfo --noheader --nodes="$SLURM_JOB_NODELIST" --format=%T | grep -q drain; then
    queue_again "a node is being drained"
  fi
"""

_WORKER = (
    """job=${SLURM_ARRAY_JOB_ID}_$SLURM_ARRAY_TASK_ID
export TOKENMILL_RUN=slurm-$SLURM_ARRAY_JOB_ID
"""
    + _CONTROL
    + """while true; do
  export TOKENMILL_FAILURES=$failures TOKENMILL_MAX_FAILURES=@RETRIES@
  run @SRUN@ \\
    @COMMAND@@WORKER@
  case $code in 0 | 2) exit "$code" ;; esac
"""
    + _DECIDE
    + """  failures=$((failures + 1))
  if [ "$failures" -gt @RETRIES@ ]; then
    echo "tokenmill: exit code $code, $failures times: see above, and submit the same command again" >&2
    exit "$code"
  fi
  echo "tokenmill: exit code $code: starting again, failure $failures of @RETRIES@" >&2
  sleep $((failures * 10)) &
  wait
done
"""
)

_TRAINING = (
    """job=$SLURM_JOB_ID
export TOKENMILL_RUN=slurm-$SLURM_JOB_ID TOKENMILL_NODES=$SLURM_NNODES
first=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
MASTER_ADDR=$(scontrol show node "$first" | sed -n 's/.*NodeAddr=\\([^ ]*\\).*/\\1/p')  # on cloud nodes not the name
export MASTER_ADDR=${MASTER_ADDR:-$first} MASTER_PORT=$((20000 + SLURM_JOB_ID % 10000))
verdict=@VERDICT@$SLURM_JOB_ID  # the exit code of node 0, which decides for all nodes
node='trap : USR1 TERM; "$@"; code=$?; [ "$SLURM_NODEID" != 0 ] || echo "$code" >"$0"; exit "$code"'
"""
    + _CONTROL
    + """while true; do
  rm -f "$verdict"
  run @SRUN@ bash -c "$node" "$verdict" \\
    @COMMAND@
  [ ! -s "$verdict" ] || code=$(<"$verdict")
  case $code in 0 | 2) exit "$code" ;; esac
"""
    + _DECIDE
    + """  echo "tokenmill: exit code $code: starting again" >&2
  sleep 10 &
  wait
done
"""
)
