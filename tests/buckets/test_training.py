"""`tokenmill train` with datasets in buckets: Megatron-LM gets copies on the disk of its node."""

import json
import os
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from support.buckets import CUT, Proxy, Store
from support.commandline import CommandResult, tokenmill
from support.disk import Disk
from support.mill import Mill
from support.train import Job, make_settings, wait_for
from tokenmill.core.printing import format_bytes

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def dataset(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return an output of preprocess with two pairs."""
    return Mill(tmp_path_factory.mktemp("mill")).make("dataset", {"a": 8000, "b": 6000})


@pytest.fixture
def job(s3_store: Store, dataset: Path, tmp_path: Path) -> Callable[..., Job]:
    """Return a function that makes a run of the small trainer, which reads a bucket."""
    for path in dataset.rglob("*"):
        if path.is_file():
            s3_store.put(f"data/{path.relative_to(dataset).as_posix()}", path.read_bytes())
    (tmp_path / "scratch").mkdir()

    def make(store: Store = s3_store, **changed: Any) -> Job:
        settings = make_settings(tmp_path / "checkpoints", Path())
        settings["dataset"] = {"path": f"{s3_store.uri}/data", "split": "90,5,5"} | changed
        run = Job(tmp_path / f"job{len(list(tmp_path.glob('job*')))}", settings)
        run.variables |= store.environment | {"TMPDIR": str(tmp_path / "scratch")}
        return run

    return make


def find_copies(tmp_path: Path) -> dict[str, Path]:
    """Return the copies of pairs on this machine."""
    root = next((tmp_path / "scratch").glob("tokenmill-buckets-*/s3/*/data"))
    return {path.name: path for path in root.iterdir() if path.suffix in (".bin", ".idx")}


def test_a_run_reads_copies_of_its_pairs(
    job: Callable[..., Job], s3_store: Store, dataset: Path, tmp_path: Path
) -> None:
    run = job()
    code, log = run.once()
    assert code == 0, log
    run.assert_exact()
    copies = find_copies(tmp_path)
    assert copies.keys() == {path.name for path in dataset.glob("*_document.*")}
    assert all(path.read_bytes() == (dataset / name).read_bytes() for name, path in copies.items())
    assert f"copying 4 files, {format_bytes(sum(map(size, copies.values())))}, from {s3_store.uri}/data" in log
    identity = (run.checkpoints / ".tokenmill/train/identity.json").read_text()
    assert f"{s3_store.uri}/data" in identity and str(tmp_path / "scratch") not in identity
    # the copies are there; and a local copy of the dataset is the same data
    run = job()
    run.settings["training"]["iterations"] = 60
    code, log = run.once()
    assert code == 0 and "copying" not in log, log
    run.settings["training"]["iterations"] = 80
    run.settings["dataset"]["path"] = str(dataset)
    code, log = run.once()
    assert code == 0, log


def size(path: Path) -> int:
    return path.stat().st_size


def test_a_killed_copy_continues_and_a_changed_object_is_copied_again(
    job: Callable[..., Job], s3_store: Store, dataset: Path, tmp_path: Path
) -> None:
    proxy = Proxy(s3_store.address)
    with proxy.run() as address:
        run = job(s3_store.through(address))
        proxy.choose = lambda method, path: CUT if path.endswith("b_text_document.bin") and method == "GET" else None
        node = run.start()
        wait_for(run, "copying 4 files", 60)
        node.kill()
        node.wait(30)
        proxy.choose = lambda method, path: None
        code, log = run.once()
        assert code == 0 and "copying" in log, log
    other = Mill(tmp_path / "mill").make("other", {"a": 8000, "b": 6000}, seed=5)
    for path in other.rglob("*"):
        if path.is_file():
            s3_store.put(f"data/{path.relative_to(other).as_posix()}", path.read_bytes())
    run = job(allowChange=True)
    run.settings["training"]["iterations"] = 60
    code, log = run.once()
    assert code == 0 and "copying 4 files" in log, log
    assert all(path.read_bytes() == (other / name).read_bytes() for name, path in find_copies(tmp_path).items())
    assert not list((tmp_path / "scratch").rglob("*.tmp"))


def test_an_object_that_differs_from_its_record_is_refused(
    job: Callable[..., Job], s3_store: Store, dataset: Path
) -> None:
    s3_store.put("data/a_text_document.bin", b"\1" * size(dataset / "a_text_document.bin"))
    code, log = job().once()
    assert code == 2, log
    assert f"{s3_store.uri}/data/a_text_document.bin has another content than its record" in log
    assert "tokenmill verify" in log


def test_phases_and_a_blend_read_copies(
    job: Callable[..., Job], s3_store: Store, dataset: Path, tmp_path: Path
) -> None:
    parts = [
        {"path": f"{s3_store.uri}/data/a_text_document", "weight": 1},
        {"path": str(dataset / "b_text_document"), "weight": 1},
    ]
    run = job()
    run.settings["dataset"] = {"blend": {"all": parts}, "split": "80,10,10"}
    code, log = run.once()
    assert code == 0, log
    assert set(find_copies(tmp_path)) == {"a_text_document.bin", "a_text_document.idx"}
    shutil.rmtree(run.checkpoints)
    run.settings["training"]["phases"] = [
        {"iterations": 20, "blend": [parts[0]]},
        {"iterations": 20, "blend": [parts[0], parts[1]]},
    ]
    run.settings["dataset"] = {"split": "80,10,10"}
    code, log = run.once()
    assert code == 0 and "a phase ended" in log, log
    views = [path for path in run.checkpoints.rglob("*.bin") if path.is_symlink()]
    assert views and all(path.exists() for path in views)
    assert json.dumps(str(tmp_path / "scratch")) not in (run.checkpoints / ".tokenmill/train/identity.json").read_text()


def test_a_small_disk_is_refused(job: Callable[..., Job], tmp_path: Path) -> None:
    if os.geteuid() != 0:
        pytest.skip("mounting a small file system needs root")
    disk = Disk(tmp_path / "disk")
    try:
        disk.fill(leave=600_000)
        run = job()
        run.variables["TMPDIR"] = str(disk.path)
        code, log = run.once()
    finally:
        disk.unmount()
    assert code == 2 and "Megatron-LM reads a copy of the 2 pairs in buckets, which needs" in log, log


def test_megatron_lm_reads_a_bucket_itself_if_the_user_wants_it(
    job: Callable[..., Job], s3_store: Store, tmp_path: Path
) -> None:
    run = job()
    run.settings["extraArgs"] = [f"--object-storage-cache-path={tmp_path}", "--no-mmap-bin-files"]
    ended = show_command(run)
    assert ended.code == 0 and "it fetches 256 MiB for nearly each sample" in ended.err, ended.err
    blend = re.search(r"--data-args-path (\S+)", ended.out)
    assert blend and f" {s3_store.uri}/data/a_text_document\n" in Path(blend[1]).read_text()
    run.settings["extraArgs"].pop()
    ended = show_command(run)
    assert ended.code == 2 and "needs --no-mmap-bin-files; add it to extraArgs" in ended.err
    run.settings["extraArgs"] = []
    assert str(tmp_path / "scratch") in show_command(run).out


def show_command(run: Job) -> CommandResult:
    arguments, variables = run.prepare()
    return tokenmill(*arguments, "--dry-run", **variables)
