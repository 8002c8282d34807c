"""Which node this is, and what torchrun inherits."""

import pytest

from tokenmill.errors import RequestError
from tokenmill.training.runtime.node import inherited, launcher, node_of


@pytest.mark.parametrize(
    ("environment", "said"),
    [
        ({"RANK": "1", "MASTER_ADDR": "a", "TOKENMILL_NODES": "3"}, "TOKENMILL_NODES is 3, where training.nodes is 2"),
        ({"RANK": "2", "MASTER_ADDR": "a"}, "RANK is 2, where training.nodes is 2"),
        ({"RANK": "one", "MASTER_ADDR": "a"}, "RANK is 'one', no number"),
        ({"RANK": "1"}, "MASTER_ADDR does not say where node 0 is"),
        ({}, "says which node this is"),
        ({"RANK": "1", "MASTER_ADDR": "a", "MASTER_PORT": "tcp://1"}, "MASTER_PORT is 'tcp://1', no number"),
    ],
)
def test_an_environment_that_cannot_be_is_refused(environment: dict[str, str], said: str) -> None:
    with pytest.raises(RequestError) as refused:
        node_of(2, environment)
    assert said in str(refused.value)


def test_the_last_node() -> None:
    node = node_of(2, {"JOB_COMPLETION_INDEX": "1", "MASTER_ADDR": "a", "TOKENMILL_NODES": "2"})
    words = launcher(node, ["torchrun"], 8, "-odd name")
    assert words[0] == "torchrun" and "--node_rank=1" in words and "--rdzv_id=-odd name" in words
    assert "--master_addr=a" in words and "--master_port=29500" in words


def test_an_operators_words_for_torchrun_are_left_out() -> None:
    environment = {"PET_RDZV_BACKEND": "c10d", "PET_NNODES": "1:64", "NCCL_DEBUG": "WARN", "MASTER_ADDR": "a"}
    assert inherited(environment) == {"NCCL_DEBUG": "WARN", "MASTER_ADDR": "a"}
