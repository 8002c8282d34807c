"""Megatron-LM's sample index, built on a CPU before GPUs wait for it.

`build_index` gives the run's own command line to a process that has Megatron-LM (`python -m
tokenmill.training.data.index ORDER`; this file needs nothing but the standard library there, so that it may be
another Python's). GPTDataset itself then makes the files that rank 0 would make while every GPU waits, under
the names that it will look for: an MD5 over path, split, seed, sequence length, tokenizer and number of
samples (megatron/core/datasets/megatron_dataset.py). Megatron-LM's own saves are not atomic, and it takes any
file for a whole one; so the files are made elsewhere and moved, their descriptions last, without which none is
looked at.
"""

import argparse
import json
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tokenmill.files.tree import Tree
    from tokenmill.training.data.blend import Corpus
    from tokenmill.training.settings import Settings

UNKNOWN = (
    "--train-samples",
    "--step-batch-size-schedule",
    "--phase-transition-iterations",
    "--skip-train",
    "--full-validation",
    "--multiple-validation-sets",
    "--mock-data",
    "--fim-data",
    "--sft",
    "--train-data-path",
    "--valid-data-path",
    "--test-data-path",
    "--per-dataset-sequences-path",
    "--dataloader-fast-cache-load",
    "--dataloader-defer-npy-index-mmap",
    "--yaml-cfg",
)
"""Flags that change which samples there are in ways that are not followed here."""

ORPHANED_SECONDS = 600.0
"""In a cache that several runs share, a file that was not written for so long is nobody's any more."""


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


def build_index(
    settings: "Settings", corpus: "Corpus", *, python: Sequence[str] = (sys.executable,), threads: int | None = None
) -> str:
    """Build the sample index of a run, unless it is there; return what to say of it.

    `python` is an interpreter with torch and, if it does not lie beside the training script, Megatron-LM.
    A killed build leaves nothing that counts. Raises RequestError where Megatron-LM refuses the data.
    """
    import shutil

    from tokenmill.errors import RequestError
    from tokenmill.files.codec import content_id, readable_json
    from tokenmill.files.explain import explained
    from tokenmill.files.publish import abandoned, fsync_directory, write_atomic
    from tokenmill.training.arguments import megatron_arguments
    from tokenmill.training.data.blend import cache_path, data_flags

    cache = cache_path(corpus, settings)
    with explained(cache):
        _tree(cache, shared=settings.dataset.cache_path is not None).make_directory(cache)
        for left in cache.glob(".index.*.tmp"):
            if abandoned(left):
                shutil.rmtree(left, ignore_errors=True)
        staging = _staging(cache)
        try:
            words = megatron_arguments(settings, data_flags(corpus, settings, staging))
            flag = next((word.partition("=")[0] for word in words if word.partition("=")[0] in UNKNOWN), None)
            if flag:
                raise RequestError(
                    f"the sample index of a run with {flag} (extraArgs) cannot be built beforehand: start it without"
                )
            args = parse(words)
            asked = {k: v for k, v in vars(args).items() if not k.endswith("args_path")}
            done = cache / f"built-{content_id({'lists': _words(args), **asked})}.json"
            if _holds(done):
                return f"the sample index is there: {cache}"
            started = time.monotonic()
            made = staging / "made"
            order = {
                "words": words,
                "cache": str(made),
                "script": settings.trainer.script,
                "threads": threads or len(os.sched_getaffinity(0)),
                "outcome": str(staging / "outcome.json"),
            }
            (staging / "order.json").write_text(json.dumps(order))
            outcome = _run([*python, "-P", __file__, str(staging / "order.json")], staging)
            files = sorted(made.iterdir(), key=lambda path: (path.suffix == ".txt", path.name))
            sizes = {path.name: path.stat().st_size for path in files}
            for path in files:
                _sync(path)
            for path in files:
                path.replace(cache / path.name)
            fsync_directory(cache)
            write_atomic(done, readable_json({"samples": outcome["samples"], "files": sizes}))
        finally:
            shutil.rmtree(staging, ignore_errors=True)
    there = ", ".join(f"{count:,} {name}" for name, count in outcome["samples"].items())
    return f"sample index built in {time.monotonic() - started:.0f} s: {there} samples in {cache}"


def sweep(cache: Path, *, shared: bool) -> list[Path]:
    """Remove index files that were cut short, which Megatron-LM would take and fail on at every start.

    For node 0, before the trainer starts. In a cache that other runs write to (`shared`), what was written
    lately is left alone. Returns what was removed.
    """
    tree = _tree(cache, shared=shared)
    now = tree.server_time(cache) if shared else 0.0
    removed = []
    for path in (cache / name for name in tree.names(cache) if name.endswith(".npy")):
        status = tree.stat(path)
        if status is None or _whole(tree, path) or (shared and now - status.st_mtime < ORPHANED_SECONDS):
            continue
        tree.unlink(path)
        removed.append(path)
    return removed


def _tree(cache: Path, *, shared: bool) -> "Tree":
    """Return the directory that was named, below which no link is followed: the checkpoints', or dataset.cachePath."""
    from tokenmill.files.tree import Tree

    return Tree(cache.parent if shared else cache.parents[2])


def _whole(tree: "Tree", path: Path) -> bool:
    """Tell whether a .npy file has the size that its header says."""
    import numpy as np

    try:
        with tree.open(path) as file:
            major, _ = np.lib.format.read_magic(file)
            read = np.lib.format.read_array_header_1_0 if major == 1 else np.lib.format.read_array_header_2_0
            shape, _, dtype = read(file)
            expected = file.tell() + int(np.prod(shape, dtype=np.int64)) * dtype.itemsize
            return os.fstat(file.fileno()).st_size == expected
    except (ValueError, EOFError, FileNotFoundError, TypeError, SyntaxError, OverflowError):
        return False


def _staging(cache: Path) -> Path:
    """Make a directory for this build alone, whose name says who to look for."""
    import secrets

    from tokenmill.machine import machine_tag

    staging = cache / f".index.{machine_tag()}-{os.getpid()}-{secrets.token_hex(4)}.tmp"
    staging.mkdir()
    return staging


def _words(args: argparse.Namespace) -> Any:
    """Return the content of the file that names the datasets."""
    path = args.data_args_path or args.per_split_data_args_path
    return Path(path).read_text() if path else None


def _holds(done: Path) -> bool:
    """Tell whether an index was built, and its files are there as they were made."""
    from tokenmill.files.codec import read_json
    from tokenmill.files.publish import size_of

    said = read_json(done)
    files = said.get("files") if isinstance(said, dict) else None
    return isinstance(files, dict) and all(
        "/" not in name and size_of(done.parent / name) == size for name, size in files.items()
    )


def _sync(path: Path) -> None:
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def _run(command: Sequence[str], staging: Path) -> Any:
    """Run the build; a heartbeat on its directory keeps others from taking it for a dead one's."""
    import signal
    import subprocess

    from tokenmill.errors import MachineError, RequestError, TokenmillError
    from tokenmill.files.codec import read_json
    from tokenmill.machine import memory_words

    environ = {**os.environ, "CUDA_VISIBLE_DEVICES": "", "HF_HUB_OFFLINE": "1"}
    with (staging / "log").open("wb") as log:
        child = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=environ)
        try:
            while True:
                try:
                    code = child.wait(timeout=30)
                    break
                except subprocess.TimeoutExpired:
                    os.utime(staging)
        finally:
            child.kill()
            child.wait()
    outcome = read_json(staging / "outcome.json")
    if code == 0 and isinstance(outcome, dict) and "samples" in outcome:
        return outcome
    if code == -signal.SIGKILL:
        raise MachineError(
            f"the process building the sample index was killed, most likely for want of memory ({memory_words()}): "
            "raise the limit, or build with fewer threads"
        )
    if isinstance(outcome, dict) and "refused" in outcome:
        raise RequestError(outcome["refused"])
    said = (staging / "log").read_text(errors="replace").strip()
    raise TokenmillError(f"building the sample index ended with exit code {code}:\n{said[-4000:]}")


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
