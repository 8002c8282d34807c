"""What the training tests share: a dataset on the volume, small runs, and how they ended."""

import json
import re
import shutil
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
"""A run of the tests' trainer on processes without GPUs."""
SETTINGS = f"{RUN} --set tensorboard.enabled=false"


def make_dataset(namespace: Namespace, scratch: Path) -> None:
    """Lay a finished dataset where the chart looks for it."""
    source, output = scratch / "text", namespace.data / "slimpajama" / "preprocessed"
    if output.exists():
        return
    source.mkdir()
    for number in range(4):
        (source / f"{number}.jsonl").write_bytes(shard(number, 4000))
    made = scratch / "preprocessed"
    ended = tokenmill("preprocess", source, made, "--tokenizer", TOKENIZER, "--processes", 1, timeout=120)
    assert ended.code == 0, ended.err
    shutil.copytree(made, output)


class Training:
    """A release of megatron-training."""

    def __init__(self, namespace: Namespace, name: str, engine: str = "pytorchjob") -> None:
        """Name it; `install` makes it."""
        self.namespace, self.name, self.engine = namespace, name, engine
        self.account: Account = namespace.admin  # the role edit has no rights on PyTorchJobs here
        self.kind = {"pytorchjob": "pytorchjob", "jobset": "jobset"}[engine]
        label = {"pytorchjob": "job-name", "jobset": "jobset.sigs.k8s.io/jobset-name"}[engine]
        self.selector = f"-l {label}={name}"
        self.faults = namespace.data / f"faults-{name}"
        self.faults.mkdir()
        self.faults.chmod(0o777)

    def command(self, iterations: int, *settings: str, nodes: int = 2, step: float = 0.05) -> str:
        """Return what follows `helm install` or `helm upgrade`."""
        line = f"{self.name} {SETTINGS} --set engine={self.engine} --set training.nodes={nodes}"
        line += f" --set training.iterations={iterations} --set environmentVariables.TRAINER_STEP_SECONDS={step}"
        line += f" --set environmentVariables.TRAINER_FAULTS=/data/faults-{self.name}"
        return " ".join([line, *settings])

    def install(self, iterations: int, *settings: str, nodes: int = 2, step: float = 0.05) -> str:
        """Install it."""
        return self.account.does(f"helm install {self.command(iterations, *settings, nodes=nodes, step=step)}")

    @property
    def checkpoints(self) -> Path:
        """Where its checkpoints are, as this machine sees them."""
        return self.namespace.data / "checkpoints" / f"{self.name}-custom"

    def run(self) -> dict[str, Any]:
        """Return the PyTorchJob or JobSet."""
        found: dict[str, Any] = self.account.get(f"{self.kind} {self.name}")
        return found

    def pods(self) -> list[dict[str, Any]]:
        """Return its pods, node 0 first."""
        items: list[dict[str, Any]] = self.account.get(f"pods {self.selector}")["items"]
        return sorted(items, key=lambda pod: pod["metadata"]["name"].replace("-master-", "-0-"))

    def wait(self, *ends: str, timeout: float = 240) -> str:
        """Wait until it has one of these conditions, and return it."""

        def ended() -> str | None:
            return next((end for end in ends if end in conditions(self.run())), None)

        found: str | None = wait_for(ended, timeout)
        assert found, f"{self.name} is not {' or '.join(ends)} after {timeout} s\n{self.describe()}"
        return found

    @property
    def good(self) -> str:
        """The condition of a run that reached its target."""
        return {"pytorchjob": "Succeeded", "jobset": "Completed"}[self.engine]

    def succeed(self, timeout: float = 240) -> None:
        """Wait for its success, and fail as soon as it failed."""
        end = self.wait(self.good, "Failed", timeout=timeout)
        assert end == self.good, self.describe()

    def iteration(self) -> int:
        """Return the iteration of the last checkpoint, 0 before there is one."""
        try:
            return int((self.checkpoints / "latest_checkpointed_iteration.txt").read_text())
        except (OSError, ValueError):
            return 0

    def logged(self) -> int:
        """Return the last iteration that the last rank's pod has logged since its start."""
        last = self.pods()[-1]["metadata"]["name"]
        found = re.findall(r" iteration +(\d+)/", self.account.run(f"kubectl logs {last}").out)
        return int(found[-1]) if found else 0

    def wait_for_iteration(self, number: int, timeout: float = 120) -> None:
        """Wait until a checkpoint is saved."""
        assert wait_for(lambda: self.iteration() >= number, timeout), self.describe()

    def assert_exact(self, target: int) -> None:
        """Check that every iteration was done once in what became the result."""
        assert self.iteration() == target
        value = json.loads((self.checkpoints / f"iter_{target:07d}" / "__0_0.distcp").read_bytes())
        assert (value["iteration"], value["sum"]) == (target, target * (target + 1) // 2)

    def messages(self) -> list[str]:
        """Return the termination messages of its pods."""
        found = []
        for pod in self.pods():
            for status in pod["status"].get("containerStatuses", []):
                for state in (status["state"], status.get("lastState", {})):
                    found.append(state.get("terminated", {}).get("message", ""))
        return found

    def describe(self) -> str:
        """Tell how it is."""
        lines = [f"{self.kind} {self.name}: {json.dumps(self.run().get('status', {}))}"]
        for pod in self.pods():
            lines.append(describe_pod(pod))
            said = self.account.run(f"kubectl logs {pod['metadata']['name']} --all-containers --tail=25")
            lines += [f"    {line}" for line in (said.out or said.err).splitlines()]
        return "\n".join(lines)

    def kill(self, pod: str) -> bool:
        """Kill all processes of a pod with SIGKILL, as a node's out-of-memory killer would; False when it is gone."""
        program = "import os, signal; os.kill(-1, signal.SIGKILL)"
        ended = self.account.run(f"kubectl exec {pod} -c {self.container} -- python3 -c '{program}'")
        return "not found" not in ended.err and "container not found" not in ended.err

    @property
    def container(self) -> str:
        """The name of the training container."""
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
        self.account.does(f"kubectl create --raw {path} -f -", json.dumps(eviction))


def settled(training: Training, seconds: float = 5.0) -> dict[str, Any]:
    """Return the run after a while in which nothing should happen to it."""
    time.sleep(seconds)
    return training.run()
