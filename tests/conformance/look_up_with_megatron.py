"""Build the datasets of a run as Megatron-LM does at its start; test_sample_index.py runs this in its own environment.

Reads a request from standard input and writes the response to a file, both JSON: {"arguments": command line,
"iteration": the last one before the start, "script": pretrain_gpt.py or null, "response": file} -> for each split null,
or the number of samples and hashes of the tokens of a few. With a script, its own provider of datasets and
Megatron-LM's own parser are used. Without a script, as with megatron-core alone, `build_with_core` repeats their
results for these arguments.
"""

import hashlib
import json
import sys
from argparse import Namespace
from itertools import pairwise
from pathlib import Path


def build_with_script(arguments, script, iteration):
    """Perform the steps of pretrain() up to the datasets."""
    sys.path.insert(0, str(Path(script).parent))
    sys.argv = [script, *arguments]
    import pretrain_gpt
    from megatron.training.arguments import parse_args
    from megatron.training.global_vars import set_args
    from megatron.training.training import get_train_valid_test_num_samples

    args = parse_args()
    # Derived by validate_args, which as a whole needs GPUs.
    args.data_parallel_size, args.iteration = 1, iteration
    if args.train_samples:
        args.train_iters = args.train_samples // args.global_batch_size
    args.eval_global_batch_size = args.global_batch_size
    set_args(args)
    return pretrain_gpt.train_valid_test_datasets_provider(get_train_valid_test_num_samples())


def build_with_core(arguments, iteration):
    """Build the same datasets with megatron-core, which needs a rank; the arguments are those of the test."""
    import torch
    from megatron.core.datasets.blended_megatron_dataset_builder import BlendedMegatronDatasetBuilder
    from megatron.core.datasets.gpt_dataset import GPTDataset, GPTDatasetConfig
    from megatron.core.datasets.utils import get_blend_from_list

    try:
        from megatron.core.tokenizers.utils.build_tokenizer import build_tokenizer
    except ImportError:  # megatron-core 0.16
        from megatron.core.tokenizers.text.utils.build_tokenizer import build_tokenizer

    def value(flag, default=None):
        return arguments[arguments.index(flag) + 1] if flag in arguments else default

    blend = {"split": value("--split")}
    if value("--per-split-data-args-path"):
        lists = json.loads(Path(value("--per-split-data-args-path")).read_text())
        blend["blend_per_split"] = [get_blend_from_list(lists[name]) for name in ("train", "valid", "test")]
    elif value("--data-args-path"):
        blend["blend"] = get_blend_from_list(Path(value("--data-args-path")).read_text().split())
    else:
        blend["blend"] = get_blend_from_list([value("--data-path")])
    unset = ("chat_template", "vocab_file", "merge_file", "special_tokens", "metadata_path", "tokenizer_metadata")
    off = ("tokenizer_hf_no_use_fast", "tokenizer_hf_no_include_special_tokens", "trust_remote_code", "use_gigatoken")
    on = ("tokenizer_hf_use_fast", "tokenizer_hf_include_special_tokens")
    defaults = dict.fromkeys((*unset, "tokenizer_special_tokens")) | dict.fromkeys((*off, "pad_vocab_size"), False)
    selected = {"tokenizer_type": value("--tokenizer-type"), "tokenizer_model": value("--tokenizer-model")}
    tokenizer = build_tokenizer(Namespace(**defaults, **dict.fromkeys(on, True), **selected))
    sequences = next((word.partition("=")[2] for word in arguments if word.startswith("--per-dataset-seq")), None)
    config = GPTDatasetConfig(
        random_seed=int(value("--seed")),
        sequence_length=int(value("--seq-length")),
        path_to_cache=value("--data-cache-path"),
        tokenizer=tokenizer,
        reset_position_ids=False,
        reset_attention_mask=False,
        eod_mask_loss=False,
        create_attention_mask=False,
        mid_level_dataset_surplus=float(value("--mid-level-dataset-surplus", 0.005)),
        fast_cache_load="--dataloader-fast-cache-load" in arguments,
        defer_npy_index_mmap="--dataloader-defer-npy-index-mmap" in arguments,
        sequences_per_dataset=json.loads(Path(sequences).read_text()) if sequences else None,
        **blend,
    )
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    iterations, batch = int(value("--train-iters", 0)), int(value("--global-batch-size"))
    train = iterations * batch
    if value("--train-samples"):
        iterations = int(value("--train-samples")) // batch
        ends = [0, *map(int, value("--phase-transition-iterations").split(",")), iterations]
        train = batch * next(end - begin for begin, end in pairwise(ends) if begin <= iteration < end)
    evaluation = int(value("--eval-iters")) * batch
    sizes = [train, (iterations // int(value("--eval-interval")) + 1) * evaluation, evaluation]
    return BlendedMegatronDatasetBuilder(GPTDataset, sizes, lambda: True, config).build()


def main():
    request = json.load(sys.stdin)
    arguments, script, iteration = request["arguments"], request["script"], request["iteration"]
    parts = build_with_script(arguments, script, iteration) if script else build_with_core(arguments, iteration)
    response = [
        part
        and {
            "samples": len(part),
            "first": [
                hashlib.sha256(part[i]["tokens"].numpy().tobytes()).hexdigest() for i in range(min(3, len(part)))
            ],
        }
        for part in parts
    ]
    Path(request["response"]).write_text(json.dumps(response))


if __name__ == "__main__":
    main()
