"""A Python interface to the stages with the names, defaults and signatures of NVIDIA's data preparation module.

    config    the configuration classes
    blend     the datasets of a run with their weights
    sources   the files of a dataset
    run       `run_data_prep` and `last_mile_process`: which stages run, in which directories
    shards    the shards of each split, and their weights
    layout    the files of the output, and blend.json
    results   the result classes
    formats   the transforms

docs/data-prep.md describes the interface, and lists its differences to the original.
"""

from tokenmill.data_prep.blend import DataBlend
from tokenmill.data_prep.blend import SourceDataset as Dataset
from tokenmill.data_prep.config import (
    BinIdxOutputConfig,
    ChatSftOutputConfig,
    DataPrepConfig,
    JsonlOutputConfig,
    OutputConfig,
    PackedOutputConfig,
    PerSplitConfig,
    PipelineConfig,
    TokenizerConfig,
)
from tokenmill.data_prep.results import DataBlendsArtifact, PipelineResult, SplitResult
from tokenmill.data_prep.run import last_mile_process, run_data_prep, tokenize

__all__ = [
    "BinIdxOutputConfig",
    "ChatSftOutputConfig",
    "DataBlend",
    "DataBlendsArtifact",
    "DataPrepConfig",
    "Dataset",
    "JsonlOutputConfig",
    "OutputConfig",
    "PackedOutputConfig",
    "PerSplitConfig",
    "PipelineConfig",
    "PipelineResult",
    "SplitResult",
    "TokenizerConfig",
    "last_mile_process",
    "run_data_prep",
    "tokenize",
]
