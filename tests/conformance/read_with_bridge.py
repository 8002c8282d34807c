"""Open packed shards with Megatron-Bridge's own readers; test_packing.py runs this in Megatron-LM's environment.

Reads a request from standard input and writes the response to a file; both are JSON:
{"shards": [{"path": ..., "metadata": ..., "eos": ..., "pack_size": ..., "multiple": ...}], "response": file}
-> [{"rows": [[input_ids, loss_mask, seq_boundaries], ...], "invalid": [...], "batches": [...]}, ...].

The package `megatron.bridge` imports the training of all models, which needs CUDA and a newer Python. Only its modules
for packed data are imported here. PARENTS are packages without their `__init__.py`, and UNUSED are modules that are
imported there and not used for packed data.
"""

import importlib.machinery
import json
import sys
import types
from pathlib import Path

PARENTS = (
    "megatron.bridge",
    "megatron.bridge.data",
    "megatron.bridge.data.datasets",
    "megatron.bridge.training",
    "megatron.bridge.training.tokenizers",
    "megatron.bridge.utils",
)
"""Packages whose `__init__.py` is left out."""

UNUSED = {
    "datasets": {"builder": types.SimpleNamespace(), "load_dataset": None},
    "megatron.bridge.training.tokenizers.tokenizer": {"MegatronTokenizer": object},
    "megatron.bridge.utils.common_utils": {"get_local_rank_preinit": int},
}
"""Modules that the readers import for other datasets, with the names that they import."""


def add_empty_modules():
    """Add the modules of PARENTS and UNUSED."""
    import megatron

    (root,) = (Path(entry) / "bridge" for entry in megatron.__path__ if (Path(entry) / "bridge").is_dir())
    for name in PARENTS:
        module = types.ModuleType(name)
        module.__path__ = [str(root.joinpath(*name.split(".")[2:]))]
        sys.modules[name] = module
    for name, attributes in UNUSED.items():
        module = types.ModuleType(name)
        module.__spec__ = importlib.machinery.ModuleSpec(name, None)
        vars(module).update(attributes)
        sys.modules[name] = module


class Tokenizer:
    """The attributes of a tokenizer that the readers use."""

    def __init__(self, eos):
        self.eos_id = self.eod = self.eos = eos
        self.space_sensitive = False


def read(shard):
    """Return all rows, the rows that validate_row refuses, and what the trainer gets for each row."""
    from megatron.bridge.data.packing.gpt_sft import GPTSFTPackedDataset
    from megatron.bridge.data.packing.parquet import GPTSFTPackedParquetDataset

    kind = GPTSFTPackedDataset if shard["path"].endswith(".npy") else GPTSFTPackedParquetDataset
    dataset = kind(
        file_path=shard["path"],
        tokenizer=Tokenizer(shard["eos"]),
        max_seq_length=shard["pack_size"],
        pad_seq_to_mult=shard["multiple"],
        prompt_template="{text} {answer}",  # unused, but required
        pad_to_max_length=True,
        pad_cu_seqlens=True,
        pack_metadata_file_path=shard["metadata"],
    )
    rows, invalid, batches = [], [], []
    for number in range(len(dataset)):
        item = dataset[number]
        rows.append([item["input_ids"], item["loss_mask"], item["seq_boundaries"]])
        try:
            GPTSFTPackedParquetDataset.validate_row(
                number, item["input_ids"], item["loss_mask"], item["seq_boundaries"][:-1]
            )
        except ValueError as error:
            invalid.append(str(error))
        batch = dataset.collate_fn([item])
        batches.append({key: value.tolist() for key, value in batch.items() if hasattr(value, "tolist")})
    return {"rows": rows, "invalid": invalid, "batches": batches}


def main():
    request = json.load(sys.stdin)
    add_empty_modules()
    Path(request["response"]).write_text(json.dumps([read(shard) for shard in request["shards"]]))


if __name__ == "__main__":
    main()
