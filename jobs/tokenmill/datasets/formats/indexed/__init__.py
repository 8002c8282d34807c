"""Megatron-LM's indexed dataset: a `.bin` and an `.idx` file for each key of a unit, which `tokenize` writes.

`writer` describes the layout and writes it, `reader` maps it, `check` checks it as Megatron-LM will read it.
"""

from typing import TYPE_CHECKING

import msgspec

from tokenmill.datasets.formats.base import Destination, State
from tokenmill.engine.contract import EmptyPair

if TYPE_CHECKING:
    from tokenmill.datasets.formats.base import Array
    from tokenmill.datasets.formats.indexed.writer import IndexedWriter
    from tokenmill.engine.contract import Part
    from tokenmill.engine.workspace import OutputFile


SUFFIXES = ("bin", "idx")
"""The suffixes of the files of a pair, and their roles in a receipt; the entry of the first describes the pair."""


class PairWriter:
    """Writes the pair of one key in batches: the .bin file, and the parts of the .idx file."""

    def __init__(self, destination: Destination, output: "OutputFile", writer: "IndexedWriter") -> None:
        """Write to an open .bin file."""
        self._destination = destination
        self._bin = output
        self._writer = writer

    @property
    def sequences(self) -> int:
        """The number of sequences so far."""
        return self._writer.sequences

    @property
    def tokens(self) -> int:
        """The number of tokens so far."""
        return self._writer.tokens

    def add(self, ids: "Array", lengths: "Array", sequences_per_document: "Array | None") -> None:
        """Append a batch from `tokenize.assemble`; None means one sequence in each document."""
        self._writer.add(ids, lengths, sequences_per_document)

    def save_state(self) -> State:
        """Make the added documents durable; return the state from which `resume_pair` continues."""
        self._bin.sync()
        state: State = msgspec.to_builtins(self._writer.save_state(self._bin.hashed()))
        return state

    def finish(self, parts: "list[Part]") -> None:
        """Write the index and describe the files for the receipt; `parts` are the source records in them.

        A pair without tokens is recorded as empty, because Megatron-LM cannot map it.
        """
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


def start_pair(destination: Destination) -> PairWriter:
    """Return a writer for a unit without data."""
    from tokenmill.datasets.formats.indexed.writer import IndexedWriter

    output = destination.open("bin", read_soon=False)
    return PairWriter(destination, output, IndexedWriter(output, destination.path("idx"), destination.dtype))


def can_resume_pair(destination: Destination, state: State) -> bool:
    """Return whether the attempt has the files that a state requires; if not, the unit starts again."""
    from tokenmill.datasets.formats.indexed.writer import CODES, WriterState

    saved = WriterState.from_json(state)
    index = destination.path("idx").name
    return (
        saved.dtype_code == CODES[destination.dtype]
        and destination.has(destination.path("bin").name, saved.bin_bytes, saved.bin_hash)
        and destination.has(f"{index}.lengths", 4 * saved.sequences, saved.lengths_hash)
        and destination.has(f"{index}.documents", 8 * (saved.documents - saved.even), saved.documents_hash)
    )


def resume_pair(destination: Destination, state: State) -> PairWriter:
    """Return a writer that continues from a state; data written after the state was saved is cut off."""
    from tokenmill.datasets.formats.indexed.writer import IndexedWriter, WriterState

    saved = WriterState.from_json(state)
    output = destination.open("bin", keep=saved.bin_bytes, read_soon=False)
    return PairWriter(destination, output, IndexedWriter.resume(saved, output, destination.path("idx")))
