"""An unfinished output of 0.1.0, from before the typed records: commands read and finish it correctly."""

import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest

from support.commandline import tokenmill
from tokenmill.core.files.codec import content_id
from tokenmill.datasets.contract import PREPROCESS
from tokenmill.engine.record import StageRecord
from tokenmill.pipelines import sample

TOKENIZER = Path(sample.__file__).parent / "tokenizer"
STORED = Path(__file__).parent / "data" / "output-0.1.0"
RECORDS = Path(".tokenmill") / "preprocess"


@pytest.fixture
def old(tmp_path: Path) -> Path:
    """Copy the stored output, and create the text that it was made from."""
    output, source = tmp_path / "output", tmp_path / "srcbad"
    shutil.copytree(STORED, output)
    shutil.copytree(TOKENIZER, output / "tokenizer")
    source.mkdir()
    for unit in json.loads((output / RECORDS / "plan.json").read_text())["units"]:
        (file,) = unit["spec"]["inputs"]
        number = file["path"][1]
        lines = [
            json.dumps({"text": f"document {number} {i}. The quick brown fox", "title": f"t{i}"}) for i in range(20)
        ]
        lines += ['{"text": 5}'] if number == "2" else []
        (source / file["path"]).write_text("\n".join(lines) + "\n")
        changed = int(
            file["identity"].partition("@")[2]
        )  # size and time identify a file that tokenmill did not download
        os.utime(source / file["path"], ns=(changed, changed))
    return output


def finish(output: Path, *options: str) -> Any:
    source = output.parent / "srcbad"
    return tokenmill(
        *("preprocess", source, output, "--tokenizer", TOKENIZER, "--on-bad-record", "quarantine", "--processes", 1),
        *options,
    )


@pytest.mark.slow
def test_an_old_output_is_finished_with_the_bytes_of_a_new_one(old: Path) -> None:
    status = tokenmill("status", old)
    assert status.code == 0 and "failed, 2/3 units" in status.out and "line 21: 'text' is a number" in status.out
    unfinished = tokenmill("verify", old)
    assert unfinished.code == 2 and "1 of 3 units have no receipt, first: f2" in unfinished.out + unfinished.err
    kept = {path: path.stat().st_mtime_ns for path in old.glob("f[01]_*")}
    result = finish(old)
    assert result.code == 0 and "1 unit to run" in result.err and "2 already finished" in result.err, result.err
    assert {path: path.stat().st_mtime_ns for path in old.glob("f[01]_*")} == kept
    assert tokenmill("verify", old).code == 0
    new = old.parent / "new"
    assert finish(new).code == 0
    assert {p.name: p.read_bytes() for p in old.glob("f*")} == {p.name: p.read_bytes() for p in new.glob("f*")}
    blended = tokenmill("blend", old.parent / "blend.txt", old, "--split", "80,10,10")
    assert blended.code == 0 and "60" in blended.out
    assert "from record 0" in tokenmill("inspect", old, "--document", 0).out


@pytest.mark.parametrize("other_format", [0, 2, None, "1"])
def test_every_command_refuses_a_plan_of_another_format_with_remedies(old: Path, other_format: object) -> None:
    path = old / RECORDS / "plan.json"
    plan = json.loads(path.read_text()) | {"format": other_format}
    path.write_text(json.dumps(plan | {"id": content_id({k: v for k, v in plan.items() if k != "id"})}))
    commands = (("status", old), ("verify", old), ("inspect", old), ("blend", old.parent / "b.txt", old))
    for result in (*(tokenmill(*command) for command in commands), finish(old), finish(old, "--replace")):
        assert (
            result.code == 2
            and f"it has format {other_format!r}, but this version of tokenmill writes 1; " in result.err
        )
        assert "use the version that started it, choose another output directory, or delete" in result.err


@pytest.mark.slow
def test_a_manifest_of_another_format_is_rebuilt_from_receipts(old: Path) -> None:
    assert finish(old).code == 0
    path = old / RECORDS / "manifest.json"
    before, record = path.read_bytes(), StageRecord(old, PREPROCESS)
    assert record.stored_manifest(record.plan_id()) is not None
    manifest: dict[str, Any] = json.loads(before) | {"format": 2}
    manifest["files"] = [file for file in manifest["files"] if not file["path"].startswith("f1")]
    manifest["hash"] = content_id({k: v for k, v in manifest.items() if k != "hash"})
    path.write_text(json.dumps(manifest))
    assert record.stored_manifest(record.plan_id()) is None
    assert finish(old).code == 0
    assert path.read_bytes() == before
