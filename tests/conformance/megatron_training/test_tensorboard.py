"""The chart's TensorBoard serves the events of a real run."""

import json
import re
import socket
import subprocess
import time
import urllib.request
from pathlib import Path
from urllib.parse import urlencode

import pytest

from support.megatron_runs import ITERATIONS, RUN_SECONDS, MegatronInstallation, UndisturbedRun
from support.runs import environment

pytestmark = pytest.mark.conformance

TEMPLATE = Path(__file__).parents[3] / "charts/megatron-training/templates/_tensorboard.tpl"


def test_the_charts_tensorboard_serves_the_losses(undisturbed: UndisturbedRun, megatron: MegatronInstallation) -> None:
    program = Path(megatron.python).with_name("tensorboard")
    if not program.exists():
        pytest.skip(f"there is no {program}")
    arguments = re.search(r'"arguments" \(printf "([^"]*)"', TEMPLATE.read_text())
    assert arguments and arguments[1] == r"- --logdir\n- %s\n- --bind_all\n- --port=6006"
    with socket.create_server(("localhost", 0)) as free:
        port = free.getsockname()[1]
    server = subprocess.Popen(
        [program, "--logdir", str(undisturbed.job.directory / "events"), "--bind_all", f"--port={port}"],
        env=environment(),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        query = urlencode({"run": ".", "tag": "lm loss"})
        points = wait_for_scalars(f"http://localhost:{port}/data/plugin/scalars/scalars?{query}")
    finally:
        server.terminate()
        server.wait(30)
    assert [step for _, step, _ in points] == list(range(1, ITERATIONS + 1))
    for _, step, value in points:
        if step != 2:  # the second line of the log has the mean of two iterations
            assert f"{value:.6E}" == undisturbed.job.losses[step]


def wait_for_scalars(url: str) -> list[tuple[float, int, float]]:
    """Return [time, step, value] of each point, once TensorBoard has read the events."""
    deadline = time.monotonic() + RUN_SECONDS
    while True:
        try:
            with urllib.request.urlopen(url, timeout=10) as answer:
                points: list[tuple[float, int, float]] = json.load(answer)
                if len(points) == ITERATIONS:
                    return points
        except OSError as error:
            problem: object = error
        else:
            problem = points
        assert time.monotonic() < deadline, problem
        time.sleep(0.2)
