"""The identity of a node, and the environment of torchrun."""

import pytest

from tokenmill.errors import RequestError
from tokenmill.train.runtime.node import build_launcher_command, build_launcher_environment, read_node


@pytest.mark.parametrize(
    ("environment", "message"),
    [
        ({"RANK": "1", "MASTER_ADDR": "a", "TOKENMILL_NODES": "3"}, "TOKENMILL_NODES is 3, but training.nodes is 2"),
        ({"RANK": "2", "MASTER_ADDR": "a"}, "RANK is 2, but training.nodes is 2"),
        ({"RANK": "one", "MASTER_ADDR": "a"}, "invalid RANK 'one': it must be an integer"),
        ({"RANK": "1"}, "MASTER_ADDR is not set"),
        ({}, "the rank of this node is not set"),
        (
            {"RANK": "1", "MASTER_ADDR": "a", "MASTER_PORT": "tcp://1"},
            "invalid MASTER_PORT 'tcp://1': it must be an integer",
        ),
    ],
)
def test_an_invalid_environment_is_refused(environment: dict[str, str], message: str) -> None:
    with pytest.raises(RequestError) as refused:
        read_node(2, environment)
    assert message in str(refused.value)


def test_the_last_node() -> None:
    node = read_node(2, {"JOB_COMPLETION_INDEX": "1", "MASTER_ADDR": "a", "TOKENMILL_NODES": "2"})
    arguments = build_launcher_command(node, ["torchrun"], 8, "-odd name")
    assert arguments[0] == "torchrun" and "--node_rank=1" in arguments and "--rdzv_id=-odd name" in arguments
    assert "--master_addr=a" in arguments and "--master_port=29500" in arguments


def test_torchrun_options_of_an_operator_are_removed() -> None:
    environment = {"PET_RDZV_BACKEND": "c10d", "PET_NNODES": "1:64", "NCCL_DEBUG": "WARN", "MASTER_ADDR": "a"}
    assert build_launcher_environment(environment) == {"NCCL_DEBUG": "WARN", "MASTER_ADDR": "a"}
