"""The files of a pair while a unit writes them, and the problems that a check finds in them."""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tokenmill.errors import remake

if TYPE_CHECKING:
    import numpy.typing as npt

    from tokenmill.engine.workspace import OutputFile, Workspace

    Array = npt.NDArray[Any]

_MADE_BY = "the tokenmill command that made it"
REMAKE = f"the pair is damaged, or tokenmill did not make it; {remake(_MADE_BY)}"
"""The remedy for a damaged pair where its stage is unknown."""

State = dict[str, int | str]
"""The state of a PairWriter in the journal, as JSON: how much of its files is durable."""


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
        return replace(self, remedy=self.remedy.replace(_MADE_BY, f"the same tokenmill {stage}"))


@dataclass(frozen=True)
class Destination:
    """The files to which a PairWriter writes the documents of one key; the names of all start with `prefix`.

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
