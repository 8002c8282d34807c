"""preprocess directly from the Hub: the bytes of download and preprocess, also after faults, and an empty scratch."""

import json
import os
import shutil
import signal
import time
from pathlib import Path
from typing import Any

import pytest

from support.corpus import REPOSITORY, TOKENIZER
from support.hub import Fault, Hub
from support.runs import HANG_TIMEOUT_SECONDS, Forge, assert_kept, receipts


def command(hub: Hub, output: Path, scratch: Path, *more: Any) -> list[Any]:
    source = f"hf://datasets/{REPOSITORY}"
    options = ["--endpoint", hub.endpoint, "--tokenizer", TOKENIZER, "--scratch", scratch, "--processes", 1]
    return ["preprocess", source, output, *options, *more]


def pairs(output: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in output.glob("*.[bi][id][nx]")}


def assert_traced(output: Path, expected: Path) -> None:
    """Compare the pairs, and the sources that the manifests record."""
    assert pairs(output) and pairs(output) == pairs(expected)
    manifest, other = (
        json.loads((path / ".tokenmill/preprocess/manifest.json").read_bytes()) for path in (output, expected)
    )
    assert manifest["files"] == other["files"]
    assert (manifest["counts"], manifest["source"]) == (other["counts"], other["source"])


@pytest.fixture
def output(prepared: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(prepared, tmp_path / "out"))


@pytest.mark.parametrize("target_files", [None, 3])
def test_the_same_as_download_and_preprocess(
    forge: Forge, hub: Hub, corpus: Path, output: Path, prepared: Path, tmp_path: Path, target_files: int | None
) -> None:
    more = ["--target-files", target_files] if target_files else []
    expected = Path(shutil.copytree(prepared, tmp_path / "expected"))
    forge.complete(["preprocess", corpus, expected, "--tokenizer", TOKENIZER, "--processes", 1, *more])
    forge.complete(command(hub, output, tmp_path / "scratch", *more))
    assert_traced(output, expected)
    assert not any((tmp_path / "scratch").iterdir()), "scratch is not empty"
    inspection = forge.complete(["inspect", output, "--document", 3]).output
    assert f"hf://datasets/{REPOSITORY} at revision" in inspection


def test_a_killed_run_resumes_and_leaves_no_scratch(
    forge: Forge, hub: Hub, output: Path, prepared: Path, tmp_path: Path
) -> None:
    scratch, reference = tmp_path / "scratch", Path(shutil.copytree(prepared, tmp_path / "reference"))
    forge.complete(command(hub, reference, scratch))
    run = forge.start(command(hub, output, scratch))
    while len(receipts(output, "preprocess")) < 3 and run.poll(0.005) is None:
        pass
    run.kill()
    run.wait()
    done = receipts(output, "preprocess")
    assert 3 <= len(done) <= 8
    forge.complete(command(hub, output, scratch))
    assert_kept(done, receipts(output, "preprocess"))
    assert_traced(output, reference)
    assert not any(scratch.iterdir())


def test_wrong_bytes_never_become_tokens(forge: Forge, shards: dict[str, bytes], output: Path, tmp_path: Path) -> None:
    """A wrong byte causes another request; if every response has one, the unit fails and leaves no output."""
    with Hub() as hub:
        hub.add_dataset(REPOSITORY, shards)
        hub.faults.add(Fault("flip", path="*05*", where="cdn", at=100, times=1000))
        run = forge.run(command(hub, output, tmp_path / "scratch"))
    assert run.exit == 1, run.output
    assert "train/05.jsonl.zst: sha256 is" in run.output
    assert len(receipts(output, "preprocess")) == len(shards) - 1
    assert "05_text_document.bin" not in pairs(output)


def test_terminated_during_a_download(forge: Forge, shards: dict[str, bytes], output: Path, tmp_path: Path) -> None:
    with Hub() as hub:
        hub.add_dataset(REPOSITORY, shards)
        # Planning reads only the first shards; the last shard never arrives.
        hub.faults.add(Fault("stall", path="*07*", where="cdn", at=10, seconds=HANG_TIMEOUT_SECONDS))
        run = forge.start(command(hub, output, tmp_path / "scratch"))
        while len(receipts(output, "preprocess")) < len(shards) - 1 and run.poll(0.0) is None:
            time.sleep(0.01)
        os.kill(run.pid, signal.SIGTERM)
        assert run.wait(25) == 143, run.output
        done = receipts(output, "preprocess")
        hub.faults.clear()
        forge.complete(command(hub, output, tmp_path / "scratch"))
        assert_kept(done, receipts(output, "preprocess"))


def test_another_source_on_the_same_output_is_refused(forge: Forge, hub: Hub, output: Path, tmp_path: Path) -> None:
    forge.complete(command(hub, output, tmp_path / "scratch", "--sample", 2))
    run = forge.run(command(hub, output, tmp_path / "scratch", "--sample", 3))
    assert run.exit == 2 and '"sample": 2' in run.output and '"sample": 3' in run.output
    done = receipts(output, "preprocess")
    forge.complete(command(hub, output, tmp_path / "scratch", "--sample", 3, "--replace"))
    after = receipts(output, "preprocess")
    assert [after[name][2] for name in done] == [files for _, _, files in done.values()], "the smaller sample is kept"


def test_a_wrong_key_is_reported_before_reading(forge: Forge, hub: Hub, output: Path, tmp_path: Path) -> None:
    run = forge.run(command(hub, output, tmp_path / "scratch", "--keys", "body"))
    assert run.exit == 2 and "no key 'body'" in run.output and "--keys" in run.output
    assert not receipts(output, "preprocess")


def test_options_of_a_source_are_refused_for_a_path(forge: Forge, corpus: Path, tmp_path: Path) -> None:
    run = forge.run(["preprocess", corpus, tmp_path / "o", "--tokenizer", TOKENIZER, "--sample", 2])
    assert run.exit == 2 and "Invalid value for --sample: it needs a source" in run.output
    run = forge.run(["preprocess", "hf://datasets/a/b", "--tokenizer", TOKENIZER])
    assert run.exit == 2 and "specify the output directory" in run.output
