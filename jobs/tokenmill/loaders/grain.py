"""The samples as a data source and a dataset of Grain, for programs in JAX such as MaxText.

`RankDataset` has the batches of one data-parallel rank in the order of `tokenmill.data.Order`: Grain must not shuffle,
repeat, shard or batch them. `GrainSource` has the samples by number, for other pipelines of Grain.
"""

from collections.abc import Mapping
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from tokenmill.errors import RequestError
from tokenmill.loaders.state import LoaderState, check_state, log_batch_change, log_start
from tokenmill.samples.order import Order
from tokenmill.samples.samples import Samples

try:
    import grain
    from grain.experimental import ElasticIterator
except ModuleNotFoundError as error:
    if error.name != "grain":
        raise
    raise ModuleNotFoundError(
        "tokenmill.loaders.grain needs Grain: run pip install '.[grain]' in the clone of tokenmill", name="grain"
    ) from None

Array = npt.NDArray[Any]

Fields = Literal["tokenmill", "maxtext"]
"""The names and forms of the arrays of a batch, each of shape (samples, seq_length) if no other is given:

- tokenmill: those of `tokenmill.loaders.torch.Tensors`, as arrays
- maxtext: int32. `inputs` and `targets`, the token after each input; `inputs_position` and `targets_position`;
  `inputs_segmentation`, the number of the document in the sample, from 1 on, or 1 with documents "none";
  `targets_segmentation`, the same, and 0 where the loss does not count
  (src/maxtext/input_pipeline/data_processing_utils.py and loss_fn in trainers/pre_train/train.py of MaxText)
"""

Arrays = dict[str, "Array | int"]


class GrainSource:
    """The samples by number: a `grain.sources.RandomAccessDataSource`.

    A worker process opens the files again: neither the ids nor the order of the samples are copied to it.
    """

    def __init__(self, samples: Samples, fields: Fields = "tokenmill") -> None:
        """Wrap samples.

        Raises:
            RequestError: the fields are unknown, or cannot show the documents of the samples.
        """
        _check_fields(samples, fields)
        if samples.documents == "varlen":
            raise RequestError(
                "invalid documents varlen: its cu_seqlens belong to a batch, and GrainSource returns samples; use "
                "RankDataset, or specify documents positions"
            )
        self.samples, self.fields = samples, fields

    def __len__(self) -> int:
        """Return the number of samples."""
        return len(self.samples)

    def __getitem__(self, number: int) -> dict[str, Array]:
        """Return a sample: the arrays of a batch without their first dimension."""
        arrays: Any = _read_arrays(self.samples, [number], self.fields)
        return {name: array[0] for name, array in arrays.items()}

    def __repr__(self) -> str:
        """Return a text that is equal for equal samples: Grain's DataLoader compares it on a resume."""
        return f"GrainSource({self.samples.fingerprint()}, {self.fields})"


class RankDataset(grain.IterDataset):  # type: ignore[misc]
    """The batches of one data-parallel rank, step by step; its iterators resume on any number of ranks.

    Grain's operations on elements, such as `map`, may follow it. An incomplete last step is left out on all ranks. The
    threads and worker processes are those of the arguments, in place of `mp_prefetch`.
    """

    def __init__(
        self,
        samples: Samples,
        micro_batch: int,
        *,
        rank: int,
        world: int,
        global_batch: int | None = None,
        consumed: int = 0,
        fields: Fields = "tokenmill",
        read_options: "grain.ReadOptions | None" = None,
        multiprocessing_options: "grain.MultiprocessingOptions | None" = None,
    ) -> None:
        """Start after `consumed` samples.

        Args:
            samples: the samples of the run.
            micro_batch: the samples of one rank in one batch.
            rank: the data-parallel rank; jax.process_index() if each process has its own samples.
            world: the number of data-parallel ranks, such as jax.process_count().
            global_batch: samples of all ranks in one step of the optimizer, as of `Order`.
            consumed: the samples that all ranks together have consumed before.
            fields: the names of the arrays of a batch.
            read_options: threads of this process, or of each worker process. None: one thread that reads two batches
                ahead.
            multiprocessing_options: worker processes, each of which reads its share of the steps. None: none.

        Raises:
            RequestError: a number is outside its range, the global batch is not a multiple, or the fields are unknown
                or cannot show the documents of the samples.
        """
        super().__init__()
        _check_fields(samples, fields)
        self.samples, self.fields = samples, fields
        self.global_batch = global_batch
        self._micro_batch, self._rank, self._world, self._consumed = micro_batch, rank, world, consumed
        self._read_options = read_options or grain.ReadOptions(num_threads=1, prefetch_buffer_size=2)
        self._multiprocessing_options = multiprocessing_options
        self.start(consumed)  # checks the numbers

    def __iter__(self) -> "RankIterator":
        """Return an iterator over the batches after `consumed` samples."""
        return RankIterator(self, self._consumed)

    def start(self, consumed: int) -> Order:
        """Return the order of this rank after a number of samples (RequestError: there are fewer)."""
        return Order(
            len(self.samples),
            self._micro_batch,
            rank=self._rank,
            world=self._world,
            consumed=consumed,
            global_batch=self.global_batch or self._micro_batch * self._world,
        )

    def read(self, order: Order) -> "grain.DatasetIterator":
        """Return an iterator of Grain over the batches of an order."""
        steps = grain.MapDataset.source(_StepSource(self.samples, order, self.fields))
        batches = steps.to_iter_dataset(self._read_options)
        if self._multiprocessing_options is not None:
            batches = batches.mp_prefetch(self._multiprocessing_options)
        return iter(batches)


class RankIterator(grain.DatasetIterator):  # type: ignore[misc]
    """The batches of a RankDataset; its state is that of all loaders of tokenmill, and the same on all ranks."""

    def __init__(self, dataset: RankDataset, consumed: int) -> None:
        """Start after `consumed` samples; nothing is read before the first batch, or `start_prefetch`."""
        super().__init__()
        self._dataset = dataset
        self._order = dataset.start(consumed)
        self._state = LoaderState.capture(dataset.samples.identity, consumed, dataset.global_batch or 0)
        self._reader: grain.DatasetIterator | None = None
        log_start(dataset.samples, consumed, self._order.rank, self._order.world)

    @property
    def consumed(self) -> int:
        """Samples that all ranks together have consumed, including those of the batch that was yielded last."""
        return self._order.consumed

    @property
    def base_iterator(self) -> "grain.DatasetIterator":
        """The iterator of Grain that reads the batches; Grain's checkpoints ask for it in an ElasticIterator."""
        if self._reader is None:
            self._reader = self._dataset.read(self._order.copy())
        return self._reader

    def __next__(self) -> Arrays:
        """Return the next batch."""
        self._assert_not_closed()
        batch: Arrays = next(self.base_iterator)
        self._order.advance()
        return batch

    def get_state(self) -> dict[str, int | str]:
        """Return the state for a checkpoint: numbers and texts, the same on all ranks."""
        return {**self._state, "consumed": self.consumed}

    def set_state(self, state: Mapping[str, object]) -> None:
        """Continue after the samples of a checkpoint, also of another number of ranks or another batch.

        Raises:
            RequestError: the state is damaged, or belongs to other samples; the message lists the differences.
        """
        samples = self._dataset.samples
        content = check_state(state, samples)
        self._order = self._dataset.start(content.consumed)
        self._stop_reading()
        log_batch_change(samples, content.global_batch, self._dataset.global_batch or 0)
        log_start(samples, content.consumed, self._order.rank, self._order.world)

    def start_prefetch(self) -> None:
        """Begin to read the next batches."""
        self.base_iterator.start_prefetch()

    def close(self) -> None:
        """End the threads and worker processes."""
        super().close()
        self._stop_reading()

    def _stop_reading(self) -> None:
        if self._reader is not None:
            self._reader.close()
            self._reader = None


# MaxText stores the state of an ElasticIterator once for all processes, and loads it on any number of them.
ElasticIterator.register(RankIterator)


class _StepSource:
    """The batches of an order by the number of the step."""

    def __init__(self, samples: Samples, order: Order, fields: Fields) -> None:
        self._samples, self._order, self._fields = samples, order, fields
        self._steps = len(order)

    def __len__(self) -> int:
        return self._steps

    def __getitem__(self, step: int) -> Arrays:
        return _read_arrays(self._samples, self._order.peek(step), self._fields)


def _check_fields(samples: Samples, fields: Fields) -> None:
    if fields not in ("tokenmill", "maxtext"):
        raise RequestError(f"invalid fields {fields!r}: choose tokenmill or maxtext")
    if fields == "maxtext" and samples.documents not in ("none", "positions"):
        raise RequestError(
            f"invalid documents {samples.documents!r}: MaxText makes masks from the numbers of documents; choose none "
            "or positions"
        )


def _read_arrays(samples: Samples, numbers: list[int], fields: Fields) -> Arrays:
    batch = samples.batch(numbers)
    if fields == "maxtext":
        starts = batch.starts
        segments = np.ones_like(batch.tokens) if starts is None else starts.cumsum(axis=1)
        arrays = {
            "inputs": batch.tokens,
            "inputs_position": batch.position_ids,
            "inputs_segmentation": segments,
            "targets": batch.labels,
            "targets_position": batch.position_ids,
            "targets_segmentation": np.where(batch.loss_mask != 0, segments, 0),
        }
        return {name: array.astype(np.int32) for name, array in arrays.items()}
    named: Arrays = {
        "tokens": batch.tokens,
        "labels": batch.masked_labels(),
        "loss_mask": batch.loss_mask,
        "position_ids": batch.position_ids,
    }
    if batch.attention_mask is not None:
        named["attention_mask"] = batch.attention_mask
    if batch.cu_seqlens is not None and batch.max_seqlen is not None:
        named |= {"cu_seqlens": batch.cu_seqlens, "max_seqlen": batch.max_seqlen}
    return named
