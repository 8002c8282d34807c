"""The subprocess in which Megatron-LM builds a sample index: `index` starts `python index_child.py ORDER`.

It imports only the standard library and Megatron-LM, because it may run under another Python than tokenmill's.
"""

import argparse
import json
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any


def parse_data_arguments(arguments: Sequence[str]) -> argparse.Namespace:
    """Parse the arguments of Megatron-LM that determine its datasets, with the defaults of its arguments.py."""
    parser = argparse.ArgumentParser(allow_abbrev=False, add_help=False)
    parser.add_argument("--data-path", nargs="*")
    for name in ("--data-args-path", "--per-split-data-args-path", "--split", "--data-cache-path"):
        parser.add_argument(name)
    for name in ("--tokenizer-type", "--tokenizer-model", "--chat-template", "--vocab-file", "--merge-file"):
        parser.add_argument(name)
    parser.add_argument("--tokenizer-metadata", dest="metadata_path")
    parser.add_argument("--tokenizer-special-tokens", dest="special_tokens", nargs="+")
    defaults: dict[str, int | None] = {"--seed": 1234, "--eval-iters": 100, "--eval-interval": 1000}
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
    return parser.parse_known_args(list(arguments))[0]


def count_samples(args: argparse.Namespace) -> tuple[int, int, int]:
    """Return the samples of train, validation and test that megatron/training/training.py requests."""
    batch = args.global_batch_size
    evaluations = args.train_iters // args.eval_interval + 1
    if args.start_eval_at_iter is not None:
        evaluations = max(0, evaluations - args.start_eval_at_iter // args.eval_interval)
    samples_per_evaluation = args.eval_iters * (args.eval_global_batch_size or batch)
    return args.train_iters * batch, evaluations * samples_per_evaluation, samples_per_evaluation


@dataclass(frozen=True)
class IndexOrder:
    """The content of the order file: Megatron-LM's arguments, the directory to write to, and the outcome file."""

    words: list[str]
    cache: str
    script: str
    threads: int
    outcome: str


def _build(order: IndexOrder) -> dict[str, object]:
    """Build the index for which Megatron-LM searches at a start, and return the numbers of samples or an error."""
    script_directory = Path(order.script).parent
    if (script_directory / "megatron").is_dir():
        sys.path.insert(0, str(script_directory))  # as Python does when torchrun starts the script
    try:
        import torch
        from megatron.core.datasets import utils
    except ImportError as error:
        return {
            "refused": f"cannot build the sample index, because this Python cannot import Megatron-LM or torch "
            f"({error}): run the command in the training image"
        }
    try:
        import megatron.core.datasets.helpers_cpp  # noqa: F401
    except ImportError:
        try:
            utils.compile_helpers()
        except SystemExit:
            return {
                "refused": f"the C++ helpers in {Path(utils.__file__).parent} are not compiled, and compiling them "
                "failed: run make in that directory when you build the training image"
            }
    from megatron.core.datasets.blended_megatron_dataset_builder import BlendedMegatronDatasetBuilder
    from megatron.core.datasets.gpt_dataset import GPTDataset, GPTDatasetConfig

    # megatron-core 0.16 needs its rank before it saves the index of a blend.
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    args = parse_data_arguments(order.words)
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
        num_dataset_builder_threads=order.threads,
        path_to_cache=order.cache,
        tokenizer=_tokenizer(args),
        reset_position_ids=args.reset_position_ids,
        reset_attention_mask=args.reset_attention_mask,
        eod_mask_loss=args.eod_mask_loss,
        mid_level_dataset_surplus=args.mid_level_dataset_surplus,
    )
    sizes = count_samples(args)
    try:
        datasets = BlendedMegatronDatasetBuilder(GPTDataset, list(sizes), lambda: True, config).build()
    except IndexError as error:
        return {
            "refused": f"Megatron-LM cannot draw the requested samples from the blend ({error}), because it rounds the "
            "smallest shares up to one sample each: write fewer, larger pairs (tokenmill join), "
            "or raise training.evalIterations, or --mid-level-dataset-surplus in extraArgs"
        }
    names = ("train", "validation", "test")
    return {
        "samples": {name: len(dataset) for name, dataset in zip(names, datasets, strict=True) if dataset is not None}
    }


def _tokenizer(args: argparse.Namespace) -> Any:
    """Build the tokenizer as Megatron-LM does, because its identity is part of the index's name."""
    args.pad_vocab_size = False  # does not affect the index
    args.tokenizer_hf_use_fast = not args.tokenizer_hf_no_use_fast  # megatron-core 0.16 reads these four names
    args.tokenizer_hf_include_special_tokens = not args.tokenizer_hf_no_include_special_tokens
    args.tokenizer_special_tokens = args.special_tokens
    args.tokenizer_metadata = args.metadata_path
    try:
        from megatron.core.tokenizers.utils.build_tokenizer import build_tokenizer
    except ImportError:
        from megatron.core.tokenizers.text.utils.build_tokenizer import build_tokenizer
    return build_tokenizer(args)


def main() -> None:
    """Build the index of the order file that the command line names, and write the outcome file."""
    order = IndexOrder(**json.loads(Path(sys.argv[1]).read_bytes()))
    Path(order.outcome).write_text(json.dumps(_build(order)))


if __name__ == "__main__":
    main()
