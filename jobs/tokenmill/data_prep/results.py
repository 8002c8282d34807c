"""The results of a data preparation: what was written, where it is, and how much it is."""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path


@dataclass(frozen=True, kw_only=True)
class SplitResult:
    """The output of one split.

    `data_paths` has alternating weights and paths, as blend.json has them. A path is the prefix of a pair, or a file.
    """

    name: str
    run_hash: str
    output_dir: Path
    data_paths: list[str]
    num_shards: int
    total_tokens: int
    total_sequences: int


@dataclass(frozen=True, kw_only=True)
class PipelineResult:
    """The output of `last_mile_process`; `from_cache` is true if all files existed before the call."""

    output_dir: Path
    blend_path: Path
    splits: Mapping[str, SplitResult]
    is_per_split: bool
    split_ratio: str | None
    elapsed_sec: float
    from_cache: bool = False

    @property
    def run_hash(self) -> str:
        """The hash of the parameters of the run."""
        return next(iter(self.splits.values())).run_hash

    @property
    def total_tokens(self) -> int:
        """The tokens of all splits; 0 for a format without tokens."""
        return sum(split.total_tokens for split in self.splits.values())

    @property
    def total_sequences(self) -> int:
        """The documents of all splits."""
        return sum(split.total_sequences for split in self.splits.values())

    @property
    def num_shards(self) -> int:
        """The shards of all splits."""
        return sum(split.num_shards for split in self.splits.values())


@dataclass(frozen=True, kw_only=True)
class DataBlendsArtifact:
    """The output of `run_data_prep`: the path of blend.json, and the sizes of the data that it lists."""

    path: Path
    blend_path: Path
    total_tokens: int
    total_sequences: int
    elapsed_sec: float
    num_shards: int
    train_tokens: int | None = None
    valid_tokens: int | None = None
    test_tokens: int | None = None
    source_datasets: list[str] = field(default_factory=list)
    tokenizer_uri: str | None = None
    name: str | None = None

    def to_json(self) -> str:
        """Return all fields as a JSON object."""
        return json.dumps(asdict(self), default=str)

    def __str__(self) -> str:
        """Return the JSON of the artifact."""
        return self.to_json()
