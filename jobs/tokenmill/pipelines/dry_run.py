"""The plan of a command, for `--dry-run`: what its stages would read, fetch and write.

Each stage makes its plan in a scratch directory, so that all is refused that the command would refuse. A stage that
reads records also runs on the beginning of some files; its counts, scaled to all files, are the expected ones. In a
pipeline, the stage after a download reads the beginnings from the source.
"""

import shutil
import tempfile
from collections.abc import Iterator
from contextlib import closing, suppress
from dataclasses import replace
from pathlib import Path

from msgspec.structs import replace as replace_fields

from tokenmill.core.json_lines import JsonEvent
from tokenmill.engine.progress import Reporter
from tokenmill.engine.rates import read_rate
from tokenmill.engine.record import Plan, StageRecord
from tokenmill.engine.run import run_stage
from tokenmill.engine.selection import Selection
from tokenmill.engine.stage import Stage, StageRun
from tokenmill.errors import InputError
from tokenmill.pipelines.pipeline import Pipeline
from tokenmill.pipelines.sft import FineTuningData
from tokenmill.records.blocks import detect_format
from tokenmill.records.compression import open_decompressed
from tokenmill.records.suffixes import strip_compression
from tokenmill.stages.download import Download
from tokenmill.stages.pairs import PairStage
from tokenmill.stages.preprocess import Preprocess
from tokenmill.stages.sources import SourceStage
from tokenmill.tokenize.stream import Stream

SAMPLED_FILES, SAMPLED_BYTES = 8, 1 << 20
"""How many files are sampled, and the decompressed bytes of the beginning of each in the sample."""

RATIO_BYTES = 4 << 20
"""Bytes of a compressed file that are decompressed to measure the ratio."""


class StagePlan(JsonEvent, frozen=True, tag="plan", kw_only=True):
    """The plan of a stage and its expected result; None stands for a number that an earlier stage determines.

    `files`, `units` and `input_bytes` are those of the plan, `units_done` counts the finished units, and `fetch_bytes`
    the bytes to request from a source. `documents`, `tokens` and `output_bytes` are expected for all units, `seconds`
    for the units that are left.
    """

    stage: str
    output: Path
    files: int
    units: int | None
    units_done: int
    input_bytes: int
    fetch_bytes: int
    documents: int | None = None
    tokens: int | None = None
    output_bytes: int | None = None
    free_bytes: int
    seconds: float | None = None
    bytes_per_second: int | None = None


class _Silent(Reporter):
    """A reporter that reports nothing: the command itself has not started."""

    def __init__(self) -> None:
        super().__init__(json_lines=True)

    def write(self, text: str, event: JsonEvent) -> None:
        """Do nothing."""


def plan_stage(stage: Stage, run: StageRun) -> StagePlan:
    """Return what a stage would do; raise the error that ends its planning."""
    run = run._replace(reporter=_Silent(), collector=None)
    with tempfile.TemporaryDirectory(prefix="tokenmill-dry-run-") as scratch:
        planned = replace(stage, output=Path(scratch) / "plan")  # type: ignore[type-var]
        plan = planned.prepare(run).make()
        expected: dict[str, int] = {}
        if isinstance(stage, SourceStage):
            expected = _run_sample(stage, plan, run, Path(scratch))
        elif isinstance(stage, Download):
            expected = {"output_bytes": plan.weight}
    finished = list(_list_finished(stage, plan))
    left, rate = plan.weight - sum(finished), read_rate(plan.stage)
    return StagePlan(
        stage=plan.stage,
        output=stage.output,
        files=sum(len(unit.inputs) or 1 for unit in plan.units),
        units=len(plan.units),
        units_done=len(finished),
        input_bytes=plan.weight,
        fetch_bytes=left if stage.fetches else 0,
        free_bytes=find_free_bytes(stage.output),
        seconds=left / rate if rate else None,
        bytes_per_second=rate,
        **expected,
    )


def plan_pipeline(pipeline: Pipeline, run: StageRun) -> list[StagePlan]:
    """Return what the stages of `tokenmill run` would do."""
    stages = pipeline.stages()
    plans: list[StagePlan] = []
    for stage in stages:
        ready = not plans or plans[-1].units_done == plans[-1].units
        if ready:
            plans.append(plan_stage(stage, run))
        elif isinstance(stage, Preprocess):
            stream = Stream(uri=pipeline.uri, selection=pipeline.selection, source=pipeline.source)
            options = replace(stage.options, target_files=None)
            streamed = plan_stage(replace(stage, input=stream, from_stage=None, options=options), run)
            units = streamed.units if len(stages) == 2 else pipeline.concatenate
            plans.append(replace_fields(streamed, fetch_bytes=0, units=stage.options.target_files or units))
        else:
            plans.append(_make_unplanned(stage, plans[0].files, plans[0].input_bytes))
    return plans


def plan_fine_tuning(data: FineTuningData, run: StageRun, only: str | None = None) -> list[StagePlan]:
    """Return what the stages of `tokenmill sft` would do, or only one of them."""
    if only:
        stages = [stage for _, stage in data.list_stages(download=data.download) if stage.kind.name == only]
        return [plan_stage(stage, run) for stage in stages]
    *chats, pack = (stage for _, stage in data.list_stages(download=False))
    plans = [plan_stage(stage, run) for stage in chats]
    if all(plan.units_done == plan.units for plan in plans):
        return [*plans, plan_stage(pack, run)]
    unplanned = _make_unplanned(pack, sum(plan.units or 0 for plan in plans), sum(p.output_bytes or 0 for p in plans))
    tokens = [plan.tokens for plan in plans]
    return [*plans, replace_fields(unplanned, tokens=None if None in tokens else sum(filter(None, tokens)))]


def _make_unplanned(stage: Stage, files: int, input_bytes: int) -> StagePlan:
    """Return what is known of a stage whose input does not exist yet."""
    return StagePlan(
        stage=stage.kind.name,
        output=stage.output,
        files=files,
        units=None,
        units_done=0,
        input_bytes=input_bytes,
        fetch_bytes=0,
        free_bytes=find_free_bytes(stage.output),
    )


def find_free_bytes(directory: Path) -> int:
    """Return the free bytes of the file system on which a directory is, or would be made."""
    existing = next(path for path in (directory.absolute(), *directory.absolute().parents) if path.exists())
    return shutil.disk_usage(existing).free


def _list_finished(stage: Stage, plan: Plan) -> Iterator[int]:
    """Yield the weights of the units that the output has already, if the output has this plan."""
    record = StageRecord(stage.output, stage.kind)
    stored = record.read_plan() if record.directory.is_dir() else None
    if stored is not None and stored.units == plan.units:
        for unit in stored.units:
            if record.read_receipt(stored, unit) is not None:
                yield unit.weight


def _run_sample(stage: SourceStage, plan: Plan, run: StageRun, scratch: Path) -> dict[str, int]:
    """Run a stage on the beginning of some files; return its documents, tokens and bytes, scaled to all files."""
    sample = scratch / "sample"
    sample.mkdir()
    with stage.find_input(run, plan.source.commit).list_files().open_heads() as paths:
        step = max(1, len(paths) // SAMPLED_FILES)
        weight = sum(
            _take_sample(path, sample / f"{number}-{strip_compression(path.name)[0]}", stage.file_format)
            for number, path in enumerate(paths[::step][:SAMPLED_FILES])
        )
    if not weight:
        return {}
    sampled = replace(
        stage, input=sample, output=scratch / "sampled", from_stage=None, selection=Selection(split="any")
    )
    if isinstance(sampled, PairStage):
        sampled = replace(sampled, options=replace(sampled.options, target_files=None))
    summary = run_stage(sampled, run)
    manifest, scale = summary.completion.manifest, plan.weight / weight
    if manifest is None:
        return {}
    counts = {"documents": manifest.counts.get("out"), "tokens": manifest.counts.get("tokens")}
    counts["output_bytes"] = sum(entry.bytes for entry in manifest.files)
    return {name: round(scale * count) for name, count in counts.items() if count is not None}


def _take_sample(path: Path, target: Path, file_format: str | None) -> float:
    """Write the first records of a file to another one; return the bytes of the file that they take, or 0."""
    if file_format == "json" or path.name.endswith(".json"):
        file_format = "json"
    detected = detect_format(path, file_format)
    if detected in ("parquet", "arrow"):
        return _take_rows(path, target) if detected == "parquet" else 0.0
    text, total = b"", 0
    with closing(open_decompressed(path, chunk=SAMPLED_BYTES)) as reader, suppress(InputError):
        # The reader reads blocks of the file, so that only a longer text shows how many bytes a part of it takes. A
        # fetched beginning of a compressed file ends in a frame.
        for block in reader:
            text, total = text or block, total + len(block)
            if reader.compressed_read >= RATIO_BYTES:
                break
    if len(text) < total:
        if detected == "json":
            return 0.0
        text = text[: text.rfind(b"\n") + 1]
    target.write_bytes(text)
    return reader.compressed_read * len(text) / max(total, 1)


def _take_rows(path: Path, target: Path) -> float:
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        with pq.ParquetFile(path) as file:
            rows = file.metadata.num_rows
            size = sum(file.metadata.row_group(i).total_byte_size for i in range(file.metadata.num_row_groups))
            batch = next(file.iter_batches(max(1, rows * SAMPLED_BYTES // max(size, 1))), None)
    except (OSError, pa.ArrowException):  # the unit of this file reports the damage
        return 0.0
    if batch is None:
        return 0.0
    pq.write_table(pa.Table.from_batches([batch]), target)
    return path.stat().st_size * float(batch.num_rows / rows)
