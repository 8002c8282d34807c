"""What a stage reads when it is given a directory: real stages, run in this process on small files."""

import gzip
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from support import stages
from tokenmill.errors import RequestError, TransientError
from tokenmill.flow.attempt import planning_lease
from tokenmill.flow.contract import Origin, Part
from tokenmill.flow.lineage import StageInput, find_upstream
from tokenmill.flow.progress import Reporter
from tokenmill.flow.record import StageRecord
from tokenmill.flow.stage import StageRun
from tokenmill.flow.status import list_statuses
from tokenmill.flow.worker import Summary
from tokenmill.selection import Selection
from tokenmill.stages.registry import CONCATENATE, EXTRACT, KINDS, PREPROCESS, earlier_kinds
from tokenmill.suffixes import DATA_SUFFIXES
from tokenmill.tokens.dataset import verify_outputs

FILES = 4


def how(worker: int = 0, workers: int = 1, *, replace: bool = False) -> StageRun:
    return StageRun(Reporter(), worker, workers, processes=1, replace=replace)


def fill(source: Path, files: int = FILES, text: str = "document") -> Path:
    source.mkdir(parents=True, exist_ok=True)
    for index in range(files):
        lines = "".join(json.dumps({"text": f"{text} {index} {line}"}) + "\n" for line in range(index + 1))
        (source / f"{index}.jsonl.gz").write_bytes(gzip.compress(lines.encode(), mtime=0))
    return source


def download(source: Path | str, output: Path, run: StageRun | None = None, *, sample: int | None = None) -> Summary:
    how_much = {"connections": 4, "deadline": 30, "stall_seconds": 5}
    return stages.download(source, output, run or how(), Selection(sample=sample), **how_much)


def extract(root: Path, run: StageRun | None = None) -> Summary:
    return stages.extract(root, root / "extracted", run or how())


def concatenate(root: Path, output: Path | None = None, *, files: int = 2, run: StageRun | None = None) -> Summary:
    return stages.concatenate(root, output or root / "concatenated", run or how(), target_files=files, name="part")


def upstream(path: Path, **options: str) -> StageInput:
    return find_upstream(path, "preprocess", earlier_kinds(PREPROCESS), usable=DATA_SUFFIXES, only=options.get("only"))


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A dataset's root with a finished download."""
    download(fill(tmp_path / "source"), tmp_path / "corpus")
    return tmp_path / "corpus"


def stage_and_place(dataset: StageInput) -> tuple[str | None, Path]:
    return dataset.upstream.maker, dataset.root


def test_the_furthest_finished_stage_is_taken_and_said(root: Path) -> None:
    assert stage_and_place(upstream(root)) == ("download", root)
    extract(root)
    assert stage_and_place(upstream(root)) == ("extract", root / "extracted")
    summary = concatenate(root)
    taken = upstream(root)
    assert stage_and_place(taken) == ("concatenate", root / "concatenated")
    assert taken.notes == [f"reading 2 files of concatenate in {root / 'concatenated'}"]
    assert summary.completion.manifest is not None
    assert taken.upstream.manifest == summary.completion.manifest.hash
    # The stage itself and what comes after it are no input of it.
    assert stage_and_place(find_upstream(root, "concatenate", earlier_kinds(CONCATENATE))) == (
        "extract",
        root / "extracted",
    )
    assert stage_and_place(find_upstream(root, "extract", earlier_kinds(EXTRACT))) == ("download", root)
    # A stage's own directory is as good as the root.
    assert stage_and_place(upstream(root / "extracted")) == ("extract", root / "extracted")


def test_from_chooses_an_earlier_stage(root: Path) -> None:
    extract(root)
    assert stage_and_place(upstream(root, only="download")) == ("download", root)
    with pytest.raises(RequestError, match=r"--from verify: preprocess reads one of download, extract, concatenate"):
        upstream(root, only="verify")
    with pytest.raises(RequestError, match=r"no concatenate was started in .*tokenmill status"):
        upstream(root, only="concatenate")


def test_the_source_stays_known_through_all_stages(root: Path, tmp_path: Path) -> None:
    extract(root)
    concatenate(root)
    dataset = upstream(root)
    assert dataset.source == Origin("file:source", None)
    parts = [part for file in dataset.files for part in file.parts]
    assert parts == [Part(f"{index}.jsonl.gz", 0, index + 1) for index in range(FILES)]


def test_what_a_stage_counted_is_not_counted_again(root: Path) -> None:
    extract(root)
    concatenate(root)
    plan = StageRecord(root / "concatenated", CONCATENATE).read_plan()
    assert plan is not None
    inputs = [file for unit in plan.units for file in unit.inputs]
    assert [(file.records, file.blank) for file in inputs] == [(index + 1, 0) for index in range(FILES)]
    assert [file.remote for file in upstream(root).files] == [None] * 2


def test_an_unfinished_stage_is_refused_with_how_far_it_is(root: Path) -> None:
    stages.extract(root, root / "extracted", how(0, 2))
    receipts = len(list((root / "extracted/.tokenmill/extract/receipts").iterdir()))
    assert 0 < receipts < FILES
    with pytest.raises(RequestError, match=rf"extract in .* is not finished: {receipts} of {FILES} units") as caught:
        upstream(root)
    assert "first missing: " in str(caught.value) and "--from" in str(caught.value)
    assert stage_and_place(upstream(root, only="download")) == ("download", root)
    stages.extract(root, root / "extracted", how(1, 2))
    assert stage_and_place(upstream(root)) == ("extract", root / "extracted")


def test_a_stage_without_a_plan_yet_is_refused(root: Path) -> None:
    record = StageRecord(root / "extracted", EXTRACT)
    record.directory.mkdir(parents=True)
    assert stage_and_place(upstream(root)) == ("download", root)  # nobody is at it: it never began
    planning_lease(record).acquire()
    with pytest.raises(RequestError, match="has no plan yet"):
        upstream(root)


def test_a_stage_that_could_not_be_planned_says_why_there_is_nothing_to_read(tmp_path: Path) -> None:
    (tmp_path / "source").mkdir()
    with pytest.raises(RequestError, match="there are no files at"):
        download(tmp_path / "source", tmp_path / "corpus")
    with pytest.raises(RequestError, match=r"download in .*corpus failed and has no files; .*there are no files at"):
        upstream(tmp_path / "corpus")


def test_a_stage_that_never_got_a_plan_does_not_claim_a_directory_of_ones_own(tmp_path: Path) -> None:
    own = fill(tmp_path / "own")
    fill(own / "more", files=1)
    for place in (own, own / "more"):
        with pytest.raises(RequestError, match="there are no files at"):
            download(tmp_path / "nowhere", place)
    taken = upstream(own)
    assert len(taken.files) == FILES + 1 and taken.upstream.stage is None
    assert not any("left out" in note for note in taken.notes)
    assert extract(own).completion.manifest is not None


@pytest.mark.parametrize("scheme", ["", "file://"])
def test_a_download_into_its_own_source_is_refused_before_anything_is_written(tmp_path: Path, scheme: str) -> None:
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
    assert stage_and_place(upstream(root / "other")) == ("concatenate", root / "other")


def test_what_was_made_from_a_replaced_download_is_not_taken(root: Path, tmp_path: Path) -> None:
    extract(root)
    concatenate(root)
    shutil.rmtree(tmp_path / "source")
    download(fill(tmp_path / "source", files=2, text="new"), root, how(replace=True), sample=2)
    taken = upstream(root)
    assert stage_and_place(taken) == ("download", root)
    assert any("extract" in note and "older download" in note for note in taken.notes)


def test_an_upstream_made_again_with_the_same_content_invalidates_nothing(root: Path, tmp_path: Path) -> None:
    extract(root)
    before = StageRecord(root / "extracted", EXTRACT).read_plan()
    for path in (root / ".tokenmill/download/receipts").iterdir():
        path.unlink()
    (root / ".tokenmill/download/manifest.json").unlink()
    download(tmp_path / "source", root)
    again = extract(root)
    assert before is not None and again.plan.id == before.id and again.done_now == 0


def test_intermediate_data_may_be_deleted_once_the_next_stage_is_made(root: Path) -> None:
    extract(root)
    concatenate(root)
    for name in os.listdir(root / "extracted"):
        if name.endswith(".jsonl"):
            (root / "extracted" / name).unlink()
    assert stage_and_place(upstream(root)) == ("concatenate", root / "concatenated")
    with pytest.raises(RequestError, match=r"4 of its 4 files are missing .*tokenmill extract again"):
        upstream(root, only="extract")


def test_a_damaged_file_of_the_stage_to_read_fails_its_unit_alone(
    root: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    extract(root)
    whole = {path: path.read_bytes() for path in (root / "extracted").glob("*.jsonl")}
    truncated, gone = root / "extracted/3.jsonl", root / "extracted/0.jsonl"
    truncated.write_bytes(whole[truncated][:-5])
    gone.unlink()
    with pytest.raises(RequestError, match=r"manifest of the extract .* run tokenmill extract again") as caught:
        concatenate(root, files=FILES, run=StageRun(Reporter(), processes=1))
    for path, found in ((truncated, f"has {len(whole[truncated]) - 5} bytes"), (gone, "is missing")):
        expected = f"{path} {found}, but the manifest of the extract stage records {len(whole[path])} bytes"
        assert expected in str(caught.value)
    assert "2 of its 4 files are missing or have another size now: 0.jsonl, 3.jsonl" in capfd.readouterr().err
    extract(root)
    again = concatenate(root, files=FILES)
    assert (again.done_now, again.done_before) == (2, 2) and again.completion.manifest is not None


def test_a_later_reader_completes_a_missing_manifest(root: Path) -> None:
    manifest = root / ".tokenmill/download/manifest.json"
    content = manifest.read_bytes()
    for left in (None, content[: len(content) // 2]):
        if left is None:
            manifest.unlink()
        else:
            manifest.write_bytes(left)
        assert stage_and_place(upstream(root)) == ("download", root)
        assert manifest.read_bytes() == content


def test_a_manifest_that_says_other_than_the_receipts_is_noticed_and_not_read(root: Path) -> None:
    manifest = root / ".tokenmill/download/manifest.json"
    content = manifest.read_bytes()
    value = json.loads(content)
    manifest.write_text(json.dumps(value | {"files": value["files"][1:]}))
    assert any("does not match the receipts" in problem for problem in verify_outputs(root, KINDS, full=False)[1])
    assert len(upstream(root).files) == FILES
    assert manifest.read_bytes() == content
    assert verify_outputs(root, KINDS, full=False)[1] == []


def test_a_plain_directory_is_read_as_it_lies_but_not_what_it_is_written_to(tmp_path: Path) -> None:
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


def test_what_was_made_of_plain_files_is_no_more_of_them(tmp_path: Path) -> None:
    root = fill(tmp_path / "plain")
    extract(root)
    stages.extract(root, root / "again", how())
    assert len(list((root / "again").glob("**/*.jsonl"))) == FILES
    with pytest.raises(RequestError, match="specify another output directory"):
        stages.extract(root, root, how())


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


def test_nothing_to_read_says_what_was_seen_and_wanted(tmp_path: Path) -> None:
    with pytest.raises(RequestError, match="does not exist"):
        upstream(tmp_path / "nowhere")
    with pytest.raises(RequestError, match=r"no data files in .*\.jsonl"):
        upstream(tmp_path)
    (tmp_path / "notes.txt").write_text("x")
    with pytest.raises(RequestError, match=r"1 other files, such as 'notes\.txt'"):
        upstream(tmp_path)
    assert [file.path for file in upstream(tmp_path / "notes.txt").files] == ["notes.txt"], (
        "it is judged by its content"
    )


def test_what_describes_arrow_files_is_no_data(tmp_path: Path) -> None:
    """What save_to_disk of datasets leaves; elsewhere such names are data."""
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


def private_mounts() -> bool:
    tools = shutil.which("unshare") and shutil.which("mount")
    return bool(tools) and subprocess.run(["unshare", "-m", "true"], capture_output=True, check=False).returncode == 0


@pytest.mark.skipif(not private_mounts(), reason="needs the right to mount")
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


def test_the_same_content_has_the_same_manifest_wherever_and_however_it_was_made(root: Path, tmp_path: Path) -> None:
    extract(root)
    there = tmp_path / "there" / "corpus"
    for worker in (2, 0, 1):
        download(tmp_path / "source", there, how(worker, 3))
    for worker in (1, 0):
        stages.extract(there, there / "extracted", how(worker, 2))
    assert upstream(there).upstream == upstream(root).upstream


def test_what_tokenmill_made_is_never_read_as_files_somebody_brought(tmp_path: Path) -> None:
    """An extract's output lies inside the directory it read: a download of that directory must not double it."""
    brought = fill(tmp_path / "brought", files=2, text="own")
    extract(brought)
    taken = find_upstream(brought, "extract", earlier_kinds(EXTRACT), usable=(".gz", ".jsonl"))
    assert len(taken.files) == 2
    assert any("ignoring outputs" in note and "extracted" in note for note in taken.notes)
    download(brought, tmp_path / "copy", how())
    assert len([path for path in (tmp_path / "copy").iterdir() if path.is_file()]) == 2
    with pytest.raises(RequestError, match="specify another output directory"):
        find_upstream(brought, "extract", earlier_kinds(EXTRACT), output=brought)


def test_a_refused_plan_does_not_stand_in_the_way(tmp_path: Path) -> None:
    brought = fill(tmp_path / "brought", files=1, text="own")
    (brought / "a.parquet").write_bytes(b"PAR1")
    with pytest.raises(RequestError, match="Parquet"):
        extract(brought)
    (status,) = list_statuses(brought, KINDS)
    assert status.state == "failed while planning" and "Parquet" in status.failures[0].message
    assert len(upstream(brought).files) == 2


def test_a_changed_input_is_named_with_what_to_do(tmp_path: Path) -> None:
    brought = fill(tmp_path / "brought", files=2, text="own")
    extract(brought)
    (first, second) = sorted(path for path in brought.iterdir() if path.is_file())
    second.unlink()
    first.write_bytes(first.read_bytes() + b"")
    (brought / "new.jsonl").write_text("{}\n")
    with pytest.raises(
        RequestError, match=rf"changed: {first.name}; added: new.jsonl; missing: {second.name}.*--replace"
    ):
        extract(brought)


def test_a_source_that_changes_during_a_download_is_not_mixed(tmp_path: Path) -> None:
    source = fill(tmp_path / "source")
    download(source, tmp_path / "out", how(0, 2))
    fill(source, text="another")
    with pytest.raises(RequestError, match=r"changed since it was planned; if the source is a directory, .* --replace"):
        download(source, tmp_path / "out", how(1, 2))
    download(source, tmp_path / "another")
    download(source, tmp_path / "out", how(replace=True))
    for file in source.iterdir():
        assert (tmp_path / "out" / file.name).read_bytes() == file.read_bytes()


def test_replace_plans_a_directory_anew_and_fetches_what_changed_alone(tmp_path: Path) -> None:
    source = fill(tmp_path / "source")
    first = download(source, tmp_path / "out")
    assert download(source, tmp_path / "out", how(replace=True)).plan.id == first.plan.id
    (source / "1.jsonl.gz").write_bytes(gzip.compress(b'{"text": "corrected"}\n', mtime=0))
    assert download(source, tmp_path / "out").plan.id == first.plan.id
    again = download(source, tmp_path / "out", how(replace=True))
    assert (again.done_before, again.done_now) == (FILES - 1, 1)
    assert gzip.decompress((tmp_path / "out/1.jsonl.gz").read_bytes()) == b'{"text": "corrected"}\n'
    shutil.rmtree(source)
    assert download(source, tmp_path / "out", how(replace=True)).done_now == 0


class Meddler(Reporter):
    """Writes to a file as soon as the work is announced: planned it is then, and not yet read."""

    def __init__(self, path: Path, content: str) -> None:
        super().__init__()
        self.path = path
        self.content = content

    def log(self, text: str, **event: object) -> None:
        if "units" in event:
            self.path.write_text(self.content)


@pytest.mark.parametrize("content", ['{"text": "x"}\n{"text": "late"}\n', '{"text": "y"}\n'], ids=["grown", "other"])
@pytest.mark.parametrize("stage", ["extract", "concatenate"])
def test_an_input_that_is_still_written_to_is_not_taken_for_whole(tmp_path: Path, stage: str, content: str) -> None:
    for name in ("a", "b"):
        (tmp_path / "plain").mkdir(exist_ok=True)
        (tmp_path / f"plain/{name}.jsonl").write_text('{"text": "x"}\n')
    run = StageRun(Meddler(tmp_path / "plain/b.jsonl", content), processes=1)
    more = {"target_files": 1, "name": "part"} if stage == "concatenate" else {}
    with pytest.raises(TransientError, match="another program writes to it"):
        getattr(stages, stage)(tmp_path / "plain", tmp_path / "out", run, **more)
    assert not StageRecord(tmp_path / "out", next(kind for kind in KINDS if kind.name == stage)).manifest_path.exists()
