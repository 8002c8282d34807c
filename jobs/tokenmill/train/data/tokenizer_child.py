"""A subprocess that asks Megatron-LM how it identifies a tokenizer: `index` starts `python tokenizer_child.py ORDER`.

It imports only the standard library and Megatron-LM, because it may run under another Python than tokenmill's.
"""

import argparse
import json
import sys
from pathlib import Path
from typing import Any


def _identify(options: dict[str, Any], script: str) -> dict[str, object]:
    """Return what Megatron-LM writes about a tokenizer in the description of an index, and its flags; {} without it."""
    script_directory = Path(script).parent
    if (script_directory / "megatron").is_dir():
        sys.path.insert(0, str(script_directory))  # as Python does when torchrun starts the script
    try:
        from megatron.core.datasets.blended_megatron_dataset_config import BlendedMegatronDatasetConfig
        from megatron.core.datasets.gpt_dataset import GPTDatasetConfig

        try:
            from megatron.core.tokenizers.utils.build_tokenizer import build_tokenizer
        except ImportError:
            from megatron.core.tokenizers.text.utils.build_tokenizer import build_tokenizer
    except ImportError:
        return {}
    args = argparse.Namespace(**options)
    args.pad_vocab_size = False  # does not affect the index
    args.tokenizer_hf_use_fast = not args.tokenizer_hf_no_use_fast  # megatron-core 0.16 reads these four names
    args.tokenizer_hf_include_special_tokens = not args.tokenizer_hf_no_include_special_tokens
    args.tokenizer_special_tokens = args.special_tokens
    args.tokenizer_metadata = args.metadata_path
    tokenizer = build_tokenizer(args)
    fields = {*BlendedMegatronDatasetConfig.__dataclass_fields__, *GPTDatasetConfig.__dataclass_fields__}
    size = tokenizer.vocab_size
    return {
        "tokenizer": tokenizer.unique_identifiers,
        "token_bytes": size and (4 if size > 2**16 else 2),  # GPTDatasetConfig.token_dtype_code
        "fields": sorted(fields & {"fast_cache_load", "defer_npy_index_mmap", "sequences_per_dataset"}),
    }


def main() -> None:
    """Read the order file that the command line names, and write the outcome file."""
    order = json.loads(Path(sys.argv[1]).read_bytes())
    Path(order["outcome"]).write_text(json.dumps(_identify(order["options"], order["script"])))


if __name__ == "__main__":
    main()
