"""Errors of the file system in every command: a message that names the file and the remedy, and a good rerun."""

import re
from pathlib import Path
from typing import Any

import pytest

from support.chat import conversations, lines, make_tokenizer
from support.file_calls import run_with_fault
from support.hub_models import make_model
from support.runs import Forge

pytestmark = pytest.mark.slow

TEMPLATE = ("--chat-template", "chatml")


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory, forge: Forge) -> Path:
    """Return conversations, their pairs and rows, a model, and its import."""
    root = tmp_path_factory.mktemp("inputs")
    (root / "rows").mkdir()
    (root / "rows" / "a.jsonl").write_bytes(lines(conversations(1, 40)))
    tokenizer = make_tokenizer(root / "tokenizer")
    make_model(root / "model")
    forge.complete(["chat", root / "rows", root / "chat", "--tokenizer", tokenizer, *TEMPLATE, "--processes", 1])
    forge.complete(["pack", root / "chat", root / "pack", "--pack-size", 1024, "--processes", 1])
    forge.complete(["checkpoint", "import", root / "model", root / "imported"])
    return root


def refuse(code: int, log: str, name: str) -> None:
    """Check that a command ended with a message about a file."""
    assert "Traceback" not in log, log
    assert re.search(r"^error: ", log, re.MULTILINE), log
    message = log[log.rindex("\nerror: ") if "\nerror: " in log else 0 :]
    assert re.search(name, message), message
    assert code == (2 if re.search("choose|change its owner", message) else 1), log


COMMANDS: dict[str, list[Any]] = {
    "verify": ["verify", "chat"],
    "inspect": ["inspect", "chat", "--document", 0],
    "report": ["report", "chat"],
    "status": ["status", "chat"],
    "pack": ["pack", "chat", "OUT", "--pack-size", 1024, "--processes", 1],
    "export": ["checkpoint", "export", "imported", "OUT"],
    "import": ["checkpoint", "import", "model", "OUT"],
    "checkpoint verify": ["checkpoint", "verify", "imported"],
    "verify pack": ["verify", "pack"],
}


def make_command(inputs: Path, name: str, output: Path) -> list[Any]:
    places = {"OUT": output, **{path.name: path for path in inputs.iterdir()}}
    first, *rest = COMMANDS[name]
    return [first, *(places.get(word, word) for word in rest)]


@pytest.mark.parametrize(
    ("name", "match"),
    [
        ("verify", r"chat/[^/]*\.bin"),
        ("verify", r"chat/[^/]*\.idx"),
        ("verify pack", r"pack/[^/]*\.parquet"),
        ("inspect", r"receipts/|plan\.json|manifest\.json"),
        ("report", r"plan\.json|manifest\.json"),
        ("status", r"receipts/|plan\.json|manifest\.json"),
        ("pack", r"chat/[^/]*\.idx"),
        ("export", r"imported/.*\.distcp"),
        ("import", r"model/.*\.safetensors"),
    ],
)
def test_a_read_error_names_the_file(inputs: Path, tmp_path: Path, name: str, match: str) -> None:
    command = make_command(inputs, name, tmp_path / "out")
    code, log = run_with_fault("EIO read all", inputs, *command, match=match)
    refuse(code, log, match)
    assert "cannot read" in log


@pytest.mark.parametrize("fault", ["ESTALE", "EACCES", "ENOMEM", "EIO"])
@pytest.mark.parametrize("name", ["verify", "inspect", "report", "status", "pack"])
def test_an_output_that_cannot_be_opened_again(inputs: Path, tmp_path: Path, name: str, fault: str) -> None:
    command = make_command(inputs, name, tmp_path / "out")
    code, log = run_with_fault(f"{fault} open all", inputs, *command, match=r"chat/\.tokenmill/chat|plan\.json")
    refuse(code, log, "chat")
    assert code == (2 if fault == "EACCES" else 1)


def test_an_error_of_closing_a_directory_loses_nothing(inputs: Path, tmp_path: Path) -> None:
    output = tmp_path / "out"
    command = make_command(inputs, "pack", output)
    directories = r"^out(/shards|/\.tokenmill(/pack(/receipts)?)?)?$"
    code, log = run_with_fault("EIO close all", tmp_path, *command, match=directories)
    assert code == 0, log
    assert not list(output.rglob("attempts"))


@pytest.mark.parametrize("call", ["close", "fsync", "rename", "write"])
@pytest.mark.parametrize("name", ["pack", "export", "import"])
def test_an_error_of_writing_names_the_file_and_a_rerun_completes(
    forge: Forge, inputs: Path, tmp_path: Path, name: str, call: str
) -> None:
    output = tmp_path / "out"
    command = make_command(inputs, name, output)
    code, log = run_with_fault(f"EIO {call} all", tmp_path, *command, match="out/")
    refuse(code, log, str(output))
    assert code == 1
    forge.complete(command)
    reference = tmp_path / "reference"
    forge.complete(make_command(inputs, name, reference))
    for path in (path for path in reference.rglob("*") if path.is_file() and ".tokenmill" not in path.parts):
        if path.name != "blend.json":  # has absolute paths
            assert (output / path.relative_to(reference)).read_bytes() == path.read_bytes()
