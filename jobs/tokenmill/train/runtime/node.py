"""This node's place in the run, read from the environment that the engine sets, and the launcher's arguments.

`prepare` composes the command of a node from it, and `run` starts that command.
"""

import os
from collections.abc import Mapping
from dataclasses import dataclass

from tokenmill.errors import RequestError

RANK_VARIABLES = ("TOKENMILL_NODE_RANK", "RANK", "JOB_COMPLETION_INDEX", "SLURM_NODEID")
"""Variables with a node's rank: tokenmill's, PyTorchJob's (one launcher a pod), Indexed Jobs' and JobSet's, Slurm's."""
DEFAULT_PORT = 29500
RENDEZVOUS_TIMEOUT_SECONDS = 7 * 24 * 3600
"""Timeout of torchrun's rendezvous: the supervisor detects earlier, and better, that a node does not start."""
RENDEZVOUS_FLAG = "--rdzv_id="
NODES_VARIABLE = "TOKENMILL_NODES"
"""Variable with the number of nodes that the chart creates; another number in the settings is an incomplete upgrade."""


@dataclass(frozen=True)
class Node:
    """One of a run's pods."""

    rank: int
    nodes: int
    address: str
    """Host of node 0, to which the ranks connect."""
    port: int

    @property
    def is_leader(self) -> bool:
        """Return whether this node repairs checkpoints and decides how an attempt ended."""
        return self.rank == 0


def read_rank(environment: Mapping[str, str] = os.environ) -> int:
    """Return this node's rank before the settings are read; 0 if the environment has no valid one."""
    text = next((environment[name] for name in RANK_VARIABLES if environment.get(name)), "0")
    return int(text) if text.isdecimal() else 0


def read_node(nodes: int, environment: Mapping[str, str] = os.environ) -> Node:
    """Return this node of a run with `nodes` nodes.

    Raises:
        RequestError: the environment does not contain the node's rank or address, or contains an invalid one.
    """
    if (declared := _read_integer(environment, NODES_VARIABLE, nodes)) != nodes:
        raise RequestError(
            f"{NODES_VARIABLE} is {declared}, but training.nodes is {nodes}: this pod and its settings are from two "
            "different runs; uninstall the release and install it again"
        )
    name = next((variable for variable in RANK_VARIABLES if environment.get(variable)), None)
    if name is None and nodes > 1:
        raise RequestError(
            f"training.nodes is {nodes}, but the rank of this node is not set: set one of {', '.join(RANK_VARIABLES)}"
        )
    rank = _read_integer(environment, name, 0) if name else 0
    if not 0 <= rank < nodes:
        raise RequestError(f"{name} is {rank}, but training.nodes is {nodes}: set a rank from 0 to training.nodes - 1")
    address = environment.get("MASTER_ADDR", "")
    if nodes > 1 and not address:
        raise RequestError(f"training.nodes is {nodes}, but MASTER_ADDR is not set: set it to the host of node 0")
    return Node(rank, nodes, address or "localhost", _read_integer(environment, "MASTER_PORT", DEFAULT_PORT))


def _read_integer(environment: Mapping[str, str], name: str, default: int) -> int:
    value = environment.get(name)
    if not value:
        return default
    try:
        return int(value)
    except ValueError:
        raise RequestError(f"invalid {name} {value!r}: it must be an integer; set a number or unset it") from None


def build_launcher_command(node: Node, program: list[str], gpus_per_node: int, release: str) -> list[str]:
    """Return torchrun and its arguments before the script: a fixed number of nodes, and no restarts by torchrun.

    The engine restarts nodes, and the layout of a model does not allow another number of nodes. The command specifies
    the node ranks instead of letting torchrun assign them, so that neighbours in rank are neighbours in the network.
    Option names have underscores, because torch 1 accepts no other names.
    """
    arguments = [*program, f"--nnodes={node.nodes}", f"--nproc_per_node={gpus_per_node}", "--max_restarts=0"]
    arguments.append(f"{RENDEZVOUS_FLAG}{release}")
    if node.nodes == 1:
        return [*arguments, "--standalone"]
    arguments.append(f"--rdzv_conf=timeout={RENDEZVOUS_TIMEOUT_SECONDS}")
    return [*arguments, f"--node_rank={node.rank}", f"--master_addr={node.address}", f"--master_port={node.port}"]


def build_launcher_environment(environment: Mapping[str, str] = os.environ) -> dict[str, str]:
    """Return the environment for torchrun, without the PET_ variables that operators set for it.

    The arguments of torchrun specify everything that these variables would.
    """
    return {name: value for name, value in environment.items() if not name.startswith("PET_")}
