"""Open pairs with Megatron-LM's own reader; test_megatron_reader.py runs this in its own environment.

Reads a request from standard input and writes the response to a file, because Megatron-LM prints too; both are JSON:
{"prefixes": [...], "cases": [...], "merged": prefix, "response": file} -> {"sequences": ..., "samples": ...}. The pairs
are also merged, as Megatron-LM's tools/merge_datasets.py does it.
"""

import hashlib
import json
import sys
from pathlib import Path

from megatron.core.datasets.blended_megatron_dataset_builder import BlendedMegatronDatasetBuilder
from megatron.core.datasets.gpt_dataset import GPTDataset, GPTDatasetConfig
from megatron.core.datasets.indexed_dataset import IndexedDataset, IndexedDatasetBuilder


class Tokenizer:
    """The attributes of a tokenizer that GPTDataset uses."""

    eod = 0
    pad = 0
    vocab_size = 4096
    unique_identifiers = {"class": "tiny"}  # noqa: RUF012


def sha256(tokens):
    return hashlib.sha256(tokens.astype("<i8").tobytes()).hexdigest()


def sequences(prefix):
    """Return the hash of every sequence of an IndexedDataset, and the documents' boundaries."""
    dataset = IndexedDataset(prefix)
    return {
        "sequences": [sha256(dataset[i]) for i in range(len(dataset))],
        "document_indices": [int(entry) for entry in dataset.document_indices],
        "dtype": dataset.index.dtype.__name__,
    }


def samples(case):
    """Build train, valid and test as pre-training does; hash the first samples of the requested part."""
    config = GPTDatasetConfig(
        random_seed=case["seed"],
        sequence_length=case["sequence_length"],
        blend=(case["datasets"], case["weights"]),
        split=case["split"],
        tokenizer=Tokenizer(),
        reset_position_ids=False,
        reset_attention_mask=False,
        eod_mask_loss=False,
        create_attention_mask=False,
    )
    parts = BlendedMegatronDatasetBuilder(GPTDataset, case["sizes"], lambda: True, config).build()
    dataset = parts[("train", "valid", "test").index(case["part"])]
    items = [dataset[i] for i in range(case["take"])]
    return {
        "length": len(dataset),
        "samples": [{name: sha256(item[name].numpy())[:32] for name in ("tokens", "labels")} for item in items],
        "first": items[0]["tokens"][:16].tolist(),
    }


def merge(prefixes, merged):
    """Write pairs as one."""
    builder = IndexedDatasetBuilder(f"{merged}.bin", dtype=IndexedDataset(prefixes[0]).index.dtype)
    for prefix in prefixes:
        builder.add_index(prefix)
    builder.finalize(f"{merged}.idx")


def main():
    request = json.load(sys.stdin)
    response = {
        "sequences": {prefix: sequences(prefix) for prefix in request["prefixes"]},
        "samples": [samples(case) for case in request["cases"]],
    }
    merge(request["prefixes"], request["merged"])
    Path(request["response"]).write_text(json.dumps(response))


if __name__ == "__main__":
    main()
