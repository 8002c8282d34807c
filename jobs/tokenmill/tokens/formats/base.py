"""What an output format is: how the token ids of documents are laid out in files.

`tokens.unit_tokenizer` gives each key of a unit a Writer of the output's Format, and knows no more of the files.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    import numpy.typing as npt

    from tokenmill.flow.contract import FileEntry, Part
    from tokenmill.flow.workspace import OutputFile, Workspace

    Array = npt.NDArray[Any]

State = dict[str, int | str]
"""What a Writer's mark leaves in the journal, as JSON: how far its files are."""


@dataclass(frozen=True)
class Problem:
    """One thing that is wrong with a file, and what to do about it."""

    path: Path
    what: str
    remedy: str

    def __str__(self) -> str:
        return f"{self.path}: {self.what}; {self.remedy}"


@dataclass(frozen=True)
class Destination:
    """Where a Writer writes the documents of one key of a unit: `prefix` begins the names of all its files.

    `number` tells the keys of a unit apart; `dtype` is numpy's name of the type that the vocabulary's ids need.
    """

    workspace: "Workspace"
    number: int
    key: str
    prefix: str
    dtype: str

    def path(self, suffix: str) -> Path:
        """Return where the file with a suffix lies while the unit is not finished."""
        return self.workspace.path(f"{suffix}-{self.number}")

    def open(self, suffix: str, *, keep: int = 0, read_soon: bool = True) -> "OutputFile":
        """Open the file `<prefix>.<suffix>` of the output, of which the first `keep` bytes are there already."""
        name = self.path(suffix).name
        return self.workspace.open(f"{self.prefix}.{suffix}", temporary=name, keep=keep, read_soon=read_soon)

    def has(self, name: str, size: int) -> bool:
        """Tell whether a file of the attempt has at least so many bytes."""
        return (self.workspace.tree.size(self.workspace.path(name)) or 0) >= size


class Writer(Protocol):
    """Writes the documents of one key of a unit, a batch at a time, and counts them."""

    @property
    def documents(self) -> int: ...

    @property
    def sequences(self) -> int: ...

    @property
    def tokens(self) -> int: ...

    def add(self, ids: "Array", lengths: "Array", sequences_per_document: "Array | None") -> None:
        """Append a batch, as `tokens.assemble` returns it; None stands for one sequence a document."""

    def mark(self) -> State:
        """Make what was added durable; return the state from which `Format.resume` goes on."""

    def finish(self, parts: "list[Part]") -> None:
        """Complete the files and describe them for the receipt; `parts` says which source records they hold."""


class Format(Protocol):
    """An output format. `suffixes` are the suffixes of its files and their roles in a receipt.

    The file with the first suffix is described with its documents, sequences and tokens: it stands for all.
    """

    @property
    def name(self) -> str: ...

    @property
    def suffixes(self) -> tuple[str, ...]: ...

    def begin(self, destination: Destination) -> Writer:
        """Return a Writer for a unit that has nothing yet."""

    def holds(self, destination: Destination, state: State) -> bool:
        """Tell whether the attempt has what a mark counts on; where it has not, the unit begins anew."""

    def resume(self, destination: Destination, state: State) -> Writer:
        """Return a Writer that goes on from a mark; what was written after the mark is cut off."""

    def check(
        self,
        prefix: Path,
        files: "Mapping[str, FileEntry]",
        *,
        vocab_size: int | None,
        eod: int | None,
        full: bool,
        foreign: str | None,
    ) -> list[Problem]:
        """Find what is wrong with the files of a prefix; `files` has what the receipt says of each, by suffix.

        `full` false leaves out what needs the whole content. `foreign` is the remedy for what another tool made.
        """
