"""The records of the stage transform in plans: what a unit reads and writes, and what else determines its bytes."""

from typing import Annotated, Any

from msgspec import Meta

from tokenmill.flow.contract import Count, InputFile, Name, Record, StageKind


class TransformSpec(Record, frozen=True):
    """The inputs and the shards of a unit.

    Shard number i of `shards` has the records whose number in the input, modulo `modulus`, is `remainder` + i. A unit
    whose input is not divided has one shard and the modulus 1. `limits` has the maximum number of records that each
    shard reads.
    """

    inputs: Annotated[list[InputFile], Meta(min_length=1)]
    shards: Annotated[list[Name], Meta(min_length=1)]
    remainder: Count = 0
    modulus: Annotated[int, Meta(ge=1)] = 1
    limits: list[Count] | None = None


class TransformBasis(Record, frozen=True):
    """The parameters that determine the bytes of all units: the transform with its arguments, and the output's form.

    `transform` is the JSON of a `transforms.call.TransformCall`; for a function of the user, `code` is a hash of it.
    """

    transform: dict[str, Any]
    compression: str
    code: str = ""
    format: str = ""
    output_format: str = ""


TRANSFORM = StageKind("transform", TransformSpec, TransformBasis)
"""The record types of the stage that changes the shape of records."""
