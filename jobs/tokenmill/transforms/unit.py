"""Transform one unit: read its files in blocks, apply the function to each record, and write the records to shards.

A unit has several shards if its input file is divided between many shards: then it reads the file once for all of them.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager, closing
from pathlib import Path
from typing import NamedTuple

import xxhash

from tokenmill.corpus.block_kinds import ROWS, ReadSettings
from tokenmill.corpus.blocks import BlockReader, open_blocks
from tokenmill.corpus.parse import ParsedRecords, RejectedRecord, parse_records
from tokenmill.corpus.quarantine import Quarantine, how_to_correct
from tokenmill.corpus.readers import MemoryBuffer, get_record_unit, make_bad_record_error, reject_mismatch
from tokenmill.flow.contract import InputFile, InputRange, Part
from tokenmill.flow.lineage import select
from tokenmill.flow.record import Counts, Unit
from tokenmill.flow.workspace import OutputFile, Workspace
from tokenmill.transforms.contract import TransformSpec
from tokenmill.transforms.lines import encode_line, make_compressor, remove_nulls
from tokenmill.transforms.options import ZSTD, TransformOptions
from tokenmill.transforms.types import Record, RejectedRow, Transform

BLOCK_BYTES = 1 << 20
"""Bytes of input that are in memory at a time. The blocks of a file, and so the output, do not depend on workers."""

FAILED, REFUSED, NOT_AN_OBJECT = "transform_failed", "transform_refused", "transform_result"
"""Codes of the reasons for which a record is rejected here."""

Fetch = Callable[[InputFile], AbstractContextManager[Path]]
"""A function that opens a context with the local path of an input."""


class _Shard:
    """A shard that is being written, and which records of the current input it has."""

    def __init__(self, output: OutputFile, compression: str, limit: int | None) -> None:
        self.output = output
        self.limit = limit
        self.read = 0
        self.records = 0
        self.parts: list[Part] = []
        self.ranges: list[InputRange] = []
        self._compressor = make_compressor() if compression == ZSTD else None
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
            data = b"\n".join(self._lines)
            self._lines = []
            self.output.write(self._compressor.compress(data) if self._compressor else data)

    def end_input(self, input: InputFile, records: int, first: int, step: int) -> None:
        """Record which records of an input the shard has; the input has `records`."""
        kept = int.from_bytes(self._kept, "little")
        self.parts += select(input.parts or [], records, kept, first, step)
        self.ranges.append(InputRange(input.path, self._first, self.records - self._first))
        self._first, self._kept = self.records, bytearray()

    def finish(self) -> None:
        """Complete the file."""
        if self._compressor:
            self.output.write(self._compressor.flush())
        self.output.describe(records=self.records, blank=0, parts=self.parts)


class _Position(NamedTuple):
    """The number of records and lines of an input before the current block."""

    records: int = 0
    lines: int = 0


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
        limits = self._spec.limits
        self._shards = [
            _Shard(workspace.open(name), options.compression, limits[number] if limits else None)
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
                self._transform(input, path, parsed, position, blocks.kind)
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

    def _transform(self, input: InputFile, path: Path, parsed: ParsedRecords, position: _Position, kind: str) -> None:
        """Transform the records of a block and write them; then treat the rejected ones in their order."""
        rejected = parsed.rejected
        remainder, modulus = self._spec.remainder, self._spec.modulus
        for number, row in enumerate(parsed.rows):
            index, shard_number = divmod(position.records + parsed.get_record(number), modulus)
            shard = self._shards[shard_number - remainder]
            if shard.is_full:
                self.counts["in"] -= 1
                continue
            shard.read += 1
            try:
                result = self._function(remove_nulls(row) if kind == ROWS else row)
                if result is None:
                    self.counts["dropped"] += 1
                    continue
                if not isinstance(result, dict):
                    reason = f"the transform returned {type(result).__name__}, not an object or None"
                    rejected.append(parsed.describe_rejected(number, NOT_AN_OBJECT, reason))
                    continue
                line = encode_line(result)
            except RejectedRow as error:
                rejected.append(parsed.describe_rejected(number, REFUSED, str(error)))
            except MemoryError:
                raise
            except Exception as error:  # the function is code of the user
                reason = f"the transform failed: {type(error).__name__}: {error}"
                rejected.append(parsed.describe_rejected(number, FAILED, reason))
            else:
                shard.add(index, line)
        for shard_file in self._shards:
            shard_file.write()
        for bad in sorted(rejected):
            self._reject(input, path, bad, position, kind)

    def _reject(self, input: InputFile, path: Path, bad: RejectedRecord, position: _Position, kind: str) -> None:
        bad = bad._replace(record=position.records + bad.record, line=position.lines + bad.line)
        if self._options.on_bad_record == "fail":
            unit = get_record_unit(path, self._reading, kind)
            correct = how_to_correct(self._workspace.plan, input, bad.record)
            raise make_bad_record_error(str(path), unit, bad, correct)
        self._quarantine.add(input.path, bad)


def _count_records(input: InputFile, read: int) -> int:
    """Return the number of records of an input, of which only the first ones were read."""
    counts = [part.count for part in input.parts or []]
    return read if None in counts else sum(count or 0 for count in counts)
