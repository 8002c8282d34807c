"""The formats of packed shards. All have the same three columns: `input_ids`, `loss_mask` and `seq_start_id`.

`loss_mask` is shifted inside each sequence (`stages.pack.rows`), `seq_start_id` has the first position of each
sequence. These are the columns of Megatron-Bridge's packed datasets (megatron/bridge/data/packing).
"""

from tokenmill.packs.writers.base import ShardFormat, ShardInfo, ShardWriter
from tokenmill.packs.writers.jsonl import JsonlFormat
from tokenmill.packs.writers.npy import NpyFormat
from tokenmill.packs.writers.parquet import ParquetFormat

__all__ = ["SHARD_FORMATS", "ShardFormat", "ShardInfo", "ShardWriter"]

SHARD_FORMATS: dict[str, ShardFormat] = {"parquet": ParquetFormat(), "npy": NpyFormat(), "jsonl": JsonlFormat()}
"""The formats by name."""
