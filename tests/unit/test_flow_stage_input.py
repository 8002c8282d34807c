"""The input of a stage that reads a directory: real stages, run in this process on small files."""

import gzip
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from support import stages
from tokenmill.core.json_lines import JsonEvent
from tokenmill.datasets.dataset import verify_outputs
from tokenmill.engine.attempt import planning_lease
from tokenmill.engine.contract import Origin, Part
from tokenmill.engine.progress import Reporter, StartEvent
from tokenmill.engine.record import StageRecord
from tokenmill.engine.selection import Selection
from tokenmill.engine.stage import StageRun
from tokenmill.engine.stage_input import StageInput, find_upstream
from tokenmill.engine.status import list_statuses
from tokenmill.engine.worker import Summary
from tokenmill.errors import RequestError, TransientError
from tokenmill.records.suffixes import DATA_SUFFIXES
from tokenmill.stages.registry import CONCATENATE, EXTRACT, KINDS, PREPROCESS, earlier_kinds

FILES = 4


def make_run(worker: int = 0, workers: int = 1, *, replace: bool = False) -> StageRun:
    return StageRun(Reporter(), worker, workers, processes=1, replace=replace)


def fill(source: Path, files: int = FILES, text: str = "document") -> Path:
    source.mkdir(parents=True, exist_ok=True)
    for index in range(files):
        lines = "".join(json.dumps({"text": f"{text} {index} {line}"}) + "\n" for line in range(index + 1))
        (source / f"{index}.jsonl.gz").write_bytes(gzip.compress(lines.encode(), mtime=0))
    return source


def download(source: Path | str, output: Path, run: StageRun | None = None, *, sample: int | None = None) -> Summary:
    options = {"connections": 4, "deadline": 30, "stall_seconds": 5}
    return stages.download(source, output, run or make_run(), Selection(sample=sample), **options)


def extract(root: Path, run: StageRun | None = None) -> Summary:
    return stages.extract(root, root / "extracted", run or make_run())


def concatenate(root: Path, output: Path | None = None, *, files: int = 2, run: StageRun | None = None) -> Summary:
    return stages.concatenate(root, output or root / "concatenated", run or make_run(), target_files=files, name="part")


def upstream(path: Path, **options: str) -> StageInput:
    return find_upstream(path, "preprocess", earlier_kinds(PREPROCESS), usable=DATA_SUFFIXES, only=options.get("only"))


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """Return a dataset's root with a finished download."""
    download(fill(tmp_path / "source"), tmp_path / "corpus")
    return tmp_path / "corpus"


def stage_and_root(dataset: StageInput) -> tuple[str | None, Path]:
    return dataset.upstream.maker, dataset.root


def test_latest_finished_stage_is_read(root: Path) -> None:
    assert stage_and_root(upstream(root)) == ("download", root)
    extract(root)
    assert stage_and_root(upstream(root)) == ("extract", root / "extracted")
    summary = concatenate(root)
    taken = upstream(root)
    assert stage_and_root(taken) == ("concatenate", root / "concatenated")
    assert taken.notes == [f"reading 2 files of concatenate in {root / 'concatenated'}"]
    assert summary.completion.manifest is not None
    assert taken.upstream.manifest == summary.completion.manifest.hash
    # A stage does not read its own output or the output of a later stage.
    assert stage_and_root(find_upstream(root, "concatenate", earlier_kinds(CONCATENATE))) == (
        "extract",
        root / "extracted",
    )
    assert stage_and_root(find_upstream(root, "extract", earlier_kinds(EXTRACT))) == ("download", root)
    # The directory of a stage works like the root.
    assert stage_and_root(upstream(root / "extracted")) == ("extract", root / "extracted")


def test_from_chooses_an_earlier_stage(root: Path) -> None:
    extract(root)
    assert stage_and_root(upstream(root, only="download")) == ("download", root)
    with pytest.raises(RequestError, match=r"--from verify: preprocess reads one of download, extract, concatenate"):
        upstream(root, only="verify")
    with pytest.raises(RequestError, match=r"no concatenate was started in .*tokenmill status"):
        upstream(root, only="concatenate")


def test_source_is_recorded_through_all_stages(root: Path, tmp_path: Path) -> None:
    extract(root)
    concatenate(root)
    dataset = upstream(root)
    assert dataset.source == Origin("file:source", None)
    parts = [part for file in dataset.files for part in file.parts]
    assert parts == [Part(f"{index}.jsonl.gz", 0, index + 1) for index in range(FILES)]


def test_counted_records_are_not_counted_again(root: Path) -> None:
    extract(root)
    concatenate(root)
    plan = StageRecord(root / "concatenated", CONCATENATE).read_plan()
    assert plan is not None
    inputs = [file for unit in plan.units for file in unit.inputs]
    assert [(file.records, file.blank) for file in inputs] == [(index + 1, 0) for index in range(FILES)]
    assert [file.remote for file in upstream(root).files] == [None] * 2


def test_unfinished_stage_is_refused_with_its_progress(root: Path) -> None:
    stages.extract(root, root / "extracted", make_run(0, 2))
    receipts = len(list((root / "extracted/.tokenmill/extract/receipts").iterdir()))
    assert 0 < receipts < FILES
    with pytest.raises(RequestError, match=rf"extract in .* is not finished: {receipts} of {FILES} units") as caught:
        upstream(root)
    assert "first missing: " in str(caught.value) and "--from" in str(caught.value)
    assert stage_and_root(upstream(root, only="download")) == ("download", root)
    stages.extract(root, root / "extracted", make_run(1, 2))
    assert stage_and_root(upstream(root)) == ("extract", root / "extracted")


def test_a_stage_without_a_plan_yet_is_refused(root: Path) -> None:
    record = StageRecord(root / "extracted", EXTRACT)
    record.directory.mkdir(parents=True)
    assert stage_and_root(upstream(root)) == ("download", root)  # no process holds the lease: the stage never started
    planning_lease(record).acquire()
    with pytest.raises(RequestError, match="has no plan yet"):
        upstream(root)


def test_failed_planning_is_reported_by_the_next_stage(tmp_path: Path) -> None:
    (tmp_path / "source").mkdir()
    with pytest.raises(RequestError, match="there are no files at"):
        download(tmp_path / "source", tmp_path / "corpus")
    with pytest.raises(RequestError, match=r"download in .*corpus failed and has no files; .*there are no files at"):
        upstream(tmp_path / "corpus")


def test_failed_planning_does_not_claim_a_plain_directory(tmp_path: Path) -> None:
    own = fill(tmp_path / "own")
    fill(own / "more", files=1)
    for directory in (own, own / "more"):
        with pytest.raises(RequestError, match="there are no files at"):
            download(tmp_path / "nowhere", directory)
    taken = upstream(own)
    assert len(taken.files) == FILES + 1 and taken.upstream.stage is None
    assert not any("left out" in note for note in taken.notes)
    assert extract(own).completion.manifest is not None


@pytest.mark.parametrize("scheme", ["", "file://"])
def test_download_into_its_source_is_refused_before_it_writes(tmp_path: Path, scheme: str) -> None:
    own = fill(tmp_path / "own")
    before = sorted(own.rglob("*"))
    with pytest.raises(RequestError, match="own cannot be both input and output; specify another output directory"):
        download(f"{scheme}{own}", own)
    assert sorted(own.rglob("*")) == before


def test_two_outputs_of_one_stage_are_ambiguous(root: Path) -> None:
    extract(root)
    concatenate(root)
    concatenate(root, root / "other", files=3)
    with pytest.raises(RequestError, match="more than one concatenate") as caught:
        upstream(root)
    assert str(root / "other") in str(caught.value) and str(root / "concatenated") in str(caught.value)
    assert stage_and_root(upstream(root / "other")) == ("concatenate", root / "other")


def test_outputs_of_a_replaced_download_are_not_read(root: Path, tmp_path: Path) -> None:
    extract(root)
    concatenate(root)
    shutil.rmtree(tmp_path / "source")
    download(fill(tmp_path / "source", files=2, text="new"), root, make_run(replace=True), sample=2)
    taken = upstream(root)
    assert stage_and_root(taken) == ("download", root)
    assert any("extract" in note and "older download" in note for note in taken.notes)


def test_identical_upstream_keeps_the_plan(root: Path, tmp_path: Path) -> None:
    extract(root)
    before = StageRecord(root / "extracted", EXTRACT).read_plan()
    for path in (root / ".tokenmill/download/receipts").iterdir():
        path.unlink()
    (root / ".tokenmill/download/manifest.json").unlink()
    download(tmp_path / "source", root)
    again = extract(root)
    assert before is not None and again.plan.id == before.id and again.done_now == 0


def test_intermediate_data_may_be_deleted_after_the_next_stage(root: Path) -> None:
    extract(root)
    concatenate(root)
    for name in os.listdir(root / "extracted"):
        if name.endswith(".jsonl"):
            (root / "extracted" / name).unlink()
    assert stage_and_root(upstream(root)) == ("concatenate", root / "concatenated")
    with pytest.raises(RequestError, match=r"4 of its 4 files are missing .*tokenmill extract again"):
        upstream(root, only="extract").announce(Reporter())


def test_each_worker_looks_at_its_share_of_the_input(root: Path, capfd: pytest.CaptureFixture[str]) -> None:
    extract(root)
    (root / "extracted/1.jsonl").unlink()
    for worker in range(3):
        upstream(root).announce(Reporter(), worker, workers=3)
        warned = "1 of the 1 files that this worker checked are missing" in capfd.readouterr().err
        assert warned == (worker == 1)
    for path in (root / "extracted").glob("*.jsonl"):
        path.unlink()
    for worker in range(3):
        with pytest.raises(RequestError, match="4 of its 4 files are missing"):
            upstream(root).announce(Reporter(), worker, workers=3)


def test_damaged_input_file_fails_only_its_unit(root: Path, capfd: pytest.CaptureFixture[str]) -> None:
    extract(root)
    contents = {path: path.read_bytes() for path in (root / "extracted").glob("*.jsonl")}
    truncated, deleted = root / "extracted/3.jsonl", root / "extracted/0.jsonl"
    truncated.write_bytes(contents[truncated][:-5])
    deleted.unlink()
    with pytest.raises(RequestError, match=r"manifest of the extract .* run tokenmill extract again") as caught:
        concatenate(root, files=FILES, run=StageRun(Reporter(), processes=1))
    for path, problem in ((truncated, f"has {len(contents[truncated]) - 5} bytes"), (deleted, "is missing")):
        expected = f"{path} {problem}, but the manifest of the extract stage records {len(contents[path])} bytes"
        assert expected in str(caught.value)
    assert "2 of its 4 files are missing or have another size now: 0.jsonl, 3.jsonl" in capfd.readouterr().err
    extract(root)
    again = concatenate(root, files=FILES)
    assert (again.done_now, again.done_before) == (2, 2) and again.completion.manifest is not None


def test_a_later_reader_completes_a_missing_manifest(root: Path) -> None:
    manifest = root / ".tokenmill/download/manifest.json"
    content = manifest.read_bytes()
    for remaining in (None, content[: len(content) // 2]):
        if remaining is None:
            manifest.unlink()
        else:
            manifest.write_bytes(remaining)
        assert stage_and_root(upstream(root)) == ("download", root)
        assert manifest.read_bytes() == content


def test_manifest_that_contradicts_the_receipts_is_not_read(root: Path) -> None:
    manifest = root / ".tokenmill/download/manifest.json"
    content = manifest.read_bytes()
    value = json.loads(content)
    manifest.write_text(json.dumps(value | {"files": value["files"][1:]}))
    assert any("does not match the receipts" in problem for problem in verify_outputs(root, KINDS, full=False)[1])
    assert len(upstream(root).files) == FILES
    assert manifest.read_bytes() == content
    assert verify_outputs(root, KINDS, full=False)[1] == []


def test_plain_directory_is_read_without_its_output(tmp_path: Path) -> None:
    root = tmp_path / "plain"
    for name in ("b.jsonl", "sub/a.jsonl", "README.md", ".hidden.jsonl", "out/old.jsonl"):
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text('{"text": "x"}\n')
    dataset = find_upstream(root, "preprocess", earlier_kinds(PREPROCESS), usable=DATA_SUFFIXES, output=root / "out")
    assert [file.path for file in dataset.files] == ["b.jsonl", "sub/a.jsonl"]
    assert dataset.upstream.stage is None
    assert any("README.md" in note for note in dataset.notes)
    moved = root.rename(tmp_path / "elsewhere")
    assert (
        find_upstream(
            moved, "preprocess", earlier_kinds(PREPROCESS), usable=DATA_SUFFIXES, output=moved / "out"
        ).upstream
        == dataset.upstream
    )
    (moved / "b.jsonl").write_text('{"text": "another"}\n')
    assert (
        find_upstream(
            moved, "preprocess", earlier_kinds(PREPROCESS), usable=DATA_SUFFIXES, output=moved / "out"
        ).upstream
        != dataset.upstream
    )


def test_outputs_in_a_plain_directory_are_not_read(tmp_path: Path) -> None:
    root = fill(tmp_path / "plain")
    extract(root)
    stages.extract(root, root / "again", make_run())
    assert len(list((root / "again").glob("**/*.jsonl"))) == FILES
    with pytest.raises(RequestError, match="specify another output directory"):
        stages.extract(root, root, make_run())


def test_a_directory_that_two_links_lead_to_is_read_once(tmp_path: Path) -> None:
    fill(tmp_path / "elsewhere")
    root = tmp_path / "plain"
    root.mkdir()
    for name in ("a", "b"):
        (root / name).symlink_to(tmp_path / "elsewhere")
    assert len(upstream(root).files) == FILES


def test_a_single_file_is_read_alone(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text("{}\n")
    (tmp_path / "b.jsonl").write_text("{}\n")
    dataset = upstream(tmp_path / "b.jsonl")
    assert (dataset.root, [file.path for file in dataset.files]) == (tmp_path, ["b.jsonl"])


def test_hidden_files_are_left_out_and_named(tmp_path: Path) -> None:
    (tmp_path / "deep/.kept").mkdir(parents=True)
    for name in ("deep/._a.jsonl", ".DS_Store", "deep/.kept/b.jsonl"):
        (tmp_path / name).write_text("{}\n")
    with pytest.raises(RequestError, match=r"1 hidden files, such as 'deep/\._a\.jsonl'; a file name must end in"):
        upstream(tmp_path)
    (tmp_path / "a.jsonl").write_text("{}\n")
    dataset = upstream(tmp_path)
    assert [file.path for file in dataset.files] == ["a.jsonl"]
    assert dataset.notes == [f"reading 1 files in {tmp_path}", "ignoring 1 hidden files, such as 'deep/._a.jsonl'"]


def test_missing_data_is_reported_with_other_files(tmp_path: Path) -> None:
    with pytest.raises(RequestError, match="does not exist"):
        upstream(tmp_path / "nowhere")
    with pytest.raises(RequestError, match=r"no data files in .*\.jsonl"):
        upstream(tmp_path)
    (tmp_path / "notes.txt").write_text("x")
    with pytest.raises(RequestError, match=r"1 other files, such as 'notes\.txt'"):
        upstream(tmp_path)
    assert [file.path for file in upstream(tmp_path / "notes.txt").files] == ["notes.txt"], (
        "the content decides whether the file has data"
    )


def test_descriptions_of_arrow_files_are_not_data(tmp_path: Path) -> None:
    """save_to_disk of datasets writes these files; in other directories, such names are data."""
    for name in (
        "saved/data-0.arrow",
        "saved/state.json",
        "saved/dataset_info.json",
        "dataset_dict.json",
        "x/state.json",
    ):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("{}")
    dataset = upstream(tmp_path)
    assert sorted(file.path for file in dataset.files) == ["saved/data-0.arrow", "x/state.json"]
    assert "left out 3 files that are not data files" in " ".join(dataset.notes)


READ_ONLY = 'mount --bind "$1" "$1" && mount -o remount,bind,ro "$1" && shift && exec "$@"'


def can_mount() -> bool:
    tools = shutil.which("unshare") and shutil.which("mount")
    return bool(tools) and subprocess.run(["unshare", "-m", "true"], capture_output=True, check=False).returncode == 0


@pytest.mark.skipif(not can_mount(), reason="needs the right to mount")
def test_a_read_only_input_is_read_and_its_status_shown(root: Path, tmp_path: Path) -> None:
    (root / ".tokenmill/download/manifest.json").unlink()
    work = root / ".tokenmill/download/attempts/0.jsonl.gz~1-0"
    work.mkdir(parents=True)
    before = sorted(path for path in root.rglob("*"))
    for arguments in (["status", root], ["extract", root, tmp_path / "out", "--processes", "1"]):
        command = [sys.executable, "-m", "tokenmill", *map(str, arguments)]
        done = subprocess.run(
            ["unshare", "-m", "sh", "-c", READ_ONLY, "sh", str(root), *command],
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        assert "complete" in done.stdout
    assert sorted(path for path in root.rglob("*")) == before
    assert len(list((tmp_path / "out").glob("*.jsonl"))) == FILES


def test_manifest_depends_only_on_the_content(root: Path, tmp_path: Path) -> None:
    extract(root)
    other = tmp_path / "there" / "corpus"
    for worker in (2, 0, 1):
        download(tmp_path / "source", other, make_run(worker, 3))
    for worker in (1, 0):
        stages.extract(other, other / "extracted", make_run(worker, 2))
    assert upstream(other).upstream == upstream(root).upstream


def test_outputs_of_tokenmill_are_not_read_as_plain_files(tmp_path: Path) -> None:
    """The output of extract is inside its input directory: a download of that directory must not read it again."""
    own = fill(tmp_path / "brought", files=2, text="own")
    extract(own)
    taken = find_upstream(own, "extract", earlier_kinds(EXTRACT), usable=(".gz", ".jsonl"))
    assert len(taken.files) == 2
    assert any("ignoring outputs" in note and "extracted" in note for note in taken.notes)
    download(own, tmp_path / "copy", make_run())
    assert len([path for path in (tmp_path / "copy").iterdir() if path.is_file()]) == 2
    with pytest.raises(RequestError, match="specify another output directory"):
        find_upstream(own, "extract", earlier_kinds(EXTRACT), output=own)


def test_refused_plan_does_not_block_others(tmp_path: Path) -> None:
    own = fill(tmp_path / "brought", files=1, text="own")
    (own / "a.parquet").write_bytes(b"PAR1")
    with pytest.raises(RequestError, match="Parquet"):
        extract(own)
    (status,) = list_statuses(own, KINDS)
    assert status.state == "failed while planning" and "Parquet" in status.failures[0].message
    assert len(upstream(own).files) == 2


def test_changed_input_is_named_with_a_remedy(tmp_path: Path) -> None:
    own = fill(tmp_path / "brought", files=2, text="own")
    extract(own)
    (first, second) = sorted(path for path in own.iterdir() if path.is_file())
    second.unlink()
    first.write_bytes(first.read_bytes() + b"")
    (own / "new.jsonl").write_text("{}\n")
    with pytest.raises(
        RequestError, match=rf"changed: {first.name}; added: new.jsonl; missing: {second.name}.*--replace"
    ):
        extract(own)


def test_a_source_that_changes_during_a_download_is_not_mixed(tmp_path: Path) -> None:
    source = fill(tmp_path / "source")
    download(source, tmp_path / "out", make_run(0, 2))
    fill(source, text="another")
    with pytest.raises(RequestError, match=r"changed since it was planned; if the source is a directory, .* --replace"):
        download(source, tmp_path / "out", make_run(1, 2))
    download(source, tmp_path / "another")
    download(source, tmp_path / "out", make_run(replace=True))
    for file in source.iterdir():
        assert (tmp_path / "out" / file.name).read_bytes() == file.read_bytes()


def test_replace_downloads_only_changed_files(tmp_path: Path) -> None:
    source = fill(tmp_path / "source")
    first = download(source, tmp_path / "out")
    assert download(source, tmp_path / "out", make_run(replace=True)).plan.id == first.plan.id
    (source / "1.jsonl.gz").write_bytes(gzip.compress(b'{"text": "corrected"}\n', mtime=0))
    assert download(source, tmp_path / "out").plan.id == first.plan.id
    again = download(source, tmp_path / "out", make_run(replace=True))
    assert (again.done_before, again.done_now) == (FILES - 1, 1)
    assert gzip.decompress((tmp_path / "out/1.jsonl.gz").read_bytes()) == b'{"text": "corrected"}\n'
    shutil.rmtree(source)
    assert download(source, tmp_path / "out", make_run(replace=True)).done_now == 0


class Meddler(Reporter):
    """Writes to a file when the work is announced: the file is then planned, but not yet read."""

    def __init__(self, path: Path, content: str) -> None:
        super().__init__()
        self.path = path
        self.content = content

    def write(self, text: str, event: JsonEvent) -> None:
        if isinstance(event, StartEvent):
            self.path.write_text(self.content)


@pytest.mark.parametrize("content", ['{"text": "x"}\n{"text": "late"}\n', '{"text": "y"}\n'], ids=["grown", "other"])
@pytest.mark.parametrize("stage", ["extract", "concatenate"])
def test_input_that_is_still_written_is_refused(tmp_path: Path, stage: str, content: str) -> None:
    for name in ("a", "b"):
        (tmp_path / "plain").mkdir(exist_ok=True)
        (tmp_path / f"plain/{name}.jsonl").write_text('{"text": "x"}\n')
    run = StageRun(Meddler(tmp_path / "plain/b.jsonl", content), processes=1)
    more = {"target_files": 1, "name": "part"} if stage == "concatenate" else {}
    with pytest.raises(TransientError, match="another program writes to it"):
        getattr(stages, stage)(tmp_path / "plain", tmp_path / "out", run, **more)
    assert not StageRecord(tmp_path / "out", next(kind for kind in KINDS if kind.name == stage)).manifest_path.exists()
