"""Which of a run's nodes this is, from what the engine puts into the environment."""

import os
from collections.abc import Mapping
from dataclasses import dataclass

from tokenmill.errors import RequestError

RANKS = ("TOKENMILL_NODE_RANK", "RANK", "JOB_COMPLETION_INDEX")
"""Where the engines say it: ours, PyTorchJob's operator (for one launcher a pod), Indexed Jobs and JobSet."""
PORT = 29500
MEETING = 7 * 24 * 3600
"""Seconds that torchrun waits for other nodes: the supervisor knows better whether they are yet to come."""
OURS = "TOKENMILL_NODES"
"""How many nodes the chart makes; what differs from the file is half of an upgrade."""


@dataclass(frozen=True)
class Node:
    """One of a run's pods."""

    rank: int
    nodes: int
    address: str
    """Host of node 0, where the ranks meet."""
    port: int

    @property
    def judges(self) -> bool:
        """Whether this node repairs checkpoints and says how an attempt ended."""
        return self.rank == 0


def node_of(nodes: int, environment: Mapping[str, str] = os.environ) -> Node:
    """Return this node of so many.

    Raises:
        RequestError: the environment does not say which, or says what cannot be.
    """
    if (told := _number(environment, OURS, nodes)) != nodes:
        raise RequestError(
            f"{OURS} is {told}, where training.nodes is {nodes}: this pod and its settings are of two runs; "
            "uninstall the release and install it again"
        )
    name = next((each for each in RANKS if environment.get(each)), None)
    if name is None and nodes > 1:
        raise RequestError(f"training.nodes is {nodes}, and none of {', '.join(RANKS)} says which node this is")
    rank = _number(environment, name, 0) if name else 0
    if not 0 <= rank < nodes:
        raise RequestError(f"{name} is {rank}, where training.nodes is {nodes}")
    address = environment.get("MASTER_ADDR", "")
    if nodes > 1 and not address:
        raise RequestError(f"training.nodes is {nodes}, and MASTER_ADDR does not say where node 0 is")
    return Node(rank, nodes, address or "localhost", _number(environment, "MASTER_PORT", PORT))


def _number(environment: Mapping[str, str], name: str, default: int) -> int:
    value = environment.get(name)
    if not value:
        return default
    try:
        return int(value)
    except ValueError:
        raise RequestError(f"{name} is {value!r}, no number") from None


def launcher(node: Node, program: list[str], gpus_per_node: int, release: str) -> list[str]:
    """Return torchrun's words before the script: a fixed number of nodes, no restarts of its own.

    Restarts are the engine's: a model's parallelism does not bear another number of nodes. Node ranks are given,
    not drawn, so that neighbours in rank are neighbours in the network. Underscores, because torch 1 takes no others.
    """
    words = [*program, f"--nnodes={node.nodes}", f"--nproc_per_node={gpus_per_node}", "--max_restarts=0"]
    words.append(f"--rdzv_id={release}")
    if node.nodes == 1:
        return [*words, "--standalone"]
    words.append(f"--rdzv_conf=timeout={MEETING}")
    return [*words, f"--node_rank={node.rank}", f"--master_addr={node.address}", f"--master_port={node.port}"]


def inherited(environment: Mapping[str, str] = os.environ) -> dict[str, str]:
    """Return the environment for torchrun: what operators put there for it is left out, as its words say it all."""
    return {name: value for name, value in environment.items() if not name.startswith("PET_")}
