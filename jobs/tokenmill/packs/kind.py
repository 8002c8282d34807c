"""The kind of the stage pack, for the registry of stages."""

from pathlib import Path

from tokenmill.engine.contract import FileEntry, Record, StageKind
from tokenmill.packs.contract import PackBasis, PackDetails, PackSpec


def _check_file(path: Path, entry: FileEntry, basis: Record) -> list[str]:
    """Return the problems of the content of an output."""
    from tokenmill.packs.check import check_output

    assert isinstance(basis, PackBasis)  # noqa: S101
    return check_output(path, entry, basis)


PACK = StageKind("pack", PackSpec, PackBasis, PackDetails, _check_file)
"""The record types of the stage that packs sequences into rows."""
