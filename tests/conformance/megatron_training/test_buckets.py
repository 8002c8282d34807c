"""Real Megatron-LM trains from a bucket: plain and in phases, the samples are those of the directory."""

import json
import shutil
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path

import pytest

import tokenmill.data
from support.megatron_runs import GLOBAL_BATCH, ITERATIONS, SEQ_LENGTH, MegatronJob, digest_iterations
from support.object_server import serve_objects

pytestmark = pytest.mark.conformance


def test_the_samples_of_a_bucket_are_those_of_the_directory(
    job: Callable[..., MegatronJob], dataset: Path, other_dataset: Path, tmp_path: Path
) -> None:
    objects, address = tmp_path / "objects", f"s3://{tmp_path.name}"
    shutil.copytree(dataset, objects / "first")
    shutil.copytree(other_dataset, objects / "second")
    (tmp_path / "scratch").mkdir()
    with serve_objects(objects) as server:
        environment = server.environment | {"TMPDIR": str(tmp_path / "scratch")}
        plain = job(dataset__path=f"{address}/first")
        plain.variables |= environment
        plain.build_index()
        plain.complete()
        samples = tokenmill.data.open(dataset, seq_length=SEQ_LENGTH, samples=ITERATIONS * GLOBAL_BATCH, split="90,5,5")
        assert plain.digests() == {
            iteration: digests for iteration, digests in digest_iterations(samples).items() if iteration <= ITERATIONS
        }
        plan = [
            {"iterations": 9, "blend": [{"path": "FIRST", "weight": 3}, {"path": "SECOND", "weight": 1}]},
            {"iterations": ITERATIONS - 9, "seed": 5, "blend": [{"path": "SECOND", "weight": 1}]},
        ]
        text = json.dumps({"split": "90,5,5", "global_batch": GLOBAL_BATCH, "phases": plan})
        for name, first, second in (
            ("there", f"{address}/first", f"{address}/second"),
            ("here", dataset, other_dataset),
        ):
            content = text.replace("FIRST", str(first)).replace("SECOND", str(second))
            (tmp_path / f"{name}.json").write_text(content)
        phased = job(training__phases=str(tmp_path / "there.json"), training__evalIterations=1)
        phased.settings["checkpoint"]["path"] = str(tmp_path / "phased")
        phased.settings["dataset"] = {}
        phased.variables |= environment
        log = phased.complete()
    assert log.count("a phase ended") == 1
    samples = tokenmill.data.open(phases=tmp_path / "here.json", seq_length=SEQ_LENGTH, views=tmp_path / "views")
    assert phased.digests() == digest_iterations(samples)


def test_megatron_lm_reads_a_bucket_itself(job: Callable[..., MegatronJob], dataset: Path, tmp_path: Path) -> None:
    shutil.copytree(dataset, tmp_path / "objects/first")
    (tmp_path / "packages").mkdir()
    for name in (
        "boto3",
        "botocore",
        "s3transfer",
        "jmespath",
        "dateutil",
        "urllib3",
        "six",
    ):  # its environment has none
        spec = find_spec(name)
        assert spec and spec.origin
        origin = Path(spec.origin)
        origin = origin.parent if origin.name == "__init__.py" else origin
        (tmp_path / "packages" / origin.name).symlink_to(origin)
    with serve_objects(tmp_path / "objects") as server:
        run = job(dataset__path=f"s3://{tmp_path.name}/first", torchrun=True)
        run.settings["extraArgs"] += ["--object-storage-cache-path", str(tmp_path / "idx"), "--no-mmap-bin-files"]
        run.variables |= server.environment | {"TMPDIR": str(tmp_path)}
        run.variables["PYTHONPATH"] += f":{tmp_path / 'packages'}"
        log = run.complete()
        sent = server.take_counts()
    samples = tokenmill.data.open(dataset, seq_length=SEQ_LENGTH, samples=ITERATIONS * GLOBAL_BATCH, split="90,5,5")
    expected = digest_iterations(samples)
    assert run.digests() == {iteration: expected[iteration] for iteration in range(1, ITERATIONS + 1)}
    assert "it fetches 256 MiB for nearly each sample" in log and "copying" not in log
    assert sent.bytes > 10 * ITERATIONS * GLOBAL_BATCH * SEQ_LENGTH * 2  # whole files for their samples
