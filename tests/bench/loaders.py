"""Write a pair, and read it with a loader, each in a process: `loaders.py TOOL ARGUMENT...`; the result is JSON.

    write PREFIX DOCUMENTS MEAN                   a pair of uint16 ids, documents of 1 to about 2 * MEAN tokens
    build NAME PREFIX DIRECTORY                   the files that an alternative reads instead of the pair
    read NAME PREFIX DIRECTORY BATCHES [SMALL]    the time to the first batch, and the rate of the others
    memory PREFIX DIRECTORY BATCHES               the anonymous memory of tokenmill.data

A sample has SEQ_LENGTH tokens and their labels, a batch BATCH samples. All tools read in the process that trains,
without workers: megatron (GPTDataset in torch's DataLoader), tokenmill (arrays), tokenmill-torch (`Loader`, whose
thread reads ahead), memmap (windows at random positions), litdata (TokensLoader), streaming (MDS of
mosaicml-streaming) and datasets (Arrow). The last four have no documents, masks or positions, and the last three no
labels. A tool that gets the small pair SMALL reads it first, because it imports modules with the first pair, and opens
the other pair several times.
"""

import hashlib
import json
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

SEQ_LENGTH, BATCH, SEED = 2048, 8, 1234
WINDOW = SEQ_LENGTH + 1
VOCABULARY, EOD = 50_000, 0
BLOCK = 1 << 22
"""Documents or tokens that `write` writes together."""

AGAIN = 10
"""How often a pair is opened again in one process."""

POLL_SECONDS = 0.002

Opener = Callable[[str], Iterator[Any]]
"""Opens a pair and returns its batches: dicts with tokens and labels, or only windows."""


def write(prefix: str, documents: str, mean: str) -> dict[str, Any]:
    """Write a pair in blocks; numpy's seed determines it."""
    from tokenmill.datasets.formats.indexed.writer import CODES, HEADER, MAGIC, VERSION

    random, count = np.random.default_rng(SEED), int(documents)
    Path(prefix).parent.mkdir(parents=True, exist_ok=True)
    total = 0
    with Path(f"{prefix}.idx").open("wb") as index, Path(f"{prefix}.idx.pointers").open("w+b") as pointers:
        index.write(HEADER.pack(MAGIC, VERSION, CODES["uint16"], count, count + 1))
        for first in range(0, count, BLOCK):
            lengths = random.integers(1, 2 * int(mean), min(BLOCK, count - first), "<i4")
            index.write(lengths.data)
            ends = lengths.cumsum(dtype="<i8")
            pointers.write((2 * (total + ends - lengths)).data)
            total += int(ends[-1])
        pointers.seek(0)
        while block := pointers.read(BLOCK):
            index.write(block)
        for first in range(0, count + 1, BLOCK):
            index.write(np.arange(first, min(first + BLOCK, count + 1), dtype="<i8").data)
    Path(f"{prefix}.idx.pointers").unlink()
    with Path(f"{prefix}.bin").open("wb") as ids:
        for first in range(0, total, BLOCK):
            ids.write(random.integers(1, VOCABULARY, min(BLOCK, total - first), "<u2").data)
    return {"tokens": total}


def open_windows(prefix: str) -> np.ndarray[Any, np.dtype[np.uint16]]:
    """Return the tokens of a pair in windows of a sample each, which share their first and last tokens."""
    ids = np.memmap(f"{prefix}.bin", "<u2", mode="r")
    return np.lib.stride_tricks.sliding_window_view(ids, WINDOW)[::SEQ_LENGTH]


def build_litdata(prefix: str, directory: Path) -> None:
    """Write the ids with litdata's optimize, for its TokensLoader."""
    from litdata import TokensLoader, optimize  # type: ignore[import-not-found]

    optimize(
        fn=_yield_windows,
        inputs=[prefix],
        output_dir=str(directory),
        chunk_bytes="64MB",
        item_loader=TokensLoader(block_size=WINDOW),
        num_workers=1,
        start_method="fork",
        verbose=False,
    )


def _yield_windows(prefix: str) -> Iterator[Any]:
    import torch

    for window in open_windows(prefix):
        yield torch.from_numpy(window.astype(np.int32))


def build_streaming(prefix: str, directory: Path) -> None:
    """Write the windows as MDS."""
    from streaming import MDSWriter  # type: ignore[import-not-found]

    with MDSWriter(out=str(directory), columns={"tokens": f"ndarray:uint16:{WINDOW}"}) as writer:
        for window in open_windows(prefix):
            writer.write({"tokens": window})


def build_datasets(prefix: str, directory: Path) -> None:
    """Write the windows as Arrow with pyarrow, in the int32 of a tokenizer's output; datasets itself takes longer."""
    import pyarrow as pa

    windows = open_windows(prefix)
    directory.mkdir()
    with pa.OSFile(str(directory / "windows.arrow"), "wb") as file:
        schema = pa.schema([("tokens", pa.list_(pa.int32()))])
        with pa.RecordBatchStreamWriter(file, schema) as writer:
            for first in range(0, len(windows), 1000):
                block = windows[first : first + 1000].astype(np.int32)
                offsets = np.arange(len(block) + 1, dtype=np.int32) * WINDOW
                writer.write_batch(pa.record_batch([pa.ListArray.from_arrays(offsets, block.ravel())], schema=schema))


BUILDERS: dict[str, Callable[[str, Path], None]] = {
    "litdata": build_litdata,
    "streaming": build_streaming,
    "datasets": build_datasets,
}


def build(name: str, prefix: str, directory: str) -> dict[str, Any]:
    """Write the files that an alternative reads, and measure their bytes and the time."""
    started = time.perf_counter()
    BUILDERS[name](prefix, Path(directory))
    seconds = time.perf_counter() - started
    size = sum(path.stat().st_size for path in Path(directory).rglob("*") if path.is_file())
    return {"seconds": seconds, "bytes": size}


def megatron(directory: Path) -> Opener:
    """Import megatron-core; its index is in the directory."""
    import torch
    from megatron.core.datasets.blended_megatron_dataset_builder import BlendedMegatronDatasetBuilder
    from megatron.core.datasets.gpt_dataset import GPTDataset, GPTDatasetConfig

    class Tokenizer:
        eod, vocab_size = EOD, VOCABULARY
        unique_identifiers = {"class": "bench"}  # noqa: RUF012

    def open_batches(prefix: str) -> Iterator[Any]:
        config = GPTDatasetConfig(
            random_seed=SEED,
            sequence_length=SEQ_LENGTH,
            blend=([prefix], None),
            split="1,0,0",
            path_to_cache=str(directory),
            tokenizer=Tokenizer(),
            reset_position_ids=False,
            reset_attention_mask=False,
            eod_mask_loss=False,
            create_attention_mask=False,
        )
        dataset = BlendedMegatronDatasetBuilder(GPTDataset, [None, 0, 0], lambda: True, config).build()[0]
        return iter(torch.utils.data.DataLoader(dataset, BATCH, drop_last=True))

    return open_batches


def tokenmill(directory: Path) -> Opener:
    """Import tokenmill.data, whose store of orders is in the directory."""
    import tokenmill.data

    def open_batches(prefix: str) -> Iterator[Any]:
        samples = tokenmill.data.open(prefix, seq_length=SEQ_LENGTH, index_cache=directory)
        for numbers in tokenmill.data.Order(len(samples), BATCH):
            batch = samples.batch(numbers)
            yield {"tokens": batch.tokens, "labels": batch.labels}

    return open_batches


def tokenmill_torch(directory: Path) -> Opener:
    """Import tokenmill.loaders.torch."""
    import tokenmill.data
    from tokenmill.loaders.torch import Loader

    def open_batches(prefix: str) -> Iterator[Any]:
        return iter(Loader(tokenmill.data.open(prefix, seq_length=SEQ_LENGTH, index_cache=directory), BATCH))

    return open_batches


def memmap(_: Path) -> Opener:
    """Read windows at random positions, as in many small training programs."""
    random = np.random.default_rng(SEED)

    def open_batches(prefix: str) -> Iterator[Any]:
        ids = np.memmap(f"{prefix}.bin", "<u2", mode="r")
        while True:
            starts = random.integers(0, len(ids) - WINDOW, BATCH).tolist()
            yield {
                "tokens": np.stack([ids[start : start + SEQ_LENGTH].astype(np.int64) for start in starts]),
                "labels": np.stack([ids[start + 1 : start + WINDOW].astype(np.int64) for start in starts]),
            }

    return open_batches


def litdata(directory: Path) -> Opener:
    """Import litdata."""
    from litdata import StreamingDataLoader, StreamingDataset, TokensLoader

    def open_batches(_: str) -> Iterator[Any]:
        dataset = StreamingDataset(
            str(directory), item_loader=TokensLoader(block_size=WINDOW), shuffle=True, drop_last=True, seed=SEED
        )
        return iter(StreamingDataLoader(dataset, batch_size=BATCH))

    return open_batches


def streaming(directory: Path) -> Opener:
    """Import mosaicml-streaming."""
    import torch
    from streaming import StreamingDataset

    def open_batches(_: str) -> Iterator[Any]:
        dataset = StreamingDataset(local=str(directory), shuffle=True, shuffle_seed=SEED, batch_size=BATCH)
        loader = torch.utils.data.DataLoader(dataset, BATCH, drop_last=True)
        return (batch["tokens"] for batch in loader)

    return open_batches


def arrow(directory: Path) -> Opener:
    """Import datasets."""
    import datasets  # type: ignore[import-not-found]
    import torch

    def open_batches(_: str) -> Iterator[Any]:
        dataset = datasets.Dataset.from_file(str(directory / "windows.arrow")).with_format("torch").shuffle(seed=SEED)
        loader = torch.utils.data.DataLoader(dataset, BATCH, drop_last=True)
        return (batch["tokens"] for batch in loader)

    return open_batches


LOADERS: dict[str, Callable[[Path], Opener]] = {
    "megatron": megatron,
    "tokenmill": tokenmill,
    "tokenmill-torch": tokenmill_torch,
    "memmap": memmap,
    "litdata": litdata,
    "streaming": streaming,
    "datasets": arrow,
}


def read(name: str, prefix: str, directory: str, batches: str, small: str | None = None) -> dict[str, Any]:
    """Time the imports, the way from opening to the first batch, the same again, and the following batches."""
    started = time.perf_counter()
    opener = LOADERS[name](Path(directory))
    if small:
        next(opener(small))
    seconds = []
    imported = time.perf_counter()
    for _ in range(AGAIN + 1 if small else 1):
        opening = time.perf_counter()
        iterator = opener(prefix)
        first = next(iterator)
        seconds.append(time.perf_counter() - opening)
    opened, cpu = time.perf_counter(), time.process_time()
    tokens, batch = 0, first
    for _ in range(int(batches)):
        batch = next(iterator)
        ids = batch["tokens"] if isinstance(batch, dict) else batch
        tokens += len(ids) * SEQ_LENGTH
    ended, cpu = time.perf_counter(), time.process_time() - cpu
    digest = hashlib.sha256()
    for part in (first, batch) if isinstance(first, dict) else ():
        for field in ("tokens", "labels"):
            digest.update(np.asarray(part[field], np.int64).tobytes())
    return {
        "start_seconds": imported - started + seconds[0],
        "open_seconds": seconds[0],
        "again_seconds": statistics.median(seconds[1:]) if small else 0.0,
        "rate": tokens / (ended - opened),
        "cpu_rate": tokens / cpu,
        "tokens": tokens,
        "hash": digest.hexdigest(),
    }


def memory(prefix: str, directory: str, batches: str) -> dict[str, Any]:
    """Measure the anonymous memory of tokenmill.data: its peak, and what is left after some batches.

    Memory of mapped files is not included: the kernel takes it back when it needs it.
    """
    reader, writer = os.pipe()
    watcher = os.fork()
    if not watcher:
        os.close(writer)
        os.set_blocking(reader, False)
        peak, parent = 0, os.getppid()
        while True:
            peak = max(peak, _anonymous_bytes(parent))
            try:
                os.read(reader, 1)  # the parent closed the pipe
                break
            except BlockingIOError:
                time.sleep(POLL_SECONDS)
        Path(directory, "peak").write_text(str(peak))
        os._exit(0)
    os.close(reader)
    import tokenmill.data

    before = _anonymous_bytes(os.getpid())
    started = time.perf_counter()
    samples = tokenmill.data.open(prefix, seq_length=SEQ_LENGTH, index_cache=directory)
    numbers = np.random.default_rng(SEED).integers(0, len(samples), (int(batches), BATCH))
    samples.batch(numbers[0])
    opened = time.perf_counter()
    for chosen in numbers:
        samples.batch(chosen)
    after = _anonymous_bytes(os.getpid())
    os.close(writer)
    os.waitpid(watcher, 0)
    peak = int(Path(directory, "peak").read_text())
    return {"open_seconds": opened - started, "before": before, "after": after, "peak": peak}


def _anonymous_bytes(process: int) -> int:
    lines = Path(f"/proc/{process}/status").read_text().splitlines()
    return int(next(line for line in lines if line.startswith("RssAnon")).split()[1]) * 1024


if __name__ == "__main__":
    tools: dict[str, Callable[..., dict[str, Any]]] = {"write": write, "build": build, "read": read, "memory": memory}
    print(json.dumps(tools[sys.argv[1]](*sys.argv[2:])))
