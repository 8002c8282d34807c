"""The sides of `indexes`: `python index_tools.py write|own|megatron|draw ...`; the last line of output is JSON.

`megatron` runs under a Python with megatron-core and without tokenmill.
"""

import json
import struct
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np

SEQ_LENGTH, BATCH, SEED = 4096, 512, 1234


def write(directory: Path, pairs: int, tokens: int) -> dict[str, Any]:
    """Write pairs of long documents whose `.bin` files are sparse, and their list with weights."""
    random = np.random.default_rng(3)
    shares = random.lognormal(0, 0.5, pairs)
    items: list[str] = []
    directory.mkdir()
    for number, share in enumerate(shares / shares.sum()):
        lengths = random.integers(50_000, 150_000, max(2, int(tokens * share / 100_000))).astype("<i4")
        ends = np.cumsum(lengths, dtype=np.int64)
        prefix = directory / f"{number:05d}_text_document"
        header = b"MMIDIDX\0\0" + struct.pack("<QBQQ", 1, 4, len(lengths), len(lengths) + 1)
        documents = np.arange(len(lengths) + 1, dtype="<i8")
        pointers = ((ends - lengths) * 4).astype("<i8")
        Path(f"{prefix}.idx").write_bytes(header + lengths.tobytes() + pointers.tobytes() + documents.tobytes())
        with Path(f"{prefix}.bin").open("wb") as file:
            file.truncate(int(ends[-1]) * 4)
        items += [repr(float(ends[-1])), str(prefix)]
    (directory / "blend.json").write_text(json.dumps({"train": items, "valid": None, "test": None}))
    return {"tokens": sum(float(weight) for weight in items[::2])}


def own(directory: Path, output: Path, tokenizer: Path, samples: int, python: str) -> dict[str, Any]:
    """Build the index as `tokenmill train --build-index` does."""
    from tokenmill.train.data.index import IndexCache, Start, build_index

    cache = IndexCache(output / "of" / "run" / "index", shared=False)
    options = {
        "per-split-data-args-path": directory / "blend.json",
        "seq-length": SEQ_LENGTH,
        "global-batch-size": BATCH,
        "train-iters": samples // BATCH,
        "eval-iters": 0,
        "seed": SEED,
        "tokenizer-type": "HuggingFaceTokenizer",
        "tokenizer-model": tokenizer,
        "data-cache-path": cache.path,
    }
    words = [word for name, value in options.items() for word in (f"--{name}", str(value))]
    build_index([Start(words)], cache, script="/nowhere/pretrain_gpt.py", python=[python])
    return _describe(cache.path)


def megatron(directory: Path, output: Path, tokenizer: Path, samples: int) -> dict[str, Any]:
    """Build the index as Megatron-LM's tools/prepare_cache.py does."""
    from argparse import Namespace

    import torch
    from megatron.core.datasets.blended_megatron_dataset_builder import BlendedMegatronDatasetBuilder
    from megatron.core.datasets.gpt_dataset import GPTDataset, GPTDatasetConfig
    from megatron.core.datasets.utils import get_blend_from_list

    try:
        from megatron.core.tokenizers.utils.build_tokenizer import build_tokenizer
    except ImportError:  # megatron-core 0.16
        from megatron.core.tokenizers.text.utils.build_tokenizer import build_tokenizer
    unset = ("chat_template", "vocab_file", "merge_file", "special_tokens", "metadata_path", "tokenizer_metadata")
    off = ("tokenizer_hf_no_use_fast", "tokenizer_hf_no_include_special_tokens", "trust_remote_code", "use_gigatoken")
    on = ("tokenizer_hf_use_fast", "tokenizer_hf_include_special_tokens")
    values = dict.fromkeys((*unset, "tokenizer_special_tokens")) | dict.fromkeys((*off, "pad_vocab_size"), False)
    args = Namespace(**values, **dict.fromkeys(on, True), tokenizer_type="HuggingFaceTokenizer")
    args.tokenizer_model = str(tokenizer)
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    lists = json.loads((directory / "blend.json").read_text())
    config = GPTDatasetConfig(
        random_seed=SEED,
        sequence_length=SEQ_LENGTH,
        path_to_cache=str(output),
        tokenizer=build_tokenizer(args),
        reset_position_ids=False,
        reset_attention_mask=False,
        eod_mask_loss=False,
        create_attention_mask=False,
        blend_per_split=[get_blend_from_list(lists[name]) for name in ("train", "valid", "test")],
    )
    BlendedMegatronDatasetBuilder(GPTDataset, [samples // BATCH * BATCH, 0, 0], lambda: True, config).build()
    return _describe(output)


def draw(pairs: int, number: int, cache: Path) -> dict[str, Any]:
    """Draw a late sample of a blend in a process without stored counts."""
    from tokenmill.samples.draws import plan_blend

    started = time.perf_counter()
    weights = np.random.default_rng(3).lognormal(0, 0.5, pairs).tolist()
    plan_blend(weights, number + 1_000_000, 0.005, cache).draws.get(np.array([number]))
    written = sum(path.stat().st_size for path in cache.rglob("*") if path.is_file())
    return {"seconds": time.perf_counter() - started, "written": written}


def _describe(directory: Path) -> dict[str, Any]:
    """Return the number of arrays and the sum of their bytes, which must be equal on both sides."""
    arrays = [path.stat().st_size for path in directory.glob("*.npy")]
    return {"arrays": len(arrays), "bytes": sum(arrays)}


def main() -> None:
    """Run a side, and print its result."""
    tool, *words = sys.argv[1:]
    arguments: list[Any] = [int(word) if word.isdecimal() else word for word in words]
    if tool != "draw":
        arguments = [
            Path(word) if isinstance(word, str) and place < 3 else word for place, word in enumerate(arguments)
        ]
    else:
        arguments[2] = Path(arguments[2])
    print(json.dumps({"write": write, "own": own, "megatron": megatron, "draw": draw}[tool](*arguments)))


if __name__ == "__main__":  # children of `own` import this module
    main()
