"""Outputs and records that are damaged after a run: a rerun repairs them, and repeats only the damaged units."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from support.corpus import TOKENIZER
from support.runs import Forge, assert_kept, assert_same_tree, receipts, tree

UNIT = "03.jsonl"


def truncate(output: Path) -> None:
    data = output / UNIT
    data.write_bytes(data.read_bytes()[:-7])


def delete(output: Path) -> None:
    (output / UNIT).unlink()


def empty(output: Path) -> None:
    (output / UNIT).write_bytes(b"")


def same_size(output: Path) -> None:
    data = bytearray((output / UNIT).read_bytes())
    data[len(data) // 2] ^= 1
    (output / UNIT).write_bytes(data)


def cut_receipt(output: Path) -> None:
    path = output / ".tokenmill" / "extract" / "receipts" / f"{UNIT}.json"
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def delete_receipt(output: Path) -> None:
    (output / ".tokenmill" / "extract" / "receipts" / f"{UNIT}.json").unlink()


def zero_receipt(output: Path) -> None:
    path = output / ".tokenmill" / "extract" / "receipts" / f"{UNIT}.json"
    path.write_bytes(bytes(path.stat().st_size))  # a power cut can leave zeros


@pytest.fixture(scope="module")
def finished(forge: Forge, corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a finished extract, to be copied."""
    output = tmp_path_factory.mktemp("finished") / "out"
    forge.complete(["extract", corpus, output, "--processes", 1])
    return output


@pytest.fixture
def output(finished: Path, tmp_path: Path) -> Path:
    """Return a copy of a finished extract, to be damaged."""
    return Path(shutil.copytree(finished, tmp_path / "out"))


def rerun(corpus: Path, output: Path, *options: Any) -> list[Any]:
    """Return the command that made the output."""
    return ["extract", corpus, output, "--processes", 1, *options]


@pytest.mark.parametrize(
    "damage",
    [truncate, delete, empty, same_size, cut_receipt, delete_receipt, zero_receipt],
    ids=lambda f: f.__name__,
)
def test_rerun_repairs_only_that_unit(
    forge: Forge, corpus: Path, finished: Path, output: Path, damage: Callable[[Path], None]
) -> None:
    damage(output)
    others = {name: receipt for name, receipt in receipts(finished, "extract").items() if name != f"{UNIT}.json"}
    forge.complete(rerun(corpus, output, *(["--verify-hashes"] if damage is same_size else [])))
    assert_same_tree(output, tree(finished))
    assert_kept(others, receipts(output, "extract"))


REMEDY = "with --verify-hashes (in a chart: --set verifyHashes=true), which makes only the damaged files again\n"


@pytest.mark.parametrize("stage", ["extract", "preprocess"])
def test_the_remedy_of_verify_repairs_flipped_bytes(
    forge: Forge, corpus: Path, finished: Path, tokenized: Path, tmp_path: Path, stage: str
) -> None:
    """A rerun without `--verify-hashes` compares only sizes, and they are right."""
    reference = finished if stage == "extract" else tokenized
    output = Path(shutil.copytree(reference, tmp_path / "out"))
    victim = min(output.glob("*.bin")) if stage == "preprocess" else output / UNIT
    data = bytearray(victim.read_bytes())
    data[len(data) // 2] ^= 1
    victim.write_bytes(data)
    run = forge.run(["verify", output])
    assert run.exit == 2
    message = next(line for line in run.output.splitlines(keepends=True) if str(victim) in line)
    assert message.endswith(f"run the same tokenmill {stage} again {REMEDY}")
    options = ["--tokenizer", TOKENIZER, "--target-files", 6] if stage == "preprocess" else []
    forge.complete([stage, corpus, output, "--processes", 1, *options, "--verify-hashes"])
    forge.complete(["verify", output])
    assert_same_tree(output, tree(reference))


def test_no_manifest_with_missing_data(forge: Forge, corpus: Path, finished: Path, output: Path) -> None:
    """The worker with a complete share cannot repair the other worker's unit, but it removes the manifest."""
    delete(output)
    runs = [forge.run(rerun(corpus, output, "--workers", 2, "--worker-index", index)) for index in (0, 1)]
    manifest = output / ".tokenmill" / "extract" / "manifest.json"
    assert [run.exit for run in runs] == [0, 0]
    assert_same_tree(output, tree(finished))

    delete(output)
    summary = json.loads(forge.complete(rerun(corpus, output, "--json", "--workers", 2)).output.splitlines()[-1])
    if summary["units_done"] < summary["units"]:  # the unit is worker 1's
        assert not manifest.exists()
    forge.complete(rerun(corpus, output))
    assert_same_tree(output, tree(finished))


@pytest.mark.parametrize("damage", [truncate, delete, same_size], ids=lambda f: f.__name__)
def test_the_next_stage_finishes_units_without_damaged_inputs(
    forge: Forge, corpus: Path, output: Path, tmp_path: Path, damage: Callable[[Path], None]
) -> None:
    """The unit with the damaged input fails with a remedy; after the repair the same command makes only that unit."""
    damage(output)
    command = ["concatenate", output, tmp_path / "next", "--target-files", 4, "--processes", 1]
    run = forge.run(command)
    assert run.exit == 2
    assert UNIT in run.output and "run tokenmill extract again" in run.output
    before = receipts(tmp_path / "next", "concatenate")
    assert len(before) == 3
    forge.complete(rerun(corpus, output, *(["--verify-hashes"] if damage is same_size else [])))
    forge.complete(command)
    assert_kept(before, receipts(tmp_path / "next", "concatenate"))


def test_text_that_changed_on_the_disk_never_becomes_tokens(
    forge: Forge, corpus: Path, output: Path, prepared: Path, tmp_path: Path
) -> None:
    """A record with another letter is still valid JSON; only the hash detects the change."""
    data = (output / UNIT).read_bytes()
    offset = data.index(b'"text": "') + 9
    (output / UNIT).write_bytes(data[:offset] + b"Q" + data[offset + 1 :])
    result = shutil.copytree(prepared, tmp_path / "next")
    command = ["preprocess", output, result, "--tokenizer", TOKENIZER, "--processes", 1]
    run = forge.run(command)
    assert run.exit == 2
    assert (
        f"{output / UNIT} is damaged" in run.output and "run tokenmill extract again with --verify-hashes" in run.output
    )
    before = receipts(result, "preprocess")
    assert len(before) == 7
    forge.complete(rerun(corpus, output, "--verify-hashes"))
    forge.complete(command)
    assert_kept(before, receipts(result, "preprocess"))


@pytest.mark.parametrize("name", ["manifest.json", "plan.json"])
@pytest.mark.parametrize("keep", [None, 0.0, 0.5], ids=["deleted", "empty", "half"])
def test_stage_record_lost(
    forge: Forge, corpus: Path, finished: Path, output: Path, name: str, keep: float | None
) -> None:
    """A manifest is made again from the receipts, and a plan from the input; finished units stay finished."""
    path = output / ".tokenmill" / "extract" / name
    data = path.read_bytes()
    path.unlink()
    if keep is not None:
        path.write_bytes(data[: int(len(data) * keep)])
    run = forge.run(rerun(corpus, output))
    if name == "plan.json" and run.exit == 2:  # a refusal with a remedy is right as well
        assert "plan" in run.output or "move it away" in run.output
        return
    assert run.exit == 0, run.output
    assert_same_tree(output, tree(finished))
    assert_kept(receipts(finished, "extract"), receipts(output, "extract"))


def test_a_download_whose_bytes_changed_is_not_extracted(forge: Forge, tmp_path: Path) -> None:
    """Some downloaded files have no checksum of their own, but the manifest has a hash of each."""
    source, data = tmp_path / "source", tmp_path / "data"
    source.mkdir()
    for name in ("02.jsonl", UNIT):
        (source / name).write_bytes(b'{"text": "once"}\n' * 100)
    download, extract = ["download", source, data], ["extract", data, tmp_path / "out", "--processes", 1]
    forge.complete(download)
    same_size(data)
    run = forge.run(extract)
    assert run.exit == 2
    assert UNIT in run.output and "run tokenmill download again with --verify-hashes" in run.output
    assert len(receipts(tmp_path / "out", "extract")) == 1
    forge.complete([*download, "--verify-hashes"])
    forge.complete(extract)
