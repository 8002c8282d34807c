"""Read packed pairs with GPTDataset and the sample index of tokenmill; test_packed_rows.py runs this with Megatron-LM.

Reads a request (JSON) from standard input and writes the samples to an .npz file. Megatron-LM builds its own index
first, whose names and numbers of samples are those for which it searches; then its arrays are replaced.
"""

import dataclasses
import json
import sys
from pathlib import Path

import numpy
from megatron.core.datasets.blended_megatron_dataset_builder import BlendedMegatronDatasetBuilder
from megatron.core.datasets.gpt_dataset import GPTDataset, GPTDatasetConfig
from megatron.core.datasets.indexed_dataset import IndexedDataset

from tokenmill.datasets.split import divide
from tokenmill.samples.row_order import build_row_index, count_row_epochs, find_rows

PARTS = ("train", "valid", "test")


class Tokenizer:
    """The attributes of a tokenizer that GPTDataset uses; it has no pad, as many tokenizers."""

    def __init__(self, eod):
        self.eod, self.pad = eod, None
        self.vocab_size = None
        self.unique_identifiers = {"class": "test", "eod": eod}


def replace_index(description, fractions, seed):
    """Replace the arrays of an index that Megatron-LM has built."""
    content = json.loads(description.read_text())
    pair = IndexedDataset(content["dataset_path"], mmap=True)
    part = PARTS.index(content["index_split"])
    indices = numpy.array(pair.document_indices)
    first, end = find_rows(indices, *divide(fractions, len(pair))[part])
    epochs = count_row_epochs(end - first, content["num_samples"])
    for name, array in build_row_index(indices[first : end + 1], epochs, seed)._asdict().items():
        path = description.with_name(description.name.replace("description.txt", f"{name}.npy"))
        built = numpy.load(path)
        assert built.dtype == array.dtype and built.ndim == array.ndim, name
        numpy.save(path, array)


def main():
    request = json.load(sys.stdin)
    cache = Path(request["cache"])
    options = {"path_to_cache": str(cache), "create_attention_mask": False}
    masks = "inter_document_masking" in {field.name for field in dataclasses.fields(GPTDatasetConfig)}
    if masks:
        options["inter_document_masking"] = True
    config = GPTDatasetConfig(
        random_seed=request["seed"],
        sequence_length=request["seq_length"],
        tokenizer=Tokenizer(request["eod"]),
        reset_position_ids=False,
        reset_attention_mask=False,
        eod_mask_loss=False,
        blend=(request["prefixes"], request["weights"]),
        split=request["split"],
        **options,
    )
    sizes = [0, 0, 0]
    sizes[request["part"]] = request["samples"]
    fractions = [share / sum(request["fractions"]) for share in request["fractions"]]

    def build():
        return BlendedMegatronDatasetBuilder(GPTDataset, sizes, lambda: True, config).build()[request["part"]]

    build()
    for description in cache.glob("*-GPTDataset-*-description.txt"):
        replace_index(description, fractions, request["seed"])
    before = {path.name: path.stat().st_mtime_ns for path in cache.iterdir()}
    dataset = build()
    assert {path.name: path.stat().st_mtime_ns for path in cache.iterdir()} == before, "the index was built again"
    items = [dataset[number] for number in range(request["samples"])]
    names = ["tokens", "labels", "loss_mask", "position_ids", *(["cu_seqlens"] if masks else [])]
    arrays = {name: numpy.stack([item[name].numpy() for item in items]) for name in names}
    numpy.savez(request["response"], **arrays)


if __name__ == "__main__":
    main()
