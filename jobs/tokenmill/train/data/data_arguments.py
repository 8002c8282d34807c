"""The arguments of Megatron-LM that determine its datasets, and the samples that it requests with them."""

import argparse
from collections.abc import Sequence
from typing import NamedTuple

EXISTING_INDEX_FLAGS = ("--dataloader-fast-cache-load", "--dataloader-defer-npy-index-mmap")
"""Flags with which Megatron-LM reads a sample index without looking whether it exists."""
SEQUENCES_FLAG = "--per-dataset-sequences-path"
"""The flag for a file with the number of sequences and documents of each pair."""


def parse_data_arguments(arguments: Sequence[str]) -> argparse.Namespace:
    """Parse the arguments of Megatron-LM that determine its datasets, with the defaults of its arguments.py."""
    parser = argparse.ArgumentParser(allow_abbrev=False, add_help=False)
    for name in ("--data-path", "--train-data-path", "--valid-data-path", "--test-data-path"):
        parser.add_argument(name, nargs="*")
    for name in ("--data-args-path", "--per-split-data-args-path", "--split", "--data-cache-path"):
        parser.add_argument(name)
    for name in ("--tokenizer-type", "--tokenizer-model", "--chat-template", "--vocab-file", "--merge-file"):
        parser.add_argument(name)
    parser.add_argument("--tokenizer-metadata", dest="metadata_path")
    parser.add_argument("--tokenizer-special-tokens", dest="special_tokens", nargs="+")
    defaults: dict[str, int | None] = {"--seed": 1234, "--eval-iters": 100, "--eval-interval": 1000}
    for name in ("--seq-length", "--train-iters", "--train-samples", "--global-batch-size"):
        defaults[name] = None
    for name in ("--eval-global-batch-size", "--start-eval-at-iter"):
        defaults[name] = None
    for name, default in defaults.items():
        parser.add_argument(name, type=int, default=default)
    parser.add_argument("--phase-transition-iterations", type=lambda text: [int(item) for item in text.split(",")])
    parser.add_argument("--mid-level-dataset-surplus", type=float, default=0.005)
    for name in (
        "--fim-data",
        "--skip-train",
        "--tokenizer-hf-no-use-fast",
        "--tokenizer-hf-no-include-special-tokens",
        "--trust-remote-code",
        "--use-gigatoken",
    ):
        parser.add_argument(name, action="store_true")
    return parser.parse_known_args(list(arguments))[0]


class RequestedSamples(NamedTuple):
    """The number of samples of each split that a start of Megatron-LM requests."""

    train: int
    validation: int
    test: int


def count_samples(args: argparse.Namespace, iteration: int = 0) -> RequestedSamples:
    """Return the samples that a start after an iteration requests (megatron/training/training.py)."""
    batch = args.global_batch_size
    evaluation = args.eval_iters * (args.eval_global_batch_size or batch)
    iterations = args.train_samples // batch if args.train_samples else args.train_iters
    evaluations = 1
    if not args.skip_train:
        evaluations = iterations // args.eval_interval + 1
        if args.start_eval_at_iter is not None:
            evaluations = max(0, evaluations - args.start_eval_at_iter // args.eval_interval)
    train = args.train_samples or iterations * batch
    if args.phase_transition_iterations:
        ends = [0, *(transition * batch for transition in args.phase_transition_iterations), train]
        done = iteration * batch
        train = min(end for end in ends if end > done) - max(end for end in ends if end <= done)
    return RequestedSamples(train, evaluations * evaluation, evaluation)
