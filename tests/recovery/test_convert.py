"""Kills, two processes and a Hub with faults: `tokenmill checkpoint import` and `export` give the same bytes."""

import json
import math
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from support.commandline import data_of, run_in_process, tokenmill
from support.hub import Fault, Hub
from support.hub_models import make_model, read_model
from support.runs import Forge, kill_at, stop_at
from tokenmill.checkpoints.convert.huggingface import build_config
from tokenmill.checkpoints.convert.safetensors import encode_header
from tokenmill.checkpoints.families import FAMILIES
from tokenmill.models.model import load_preset

TRACKER = "latest_checkpointed_iteration.txt"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a small model in three weight files."""
    return make_model(tmp_path_factory.mktemp("model") / "model", shards=3)


@pytest.fixture(scope="module")
def imported(tmp_path_factory: pytest.TempPathFactory, model: Path, forge: Forge) -> Path:
    """Return an undisturbed import."""
    output = tmp_path_factory.mktemp("imported") / "out"
    forge.complete(["checkpoint", "import", model, output])
    return output


@pytest.fixture(scope="module")
def exported(tmp_path_factory: pytest.TempPathFactory, imported: Path, forge: Forge) -> Path:
    """Return an undisturbed export."""
    output = tmp_path_factory.mktemp("exported") / "out"
    forge.complete(["checkpoint", "export", imported, output])
    return output


def kill_until_complete(forge: Forge, command: list[Any], output: Path, marker: str) -> int:
    """Kill new runs before ever later operations below `output`; return the number of kills."""
    kills, operation = 0, 1
    while True:
        shutil.rmtree(output, ignore_errors=True)
        run = forge.run([*command, output], kill_at(output, count=operation))
        if run.exit == 0:
            return kills
        assert run.exit == -9, run.output
        if (output / marker).exists():
            assert marker != TRACKER or run_in_process("checkpoint", "verify", output).code == 0
        else:
            assert marker != TRACKER or run_in_process("checkpoint", "verify", output).code == 2
        if kills % 4 == 0:
            forge.complete([*command, output])
            assert not list(output.rglob("*.part"))
        kills, operation = kills + 1, operation + 1 + operation // 3


@pytest.mark.slow
def test_killed_import(forge: Forge, model: Path, imported: Path, tmp_path: Path) -> None:
    output = tmp_path / "out"
    assert kill_until_complete(forge, ["checkpoint", "import", model], output, TRACKER) >= 8
    assert data_of(output) == data_of(imported)


@pytest.mark.slow
def test_killed_export(forge: Forge, model: Path, imported: Path, exported: Path, tmp_path: Path) -> None:
    output = tmp_path / "out"
    assert kill_until_complete(forge, ["checkpoint", "export", imported], output, "config.json") >= 6
    assert data_of(output) == data_of(exported)
    assert read_model(output) == read_model(model)


def test_second_process_is_refused(forge: Forge, model: Path, imported: Path, tmp_path: Path) -> None:
    output = tmp_path / "out"
    first = forge.start(["checkpoint", "import", model, output], stop_at(output, r"open .*distcp"))
    assert first.wait() == "stopped"
    second = forge.run(["checkpoint", "import", model, output])
    assert second.exit == 2
    assert "another process" in second.output
    first.kill()
    forge.complete(["checkpoint", "import", model, output])
    assert data_of(output) == data_of(imported)


def test_import_from_the_hub_with_faults(model: Path, tmp_path: Path) -> None:
    files = {path.name: path.read_bytes() for path in model.iterdir()}
    with Hub(token="hf_secret") as hub:
        commit = hub.add_model("org/small", files)
        hub.add_model("org/small", files | {"README.md": b"later"})
        hub.faults.add(Fault("429", times=1), Fault("cut", "*.safetensors", times=1))
        output = tmp_path / "out"
        result = tokenmill(*("checkpoint", "import", f"hf://org/small@{commit}", output), hub=hub, HF_TOKEN="hf_secret")
    assert result.code == 0, result.err
    assert "hf_secret" not in result.out + result.err
    assert commit in (output / "model.yaml").read_text()
    assert not (output / ".tokenmill/import/source").exists()
    assert run_in_process("checkpoint", "verify", output).code == 0
    assert run_in_process("checkpoint", "export", output, tmp_path / "exported").code == 0
    assert read_model(tmp_path / "exported") == read_model(model)
    assert f"org/small at {commit}" in (tmp_path / "exported/README.md").read_text()


@pytest.mark.slow
def test_the_memory_of_an_import_is_bounded(tmp_path: Path) -> None:
    model = tmp_path / "model"
    shard = write_zeros(model, files=3)
    # Not getrusage: its maximum includes the memory of the parent before exec.
    measured = (
        "import atexit; from pathlib import Path; from tokenmill.cli import main; "
        "atexit.register(lambda: print('\\n' + Path('/proc/self/status').read_text())); main()"
    )
    command = [sys.executable, "-c", measured, "checkpoint", "import", str(model), str(tmp_path / "out")]
    run = subprocess.run(command, check=False, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    (peak,) = re.findall(r"VmHWM:\s+([0-9]+) kB", run.stdout)
    assert int(peak) * 1024 < 1.3 * shard


def write_zeros(directory: Path, files: int) -> int:
    """Write a Llama of zeros with one large tensor in each file; return the size of the largest file."""
    fields = {"numLayers": 1, "hiddenSize": 1024, "ffnHiddenSize": 128, "numAttentionHeads": 8, "numQueryGroups": 8}
    rows = 120_000
    model = load_preset("llama3-8b", **fields, embeddingRows=rows)
    tensors = {tensor.name: tensor for piece in FAMILIES["llama"].list_pieces(model, rows) for tensor in piece.tensors}
    directory.mkdir()
    (directory / "config.json").write_text(json.dumps(build_config(model, rows, "bfloat16", eos=1, bos=1)))
    names = list(tensors)
    groups = {f"model-{n}.safetensors": names[n::files] for n in range(files)}
    for file, group in groups.items():
        header = encode_header({name: ("BF16", tensors[name].shape) for name in group})
        with (directory / file).open("wb") as output:
            output.write(header)
            output.truncate(len(header) + sum(2 * math.prod(tensors[name].shape) for name in group))
    weight_map = {name: file for file, group in groups.items() for name in group}
    (directory / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    return max((directory / file).stat().st_size for file in groups)
