"""`run_data_prep` and `last_mile_process`: run the stages of all datasets, and lay out the result.

JSONL and pairs are divided between the splits shard by shard, and linked into the output directory. Packed formats need
the stage pack, which packs the datasets of all splits together and writes into the output directory itself.
"""

import json
import time
import warnings
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TypeVar

from tokenmill.core.files.codec import content_id
from tokenmill.data_prep.blend import ALL, DataBlend, flatten
from tokenmill.data_prep.config import (
    BinIdxOutputConfig,
    ChatSftOutputConfig,
    DataPrepConfig,
    InvalidField,
    OutputConfig,
    PackedOutputConfig,
    PipelineConfig,
    TokenizerConfig,
)
from tokenmill.data_prep.datasets import DatasetWork, OutputShard, WorkSettings, forget, run_stage_of_program
from tokenmill.data_prep.layout import (
    ARGUMENTS_FILE,
    BLEND_FILE,
    PlacedFile,
    check_names,
    finish_record,
    place_files,
    record_run,
    write_blend,
)
from tokenmill.data_prep.results import DataBlendsArtifact, PipelineResult, SplitResult
from tokenmill.data_prep.shards import DatasetShard, assign_splits, weigh_shards
from tokenmill.data_prep.sources import normalize_path
from tokenmill.datasets.split import FILE_NAMES
from tokenmill.datasets.weighted import MAX_PAIRS
from tokenmill.engine.progress import Reporter
from tokenmill.engine.record import StageRecord
from tokenmill.engine.signals import STOP
from tokenmill.engine.stage import StageRun
from tokenmill.engine.worker import Summary
from tokenmill.packs.contract import SHARD
from tokenmill.stages.pack.blend import BlendedDataset, make_blend
from tokenmill.stages.pack.options import DROP, SPLIT, PackOptions
from tokenmill.stages.pack.stage import Pack
from tokenmill.stages.registry import PACK
from tokenmill.stages.transform.shards import count_shards

PACK_SEED = 42
"""The seed of packing, which the original interface does not let the caller choose."""

Artifact = TypeVar("Artifact")


def run_data_prep(
    config: DataPrepConfig,
    *,
    artifact_class: Callable[..., Artifact] = DataBlendsArtifact,  # type: ignore[assignment]
) -> Artifact:
    """Tokenize the datasets of a blend into pairs for Megatron-LM, and return the path of blend.json with the totals.

    `artifact_class` is called with the fields of `DataBlendsArtifact`.

    Raises:
        InvalidField: the configuration or the blend is invalid.
        TokenmillError: a stage failed; `exit_code` shows whether a retry can help.
    """
    blend = DataBlend.load(config.blend_path, text_field=config.text_field)
    pipeline = PipelineConfig(
        output=OutputConfig(
            dir=config.output_dir,
            format=BinIdxOutputConfig(shard_size=None, num_shards=config.num_shards),
            min_doc_chars=config.min_doc_chars,
        ),
        tokenizer=TokenizerConfig(model=config.tokenizer_model, add_bos=config.add_bos, add_eos=config.add_eos),
        force=config.force,
        split=config.split,
        per_split=config.per_split,
        on_bad_record=config.on_bad_record,
    )
    result = _Preparation(blend, pipeline, config.num_actors, config.sample).run()
    tokens = {f"{name}_tokens": split.total_tokens for name, split in result.splits.items() if name in FILE_NAMES}
    return artifact_class(
        path=result.blend_path,
        blend_path=result.blend_path,
        total_tokens=result.total_tokens,
        total_sequences=result.total_sequences,
        elapsed_sec=result.elapsed_sec,
        num_shards=result.num_shards,
        **tokens,
        source_datasets=[normalize_path(item.path) for items in blend.splits.values() for item in items],
        tokenizer_uri=config.tokenizer_model,
        name=config.artifact_name,
    )


def last_mile_process(blend: DataBlend, config: PipelineConfig) -> PipelineResult:
    """Prepare the datasets of a blend in the format of the configuration.

    Raises:
        InvalidField: the configuration does not fit the blend.
        TokenmillError: a stage failed; `exit_code` shows whether a retry can help.
    """
    return _Preparation(blend, config, config.num_actors).run()


def tokenize(blend: DataBlend, config: PipelineConfig) -> PipelineResult:
    """Call `last_mile_process`; this name is deprecated."""
    warnings.warn("tokenize is deprecated; use last_mile_process", DeprecationWarning, stacklevel=2)
    return last_mile_process(blend, config)


class _Preparation:
    """One call of the interface."""

    def __init__(
        self, blend: DataBlend, config: PipelineConfig, processes: int | None, rows: int | None = None
    ) -> None:
        if config.split is not None and blend.is_per_split:
            raise InvalidField(
                f"split is {config.split!r}, but the blend has a list for each split; leave out split, or write the "
                "datasets into one list"
            )
        self._config, self._output_format = config, config.output.format
        self._rows = rows
        self._by_shard = config.per_split if config.splits_by_shard and not blend.is_per_split else None
        held_out = self._by_shard.valid_shards + self._by_shard.test_shards if self._by_shard else 0
        self._output = config.output.dir.absolute()
        # The directories of the stages depend on all parameters, so only changed input can need another plan.
        self._run = StageRun(Reporter(), processes=processes, replace=True)
        packed = isinstance(self._output_format, PackedOutputConfig | ChatSftOutputConfig)
        settings = WorkSettings(config, self._output, self._run, 0 if packed else held_out, rows)
        self._works = [
            DatasetWork(split, dataset, settings) for split, datasets in blend.splits.items() for dataset in datasets
        ]
        self._check_distinct()
        self._hash = content_id(self._describe())

    def _check_distinct(self) -> None:
        """Raise InvalidField for two datasets with the same rows: a text would be in two splits, or counted twice."""
        places: dict[tuple[str | None, ...], DatasetWork] = {}
        for work in self._works:
            dataset = work.dataset
            other = places.setdefault((dataset.path, dataset.split, dataset.subset), work)
            if other is not work:
                raise InvalidField(
                    f"the dataset {dataset.name} in {work.split} has the path, split and subset of "
                    f"{other.dataset.name} in {other.split}; remove one of them"
                )

    def _describe(self) -> dict[str, object]:
        """Return the parameters of the call."""
        config = self._config
        output_format = {name: value for name, value in vars(self._output_format).items() if name != "transform"}
        return {
            "datasets": [[work.split, work.dataset.name, work.dataset.weight, work.hash] for work in self._works],
            "format": output_format,
            "split": config.split,
            "per_split": asdict(self._by_shard) if self._by_shard else None,
        }

    def run(self) -> PipelineResult:
        """Run the stages, and return what they wrote."""
        started = time.monotonic()
        STOP.clear()  # Ctrl-C may have stopped an earlier call of the same program, such as a notebook
        is_packed = isinstance(self._output_format, PackedOutputConfig | ChatSftOutputConfig)
        if not is_packed:
            check_names(self._output, [BLEND_FILE, *([ARGUMENTS_FILE] if self._config.split is not None else [])])
        if self._config.force:
            for work in self._works:
                work.forget()
            forget(StageRecord(self._output, PACK))
        manifests = [work.process() for work in self._works]
        summaries = [summary for work in self._works for summary in work.summaries]
        if isinstance(self._output_format, PackedOutputConfig | ChatSftOutputConfig):
            packing = self._pack(self._output_format)
            summaries.append(packing)
            splits = self._read_packed(packing)
        else:
            works = zip(self._works, manifests, strict=True)
            splits = self._place([work.list_shards(manifest) for work, manifest in works])
        record_run(self._output, self._hash, self._describe())
        return PipelineResult(
            output_dir=self._output,
            blend_path=self._output / BLEND_FILE,
            splits=splits,
            is_per_split=ALL not in splits,
            split_ratio=self._config.split,
            elapsed_sec=time.monotonic() - started,
            from_cache=not any(summary.done_now for summary in summaries),
        )

    def _place(self, results: Sequence[Sequence[OutputShard]]) -> dict[str, SplitResult]:
        """Link the shards of all datasets into the directories of their splits, and write blend.json."""
        weights = [work.dataset.weight for work in self._works]
        files: list[PlacedFile] = []
        splits: dict[str, SplitResult] = {}
        for split, shards in self._divide([len(result) for result in results]).items():
            chosen = {shard: results[shard.dataset][shard.number] for shard in shards}
            shares = weigh_shards(weights, {shard: part.size for shard, part in chosen.items()})
            weighted: list[tuple[float, str]] = []
            for number, (shard, part) in enumerate(chosen.items()):
                name = f"{split}/shard_{number:06d}"
                files += [PlacedFile(f"{name}{suffix}", path) for suffix, path in part.files.items()]
                suffix = next(iter(part.files)) if len(part.files) == 1 else ""
                weighted.append((shares[shard], str(self._output / f"{name}{suffix}")))
            splits[split] = self._make_result(
                split,
                flatten(weighted),
                sum(part.tokens for part in chosen.values()),
                sum(part.documents for part in chosen.values()),
                self._output / split,
            )
        ratio = self._config.split
        lists = {"train" if split == ALL else split: result.data_paths for split, result in splits.items()}
        place_files(self._output, files)
        write_blend(self._output, lists, ratio)
        finish_record(self._output, files, ratio)
        return splits

    def _divide(self, counts: Sequence[int]) -> dict[str, list[DatasetShard]]:
        """Return the shards of each split that has some; `counts` has the number of shards of each dataset."""
        requested = self._output_format.num_shards
        for work, count in zip(self._works, counts, strict=True):
            if requested is not None and count < requested and self._rows is None and self._config.sample is None:
                self._run.reporter.log(
                    f"dataset {work.dataset.name}: {count:,} shards instead of {requested:,}, because no other shard "
                    "has rows"
                )
        if self._by_shard:
            assigned = assign_splits(counts, self._by_shard)
        else:
            assigned = {work.split: [] for work in self._works}
            for dataset, work in enumerate(self._works):
                assigned[work.split] += [DatasetShard(dataset, number) for number in range(counts[dataset])]
        for split, shards in assigned.items():
            if len(shards) > MAX_PAIRS and isinstance(self._output_format, BinIdxOutputConfig):
                raise InvalidField(
                    f"{split} has {len(shards):,} shards, but Megatron-LM accepts at most {MAX_PAIRS:,} pairs; lower "
                    "num_shards, or raise shard_size"
                )
        return {split: shards for split, shards in assigned.items() if shards}

    def _pack(self, config: PackedOutputConfig | ChatSftOutputConfig) -> Summary:
        """Pack the pairs of all datasets; the weights repeat documents, so no dataset loses one."""
        lists: dict[str, list[BlendedDataset]] = {}
        for work in self._works:
            lists.setdefault(work.split, []).append(BlendedDataset(work.dataset.name, work.pairs, work.dataset.weight))
        valid, test = (self._by_shard.valid_shards, self._by_shard.test_shards) if self._by_shard else (0, 0)
        shards = config.num_shards
        if shards is None:
            total = sum(work.source_bytes for work in self._works)
            shards = max(count_shards(total, config.shard_size or 1), 1 + valid + test)
        options = PackOptions(
            format=config.writer,
            pack_size=config.pack_size,
            algorithm=config.algorithm.replace("_", "-"),
            seed=PACK_SEED,
            shards=shards,
            valid_shards=valid,
            test_shards=test,
            over_long=DROP if isinstance(config, ChatSftOutputConfig) else SPLIT,
        )
        stage = Pack(input=make_blend(lists, "the blend"), output=self._output, options=options)
        return run_stage_of_program(stage, self._run)

    def _read_packed(self, packing: Summary) -> dict[str, SplitResult]:
        """Return the splits of a finished pack, from its manifest and its blend.json."""
        manifest = packing.completion.manifest
        assert manifest is not None  # noqa: S101 - a single worker finishes all units, or raises an error
        entries = {str(self._output / entry.path): entry for entry in manifest.files if entry.role == SHARD}
        lists: dict[str, list[str] | None] = json.loads((self._output / BLEND_FILE).read_bytes())
        splits = {}
        for split, paths in lists.items():
            if paths:
                shards = [entries[path] for path in paths[1::2]]
                name = ALL if self._by_shard is None and self._works[0].split == ALL else split
                splits[name] = self._make_result(
                    name,
                    paths,
                    sum(shard.tokens for shard in shards),
                    sum(shard.sequences for shard in shards),
                    Path(paths[1]).parent,
                )
        return splits

    def _make_result(
        self, split: str, data_paths: list[str], tokens: int, sequences: int, directory: Path
    ) -> SplitResult:
        return SplitResult(
            name=split,
            run_hash=self._hash,
            output_dir=directory,
            data_paths=data_paths,
            num_shards=len(data_paths) // 2,
            total_tokens=tokens,
            total_sequences=sequences,
        )
