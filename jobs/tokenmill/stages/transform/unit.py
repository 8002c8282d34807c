"""Transform one unit: read its files in blocks, apply the function to each record, and write the records to shards.

A unit has several shards if its input file is divided between many shards: then it reads the file once for all of them.
"""

import os
from collections import deque
from collections.abc import Callable
from contextlib import AbstractContextManager, closing
from pathlib import Path
from typing import NamedTuple

import xxhash

from tokenmill.core.machine import describe_memory
from tokenmill.engine.contract import InputFile, InputRange, Part
from tokenmill.engine.lineage import select
from tokenmill.engine.record import Counts, Unit
from tokenmill.engine.workspace import OutputFile, Workspace
from tokenmill.errors import TransientError
from tokenmill.records.block_kinds import ROWS, ReadSettings
from tokenmill.records.blocks import BlockReader, open_blocks
from tokenmill.records.parse import ParsedRecords, RejectedRecord, parse_records
from tokenmill.records.readers import MemoryBuffer, get_record_unit, make_bad_record_error, reject_mismatch
from tokenmill.sources.quarantine import Quarantine, how_to_correct
from tokenmill.stages.registry import TransformSpec
from tokenmill.stages.transform.lines import JsonlShard, encode_line, remove_nulls
from tokenmill.stages.transform.load import describe_exception
from tokenmill.stages.transform.options import PARQUET, TransformOptions
from tokenmill.stages.transform.parquet import ParquetShard
from tokenmill.stages.transform.types import Record, RejectedRow, Transform

BLOCK_BYTES = 1 << 20
"""Bytes of input that are in memory at a time. The blocks of a file, and so the output, do not depend on workers."""

FAILED, REFUSED, NOT_AN_OBJECT = "transform_failed", "transform_refused", "transform_result"
"""Codes of the reasons for which a record is rejected here."""

Fetch = Callable[[InputFile], AbstractContextManager[Path]]
"""A function that opens a context with the local path of an input."""


class _Shard:
    """A shard that is being written, and which records of the current input it has."""

    def __init__(self, output: OutputFile, options: TransformOptions, limit: int | None) -> None:
        self.output = output
        self.limit = limit
        self.read = 0
        self.records = 0
        self.parts: list[Part] = []
        self.ranges: list[InputRange] = []
        make_file = ParquetShard if options.output_format == PARQUET else JsonlShard
        self._file = make_file(output, options.compression)
        self._lines: list[bytes] = []
        self._kept = bytearray()  # bit i: record i of the shard's records of the input was written
        self._first = 0

    @property
    def is_full(self) -> bool:
        """Whether the shard has read as many records as it may read."""
        return self.limit is not None and self.read >= self.limit

    def add(self, index: int, line: bytes) -> None:
        """Add the line of the shard's record number `index` of the current input."""
        self._lines.append(line)
        self._kept += bytes(max(0, (index >> 3) + 1 - len(self._kept)))
        self._kept[index >> 3] |= 1 << (index & 7)
        self.records += 1

    def write(self) -> None:
        """Write the lines of a block."""
        if self._lines:
            self._lines.append(b"")
            self._file.write(b"\n".join(self._lines))
            self._lines = []

    def end_input(self, input: InputFile, records: int, first: int, step: int) -> None:
        """Record which records of an input the shard has; the input has `records`."""
        kept = int.from_bytes(self._kept, "little")
        self.parts += select(input.parts or [], records, kept, first, step)
        self.ranges.append(InputRange(input.path, self._first, self.records - self._first))
        self._first, self._kept = self.records, bytearray()

    def finish(self) -> None:
        """Complete the file."""
        self._file.finish()
        self.output.describe(records=self.records, blank=0, parts=self.parts)


class _Position(NamedTuple):
    """The number of records and lines of an input before the current block."""

    records: int = 0
    lines: int = 0


class _Block(NamedTuple):
    """The records of a block of an input, whose local file is `path`, and their kind."""

    input: InputFile
    path: Path
    parsed: ParsedRecords
    position: _Position
    kind: str


class UnitTransformer:
    """The state of one unit."""

    def __init__(
        self, unit: Unit, workspace: Workspace, options: TransformOptions, function: Transform, fetch: Fetch | None
    ) -> None:
        """Prepare to run a function on the inputs of a unit; `fetch` replaces reading a file of the disk."""
        self._spec = unit.spec(TransformSpec)
        self._workspace = workspace
        self._options = options
        self._function: Callable[[Record], object] = getattr(function, "apply", function)
        self._fetch = fetch or (lambda input: workspace.reading(input, input.bytes or 0))
        self._reading: ReadSettings = options.reading()
        self.counts: Counts = {"in": 0, "out": 0, "rejected": 0, "dropped": 0, "blank": 0}
        self._quarantine = Quarantine(workspace, unit.id, options.max_bad_records, self.counts)
        self._directory = Path.cwd()
        limits = self._spec.limits
        self._shards = [
            _Shard(workspace.open(name), options, limits[number] if limits else None)
            for number, name in enumerate(self._spec.shards)
        ]

    def run(self) -> Counts:
        """Transform the inputs in their order."""
        for input in self._spec.inputs:
            if not self._is_full:
                self._read(input)
        for shard in self._shards:
            shard.finish()
            self.counts["out"] += shard.records
            self._workspace.inputs += shard.ranges
        return self.counts

    @property
    def _is_full(self) -> bool:
        return all(shard.is_full for shard in self._shards)

    def _read(self, input: InputFile) -> None:
        """Transform one file, block by block, until all shards are full."""
        # A file that no stage made has no recorded hash to compare with.
        digest = xxhash.xxh3_128() if self._workspace.plan.upstream.maker else None
        buffer, position, compressed = MemoryBuffer(), _Position(), 0
        share = len(self._shards) / self._spec.modulus
        with (
            self._fetch(input) as path,
            closing(
                open_blocks(path, (), display=str(path), digest=digest, settings=self._reading, complete=True)
            ) as blocks,
        ):
            while not blocks.finished and not self._is_full:
                end = blocks.fill(buffer, 0, BLOCK_BYTES)
                parsed = self._parse(path, blocks, buffer, end, position)
                self._transform(_Block(input, path, parsed, position, blocks.kind))
                position = _Position(position.records + parsed.records, position.lines + parsed.records + parsed.blank)
                self._workspace.report_progress(int(blocks.compressed * share) - int(compressed * share))
                compressed = blocks.compressed
            if digest is not None and blocks.finished and blocks.digested:
                self._workspace.check_hash(input, digest.hexdigest())
            records = position.records if blocks.finished else _count_records(input, position.records)
        for number, shard in enumerate(self._shards):
            shard.end_input(input, records, self._spec.remainder + number, self._spec.modulus)

    def _parse(
        self, path: Path, blocks: BlockReader, buffer: MemoryBuffer, end: int, position: _Position
    ) -> ParsedRecords:
        """Parse those records of a block that belong to this unit, and count them."""
        remainder, modulus, first = self._spec.remainder, self._spec.modulus, position.records
        last = remainder + len(self._shards)

        def is_wanted(record: int) -> bool:
            return remainder <= (first + record) % modulus < last

        parsed = parse_records(
            blocks.kind,
            buffer.data,
            0,
            end,
            (),
            begins_file=position == (0, 0),
            wanted=None if modulus == len(self._shards) else is_wanted,
        )
        if not first:
            reject_mismatch(path, self._reading, str(path), blocks.kind, len(parsed.rows), parsed.rejected)
        self.counts["in"] += parsed.records - parsed.skipped
        self.counts["blank"] += parsed.blank if remainder == 0 else 0  # another unit reads the same blank lines
        return parsed

    def _transform(self, block: _Block) -> None:
        """Transform the records of a block and write them; then treat the rejected ones in their order."""
        rejected: list[RejectedRecord] = []
        invalid = deque(sorted(block.parsed.rejected))
        for number, row in enumerate(block.parsed.rows):
            record = block.parsed.get_record(number)
            while invalid and invalid[0].record < record:
                self._read_invalid(block, invalid.popleft(), rejected)
            shard, index = self._find_shard(block, record)
            if not self._count_read(shard):
                continue
            line = self._apply(block, number, row, rejected)
            if line is not None:
                shard.add(index, line)
        for bad in invalid:
            self._read_invalid(block, bad, rejected)
        for shard_file in self._shards:
            shard_file.write()
        if Path.cwd() != self._directory:  # the paths of tokenmill may be relative
            os.chdir(self._directory)
        for bad in sorted(rejected):
            self._reject(block, bad)

    def _find_shard(self, block: _Block, record: int) -> tuple[_Shard, int]:
        """Return the shard of a record of a block, and the number of the record among those of the shard."""
        index, number = divmod(block.position.records + record, self._spec.modulus)
        return self._shards[number - self._spec.remainder], index

    def _count_read(self, shard: _Shard) -> bool:
        """Count a record of a shard as read, and return whether the shard may read it."""
        if shard.is_full:
            self.counts["in"] -= 1
            return False
        shard.read += 1
        return True

    def _read_invalid(self, block: _Block, bad: RejectedRecord, rejected: list[RejectedRecord]) -> None:
        """Reject a record that cannot be parsed, if its shard reads it."""
        shard, _ = self._find_shard(block, bad.record)
        if self._count_read(shard):
            rejected.append(bad)

    def _apply(self, block: _Block, number: int, row: Record, rejected: list[RejectedRecord]) -> bytes | None:
        """Return the line of the transformed record; None if it was dropped, or added to the rejected ones."""
        try:
            result = self._function(remove_nulls(row) if block.kind == ROWS else row)
            if result is None:
                self.counts["dropped"] += 1
                return None
            if isinstance(result, dict):
                return encode_line(result)
            code, reason = NOT_AN_OBJECT, f"the transform returned {type(result).__name__}, not an object or None"
        except RejectedRow as error:
            code, reason = REFUSED, describe_exception(error)
        except MemoryError as error:
            line = block.position.lines + block.parsed.get_line(number)
            raise TransientError(
                f"{block.path}, {get_record_unit(block.path, self._reading, block.kind)} {line:,}: memory ran out in "
                f"the transform ({describe_memory()}); raise the memory limit or lower --processes, and run the same "
                "command again"
            ) from error
        except KeyboardInterrupt:
            raise
        except BaseException as error:  # the function is code of the user, and may end with SystemExit
            code, reason = FAILED, f"the transform failed: {type(error).__name__}: {describe_exception(error)}"
        rejected.append(block.parsed.describe_rejected(number, code, reason))
        return None

    def _reject(self, block: _Block, bad: RejectedRecord) -> None:
        position = block.position
        bad = bad._replace(record=position.records + bad.record, line=position.lines + bad.line)
        if self._options.on_bad_record == "fail":
            unit = get_record_unit(block.path, self._reading, block.kind)
            correct = how_to_correct(self._workspace.plan, block.input, bad.record)
            raise make_bad_record_error(str(block.path), unit, bad, correct)
        self._quarantine.add(block.input.path, bad)


def _count_records(input: InputFile, read: int) -> int:
    """Return the number of records of an input, of which only the first ones were read."""
    counts = [part.count for part in input.parts or []]
    return read if None in counts else sum(count or 0 for count in counts)
