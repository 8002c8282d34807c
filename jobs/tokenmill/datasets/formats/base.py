"""The interface of an output format: the layout of the documents' token ids in files.

`tokenize.unit_tokenizer` passes the ids of each key of a unit to a Writer of the output's Format. Only the format
depends on the layout of the files.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from tokenmill.errors import VERIFY_HASHES_OPTION

if TYPE_CHECKING:
    import numpy.typing as npt

    from tokenmill.engine.contract import FileEntry, Part
    from tokenmill.engine.workspace import OutputFile, Workspace

    Array = npt.NDArray[Any]

_REMAKE_WITH = (
    "the pair is damaged, or tokenmill did not make it; run {} again with "
    f"{VERIFY_HASHES_OPTION}, which makes only the damaged files again"
)
REMAKE = _REMAKE_WITH.format("the tokenmill command that made it")
"""The remedy for a damaged pair where its stage is unknown."""

State = dict[str, int | str]
"""The state of a Writer in the journal, as JSON: how much of its files is durable."""


@dataclass(frozen=True)
class Problem:
    """A defect of a file, and its remedy."""

    path: Path
    description: str
    remedy: str

    def __str__(self) -> str:
        return f"{self.path}: {self.description}; {self.remedy}"

    def name_stage(self, stage: str) -> "Problem":
        """Return the problem with the stage that made the pair in its remedy."""
        remake = _REMAKE_WITH.format(f"the same tokenmill {stage}")
        return replace(self, remedy=self.remedy.replace(REMAKE, remake))


@dataclass(frozen=True)
class Destination:
    """The files to which a Writer writes the documents of one key; the names of all of them start with `prefix`.

    `number` is the number of the key in its unit. `dtype` is numpy's name of the type that can hold the vocabulary's
    ids.
    """

    workspace: "Workspace"
    number: int
    key: str
    prefix: str
    dtype: str

    def path(self, suffix: str) -> Path:
        """Return the temporary path of the file with this suffix, which it has until the unit is finished."""
        return self.workspace.path(f"{suffix}-{self.number}")

    def open(self, suffix: str, *, keep: int = 0, read_soon: bool = True) -> "OutputFile":
        """Open the output file `<prefix>.<suffix>` and keep its first `keep` bytes."""
        name = self.path(suffix).name
        return self.workspace.open(f"{self.prefix}.{suffix}", temporary=name, keep=keep, read_soon=read_soon)

    def has(self, name: str, size: int, digest: str | None = None) -> bool:
        """Return whether a file of the attempt has at least `size` bytes, the first of which have this xxh3-128."""
        return self.workspace.has_bytes(name, size, digest)


class Writer(Protocol):
    """Writes the documents of one key of a unit in batches, and counts them."""

    @property
    def documents(self) -> int: ...

    @property
    def sequences(self) -> int: ...

    @property
    def tokens(self) -> int: ...

    def add(self, ids: "Array", lengths: "Array", sequences_per_document: "Array | None") -> None:
        """Append a batch from `tokenize.assemble`; None means one sequence in each document."""

    def save_state(self) -> State:
        """Make the added documents durable; return the state from which `Format.resume` continues."""

    def finish(self, parts: "list[Part]") -> None:
        """Complete the files and describe them for the receipt; `parts` are the source records in them."""


class Format(Protocol):
    """An output format; `suffixes` are the suffixes of its files, and their roles in a receipt.

    The receipt records the documents, sequences and tokens with the file of the first suffix.
    """

    @property
    def name(self) -> str: ...

    @property
    def suffixes(self) -> tuple[str, ...]: ...

    def start(self, destination: Destination) -> Writer:
        """Return a Writer for a unit without data."""

    def can_resume(self, destination: Destination, state: State) -> bool:
        """Return whether the attempt has the files that a state requires; if not, the unit starts again."""

    def resume(self, destination: Destination, state: State) -> Writer:
        """Return a Writer that continues from a state; data written after the state was saved is cut off."""

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
        """Return the problems of the files of a prefix; `files` maps each suffix to its entry in the receipt.

        If `full` is false, skip the checks that need the complete content. `foreign_remedy` is the remedy for files
        that another tool made.
        """

    def check_mask(self, prefix: Path, mask_prefix: Path, *, full: bool) -> list[Problem]:
        """Return the problems of the files with the mask of a prefix, compared with the files of the prefix."""
