"""The process that has Megatron-LM build a sample index: `python index_child.py ORDER`, started by `index`.

It needs nothing but the standard library and Megatron-LM: it may run under another Python than tokenmill's.
"""

import argparse
import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any


def parse(words: Sequence[str]) -> argparse.Namespace:
    """Take from Megatron-LM's command line what decides its datasets, with its own defaults (arguments.py)."""
    parser = argparse.ArgumentParser(allow_abbrev=False, add_help=False)
    parser.add_argument("--data-path", nargs="*")
    for name in ("--data-args-path", "--per-split-data-args-path", "--split", "--data-cache-path"):
        parser.add_argument(name)
    for name in ("--tokenizer-type", "--tokenizer-model", "--chat-template", "--vocab-file", "--merge-file"):
        parser.add_argument(name)
    parser.add_argument("--tokenizer-metadata", dest="metadata_path")
    parser.add_argument("--tokenizer-special-tokens", dest="special_tokens", nargs="+")
    defaults: dict[str, Any] = {"--seed": 1234, "--eval-iters": 100, "--eval-interval": 1000}
    for name in ("--seq-length", "--train-iters", "--global-batch-size", "--eval-global-batch-size"):
        defaults[name] = None
    defaults["--start-eval-at-iter"] = None
    for name, default in defaults.items():
        parser.add_argument(name, type=int, default=default)
    parser.add_argument("--mid-level-dataset-surplus", type=float, default=0.005)
    for name in (
        "--reset-position-ids",
        "--reset-attention-mask",
        "--eod-mask-loss",
        "--tokenizer-hf-no-use-fast",
        "--tokenizer-hf-no-include-special-tokens",
        "--trust-remote-code",
        "--use-gigatoken",
    ):
        parser.add_argument(name, action="store_true")
    return parser.parse_known_args(list(words))[0]


def samples(args: argparse.Namespace) -> tuple[int, int, int]:
    """Return how many samples Megatron-LM asks of train, validation and test (megatron/training/training.py)."""
    batch = args.global_batch_size
    evaluations = args.train_iters // args.eval_interval + 1
    if args.start_eval_at_iter is not None:
        evaluations = max(0, evaluations - args.start_eval_at_iter // args.eval_interval)
    each = args.eval_iters * (args.eval_global_batch_size or batch)
    return args.train_iters * batch, evaluations * each, each


def _build(order: dict[str, Any]) -> dict[str, Any]:
    """Have Megatron-LM build the index that its own start would look for; in a process that has it."""
    beside = Path(order["script"]).parent
    if (beside / "megatron").is_dir():
        sys.path.insert(0, str(beside))  # as it is when torchrun starts the script
    try:
        import torch
        from megatron.core.datasets import utils
    except ImportError as error:
        return {
            "refused": f"the sample index needs Megatron-LM and torch, and this Python has not ({error}): build it in "
            "the training image"
        }
    try:
        import megatron.core.datasets.helpers_cpp  # noqa: F401
    except ImportError:
        try:
            utils.compile_helpers()
        except SystemExit:
            return {
                "refused": f"the helpers in {Path(utils.__file__).parent} are not compiled, and could not be now: let "
                "the training image bring them (make, in that directory)"
            }
    from megatron.core.datasets.blended_megatron_dataset_builder import BlendedMegatronDatasetBuilder
    from megatron.core.datasets.gpt_dataset import GPTDataset, GPTDatasetConfig

    # megatron-core 0.16 asks for its rank before it saves the index of a blend.
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    args = parse(order["words"])
    blend = blend_per_split = None
    if args.per_split_data_args_path:
        lists = json.loads(Path(args.per_split_data_args_path).read_text())
        blend_per_split = [utils.get_blend_from_list(lists[name]) for name in ("train", "valid", "test")]
    elif args.data_args_path:
        blend = utils.get_blend_from_list(Path(args.data_args_path).read_text().split())
    else:
        blend = utils.get_blend_from_list(args.data_path)
    config = GPTDatasetConfig(
        random_seed=args.seed,
        sequence_length=args.seq_length,
        blend=blend,
        blend_per_split=blend_per_split,
        split=args.split,
        num_dataset_builder_threads=order["threads"],
        path_to_cache=order["cache"],
        tokenizer=_tokenizer(args),
        reset_position_ids=args.reset_position_ids,
        reset_attention_mask=args.reset_attention_mask,
        eod_mask_loss=args.eod_mask_loss,
        mid_level_dataset_surplus=args.mid_level_dataset_surplus,
    )
    sizes = samples(args)
    try:
        parts = BlendedMegatronDatasetBuilder(GPTDataset, list(sizes), lambda: True, config).build()
    except IndexError as error:
        return {
            "refused": f"Megatron-LM cannot draw the samples asked for from the blend ({error}); the smallest shares "
            "are rounded up to a sample each: make fewer, larger pairs (tokenmill preprocess --target-files), or raise "
            "training.evalIterations, or --mid-level-dataset-surplus in extraArgs"
        }
    names = ("train", "validation", "test")
    return {"samples": {name: len(part) for name, part in zip(names, parts, strict=True) if part is not None}}


def _tokenizer(args: argparse.Namespace) -> Any:
    """Build the tokenizer as Megatron-LM does: what identifies it is part of the index's name."""
    args.pad_vocab_size = False  # of no consequence here
    args.tokenizer_hf_use_fast = not args.tokenizer_hf_no_use_fast  # these four were megatron-core 0.16's names
    args.tokenizer_hf_include_special_tokens = not args.tokenizer_hf_no_include_special_tokens
    args.tokenizer_special_tokens = args.special_tokens
    args.tokenizer_metadata = args.metadata_path
    try:
        from megatron.core.tokenizers.utils.build_tokenizer import build_tokenizer
    except ImportError:
        from megatron.core.tokenizers.text.utils.build_tokenizer import build_tokenizer
    return build_tokenizer(args)


def main() -> None:
    """Carry out the order in the file that the command line names."""
    order = json.loads(Path(sys.argv[1]).read_bytes())
    Path(order["outcome"]).write_text(json.dumps(_build(order)))


if __name__ == "__main__":
    main()
