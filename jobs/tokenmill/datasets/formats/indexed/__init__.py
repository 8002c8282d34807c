"""Megatron-LM's indexed dataset as an output format: a `.bin` and an `.idx` file for each key of a unit.

`writer` describes the layout and writes it, `reader` maps it, `check` checks it as Megatron-LM will read it.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from tokenmill.datasets.formats.base import Destination, Format, Problem, State, Writer
from tokenmill.engine.contract import EmptyPair

if TYPE_CHECKING:
    from tokenmill.datasets.formats.base import Array
    from tokenmill.datasets.formats.indexed.writer import IndexedWriter
    from tokenmill.engine.contract import FileEntry, Part
    from tokenmill.engine.workspace import OutputFile


class _PairWriter:
    """Writes the pair of one key: the .bin file, and the parts of the .idx file."""

    def __init__(self, destination: Destination, output: "OutputFile", writer: "IndexedWriter") -> None:
        self._destination = destination
        self._bin = output
        self._writer = writer

    @property
    def documents(self) -> int:
        return self._writer.documents

    @property
    def sequences(self) -> int:
        return self._writer.sequences

    @property
    def tokens(self) -> int:
        return self._writer.tokens

    def add(self, ids: "Array", lengths: "Array", sequences_per_document: "Array | None") -> None:
        self._writer.add(ids, lengths, sequences_per_document)

    def save_state(self) -> State:
        self._bin.sync()
        state: State = msgspec.to_builtins(self._writer.save_state(self._bin.hashed()))
        return state

    def finish(self, parts: "list[Part]") -> None:
        """Write the index; record a pair without tokens as empty, because Megatron-LM cannot map it."""
        destination, writer = self._destination, self._writer
        if writer.tokens == 0:
            destination.workspace.drop(self._bin)
            destination.workspace.empty.append(EmptyPair(destination.key, destination.prefix, writer.documents))
            writer.discard()
            return
        self._bin.describe(
            role="bin",
            key=destination.key,
            prefix=destination.prefix,
            documents=writer.documents,
            sequences=writer.sequences,
            tokens=writer.tokens,
            parts=parts,
        )
        index = destination.open("idx")
        index.describe(role="idx", key=destination.key, prefix=destination.prefix)
        writer.write_index(index)
        writer.close()  # the files stay: until the commit, the unit can still resume from the journal


class _IndexedFormat:
    name = "indexed"
    suffixes = ("bin", "idx")

    def start(self, destination: Destination) -> Writer:
        from tokenmill.datasets.formats.indexed.writer import IndexedWriter

        output = destination.open("bin", read_soon=False)
        return _PairWriter(destination, output, IndexedWriter(output, destination.path("idx"), destination.dtype))

    def can_resume(self, destination: Destination, state: State) -> bool:
        from tokenmill.datasets.formats.indexed.writer import CODES, WriterState

        saved = WriterState.from_json(state)
        index = destination.path("idx").name
        return (
            saved.dtype_code == CODES[destination.dtype]
            and destination.has(destination.path("bin").name, saved.bin_bytes, saved.bin_hash)
            and destination.has(f"{index}.lengths", 4 * saved.sequences, saved.lengths_hash)
            and destination.has(f"{index}.documents", 8 * (saved.documents - saved.even), saved.documents_hash)
        )

    def resume(self, destination: Destination, state: State) -> Writer:
        from tokenmill.datasets.formats.indexed.writer import IndexedWriter, WriterState

        saved = WriterState.from_json(state)
        output = destination.open("bin", keep=saved.bin_bytes, read_soon=False)
        return _PairWriter(destination, output, IndexedWriter.resume(saved, output, destination.path("idx")))

    def check(
        self,
        prefix: Path,
        files: "Mapping[str, FileEntry]",
        *,
        vocab_size: int | None,
        eod: int | None,
        full: bool,
        foreign_remedy: str | None,
    ) -> list[Problem]:
        from tokenmill.datasets.formats.indexed.check import check_pair

        expected: dict[str, int | str] = {}
        for suffix, entry in files.items():
            expected |= {f"{suffix}_bytes": entry.bytes, f"{suffix}_xxh3": entry.xxh3_128}
        return check_pair(
            prefix, vocab_size=vocab_size, eod=eod, expected=expected, full=full, foreign_remedy=foreign_remedy
        )

    def check_mask(self, prefix: Path, mask_prefix: Path, *, full: bool) -> list[Problem]:
        from tokenmill.datasets.formats.indexed.mask import check_mask

        return check_mask(prefix, mask_prefix, full=full)


FORMAT: Format = _IndexedFormat()
"""The indexed dataset as an output format."""
