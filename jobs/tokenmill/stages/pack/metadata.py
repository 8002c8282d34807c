"""The files that describe all shards of a pack: metadata.json and blend.json.

metadata.json is the list of objects that Megatron-Bridge reads for CUDA graphs (`pack_metadata` in
megatron/bridge/data/packing/gpt_sft.py), one for each split and epoch. Its keys `dataset_max_seqlen`,
`max_samples_per_bin`, `packing_factor`, `packing_efficiency`, `pack_size` and `min_packed_seqlen` count the positions
that the trainer reads: one less than the stored tokens of each sequence. All other keys are tokenmill's own.

blend.json has a flat list of weights and paths for each split, in the form of Megatron-LM's --per-split-data-args-path.
The weight of a shard is its number of rows. A split without rows is null, because Megatron-LM requires all three keys.
"""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path

from tokenmill.core.buckets.mirror import show_addresses
from tokenmill.core.files.codec import readable_json
from tokenmill.datasets.contract import ResolvedTokenizer
from tokenmill.datasets.split import FILE_NAMES
from tokenmill.packs.contract import ShardFile
from tokenmill.stages.pack.assignment import Assignment
from tokenmill.stages.pack.options import PackOptions

METADATA_FILE, BLEND_FILE = "metadata.json", "blend.json"


def describe_rows(
    assignment: Assignment, options: PackOptions, tokenizer: ResolvedTokenizer
) -> list[dict[str, object]]:
    """Return the content of metadata.json."""
    described: list[dict[str, object]] = []
    for group, totals in zip(assignment.groups, assignment.totals, strict=True):
        described.append(
            {
                "dataset_max_seqlen": totals.longest,
                "max_samples_per_bin": totals.most_sequences,
                "packing_factor": round(totals.sequences / totals.rows, 2),
                "packing_efficiency": round(100 * totals.positions / totals.rows / options.pack_size, 2),
                "pack_size": options.pack_size,
                "min_packed_seqlen": totals.emptiest,
                "split": group.split,
                "epoch": group.epoch,
                "algorithm": options.assign_by,
                "seed": options.seed + group.epoch,
                "count": options.count,
                "padded_to_multiple_of": options.multiple,
                "shards": group.shards,
                "rows": totals.rows,
                "sequences": totals.sequences,
                "documents": totals.documents,
                "stored_tokens": totals.tokens,
                "padding_tokens": totals.padding,
                "trained_tokens": totals.trained,
                "datasets": [
                    {
                        "name": name,
                        "weight": share.weight,
                        "trained_tokens": share.trained,
                        "repetitions": round(share.repetitions, 4),
                    }
                    for name, share in assignment.shares[group.split]
                ],
                "tokenizer": {
                    "reference": tokenizer.reference,
                    "revision": tokenizer.revision,
                    "fingerprint": tokenizer.fingerprint,
                },
            }
        )
    return described


def encode_metadata(metadata: Sequence[Mapping[str, object]]) -> bytes:
    """Return the bytes of metadata.json."""
    return readable_json(list(metadata))


def encode_blend(output: Path, shards: Mapping[str, Sequence[ShardFile]]) -> bytes:
    """Return the bytes of blend.json, with absolute paths or addresses: a trainer has another working directory."""
    root = show_addresses(str(output.absolute()))
    lists = {
        split: [text for shard in shards[split] for text in (str(shard.rows), f"{root}/{shard.path}")]
        if shards.get(split)
        else None
        for split in FILE_NAMES
    }
    return (json.dumps(lists, indent=1) + "\n").encode()
