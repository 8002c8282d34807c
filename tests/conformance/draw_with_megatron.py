"""Draw samples with Megatron-LM's GPTDataset; test_samples.py runs this in Megatron-LM's environment.

Reads a request from standard input and writes the response to a file, because Megatron-LM prints too; both are JSON:
{"cases": [...], "response": file} -> [{"length": ..., "hashes": ..., "fields": ...} or {"error": ...}].
"""

import hashlib
import json
import shutil
import sys
from pathlib import Path

import numpy
from megatron.core.datasets.blended_megatron_dataset_builder import BlendedMegatronDatasetBuilder
from megatron.core.datasets.gpt_dataset import GPTDataset, GPTDatasetConfig


class Tokenizer:
    """The attributes of a tokenizer that GPTDataset uses."""

    def __init__(self, eod, pad):
        """Set the ids; without a pad, Megatron-LM pads with -1."""
        self.eod = eod
        if pad is not None:
            self.pad = pad
        self.vocab_size = None
        self.unique_identifiers = {"class": "test", "eod": eod, "pad": pad}


def draw(case):
    """Build the parts as pre-training does, and hash all samples of the requested part."""
    for prefix in case["prefixes"]:  # the names of stored indices do not contain every setting
        shutil.rmtree(prefix, ignore_errors=True)
    sizes = [0, 0, 0]
    sizes[case["part"]] = case["samples"]
    if case["samples"] is None:
        sizes = [None, None, None]
    blends = {"blend": (case["prefixes"], case["weights"]), "split": case["split"]}
    if case["split"] is None:
        blends = {"blend_per_split": [None, None, None]}
        blends["blend_per_split"][case["part"]] = (case["prefixes"], case["weights"])
    config = GPTDatasetConfig(
        random_seed=case["seed"],
        sequence_length=case["seq_length"],
        tokenizer=Tokenizer(case["eod"], case["pad"]),
        reset_position_ids=case["reset"],
        reset_attention_mask=case["reset"],
        eod_mask_loss=case["mask_eod"],
        create_attention_mask=case["reset"],
        drop_last_partial_validation_sequence=not case["keep_partial"],
        mid_level_dataset_surplus=case.get("surplus", 0.005),
        **blends,
    )
    dataset = BlendedMegatronDatasetBuilder(GPTDataset, sizes, lambda: True, config).build()[case["part"]]
    # Megatron-LM 0.16 changes the loss mask that it keeps, if the first sample that it reads has padding: then it does
    # not train the same positions of all later samples.
    for part in getattr(dataset, "datasets", [dataset]):
        part.masks_and_position_ids_are_cacheable = False
    hashes, fields = [], hashlib.sha256()
    for number in range(len(dataset)) if case["numbers"] is None else case["numbers"]:
        item = dataset[number]
        tokens, labels = item["tokens"].numpy(), item["labels"].numpy()
        labels = numpy.where(item["loss_mask"].numpy() != 0, labels, -100)
        content = tokens.astype("<i8").tobytes() + labels.astype("<i8").tobytes()
        hashes.append(hashlib.sha256(content).hexdigest()[:12])
        fields.update(item["position_ids"].numpy().astype("<i8").tobytes())
        if case["reset"]:
            fields.update((~item["attention_mask"].numpy()).astype("u1").tobytes())
    return {"length": len(dataset), "hashes": hashes, "fields": fields.hexdigest()}


def main():
    request = json.load(sys.stdin)
    response = []
    for case in request["cases"]:
        try:
            response.append(draw(case))
        except (AssertionError, IndexError) as error:
            response.append({"error": f"{type(error).__name__}: {error}"})
    Path(request["response"]).write_text(json.dumps(response))


if __name__ == "__main__":
    main()
