"""Which sample each rank takes at each step, as Megatron-LM's sampler assigns them.

Step i of rank r takes the samples c + r * micro_batch to c + (r + 1) * micro_batch, with c = i * micro_batch * world.
All ranks together take the samples in their order, so the position in the data is one number, `consumed`, and a run can
continue with another number of ranks or another micro-batch (megatron/training/datasets/data_samplers.py,
`MegatronPretrainingSampler`).
"""

from collections.abc import Iterator
from copy import copy
from typing import Self

from tokenmill.errors import RequestError


class Order:
    """The sample numbers of one rank, step by step: a batch sampler for torch's DataLoader."""

    def __init__(
        self,
        total: int,
        micro_batch: int,
        *,
        rank: int = 0,
        world: int = 1,
        consumed: int = 0,
        drop_last: bool = True,
        global_batch: int | None = None,
    ) -> None:
        """Start after `consumed` samples of `total`.

        Args:
            total: the number of samples.
            micro_batch: the samples of one rank in one step.
            rank: the data-parallel rank.
            world: the number of data-parallel ranks.
            consumed: the samples that all ranks together have taken before.
            drop_last: leave out the last step if it is incomplete; otherwise some ranks get fewer samples in it, or
                an empty list.
            global_batch: samples of all ranks in one step of the optimizer, a multiple of micro_batch * world. The
                order then ends after a complete step of the optimizer. None: micro_batch * world.

        Raises:
            RequestError: a number is outside its range, or the global batch is not a multiple.
        """
        if micro_batch < 1 or world < 1:
            raise RequestError(f"invalid micro_batch {micro_batch}, world {world}: both must be 1 or more; set them")
        if not 0 <= rank < world:
            raise RequestError(f"invalid rank {rank}: it must be at least 0 and below world, {world}; set rank")
        if not 0 <= consumed <= total:
            raise RequestError(
                f"invalid consumed {consumed:,}: there are {total:,} samples; request more samples, or start with a "
                "smaller number"
            )
        if global_batch is not None and (global_batch < 1 or global_batch % (micro_batch * world)):
            raise RequestError(
                f"invalid global_batch {global_batch}: it must be a multiple of micro_batch {micro_batch} * {world} "
                "ranks; change one of them"
            )
        self.total = total if global_batch is None else total - (total - consumed) % global_batch
        self.micro_batch, self.rank, self.world = micro_batch, rank, world
        self.consumed = consumed
        """Samples of all ranks in the steps that were yielded, and before them."""
        self.drop_last = drop_last
        self._ended = False

    @property
    def step_samples(self) -> int:
        """The samples of all ranks in one complete step."""
        return self.micro_batch * self.world

    def __len__(self) -> int:
        """Return the number of steps of an iteration that starts now."""
        return self._count_steps(self.total if self._ended else self.total - self.consumed)

    def _count_steps(self, left: int) -> int:
        return left // self.step_samples if self.drop_last else -(-left // self.step_samples)

    def __iter__(self) -> Iterator[list[int]]:
        """Yield the sample numbers of this rank for each step that is left; `consumed` counts yielded steps.

        An iteration after one that reached the end starts again with the first sample.
        """
        if self._ended:
            self.consumed, self._ended = 0, False
        while self:
            numbers = self.peek()
            self.advance()
            yield numbers
        self._ended = True

    def peek(self, steps: int = 0) -> list[int]:
        """Return the sample numbers of this rank for the next step, or a number of steps after it, without counting."""
        start = self.consumed + steps * self.step_samples + self.rank * self.micro_batch
        return list(range(min(start, self.total), min(start + self.micro_batch, self.total)))

    def advance(self) -> None:
        """Count the next step."""
        self.consumed = min(self.consumed + self.step_samples, self.total)

    def copy(self) -> Self:
        """Return an order that continues from the same step, for a reader that runs ahead."""
        return copy(self)

    def __bool__(self) -> bool:
        """Return whether a step is left."""
        return self._count_steps(self.total - self.consumed) > 0
