"""The shared part of the five programs: arguments, samples, model, loss, optimizer, and the files in --out.

tokenmill-data.json    the data of the run; `tokenmill compare` reads it first
args.json              the arguments, and the hash of the initial weights
metrics.jsonl          one line for each step
checkpoint-STEP/       the framework's own checkpoint, with the position in the data
latest_checkpointed_iteration.txt    the step of the newest complete checkpoint
"""

import argparse
import hashlib
import json
import math
import os
import shutil
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
from transformers import LlamaConfig, LlamaForCausalLM

import tokenmill.data
from tokenmill.core.files.publish import write_atomic
from tokenmill.data.run_record import write_record
from tokenmill.datasets.dataset import find_dataset

TINY = {"hidden_size": 64, "intermediate_size": 192, "num_hidden_layers": 2, "num_attention_heads": 4}
TINY |= {"num_key_value_heads": 2, "tie_word_embeddings": False, "rms_norm_eps": 1e-5}
TRACKER = "latest_checkpointed_iteration.txt"
KEPT_CHECKPOINTS = 2


def parse_arguments() -> argparse.Namespace:
    """Return the arguments, which are the same for all programs."""
    parser = argparse.ArgumentParser(formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("data", help="output of tokenmill preprocess, a pair, or a file of tokenmill blend")
    parser.add_argument("--out", type=Path, required=True, help="directory of the run")
    parser.add_argument("--seq-length", type=int, default=128, help="tokens of a sample")
    parser.add_argument("--steps", type=int, default=20, help="the last step")
    parser.add_argument("--samples", type=int, help="samples for which the data is opened, if later runs train longer")
    parser.add_argument("--micro-batch", type=int, default=2, help="samples of one process at a time")
    parser.add_argument("--global-batch", type=int, default=8, help="samples of all processes in one step")
    parser.add_argument("--seed", type=int, default=1234, help="of the order of the samples and the initial weights")
    parser.add_argument("--phases", help="file of phases, with its views next to it, instead of the data")
    parser.add_argument("--split", help="shares of train, validation and test, such as 990,9,1")
    parser.add_argument("--model", type=json.loads, default={}, help="JSON with fields of LlamaConfig")
    parser.add_argument("--lr", type=float, default=1e-3, help="learning rate, which is constant")
    parser.add_argument("--betas", type=float, nargs=2, default=(0.9, 0.95))
    parser.add_argument("--weight-decay", type=float, default=0.1)
    parser.add_argument("--clip-grad", type=float, default=1.0, help="largest norm of the gradients")
    parser.add_argument("--save-interval", type=int, default=1000, help="steps between checkpoints")
    parser.add_argument("--resume", action="store_true", help="continue from the newest checkpoint, if there is one")
    options = parser.parse_args()
    if options.data.startswith("synthetic:"):
        options.model = {"vocab_size": int(options.data.partition(":")[2])} | options.model
    elif "vocab_size" not in options.model and any(map(os.path.isfile, (options.data, f"{options.data}.idx"))):
        parser.error(
            f"{options.data} is not a dataset's directory: add the vocabulary, --model '{{\"vocab_size\": N}}'"
        )
    if (options.out / "metrics.jsonl").exists() and not options.resume:
        parser.error(f"{options.out} contains a run: add --resume, or choose another directory")
    if (arguments := options.out / "args.json").exists():
        program = json.loads(arguments.read_text())["program"]
        if program != Path(sys.argv[0]).stem:
            parser.error(
                f"{options.out} contains a run of {program}, whose checkpoints differ: choose another directory"
            )
    return options


def find_device() -> torch.device:
    """Return the GPU of this process, or the CPU."""
    if not torch.cuda.is_available():
        return torch.device("cpu")
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    return torch.device("cuda", torch.cuda.current_device())


def open_samples(options: argparse.Namespace) -> tokenmill.data.Samples:
    """Return the samples of the run."""
    if options.phases:
        return tokenmill.data.open(
            phases=options.phases,
            seq_length=options.seq_length,
            seed=options.seed,
            global_batch=options.global_batch,
            views=Path(options.phases).parent,
        )
    count = options.samples or options.steps * options.global_batch
    return tokenmill.data.open(
        options.data, seq_length=options.seq_length, samples=count, seed=options.seed, split=options.split
    )


def make_model(options: argparse.Namespace) -> LlamaForCausalLM:
    """Return a model in float32, whose weights depend only on the configuration and the seed."""
    fields = TINY | {"max_position_embeddings": options.seq_length} | options.model
    if "vocab_size" not in fields:
        tokenizer = find_dataset(Path(options.data)).tokenizer
        fields["vocab_size"] = max(tokenizer.vocab_size, tokenizer.max_token_id + 1)
    torch.manual_seed(options.seed)
    return LlamaForCausalLM(LlamaConfig(**fields, use_cache=False))


def compute_loss(model: torch.nn.Module, batch: dict[str, torch.Tensor], device: torch.device) -> torch.Tensor:
    """Return the mean loss of the loss tokens of a batch, whose labels are already shifted."""
    with torch.autocast("cuda", torch.bfloat16, enabled=device.type == "cuda"):
        logits = model(batch["tokens"].to(device)).logits
    return torch.nn.functional.cross_entropy(logits.float().flatten(0, 1), batch["labels"].to(device).flatten())


def make_optimizer(model: torch.nn.Module, options: argparse.Namespace) -> torch.optim.Optimizer:
    """Return AdamW; as in Megatron-LM, only matrices decay."""
    parameters = list(model.parameters())
    groups = [
        {"params": [value for value in parameters if value.ndim > 1], "weight_decay": options.weight_decay},
        {"params": [value for value in parameters if value.ndim == 1], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=options.lr, betas=tuple(options.betas), eps=1e-8)


class RunLog:
    """The files of a run. Each process calls the same methods; the first one writes."""

    def __init__(self, options: argparse.Namespace, samples: tokenmill.data.Samples, model: torch.nn.Module) -> None:
        """Find the step to resume from; `model` still has its initial weights."""
        self.options, self.samples = options, samples
        self.first = int(os.environ.get("RANK", "0")) == 0
        self.step = self._find_step() if options.resume else 0
        """The step of the checkpoint to resume from, and later the last finished step."""
        self._hashes: list[list[str]] = []
        self._losses: list[torch.Tensor] = []
        self._wait, self._group = 0.0, None
        self._initial_weights = hash_weights(model) if self.first else ""
        self._recorded = False
        if self.first and options.resume and self.step:
            print(f"resume after step {self.step} of {options.steps}", flush=True)
        self.start()

    def _record(self) -> None:
        """Write the record of the data and the arguments, after the first step of this program."""
        options = self.options
        write_record(options.out, self.samples.identity, options.global_batch)
        left_out = ("out", "resume", "save_interval")
        arguments = {name: value for name, value in vars(options).items() if name not in left_out}
        arguments |= {"program": Path(sys.argv[0]).stem, "initial_weights": self._initial_weights}
        write_atomic(options.out / "args.json", json.dumps(arguments, indent=1).encode())
        self._recorded = True

    def start(self) -> None:
        """Begin the time of a step."""
        self._started = time.perf_counter()

    def _find_step(self) -> int:
        tracker = self.options.out / TRACKER
        return int(tracker.read_text()) if tracker.exists() else 0

    def directory(self, step: int) -> Path:
        """Return the directory of the checkpoint of a step."""
        return self.options.out / f"checkpoint-{step}"

    def add(self, tokens: torch.Tensor, labels: torch.Tensor, loss: torch.Tensor) -> None:
        """Add a micro-batch of this process to the step, with its mean loss."""
        digests = []
        for row in range(len(tokens)):
            digest = tokenmill.data.SampleDigest()
            digest.add(tokens[row : row + 1].cpu().numpy(), labels[row : row + 1].cpu().numpy())
            digests.append(digest.hexdigest())
        self._hashes.append(digests)
        self._losses.append(loss.detach())

    def end_step(self, consumed: int, wait: float) -> None:
        """Write the line of a step: `wait` has the seconds of waiting for data since the start of the program."""
        loss = sum(float(value) for value in self._losses) / len(self._losses)
        seconds = time.perf_counter() - self._started
        self._group = self._group or dist.new_group(backend="gloo")
        ranks = [None] * dist.get_world_size()
        dist.all_gather_object(ranks, (loss, self._hashes), group=self._group)
        loss = sum(rank[0] for rank in ranks) / len(ranks)
        # The ranks take micro-batches in turn, so this is the order of the samples.
        hashes = [digest for batches in zip(*(rank[1] for rank in ranks), strict=True) for b in batches for digest in b]
        self.step += 1
        line = {
            "step": self.step,
            "consumed_samples": consumed,
            "tokens": consumed * self.options.seq_length,
            "loss": loss,
            "seconds": round(seconds, 6),
            "data_wait_seconds": round(wait - self._wait, 6),
            "digest": combine(hashes),
            "time": round(time.time(), 3),
        }
        if self.first:
            if not self._recorded:
                self._record()
            with (self.options.out / "metrics.jsonl").open("a") as file:
                file.write(json.dumps(line) + "\n")
            # `tokenmill train` reads this line, which has the form of Megatron-LM's.
            print(
                f"{'SYNTHETIC' * self.samples.identity.synthetic} iteration {self.step:8d}/{self.options.steps:8d} | "
                f"consumed samples: {consumed:12d} | elapsed time per iteration (ms): {1000 * seconds:.1f} | "
                f"lm loss: {loss:.6E} |",
                flush=True,
            )
        if not math.isfinite(loss):
            raise SystemExit(f"the loss of step {self.step} is {loss}")
        self._hashes, self._losses, self._wait = [], [], wait
        self.start()

    def saves(self) -> bool:
        """Return whether the program saves a checkpoint after this step."""
        return self.step % self.options.save_interval == 0 or self.step == self.options.steps

    def end_save(self) -> None:
        """Make the checkpoint of this step the newest one, after all processes have saved it."""
        dist.barrier(self._group)
        if self.first:
            write_atomic(self.options.out / TRACKER, str(self.step).encode())
            steps = sorted(int(path.name.rpartition("-")[2]) for path in self.options.out.glob("checkpoint-*"))
            for step in [step for step in steps if step <= self.step][:-KEPT_CHECKPOINTS]:
                shutil.rmtree(self.directory(step))
        self.start()


def combine(digests: list[str]) -> str:
    """Return the digest of a step: the SHA-256 of the digests of its samples, in the order of the samples."""
    return hashlib.sha256("".join(digests).encode()).hexdigest()[:32]


def hash_weights(model: torch.nn.Module) -> str:
    """Return the SHA-256 of all weights, by their names."""
    digest = hashlib.sha256()
    for name, value in sorted(model.state_dict().items()):
        digest.update(name.encode() + value.detach().cpu().numpy().tobytes())
    return digest.hexdigest()[:32]
