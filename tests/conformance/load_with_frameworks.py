"""Load samples with the loaders of the training frameworks; test_loaders.py runs this in their environment.

Reads a request from standard input and writes the response to a file, because frameworks print too; both are JSON:
{"pair": prefix, "other": prefix, "scratch": directory, "cases": number, "response": file} -> {check: result}.

Ranks are simulated in this process. A case is a run that is killed and resumed with another number of ranks, until the
samples end; its result is the list of samples that all ranks together have trained, in the order of steps and ranks.
The numbers of ranks are random, or with "ranks" those of this list, each with its micro-batch.
"""

import contextlib
import dataclasses
import gc
import itertools
import json
import logging
import random
import sys
import warnings
from itertools import pairwise
from pathlib import Path

import numpy as np
import torch

import tokenmill.data
from tokenmill.errors import RequestError
from tokenmill.loaders.state import LoaderState

WORLDS = (1, 2, 4, 8)
SEQ_LENGTH = 8

CHECKS = {}


def check(function):
    """Add a function to the checks; its result must be JSON."""
    CHECKS[function.__name__] = function
    return function


class Case:
    """A random run: its samples, its global batch, and the parts between kills."""

    def __init__(self, request, seed, phased=False):
        self.random = random.Random(seed)
        self.ranks = request.get("ranks")
        self.global_batch = 12 if self.ranks else self.random.choice((16, 32))
        self.phases = request["phases"] if phased else None
        if self.phases is None:
            self.samples = tokenmill.data.open(request["pair"], seq_length=SEQ_LENGTH, samples=50, seed=seed)
        else:
            self.samples = tokenmill.data.open(phases=self.phases, seq_length=SEQ_LENGTH, seed=seed)
        self.steps = len(self.samples) // self.global_batch
        self.numbers = {self.samples[number].tokens.tobytes(): number for number in range(len(self.samples))}
        assert len(self.numbers) == len(self.samples)
        self.taken = []

    def name(self, tokens):
        """Return the numbers of the samples in a batch."""
        return [self.numbers[np.asarray(row, np.int64).tobytes()] for row in tokens]

    def layout(self):
        """Return a number of ranks, and a micro-batch that divides the global batch among them."""
        world = self.random.choice(WORLDS)
        return world, self.random.choice([size for size in (1, 2, 4) if self.global_batch % (size * world) == 0])

    def parts(self, most_kills=1):
        """Yield (first step, last step, world, micro-batch) for each part of the run."""
        if self.ranks:
            for first, ranks in enumerate(self.ranks):
                yield first, first + 1 if ranks is not self.ranks[-1] else self.steps, *ranks
            return
        count = min(self.random.randint(1, most_kills), self.steps - 1)
        kills = self.random.sample(range(1, self.steps), count)
        for first, last in pairwise([0, *sorted(kills), self.steps]):
            yield first, last, *self.layout()

    def add(self, ranks):
        """Add what the ranks trained, each a list of micro-batches of sample numbers."""
        assert len({len(batches) for batches in ranks}) == 1, ranks
        for step in zip(*ranks, strict=True):
            self.taken += [number for batch in step for number in batch]

    def result(self):
        """Return the trained samples, and how many there should be."""
        return {"taken": self.taken, "expected": self.steps * self.global_batch}


def run_cases(request, run):
    """Return the results of all cases."""
    results = []
    for seed in range(request["cases"]):
        case = Case(request, seed, phased=seed % 2 == 0)
        run(case, Path(request["scratch"]))
        results.append(case.result())
    return results


@check
def torch_loader(request):
    """Kill and resume Loader, with batches that were read ahead and never yielded."""
    from tokenmill.loaders.torch import Loader

    def run(case, scratch):
        state = None
        for first, last, world, micro_batch in case.parts(3):
            loaders = [
                Loader(
                    case.samples,
                    micro_batch,
                    rank=rank,
                    world=world,
                    global_batch=case.global_batch,
                    prefetch=case.random.randint(0, 4),
                )
                for rank in range(world)
            ]
            ranks, states = [], []
            for loader in loaders:
                if state is not None:
                    loader.load_state_dict(state)
                assert loader.consumed == first * case.global_batch
                batches = iter(loader)
                ranks.append([case.name(next(batches)["tokens"]) for _ in range((last - first) * loader.accumulation)])
                states.append(loader.state_dict())
            assert all(entry == states[0] for entry in states)
            torch.save(states[0], scratch / "state.pt")
            state = torch.load(scratch / "state.pt", weights_only=True)
            case.add(ranks)
            if last == case.steps:
                assert next(batches, None) is None
            elif case.random.random() < 0.5:
                loaders[0].close()

    return run_cases(request, run)


@check
def titan_loader(request):
    """Kill and resume TitanLoader, with its state in a distributed checkpoint."""
    import torch.distributed.checkpoint as dcp

    from tokenmill.loaders.titan import TitanLoader

    def run(case, scratch):
        for first, last, world, micro_batch in case.parts(2):
            config = TitanLoader.Config(
                dataset_path=None if case.phases else request["pair"],
                phases=case.phases,
                samples=None if case.phases else case.samples.identity.samples,
                seed=case.samples.identity.seed,
                prefetch=case.random.randint(0, 3),
            )
            ranks = []
            for rank in range(world):
                loader = config.build(
                    dp_world_size=world,
                    dp_rank=rank,
                    seq_len=SEQ_LENGTH,
                    local_batch_size=micro_batch,
                    tokenizer=None,
                    snapshot_every_n_steps=None,
                )
                if first:
                    dcp.load({"dataloader": loader}, checkpoint_id=scratch / "dcp", no_dist=True)
                batches = iter(loader)
                count = (last - first) * case.global_batch // (micro_batch * world)
                ranks.append([])
                for _ in range(count):
                    inputs, labels = next(batches)
                    assert list(inputs) == ["input", "positions"]
                    assert labels.shape == inputs["input"].shape
                    assert inputs["positions"].tolist() == [list(range(SEQ_LENGTH))] * micro_batch
                    ranks[-1].append(case.name(inputs["input"]))
            dcp.save({"dataloader": loader}, checkpoint_id=scratch / "dcp", no_dist=True)
            case.add(ranks)

    return run_cases(request, run)


@check
def grain_loader(request):
    """Kill and resume RankDataset, with batches that were read ahead and never yielded."""
    import grain

    from tokenmill.loaders.grain import RankDataset

    def run(case, scratch):
        state = None
        for first, last, world, micro_batch in case.parts(3):
            ranks, states = [], []
            fields = case.random.choice(("tokenmill", "maxtext"))
            for rank in range(world):
                threads = case.random.randint(0, 3)
                dataset = RankDataset(
                    case.samples,
                    micro_batch,
                    rank=rank,
                    world=world,
                    global_batch=case.global_batch,
                    fields=fields,
                    read_options=grain.ReadOptions(threads, threads + 1),
                )
                with contextlib.closing(iter(dataset)) as batches:
                    if state is not None:
                        batches.set_state(json.loads(state))
                    assert batches.consumed == first * case.global_batch
                    count = (last - first) * case.global_batch // (micro_batch * world)
                    name = "tokens" if fields == "tokenmill" else "inputs"
                    ranks.append([case.name(next(batches)[name]) for _ in range(count)])
                    states.append(json.dumps(batches.get_state()))
                    if last == case.steps:
                        assert next(batches, None) is None
            assert len(set(states)) == 1
            state = states[0]
            case.add(ranks)

    return run_cases(request, run)


class Killed(Exception):
    """Ends a training as a kill does."""


class TinyModel(torch.nn.Module):
    """One parameter; records the tokens that it trains."""

    config = None

    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(1))
        self.seen = []

    def forward(self, input_ids=None, labels=None, **arguments):
        self.seen.append((input_ids, labels, arguments))
        return {"loss": self.weight.sum() * 0 + 1}


@check
def hf_trainer(request):
    """Kill and resume the Trainer, with Accelerate's own assignment of batches to processes."""
    import functools
    import shutil

    import accelerate.utils.imports
    from accelerate.state import PartialState
    from transformers import Trainer, TrainerCallback, TrainingArguments

    from tokenmill.loaders.hf import ResumeCallback, SampleDataset, collate

    class SaveAndKill(TrainerCallback):
        def __init__(self, saved, killed):
            self.saved, self.killed = saved, killed

        def on_step_end(self, args, state, control, **_):
            control.should_save = state.global_step == self.saved
            if state.global_step == self.killed > self.saved:
                raise Killed

        def on_save(self, args, state, control, **_):
            if state.global_step == self.killed:
                raise Killed

    # Each training collects garbage, and parses the metadata of packages. Both take most of its time.
    gc.freeze()
    accelerate.utils.imports._is_package_available = functools.cache(accelerate.utils.imports._is_package_available)

    def run(case, scratch):
        output = scratch / "trainer"
        shutil.rmtree(output, ignore_errors=True)
        for first, last, world, micro_batch in case.parts():
            ranks = []
            kill = case.random.randint(last, case.steps) if last < case.steps else -1
            for rank in range(world - 1, -1, -1):  # rank 0 writes the checkpoint
                args = TrainingArguments(
                    str(output),
                    max_steps=case.steps if case.random.random() < 0.5 else -1,
                    num_train_epochs=1,
                    per_device_train_batch_size=micro_batch,
                    gradient_accumulation_steps=case.global_batch // (micro_batch * world),
                    train_sampling_strategy="sequential",
                    ignore_data_skip=True,
                    save_strategy="no",
                    use_cpu=True,
                    report_to=[],
                    disable_tqdm=True,
                    logging_strategy="no",
                )
                PartialState._shared_state.update(num_processes=world, process_index=rank)
                dataset, model = SampleDataset(case.samples), TinyModel()
                trainer = Trainer(
                    model,
                    args,
                    train_dataset=dataset,
                    data_collator=collate,
                    callbacks=[ResumeCallback(dataset), SaveAndKill(last, kill)],
                )
                with contextlib.suppress(Killed):
                    trainer.train(resume_from_checkpoint=str(output / f"checkpoint-{first}") if first else None)
                for _, labels, arguments in model.seen:
                    assert torch.equal(arguments["shift_labels"], labels)
                count = (last - first) * args.gradient_accumulation_steps
                assert len(model.seen) >= count
                ranks.append([case.name(tokens) for tokens, _, _ in model.seen][:count])
            PartialState._shared_state.update(num_processes=1, process_index=0)
            case.add(ranks[::-1])

    return run_cases(request, run)


@check
def lightning_trainer(request):
    """Kill and resume Lightning's Trainer, which reads a batch ahead."""
    import lightning.pytorch as pl

    from tokenmill.loaders.lightning import DataModule

    class Ranked(pl.Trainer):
        """Has the ranks of a strategy with several processes."""

        ranks = None

        @property
        def distributed_sampler_kwargs(self):
            return self.ranks

    class Model(pl.LightningModule):
        def __init__(self, kill):
            super().__init__()
            self.weight = torch.nn.Parameter(torch.zeros(1))
            self.seen, self.kill = [], kill

        def training_step(self, batch, index):
            if self.global_step == self.kill:
                raise Killed
            self.seen.append(batch["tokens"])
            return self.weight.sum() * 0 + 1

        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), 0.1)

    class Save(pl.Callback):
        def __init__(self, path, step):
            self.path, self.step = path, step

        def on_train_batch_end(self, trainer, *_):
            if trainer.global_step == self.step and not self.path.exists():
                trainer.save_checkpoint(self.path)

    def run(case, scratch):
        for first, last, world, micro_batch in case.parts():
            ranks = []
            kill = case.random.randint(last, case.steps) if last < case.steps else -1
            for rank in range(world):
                path = scratch / f"{last}-{rank}.ckpt"
                path.unlink(missing_ok=True)
                trainer = Ranked(
                    accelerator="cpu",
                    devices=1,
                    accumulate_grad_batches=case.global_batch // (micro_batch * world),
                    max_steps=case.steps,
                    callbacks=[Save(path, last)],
                    logger=False,
                    enable_checkpointing=False,
                    enable_progress_bar=False,
                    enable_model_summary=False,
                )
                trainer.ranks = {"rank": rank, "num_replicas": world} if world > 1 else None
                model = Model(kill)
                data = DataModule(case.samples, micro_batch, prefetch=case.random.randint(0, 2))
                resume = str(scratch / f"{first}-0.ckpt") if first else None
                with contextlib.suppress(Killed):
                    trainer.fit(model, datamodule=data, ckpt_path=resume, weights_only=True)
                count = (last - first) * trainer.accumulate_grad_batches
                assert len(model.seen) >= count
                ranks.append([case.name(tokens) for tokens in model.seen][:count])
            case.add(ranks)

    return run_cases(request, run)


def refuse(function, *arguments, **options):
    """Return the message with which a call is refused."""
    try:
        function(*arguments, **options)
    except RequestError as error:
        return str(error)
    return ""


def open_other(request, **arguments):
    """Return the samples of the other pair."""
    return tokenmill.data.open(request["other"], **{"seq_length": SEQ_LENGTH, "samples": 50, **arguments})


def list_messages(run):
    """Return the log messages of tokenmill during a call."""
    messages = []
    handler = logging.Handler()
    handler.emit = lambda record: messages.append(record.getMessage())
    log = logging.getLogger("tokenmill")
    log.addHandler(handler)
    log.setLevel(logging.INFO)
    run()
    log.removeHandler(handler)
    return messages


@check
def torch_details(request):
    """Batches, order, errors and counts of the data sets and the loader."""
    import threading

    from torch.utils.data import DataLoader

    from tokenmill.loaders.torch import Loader, MapDataset, StreamDataset

    case = Case(request, 1)
    samples, total = case.samples, len(case.samples)
    options = {"rank": 0, "world": 1}
    result = {"total": total}
    result["contents"] = {}
    for documents in ("none", "positions", "varlen", "mask"):
        opened = tokenmill.data.open(request["pair"], seq_length=SEQ_LENGTH, documents=documents)
        expected = opened.batch([0, 1, 2])
        (batch, *_) = Loader(opened, 3, **options)
        equal = [
            (batch["tokens"].numpy() == expected.tokens).all(),
            (batch["labels"].numpy() == expected.masked_labels()).all(),
            (batch["loss_mask"].numpy() == expected.loss_mask).all(),
            (batch["position_ids"].numpy() == expected.position_ids).all(),
        ]
        if documents == "varlen":
            equal += [batch["cu_seqlens"].tolist() == expected.cu_seqlens.tolist()]
            equal += [batch["max_seqlen"] == expected.max_seqlen, batch["cu_seqlens"].dtype == torch.int32]
        if documents == "mask":
            equal.append((batch["attention_mask"].numpy() == expected.attention_mask).all())
        result["contents"][documents] = [sorted(batch), all(bool(entry) for entry in equal)]
    kept = [batch["tokens"] for batch in Loader(samples, 3, prefetch=3, **options)]
    result["kept"] = [number for tokens in kept for number in case.name(tokens)]

    order = tokenmill.data.Order(total, 2, rank=1, world=2, consumed=4)
    expected = [number for numbers in order.copy() for number in numbers]
    result["order"] = expected
    for name, loader in (
        ("map", DataLoader(MapDataset(samples), batch_sampler=order.copy())),
        ("map, 2 workers", DataLoader(MapDataset(samples), batch_sampler=order.copy(), num_workers=2)),
        ("stream", DataLoader(StreamDataset(samples, order), batch_size=None)),
        ("stream, 2 workers", DataLoader(StreamDataset(samples, order), batch_size=None, num_workers=2)),
    ):
        result[name] = [number for batch in loader for number in case.name(batch["tokens"])]
    result["stream length"] = len(StreamDataset(samples, order)) * 2 == len(expected)
    item = MapDataset(samples)[3]
    result["item"] = [case.name(item["tokens"][None]), list(item["tokens"].shape)]

    class Failing(type(samples)):
        def batch(self, numbers, out=None):
            if 6 in numbers:
                raise RequestError("damaged; run tokenmill verify")
            return super().batch(numbers, out)

    failing = object.__new__(Failing)
    vars(failing).update(vars(samples))
    loader = Loader(failing, 2, prefetch=4, **options)
    result["failure"] = refuse(list, loader)
    result["consumed before the failure"] = loader.consumed

    loader = Loader(samples, 2, global_batch=6, **options)
    result["length"] = [len(loader), total // 6 * 3, loader.accumulation]
    first, second = iter(loader), iter(loader)
    next(second)
    result["older iterator"] = next(first, "ended")
    result["consumed"] = loader.consumed
    loader.seek(total // 2)
    result["seek"] = case.name(next(iter(loader))["tokens"])
    metrics = loader.metrics()
    result["metrics"] = [metrics.batches, metrics.tokens, metrics.data_wait_seconds > 0, metrics.synthetic]
    with Loader(samples, 2, **options) as loader:
        next(iter(loader))
    result["threads"] = [thread.name for thread in threading.enumerate() if thread.name.startswith("tokenmill")]

    result["refusals"] = [
        refuse(Loader, samples, 4, rank=0, world=2, global_batch=12),
        refuse(Loader, samples, 4, rank=0),
        refuse(Loader, samples, 0, rank=0, world=1),
        refuse(Loader, samples, 1, prefetch=-1),
        refuse(Loader, samples, 1, consumed=total + 1),
        refuse(MapDataset, tokenmill.data.open(request["pair"], seq_length=SEQ_LENGTH, documents="varlen")),
        refuse(Loader(open_other(request), 2).load_state_dict, loader.state_dict()),
    ]
    synthetic = tokenmill.data.open("synthetic:100", seq_length=SEQ_LENGTH, samples=20)
    result["log"] = list_messages(
        lambda: [Loader(samples, 2), Loader(synthetic, 2, pin_memory=True), Loader(synthetic, 2, global_batch=4)]
    )
    saved = Loader(synthetic, 2, global_batch=4)
    next(iter(saved))
    result["batch change"] = list_messages(
        lambda: Loader(synthetic, 2, global_batch=6).load_state_dict(saved.state_dict())
    )
    return result


@check
def hf_details(request):
    """Labels, documents, logs and refusals of the Trainer's parts."""
    from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

    from tokenmill.loaders.hf import ResumeCallback, SampleDataset, collate, collate_flat

    scratch = Path(request["scratch"])
    sizes = {"num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 2}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=60_000, hidden_size=16, intermediate_size=16, **sizes))
    result = {}
    for documents in ("none", "mask"):
        dataset = SampleDataset(tokenmill.data.open(request["pair"], seq_length=SEQ_LENGTH, documents=documents))
        batch = collate(dataset.__getitems__([0, 1]))
        output = model(**batch)
        expected = torch.nn.functional.cross_entropy(output.logits.flatten(0, 1), batch["labels"].flatten())
        result[documents] = [sorted(batch), torch.allclose(output.loss, expected)]
    opened = tokenmill.data.open(request["pair"], seq_length=SEQ_LENGTH, documents="positions")
    flat = collate_flat(SampleDataset(opened).__getitems__([0, 1, 2]))
    varlen = tokenmill.data.open(request["pair"], seq_length=SEQ_LENGTH, documents="varlen").batch([0, 1, 2])
    result["flat"] = [
        list(flat["input_ids"].shape),
        flat["cu_seq_lens_q"].tolist() == varlen.cu_seqlens.tolist(),
        flat["max_length_k"] == varlen.max_seqlen,
        flat["cu_seq_lens_k"].dtype == torch.int32,
    ]

    def make(samples, **arguments):
        dataset = SampleDataset(samples)
        callback = ResumeCallback(dataset, arguments.pop("consumed", None))
        settings = {"train_sampling_strategy": "sequential", "ignore_data_skip": True, "save_strategy": "no"}
        settings |= {"max_steps": 2, "use_cpu": True, "report_to": [], "disable_tqdm": True, "logging_steps": 1}
        settings |= {"per_device_train_batch_size": 2}
        args = TrainingArguments(str(scratch / "hf"), **settings | arguments)
        model = TinyModel()
        return Trainer(model, args, train_dataset=dataset, data_collator=collate, callbacks=[callback]), callback, model

    samples = tokenmill.data.open(request["pair"], seq_length=SEQ_LENGTH, samples=50)
    result["refused arguments"] = [
        refuse(make, samples, **arguments)
        for arguments in (
            {"train_sampling_strategy": "random"},
            {"train_sampling_strategy": "group_by_length"},
            {"ignore_data_skip": False},
            {"dataloader_in_order": False},
            {"label_smoothing_factor": 0.1},
            {"max_steps": -1, "num_train_epochs": 3},
        )
    ]
    result["too many steps"] = refuse(make(samples, max_steps=1000)[0].train)
    trainer, callback, _ = make(samples, save_strategy="steps", save_steps=1, dataloader_num_workers=2)
    trainer.train()
    checkpoint = str(scratch / "hf/checkpoint-1")
    result["logged"] = ["data_wait_seconds" in entry for entry in trainer.state.log_history]
    result["counted"] = [callback.metrics().consumed, callback.metrics().data_wait_seconds > 0]
    other, _, _ = make(open_other(request))
    result["other data"] = refuse(other.train, resume_from_checkpoint=checkpoint)
    case = Case(request, 1234)
    resumed, callback, model = make(samples, max_steps=3, per_device_train_batch_size=4)
    resumed.train(resume_from_checkpoint=checkpoint)
    result["another batch"] = [[case.name(tokens) for tokens, _, _ in model.seen], callback.consumed]
    resumed, callback, model = make(samples, max_steps=-1, num_train_epochs=1, per_device_train_batch_size=100)
    result["no steps left"] = refuse(resumed.train, resume_from_checkpoint=checkpoint)
    started, callback, model = make(samples, consumed=20)
    started.train()
    result["from 20"] = case.name(model.seen[0][0])
    path = Path(checkpoint, "trainer_state.json")
    state = json.loads(path.read_text())
    del state["stateful_callbacks"]["tokenmill"]
    path.write_text(json.dumps(state))
    unknown, _, _ = make(samples)
    result["no position"] = refuse(unknown.train, resume_from_checkpoint=checkpoint)
    synthetic, _, _ = make(tokenmill.data.open("synthetic:100", seq_length=SEQ_LENGTH, samples=8))
    result["synthetic log"] = [message[:9] for message in list_messages(synthetic.train)]
    result["synthetic history"] = [entry.get("SYNTHETIC") for entry in synthetic.state.log_history]
    return result


@check
def lightning_details(request):
    """Refusals, validation and counts of the data module."""
    import lightning.pytorch as pl

    from tokenmill.loaders.lightning import DataModule

    class Recorder(pl.LightningModule):
        def __init__(self):
            super().__init__()
            self.weight = torch.nn.Parameter(torch.zeros(1))
            self.seen, self.validated = [], []

        def training_step(self, batch, index):
            self.seen.append(batch["tokens"])
            return self.weight.sum() * 0 + 1

        def validation_step(self, batch, index):
            self.validated.append(batch["tokens"])

        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), 0.1)

    def fit(data, path=None, **arguments):
        options = {"max_steps": 4, "num_sanity_val_steps": 0, "logger": False}
        options |= {"enable_progress_bar": False, "enable_model_summary": False, "enable_checkpointing": False}
        trainer = pl.Trainer(accelerator="cpu", devices=1, **options | arguments)
        module = Recorder()
        trainer.fit(module, datamodule=data, ckpt_path=path, weights_only=True)
        return trainer, module

    case = Case(request, 1)
    samples, path = case.samples, str(Path(request["scratch"], "details.ckpt"))
    result = {}
    validation = tokenmill.data.open(request["pair"], seq_length=SEQ_LENGTH, samples=50, seed=1)
    data = DataModule(samples, 2, validation=validation)
    trainer, module = fit(data, val_check_interval=2)
    trainer.save_checkpoint(path)
    result["trained"] = [case.name(tokens) for tokens in module.seen]
    result["validated"] = [len(module.validated), 2 * (len(validation) // 2), case.name(module.validated[0])]
    result["consumed"] = [data.consumed, data.state_dict()["consumed"]]
    # an incomplete step of the optimizer is read again
    _, module = fit(DataModule(samples, 2), path, max_steps=5, accumulate_grad_batches=3)
    result["resumed"] = [case.name(tokens) for tokens in module.seen]
    _, module = fit(DataModule(samples, 2), max_epochs=3, limit_train_batches=2, max_steps=6)
    result["epochs by a limit"] = [case.name(tokens) for tokens in module.seen]
    result["refusals"] = [
        refuse(fit, DataModule(open_other(request), 2), path),
        refuse(fit, DataModule(samples, 2), max_steps=-1, max_epochs=5),
        refuse(fit, DataModule(samples, 2), max_steps=1000),
        refuse(fit, DataModule(samples, 2), max_steps=-1, max_epochs=1, limit_train_batches=2) or "accepted",
    ]
    plain = str(Path(request["scratch"], "plain.ckpt"))
    state = torch.load(path, weights_only=True)
    del state["DataModule"]
    torch.save(state, plain)
    result["no position"] = refuse(fit, DataModule(samples, 2), plain, max_steps=6)
    _, module = fit(DataModule(samples, 2, consumed=8), plain, max_steps=6)
    result["given position"] = case.name(module.seen[0])
    return result


@check
def grain_details(request):
    """Arrays, worker processes, states and refusals of Grain's data source and dataset."""
    import pickle

    import grain

    from tokenmill.loaders.grain import GrainSource, RankDataset

    case = Case(request, 1)
    samples = case.samples
    ranks = {"rank": 0, "world": 1}
    result = {"total": len(samples), "contents": {}, "maxtext": {}}
    for documents in ("none", "positions", "varlen", "mask"):
        opened = tokenmill.data.open(request["pair"], seq_length=SEQ_LENGTH, documents=documents)
        expected = opened.batch([0, 1, 2])
        arrays = {"tokens": expected.tokens, "labels": expected.masked_labels(), "loss_mask": expected.loss_mask}
        arrays |= {"position_ids": expected.position_ids}
        if documents == "varlen":
            arrays |= {"cu_seqlens": expected.cu_seqlens, "max_seqlen": expected.max_seqlen}
        elif documents == "mask":
            arrays["attention_mask"] = expected.attention_mask
        (batch, *_) = RankDataset(opened, 3, **ranks)
        equal = [list(batch) == list(arrays), *(np.array_equal(batch[name], arrays[name]) for name in arrays)]
        result["contents"][documents] = all(equal)
    for documents in ("none", "positions"):
        eod = int(samples[0].tokens[0, 2])
        opened = tokenmill.data.open(
            request["pair"], seq_length=SEQ_LENGTH, samples=50, seed=1, documents=documents, eod=eod, mask_eod=True
        )
        expected = opened.batch([0, 1, 2])
        (batch, *_) = RankDataset(opened, 3, fields="maxtext", **ranks)
        segments = expected.starts.cumsum(1) if documents == "positions" else np.ones_like(expected.tokens)
        arrays = {"inputs": expected.tokens, "inputs_position": expected.position_ids}
        arrays |= {"inputs_segmentation": segments, "targets": expected.labels}
        arrays |= {"targets_position": expected.position_ids}
        arrays |= {"targets_segmentation": segments * (expected.loss_mask != 0)}
        equal = [list(batch) == list(arrays), *(np.array_equal(batch[name], arrays[name]) for name in arrays)]
        equal.append({array.dtype.name for array in batch.values()} == {"int32"})
        result["maxtext"][documents] = [all(equal), int((batch["targets_segmentation"] == 0).sum())]

    source = GrainSource(samples, "maxtext")
    result["source"] = [
        isinstance(source, grain.sources.RandomAccessDataSource),
        [case.name(source[number]["inputs"][None]) for number in (3, 0)],
        list(source[3]["inputs"].shape),
        repr(source) == repr(GrainSource(samples, "maxtext")) != repr(GrainSource(open_other(request))),
    ]
    long = tokenmill.data.open(request["pair"], seq_length=SEQ_LENGTH, samples=100_000)
    order = long[0].tokens.tolist()
    pickled = pickle.dumps(GrainSource(long))
    result["pickled"] = [len(pickled) < 10_000, pickle.loads(pickled)[0]["tokens"].tolist() == order[0]]

    workers = grain.MultiprocessingOptions(num_workers=2, per_worker_buffer_size=2)
    dataset = RankDataset(samples, 2, rank=1, world=2, consumed=4, multiprocessing_options=workers)
    expected = list(tokenmill.data.Order(len(samples), 2, rank=1, world=2, consumed=4))
    with contextlib.closing(iter(dataset)) as batches:
        batches.start_prefetch()
        read = [case.name(next(batches)["tokens"]) for _ in range(3)]
        state = batches.get_state()
        read += [case.name(batch["tokens"]) for batch in batches]
        result["workers"] = read == expected
        batches.set_state(state)
        result["workers resumed"] = [case.name(batch["tokens"]) for batch in batches] == expected[3:]
    result["mapped"] = []
    mapped = iter(RankDataset(samples, 2, **ranks).map(lambda batch: batch["tokens"] + 1))
    for state in (None, LoaderState.capture(samples.identity, 10, 0)):
        if state:
            mapped.set_state(state)
        result["mapped"] += [case.name(next(mapped) - 1), mapped.get_state()["consumed"]]
    mapped.close()
    result["complete steps"] = [len(list(RankDataset(samples, 2, global_batch=6, **ranks))), len(samples) // 6 * 3]
    batches = iter(RankDataset(samples, 2, **ranks))
    result["shared by processes"] = isinstance(batches, grain.experimental.ElasticIterator)
    batches.close()
    with contextlib.suppress(ValueError):
        next(batches)
        result["shared by processes"] = "a closed iterator was read"

    varlen = tokenmill.data.open(request["pair"], seq_length=SEQ_LENGTH, documents="varlen")
    result["refusals"] = [
        refuse(RankDataset, samples, 4, rank=0, world=2, global_batch=12),
        refuse(RankDataset, samples, 4, rank=2, world=2),
        refuse(RankDataset, samples, 4, fields="jax", **ranks),
        refuse(RankDataset, varlen, 4, fields="maxtext", **ranks),
        refuse(GrainSource, varlen),
        refuse(iter(RankDataset(open_other(request), 2, **ranks)).set_state, state),
        refuse(iter(RankDataset(samples, 2, **ranks)).set_state, {"next_index": 3}),
    ]
    synthetic = tokenmill.data.open("synthetic:100", seq_length=SEQ_LENGTH, samples=20)
    saved = LoaderState.capture(synthetic.identity, 8, 4)
    result["log"] = list_messages(lambda: iter(RankDataset(synthetic, 2, global_batch=6, **ranks)).set_state(saved))
    return result


def titan_flat(request):
    """Compare batches of one dimension, which torchtitan's main branch reads since August 2026, with the samples."""
    from tokenmill.loaders.titan import TitanLoader

    same = []
    for documents in ("none", "positions"):
        config = TitanLoader.Config(dataset_path=request["pair"], documents=documents)
        arguments = {"dp_world_size": 1, "dp_rank": 0, "tokenizer": None, "max_context_length": SEQ_LENGTH}
        loader = config.build(num_tokens_per_batch=2 * SEQ_LENGTH, **arguments)
        inputs, labels = next(iter(loader))
        loader.close()
        opened = tokenmill.data.open(request["pair"], seq_length=SEQ_LENGTH, documents=documents).batch([0, 1])
        same += [
            inputs["input"].tolist() == opened.tokens.flatten().tolist(),
            inputs["positions"].tolist() == opened.position_ids.flatten().tolist(),
            labels.tolist() == opened.masked_labels().flatten().tolist(),
        ]
    return [*same, refuse(config.build, num_tokens_per_batch=2 * SEQ_LENGTH + 1, **arguments)]


@check
def titan_details(request):
    """Refusals and positions of torchtitan's loader."""
    from tokenmill.loaders.titan import TitanLoader

    sizes = {"dp_world_size": 1, "dp_rank": 0, "seq_len": SEQ_LENGTH, "local_batch_size": 2, "tokenizer": None}

    def build_config(**arguments):
        return TitanLoader.Config(**{"dataset_path": request["pair"], **arguments})

    def build(**arguments):
        return build_config(**arguments).build(**sizes)

    opened = tokenmill.data.open(request["pair"], seq_length=SEQ_LENGTH, documents="positions").batch([0, 1])
    inputs, labels = next(iter(build(documents="positions")))
    case = Case(request, 1)
    again = {}
    for name in ("repeat", "infinite"):  # as the validation of torchtitan sets them
        loader = dataclasses.replace(build_config(samples=50, seed=1), **{name: True}).build(**sizes)
        count = len(loader.loader)
        read = [case.name(inputs["input"]) for inputs, _ in itertools.islice(loader, 2 * count + 1)]
        again[name] = read == [[2 * (step % count), 2 * (step % count) + 1] for step in range(2 * count + 1)]
        loader.close()
    return {
        "again": again,
        "positions": [inputs["positions"].tolist() == opened.position_ids.tolist(), sorted(inputs)],
        "labels": labels.tolist() == opened.masked_labels().tolist(),
        "flat": titan_flat(request),
        "refusals": [
            refuse(build, dataset_path=None),
            refuse(build, documents="mask"),
            refuse(build(dataset_path=request["other"]).load_state_dict, build().state_dict()),
        ],
    }


def same_item(item, tokens, labels, mask):
    """Return whether an item of GPTDataset has the arrays of a sample."""
    arrays = {name: torch.as_tensor(value).numpy() for name, value in item.items() if name != "attention_mask"}
    trained = mask != 0
    return bool(
        (arrays.get("tokens", arrays.get("input_ids")) == tokens).all()
        and (arrays["labels"][trained] == labels[trained]).all()
        and (arrays["loss_mask"] == mask).all()
    )


@check
def megatron_settings(request):
    """Compare the samples of Megatron-Core and NeMo Automodel, configured by describe_data, with those of open."""
    from megatron.core.datasets.blended_megatron_dataset_builder import BlendedMegatronDatasetBuilder
    from megatron.core.datasets.gpt_dataset import GPTDataset, GPTDatasetConfig
    from nemo_automodel.components.datasets.llm.megatron_dataset import MegatronPretraining

    from tokenmill.loaders.megatron import describe_data

    class Tokenizer:
        eod = eos_token_id = 0
        pad = pad_token_id = None
        vocab_size = 60_000
        name_or_path = "test"
        unique_identifiers = {"class": "test"}  # noqa: RUF012

        def __len__(self):
            return self.vocab_size

    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    pair, other = request["pair"], request["other"]
    sources = {
        "one pair": (pair, {"split": "9,1,0"}),
        "weights": ([(0.3, pair), (0.7, other)], {"split": "9,1,0"}),
        "no weights": ([pair, other], {}),
        "lists": ({"train": [(1, pair), (2, other)], "valid": [other]}, {}),
        "one weight": ([(1, pair)], {}),
        "EOD": (pair, {"mask_eod": True}),
    }
    results = {}
    for name, (source, options) in sources.items():
        arguments = {"seq_length": SEQ_LENGTH, "samples": 300, "seed": 5, **options}
        data = describe_data(source, cache=Path(request["scratch"], "index", name), **arguments)
        expected = tokenmill.data.open(source, eod=0, **arguments)
        config = GPTDatasetConfig(**data.core(), tokenizer=Tokenizer())
        built = {
            "core": BlendedMegatronDatasetBuilder(GPTDataset, [300, 20, 20], lambda: True, config).build()[0],
        }
        if not refuse(data.automodel):
            automodel = {key: value for key, value in data.automodel().items() if key != "_target_"}
            schedule = {"micro_batch_size": 1, "global_batch_size": 1, "trainer_max_steps": 300, "num_val_samples": 20}
            pretraining = MegatronPretraining(**automodel, **schedule, tokenizer=Tokenizer())
            pretraining.build()
            built["automodel"] = pretraining.get_dataset("train")
        for framework, dataset in built.items():
            count = min(len(dataset), len(expected))
            batch = expected.batch(range(count))
            items = [dataset[number] for number in range(count)]
            equal = [
                same_item(item, *arrays)
                for item, *arrays in zip(items, batch.tokens, batch.labels, batch.loss_mask, strict=True)
            ]
            results[f"{name}, {framework}"] = [count, sum(equal)]
    torch.distributed.destroy_process_group()
    return results


@check
def bridge_fields(request):
    """Return the arguments that GPTDatasetConfig of Megatron-Bridge lacks; importing it needs Transformer Engine."""
    import ast
    from dataclasses import fields

    import megatron
    from megatron.core.datasets.gpt_dataset import GPTDatasetConfig

    from tokenmill.loaders.megatron import describe_data

    (root,) = (Path(entry) / "bridge" for entry in megatron.__path__ if (Path(entry) / "bridge").is_dir())
    names = {field.name for field in fields(GPTDatasetConfig)}
    for file, name in (("training/config.py", "GPTDatasetConfig"), ("data/base.py", "DataloaderConfig")):
        (node,) = (
            node
            for node in ast.parse((root / file).read_text()).body
            if isinstance(node, ast.ClassDef) and node.name == name
        )
        names |= {entry.target.id for entry in node.body if isinstance(entry, ast.AnnAssign)}
    data = describe_data(request["pair"], seq_length=SEQ_LENGTH, samples=10, cache=request["scratch"])
    return sorted(set(data.bridge()) - names)


@check
def documents(request):
    """Run the code of docs/frameworks.md, each section with the objects that it expects of the reader's program."""
    import os
    import shutil

    import deepspeed
    import lightning.pytorch as pl
    from transformers import LlamaConfig, LlamaForCausalLM

    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # one process needs no compiled communication
    directory = Path(request["scratch"], "documents")
    (directory / "corpus").mkdir(parents=True)
    for suffix in (".bin", ".idx"):
        shutil.copyfile(request["long"] + suffix, directory / f"corpus/tokenized{suffix}")
    os.chdir(directory)
    logits = torch.nn.Sequential(torch.nn.Embedding(1000, 4), torch.nn.Linear(4, 1000))
    sizes = {"num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 2}

    class Module(pl.LightningModule):
        def __init__(self):
            super().__init__()
            self.model = logits

        def training_step(self, batch, index):
            return torch.nn.functional.cross_entropy(self.model(batch["tokens"])[:, 0], batch["labels"][:, 0])

        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), 0.1)

    namespace = {"torch": torch, "model": logits, "device": "cpu", "lightning_module": Module()}
    namespace["optimizer"] = torch.optim.AdamW(logits.parameters())
    namespace["config"] = {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": 2,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "torch_adam": True}},
        "zero_allow_untested_optimizer": True,
        "steps_per_print": 1000,
    }
    ran = {}
    for section in request["sections"]:
        if section["title"] == "Transformers":
            config = LlamaConfig(vocab_size=1000, hidden_size=8, intermediate_size=8, **sizes)
            namespace["model"] = LlamaForCausalLM(config)
        for block in section["blocks"]:
            exec(compile(block, f"docs/frameworks.md, {section['title']}", "exec"), namespace)
        result = ran[section["title"]] = {}
        if section["title"] == "Transformers":
            result["step"] = namespace["trainer"].state.global_step
            result["last"] = json.loads(Path("checkpoints/checkpoint-8/trainer_state.json").read_text())[
                "stateful_callbacks"
            ]["tokenmill"]["consumed"]
        elif section["title"] == "Lightning":
            result["consumed"] = torch.load("last.ckpt", weights_only=True)["DataModule"]["consumed"]
        elif section["title"] == "torchtitan":
            loader = namespace["my_run"]().dataloader.build(
                dp_world_size=2, dp_rank=1, tokenizer=None, seq_len=32, local_batch_size=4
            )
            result["length"] = len(loader.loader)
        elif section["title"] == "Grain and MaxText":
            result["consumed"] = namespace["state"]["consumed"]
        elif "loader" in namespace:
            result["consumed"] = namespace["loader"].consumed
        if "arguments" in namespace:
            result["arguments"] = sorted(namespace.pop("arguments"))
    return ran


def main():
    """Run the requested checks."""
    warnings.simplefilter("ignore")
    for name in ("lightning.pytorch", "transformers", "torchtitan"):
        logging.getLogger(name).setLevel(logging.ERROR)
    torch.set_num_threads(1)
    request = json.load(sys.stdin)
    sys.path += request.get("packages", [])  # searched last, as by train.framework_child
    response = {name: CHECKS[name](request) for name in request.get("checks", CHECKS)}
    Path(request["response"]).write_text(json.dumps(response))


if __name__ == "__main__":
    main()
