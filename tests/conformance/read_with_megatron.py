"""Open pairs with Megatron-LM's own reader; test_megatron_reader.py runs this under an environment of its own.

Reads a request from standard input and writes the answer to a file, since Megatron-LM prints too; both JSON:
{"prefixes": [...], "cases": [...], "answer": file} -> {"sequences": ..., "samples": ...}.
"""

import hashlib
import json
import sys
from pathlib import Path

from megatron.core.datasets.blended_megatron_dataset_builder import BlendedMegatronDatasetBuilder
from megatron.core.datasets.gpt_dataset import GPTDataset, GPTDatasetConfig
from megatron.core.datasets.indexed_dataset import IndexedDataset


class Tokenizer:
    """What GPTDataset asks of a tokenizer."""

    eod = 0
    pad = 0
    vocab_size = 4096
    unique_identifiers = {"class": "tiny"}  # noqa: RUF012


def sha256(tokens):
    return hashlib.sha256(tokens.astype("<i8").tobytes()).hexdigest()


def sequences(prefix):
    """Hash every sequence as IndexedDataset returns it, and name the documents' boundaries."""
    dataset = IndexedDataset(prefix)
    return {
        "sequences": [sha256(dataset[i]) for i in range(len(dataset))],
        "document_indices": [int(entry) for entry in dataset.document_indices],
        "dtype": dataset.index.dtype.__name__,
    }


def samples(case):
    """Build train, valid and test as pre-training does; hash the first samples of the part asked for."""
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
    taken = [dataset[i] for i in range(case["take"])]
    return {
        "length": len(dataset),
        "samples": [{name: sha256(item[name].numpy())[:32] for name in ("tokens", "labels")} for item in taken],
        "first": taken[0]["tokens"][:16].tolist(),
    }


def main():
    request = json.load(sys.stdin)
    answer = {
        "sequences": {prefix: sequences(prefix) for prefix in request["prefixes"]},
        "samples": [samples(case) for case in request["cases"]],
    }
    Path(request["answer"]).write_text(json.dumps(answer))


if __name__ == "__main__":
    main()
