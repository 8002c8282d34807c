"""Helpers of the training tests: a dataset on the volume, small runs, and their state."""

import json
import os
import re
import shlex
import shutil
import subprocess
import time
from pathlib import Path
from typing import Any

from e2e.cluster import CLAIM, Account, Namespace, conditions, describe_pod, wait_for
from e2e.corpus import shard
from support.commandline import tokenmill

TOKENIZER = Path(__file__).parents[1] / "conformance" / "tokenizers" / "tiny"
RUN = (
    f"charts/megatron-training -f values/clusters/local.yaml --set storage.pvcName={CLAIM}"
    " --set model.size=custom,model.custom.numLayers=2,model.custom.hiddenSize=64,model.custom.numAttentionHeads=4"
    " --set model.custom.seqLength=32,training.globalBatchSize=4,training.logInterval=1"
    ' --set-json \'resources={"requests":{"cpu":"50m","memory":"200Mi"},"limits":{"memory":"2Gi"}}\''
    " --set environmentVariables.TRAINER_GLOO=1 --set job.terminationGracePeriodSeconds=30"
    " --set supervision.attemptsWithoutProgress=30"
)
"""Values of a run of the tests' trainer in processes without GPUs."""
SETTINGS = f"{RUN} --set tensorboard.enabled=false"


def make_dataset(namespace: Namespace, scratch: Path) -> None:
    """Put a finished dataset in the directory that the chart reads."""
    source, output = scratch / "text", namespace.data / "slimpajama" / "preprocessed"
    if output.exists():
        return
    source.mkdir()
    for number in range(4):
        (source / f"{number}.jsonl").write_bytes(shard(number, 4000))
    prepared = scratch / "preprocessed"
    ended = tokenmill("preprocess", source, prepared, "--tokenizer", TOKENIZER, "--processes", 1, timeout=120)
    assert ended.code == 0, ended.err
    shutil.copytree(prepared, output)


class Training:
    """A release of megatron-training."""

    def __init__(self, namespace: Namespace, name: str, engine: str = "pytorchjob", settings: str = SETTINGS) -> None:
        """Name the release, with the chart and the values that all its installations have; `install` creates it."""
        self.namespace, self.name, self.engine, self.settings = namespace, name, engine, settings
        self.account: Account = namespace.admin  # the role edit has no rights on PyTorchJobs here
        self.kind = engine
        label = "job-name" if engine == "pytorchjob" else "jobset.sigs.k8s.io/jobset-name"
        self.selector = f"-l {label}={name}"
        self.faults = namespace.data / f"faults-{name}"
        self.faults.mkdir()
        self.faults.chmod(0o777)

    def command(self, iterations: int, *settings: str, nodes: int = 2, step: float = 0.05) -> str:
        """Return the arguments of `helm install` or `helm upgrade`."""
        line = f"{self.name} {self.settings} --set engine={self.engine} --set training.nodes={nodes}"
        line += f" --set training.iterations={iterations} --set environmentVariables.TRAINER_STEP_SECONDS={step}"
        line += f" --set environmentVariables.TRAINER_FAULTS=/data/faults-{self.name}"
        return " ".join([line, *settings])

    def install(self, iterations: int, *settings: str, nodes: int = 2, step: float = 0.05) -> str:
        """Install the release."""
        return self.account.check(f"helm install {self.command(iterations, *settings, nodes=nodes, step=step)}")

    @property
    def checkpoints(self) -> Path:
        """Return the directory of the checkpoints on this machine."""
        return self.namespace.data / "checkpoints" / f"{self.name}-custom"

    def run(self) -> dict[str, Any]:
        """Return the PyTorchJob, JobSet or TrainJob."""
        result: dict[str, Any] = self.account.get(f"{self.kind} {self.name}")
        return result

    def pods(self) -> list[dict[str, Any]]:
        """Return the pods, node 0 first."""
        items: list[dict[str, Any]] = self.account.get(f"pods {self.selector}")["items"]
        return sorted(items, key=lambda pod: pod["metadata"]["name"].replace("-master-", "-0-"))

    def wait(self, *ends: str, timeout: float = 240) -> str:
        """Wait until the run has one of these conditions, and return the condition."""

        def find_end() -> str | None:
            return next((end for end in ends if end in conditions(self.run())), None)

        condition: str | None = wait_for(find_end, timeout)
        assert condition, f"{self.name} is not {' or '.join(ends)} after {timeout} s\n{self.describe()}"
        return condition

    @property
    def success(self) -> str:
        """Return the condition of a run that reached its target."""
        return {"pytorchjob": "Succeeded", "jobset": "Completed", "trainjob": "Complete"}[self.engine]

    def succeed(self, timeout: float = 240) -> None:
        """Wait for the success of the run, and fail as soon as the run fails."""
        end = self.wait(self.success, "Failed", timeout=timeout)
        assert end == self.success, self.describe()

    def iteration(self) -> int:
        """Return the iteration of the last checkpoint, or 0 without a checkpoint."""
        try:
            return int((self.checkpoints / "latest_checkpointed_iteration.txt").read_text())
        except (OSError, ValueError):
            return 0

    def logged(self) -> int:
        """Return the last iteration in the log of the last rank's pod, since its start."""
        last = self.pods()[-1]["metadata"]["name"]
        logged = re.findall(r" iteration +(\d+)/", self.account.run(f"kubectl logs {last}").out)
        return int(logged[-1]) if logged else 0

    def follow(self, pod: str, path: Path) -> subprocess.Popen[bytes]:
        """Copy the log of a running pod to a file, until its container ends; a deleted pod has no log any more."""
        environment = os.environ | {"KUBECONFIG": str(self.account.kubeconfig)}
        command = shlex.split(f"kubectl logs --follow {pod} --container {self.container}")
        with path.open("wb") as file:
            return subprocess.Popen(command, env=environment, stdout=file)

    def wait_for_iteration(self, number: int, timeout: float = 120) -> None:
        """Wait until the checkpoint of an iteration is saved."""
        assert wait_for(lambda: self.iteration() >= number, timeout), self.describe()

    def assert_exact(self, target: int) -> None:
        """Check that the result includes every iteration exactly once."""
        assert self.iteration() == target
        value = json.loads((self.checkpoints / f"iter_{target:07d}" / "__0_0.distcp").read_bytes())
        assert (value["iteration"], value["sum"]) == (target, target * (target + 1) // 2)

    def read_identities(self) -> list[dict[str, Any]]:
        """Return the recorded changes of the run's data."""
        events: list[dict[str, Any]] = json.loads((self.checkpoints / ".tokenmill/train/identity.json").read_text())[
            "events"
        ]
        return events

    def messages(self) -> list[str]:
        """Return the termination messages of the pods."""
        messages = []
        for pod in self.pods():
            for status in pod["status"].get("containerStatuses", []):
                for state in (status["state"], status.get("lastState", {})):
                    messages.append(state.get("terminated", {}).get("message", ""))
        return messages

    def describe(self) -> str:
        """Describe the state of the run and its pods."""
        lines = [f"{self.kind} {self.name}: {json.dumps(self.run().get('status', {}))}"]
        for pod in self.pods():
            lines.append(describe_pod(pod))
            logs = self.account.run(f"kubectl logs {pod['metadata']['name']} --all-containers --tail=25")
            lines += [f"    {line}" for line in (logs.out or logs.err).splitlines()]
        return "\n".join(lines)

    def kill(self, pod: str) -> bool:
        """Kill all processes of a pod with SIGKILL, as the out-of-memory killer does; return False if it is gone."""
        program = "import os, signal; os.kill(-1, signal.SIGKILL)"
        ended = self.account.run(f"kubectl exec {pod} -c {self.container} -- python3 -c '{program}'")
        return "not found" not in ended.err and "container not found" not in ended.err

    @property
    def container(self) -> str:
        """Return the name of the training container."""
        pod = self.pods()[0]
        return str(pod["spec"]["containers"][0]["name"])

    def evict(self, pod: str) -> None:
        """Evict a pod, as a drain does."""
        namespace = self.namespace.name
        eviction = {
            "apiVersion": "policy/v1",
            "kind": "Eviction",
            "metadata": {"name": pod, "namespace": namespace},
        }
        path = f"/api/v1/namespaces/{namespace}/pods/{pod}/eviction"
        self.account.check(f"kubectl create --raw {path} -f -", json.dumps(eviction))


def run_after_pause(training: Training, seconds: float = 5.0) -> dict[str, Any]:
    """Return the run after a pause, in which it should not change."""
    time.sleep(seconds)
    return training.run()
