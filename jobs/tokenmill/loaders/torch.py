"""The samples as data sets of torch, and the loader for every training loop in PyTorch: FSDP2, DDP, DeepSpeed.

`Loader` reads ahead in a thread: reading is copying from mapped files, during which other threads run, so it needs no
worker processes. `MapDataset` and `StreamDataset` are for programs that need torch's own DataLoader.
"""

import os
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from typing import TYPE_CHECKING, NamedTuple, Self

from tokenmill.errors import RequestError
from tokenmill.loaders.state import LoaderState, check_state, log, log_batch_change, log_start, mark
from tokenmill.samples.batch import IGNORED, Batch
from tokenmill.samples.order import Order
from tokenmill.samples.samples import Samples

try:
    import torch
    from torch.utils.data import Dataset, IterableDataset, get_worker_info
except ModuleNotFoundError as error:
    if error.name != "torch":
        raise
    raise ModuleNotFoundError(
        "tokenmill.loaders.torch needs PyTorch: run pip install '.[torch]' in the clone of tokenmill", name="torch"
    ) from None

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

Tensors = dict[str, "torch.Tensor | int"]
"""A batch for a training step:

- tokens: int64 (samples, seq_length)
- labels: int64, the token after each input; -100, which torch's cross_entropy ignores, where the loss does not count
- loss_mask: float32, 1 where the loss counts, otherwise 0
- position_ids: int64
- cu_seqlens: int32 (documents + 1,), and max_seqlen, an int, with documents "varlen"
- attention_mask: bool (samples, 1, seq_length, seq_length), with documents "mask"
"""


class LoaderMetrics(NamedTuple):
    """The counts of a loader since it was made.

    Attributes:
        consumed: samples that all ranks together have consumed.
        batches: batches that this rank received.
        tokens: tokens in them.
        data_wait_seconds: seconds in which this rank waited for batches.
        last_wait_seconds: seconds in which it waited for the last batch.
        synthetic: whether the samples are random numbers and no text.
    """

    consumed: int
    batches: int
    tokens: int
    data_wait_seconds: float
    last_wait_seconds: float
    synthetic: bool


class MapDataset(Dataset):  # type: ignore[misc]
    """The samples by number, for a DataLoader with a sampler that is not shuffled."""

    def __init__(self, samples: Samples) -> None:
        """Wrap samples.

        Raises:
            RequestError: the samples have documents "varlen", which describes batches and not samples.
        """
        if samples.documents == "varlen":
            raise RequestError(
                "invalid documents varlen: its cu_seqlens belong to a batch, and MapDataset returns samples; use "
                "Loader, or specify documents positions"
            )
        self.samples = samples

    def __len__(self) -> int:
        """Return the number of samples."""
        return len(self.samples)

    def __getitem__(self, number: int) -> Tensors:
        """Return a sample: a batch's tensors without their first dimension."""
        return self.__getitems__([number])[0]

    def __getitems__(self, numbers: Sequence[int]) -> list[Tensors]:
        """Return several samples, which are read together; a DataLoader calls this for a batch.

        Raises:
            RequestError: the list is empty, which a DataLoader cannot combine into a batch.
        """
        if len(numbers) == 0:
            raise RequestError(
                "this rank has no samples in the last step (drop_last=False), and a DataLoader makes no batch of 0 "
                "samples; use drop_last=True, fewer ranks, or StreamDataset with batch_size=None, which yields an "
                "empty batch"
            )
        batch = read_batch(self.samples, numbers)
        return [{name: tensor[row] for name, tensor in batch.items()} for row in range(len(numbers))]  # type: ignore[index]


class StreamDataset(IterableDataset):  # type: ignore[misc]
    """The batches of one rank, for a DataLoader with batch_size=None and any number of workers.

    Worker w of n reads the steps w, w + n, ..., and the DataLoader takes the batches of its workers in turn, so the
    order is that of `Order`. A DataLoader reads ahead, so the program must count the steps that it trained, and resume
    with Order(consumed=steps * order.step_samples). `Loader` counts them itself.
    """

    def __init__(self, samples: Samples, order: Order) -> None:
        """Wrap samples and an order."""
        self.samples, self.order = samples, order

    def __len__(self) -> int:
        """Return the number of steps that are left."""
        return len(self.order)

    def __iter__(self) -> Iterator[Tensors]:
        """Yield the batch of each step that is left, or a worker's share of them."""
        worker = get_worker_info()
        first, step = (worker.id, worker.num_workers) if worker else (0, 1)
        for number, chosen in enumerate(self.order.copy()):
            if number % step == first:
                yield read_batch(self.samples, chosen)


class Loader:
    """The batches of one rank, step by step, with a state that resumes on any number of ranks.

    An iteration continues after the batches that were yielded, so the samples are read once: `samples` of
    `tokenmill.data.open` already contains the epochs. An incomplete last step is left out on all ranks.
    """

    def __init__(
        self,
        samples: Samples,
        micro_batch: int,
        *,
        rank: int | None = None,
        world: int | None = None,
        mesh: "DeviceMesh | None" = None,
        global_batch: int | None = None,
        consumed: int = 0,
        prefetch: int = 2,
        pin_memory: bool = False,
    ) -> None:
        """Start after `consumed` samples.

        Args:
            samples: the samples of the run.
            micro_batch: the samples of one rank in one batch.
            rank: the data-parallel rank. None: that of `mesh`, of torch.distributed, or of torchrun's environment.
            world: the number of data-parallel ranks, in the same way.
            mesh: the data-parallel dimension of a device mesh, such as mesh["dp"], if ranks share samples (tensor,
                pipeline or context parallelism).
            global_batch: samples of all ranks in one step of the optimizer, a multiple of micro_batch * world. The
                loader then ends after a complete step of the optimizer. None: micro_batch * world.
            consumed: the samples that all ranks together have consumed before.
            prefetch: batches that a thread reads ahead; 0 reads in the caller's thread.
            pin_memory: read into page-locked memory, from which copies to a GPU are asynchronous
                (`tensor.to(device, non_blocking=True)`). torch uses the memory of a batch again only after these
                copies. Without a GPU it has no effect.

        Raises:
            RequestError: a number is outside its range, or the global batch is not a multiple.
        """
        self.samples, self.micro_batch = samples, micro_batch
        self.rank, self.world = find_rank(rank, world, mesh)
        self._known_batch = global_batch or 0
        self.global_batch = micro_batch * self.world if global_batch is None else global_batch
        self._order = self._start(consumed)
        if prefetch < 0:
            raise RequestError(f"invalid prefetch {prefetch}: it must be 0 or more; set prefetch")
        self.prefetch = prefetch
        self.pin_memory = pin_memory and torch.cuda.is_available()
        if pin_memory and not self.pin_memory:
            log.warning("%stokenmill data: pin_memory has no effect without a GPU", mark(samples.identity))
        self._batches: _Batches | None = None
        self._count = 0
        self._wait = self._last_wait = 0.0
        log_start(samples, consumed, self.rank, self.world)

    @property
    def consumed(self) -> int:
        """Samples that all ranks together have consumed, including those of the batch that was yielded last."""
        return self._order.consumed

    @property
    def accumulation(self) -> int:
        """Batches of this rank in one step of the optimizer."""
        return self.global_batch // (self.micro_batch * self.world)

    def __len__(self) -> int:
        """Return the number of batches that are left."""
        return len(self._order)

    def __iter__(self) -> Iterator[Tensors]:
        """Yield the batches that are left; a second iteration ends the first one."""
        self.close()
        if self._count and not self._order:
            log.warning(
                "%stokenmill data: all %d samples were read, so this iteration has no batches; request more samples, "
                "or call seek(0)",
                mark(self.samples.identity),
                self.consumed,
            )
        self._batches = _Batches(self.samples, self._order.copy(), self.prefetch, self.pin_memory)
        return self._yield(self._batches)

    def _yield(self, batches: "_Batches") -> Iterator[Tensors]:
        try:
            while self._order and not batches.closed:
                started = time.perf_counter()
                batch = batches.take()
                self._last_wait = time.perf_counter() - started
                self._wait += self._last_wait
                self._count += 1
                self._order.advance()
                yield batch
        finally:
            batches.close()

    def state_dict(self) -> dict[str, int | str]:
        """Return the state for a checkpoint: the same on all ranks."""
        return LoaderState.capture(self.samples.identity, self.consumed, self._known_batch)

    def load_state_dict(self, state: Mapping[str, object]) -> None:
        """Continue after the samples of a checkpoint, also of another number of ranks or another batch.

        Raises:
            RequestError: the state is damaged, or belongs to other samples; the message lists the differences.
        """
        content = check_state(state, self.samples)
        self.seek(content.consumed)
        log_batch_change(self.samples, content.global_batch, self._known_batch)
        log_start(self.samples, content.consumed, self.rank, self.world)

    def seek(self, consumed: int) -> None:
        """Continue after another number of samples; RequestError if there are fewer."""
        order = self._start(consumed)
        self.close()
        self._order = order

    def metrics(self) -> LoaderMetrics:
        """Return the counts since the loader was made."""
        return LoaderMetrics(
            consumed=self.consumed,
            batches=self._count,
            tokens=self._count * self.micro_batch * self.samples.seq_length,
            data_wait_seconds=self._wait,
            last_wait_seconds=self._last_wait,
            synthetic=self.samples.identity.synthetic,
        )

    @property
    def data_wait_seconds(self) -> float:
        """Seconds in which this rank waited for batches."""
        return self._wait

    def close(self) -> None:
        """End an iteration and its thread; a later iteration continues."""
        if self._batches is not None:
            self._batches.close()
            self._batches = None

    def __enter__(self) -> Self:
        """Return the loader; the end of the `with` block closes it."""
        return self

    def __exit__(self, *_: object) -> None:
        """Close the loader."""
        self.close()

    def _start(self, consumed: int) -> Order:
        return Order(
            len(self.samples),
            self.micro_batch,
            rank=self.rank,
            world=self.world,
            consumed=consumed,
            global_batch=self.global_batch,
        )


class _Batches:
    """The batches of an order, read ahead by a thread."""

    def __init__(self, samples: Samples, order: Order, prefetch: int, pin_memory: bool) -> None:
        self._samples, self._steps, self._pin_memory = samples, iter(order), pin_memory
        self._executor = ThreadPoolExecutor(1, "tokenmill-loader", _choose_device(pin_memory)) if prefetch else None
        self._pending: deque[Future[Tensors]] = deque()
        self.closed = False
        for _ in range(prefetch):
            self._request()

    def take(self) -> Tensors:
        """Return the next batch; an error of the thread is raised here."""
        if self._executor is None:
            return read_batch(self._samples, next(self._steps), self._pin_memory)
        batch = self._pending.popleft().result()
        self._request()
        return batch

    def close(self) -> None:
        """End the thread, after the batch that it reads."""
        self.closed = True
        if self._executor is not None:
            self._executor.shutdown(wait=True, cancel_futures=True)

    def _request(self) -> None:
        numbers = next(self._steps, None)
        if numbers is not None and self._executor is not None:
            self._pending.append(self._executor.submit(read_batch, self._samples, numbers, self._pin_memory))


def _choose_device(pin_memory: bool) -> Callable[[], None] | None:
    """Return a function that selects this thread's GPU in another thread, in which pinned memory is allocated.

    A new thread has GPU 0, on which every rank would otherwise create a context.
    """
    return partial(torch.cuda.set_device, torch.cuda.current_device()) if pin_memory else None


def read_batch(samples: Samples, numbers: Sequence[int], pin_memory: bool = False) -> Tensors:
    """Return the samples with these numbers as tensors, which share no memory with another batch."""
    shape = (len(numbers), samples.seq_length)

    def allocate(dtype: "torch.dtype", size: tuple[int, ...] = shape) -> "torch.Tensor":
        return torch.empty(size, dtype=dtype, pin_memory=pin_memory)

    tensors: Tensors = {
        "tokens": allocate(torch.int64),
        "labels": allocate(torch.int64),
        "loss_mask": allocate(torch.float32),
        "position_ids": allocate(torch.int64),
    }
    if samples.documents == "mask":
        tensors["attention_mask"] = allocate(torch.bool, (shape[0], 1, shape[1], shape[1]))
    arrays = {name: tensor.numpy() for name, tensor in tensors.items()}  # type: ignore[union-attr]
    starts = None if samples.documents == "none" else torch.empty(shape, dtype=torch.bool).numpy()
    batch = samples.batch(numbers, out=Batch(**arrays, starts=starts))
    batch.labels[batch.loss_mask == 0] = IGNORED
    if batch.cu_seqlens is not None and batch.max_seqlen is not None:
        tensors["cu_seqlens"] = torch.from_numpy(batch.cu_seqlens)
        tensors["max_seqlen"] = batch.max_seqlen
    return tensors


def find_rank(rank: int | None, world: int | None, mesh: "DeviceMesh | None" = None) -> tuple[int, int]:
    """Return the data-parallel rank and the number of ranks: given, of a mesh, of torch.distributed, or of torchrun.

    Raises:
        RequestError: only one of rank and world is given, or the mesh has several dimensions.
    """
    if (rank is None) != (world is None):
        raise RequestError(f"invalid rank {rank}, world {world}: specify both, or none of them")
    if rank is not None and world is not None:
        return rank, world
    if mesh is not None:
        if mesh.ndim != 1:
            raise RequestError(
                f"invalid mesh with the dimensions {mesh.mesh_dim_names}: pass only the data-parallel one, such as "
                'mesh["dp"]'
            )
        return mesh.get_local_rank(), mesh.size()
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        return torch.distributed.get_rank(), torch.distributed.get_world_size()
    values = os.environ.get("RANK", "0"), os.environ.get("WORLD_SIZE", "1")
    if not all(value.isdecimal() for value in values):
        raise RequestError(f"invalid RANK {values[0]!r}, WORLD_SIZE {values[1]!r}: they must be numbers; unset them")
    return int(values[0]), int(values[1])
