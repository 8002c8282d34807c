"""SIGTERM in the first minute of a pod is a failure: Kubernetes repeats exit code 143 without a limit."""

import json
import os
from pathlib import Path

import pytest

from support.commandline import finish, start, tokenmill
from support.hub import Fault, Hub


@pytest.mark.parametrize(("seconds", "code"), [("600", 1), ("0", 143), ("", 143)], ids=["early", "late", "no-pod"])
@pytest.mark.parametrize("where", ["a-file", "the-plan"])
def test_a_stop_soon_after_the_start_is_a_failure(tmp_path: Path, where: str, seconds: str, code: int) -> None:
    fault = Fault("stall", "0.jsonl", seconds=300) if where == "a-file" else Fault("503", where="tree", times=None)
    with Hub() as hub:
        hub.add_dataset("org/corpus", {"0.jsonl": b'{"text": "a"}\n' * 1000})
        hub.faults.add(fault)
        command = ("download", "hf://datasets/org/corpus", tmp_path / "out")
        process = start(*command, hub=hub, TOKENMILL_EARLY_STOP_SECONDS=seconds)
        assert process.stderr
        for line in process.stderr:
            if ("to run, " if where == "a-file" else "retrying in") in line:
                break
        process.terminate()
        result = finish(process)
    assert result.code == code, result.err
    assert "run the same command again" in result.err


@pytest.mark.parametrize("name", ["SIGTERM", "SIGUSR1"])
@pytest.mark.parametrize(("seconds", "code"), [("600", 1), ("", 143)], ids=["early", "no-pod"])
def test_a_stop_while_a_command_starts_has_a_message(tmp_path: Path, name: str, seconds: str, code: int) -> None:
    """The signal arrives during an import: the command finds this `typer` before the installed one."""
    text = f"import os, signal, time\nos.kill(os.getpid(), signal.{name})\ntime.sleep(60)\n"
    (tmp_path / "typer.py").write_text(text)
    path = os.pathsep.join(filter(None, (str(tmp_path), os.environ.get("PYTHONPATH"))))
    variables = {"PYTHONPATH": path, "TOKENMILL_EARLY_STOP_SECONDS": seconds}
    message = f"stopped by {name}; run the same command again"
    result = tokenmill("extract", tmp_path, real_backoff=True, **variables)
    assert (result.code, result.err) == (code, f"error: {message}\n")
    result = tokenmill("extract", tmp_path, "--json", real_backoff=True, **variables)
    assert result.code == code
    assert json.loads(result.err) == {"event": "error", "message": message, "exit_code": code}
