"""The files of a hang, read into records; a file that cannot be read becomes a problem of the report.

The directory may be that of a hang, a checkpoint directory, or one with files of other programs: dumps of torch's
flight recorder (`nccl_trace_rank_0`), output of `py-spy dump` (`rank0.txt`), or logs of `tokenmill train`.
"""

import re
from pathlib import Path

import msgspec

from tokenmill.core.files.explain import explain_os_errors
from tokenmill.core.files.tree import Tree
from tokenmill.errors import InputError, RequestError
from tokenmill.train.diagnose.flight_records import FlightRecord, UnreadableFile, read_flight_record
from tokenmill.train.diagnose.names import HANG_NAME, HANGS, find_rank
from tokenmill.train.diagnose.stacks import StackFrame, parse_main_stack, split_by_rank

MAX_FILE_BYTES = 64 << 20
"""Maximum size of a file; a dump with 2,000 operations has about 1 MB."""
MAX_FILES = 20_000
_POD = re.compile(r"^\[pod/[^\]\s]{1,300}\] ", re.MULTILINE)
"""The start of each line of `kubectl logs --prefix`."""
_PICKLE, _JSON = b"\x80", b"{"


class HangEvidence(msgspec.Struct):
    """The content of the files of a directory, by rank."""

    directory: str
    records: dict[int, FlightRecord] = {}
    stacks: dict[int, tuple[StackFrame, ...]] = {}
    """The stack of the main thread, the innermost call first."""
    stack_files: dict[int, str] = {}
    ras_files: list[str] = []
    """Files with output of ncclras."""
    problems: list[str] = []
    """Files that could not be read, and why."""


def read_evidence(path: Path) -> HangEvidence:
    """Read the files of a directory, or of the last hang below a checkpoint directory.

    Raises:
        RequestError: the path is not a directory.
        InputError: the directory has neither a stack nor a dump that can be read.
    """
    with explain_os_errors(path):
        if not path.is_dir():
            raise RequestError(
                f"{path} is not a directory; specify the directory of a hang, of a run's checkpoints, or of dumps"
            )
        directory = _find_hang(path)
        tree = Tree(directory)
        evidence = HangEvidence(str(directory))
        names = tree.names()
        for name in names[:MAX_FILES]:
            try:
                if not tree.is_directory(name):
                    _read_file(tree, name, evidence)
            except UnreadableFile as problem:
                evidence.problems.append(f"{name}: {problem}")
            except (OSError, RequestError) as problem:
                evidence.problems.append(f"{name}: {problem}")
    if len(names) > MAX_FILES:
        evidence.problems.append(f"only {MAX_FILES:,} of the {len(names):,} files were read")
    if not evidence.records and not evidence.stacks:
        problems = f" ({'; '.join(evidence.problems[:3])})" if evidence.problems else ""
        raise InputError(
            f"{directory} has neither stacks nor flight-recorder dumps that can be read{problems}; specify a directory "
            "with files such as rank-0.stack.txt, nccl_trace_rank_0 or a log of tokenmill train, or the checkpoints of "
            "a run that ended with 'the run hangs'"
        )
    return evidence


def _find_hang(path: Path) -> Path:
    """Return the directory of the last hang below checkpoints, else the path itself."""
    for hangs in (HANGS, Path()):
        names = [name for name in Tree(path).names(str(hangs) if hangs.parts else "") if HANG_NAME.fullmatch(name)]
        if names:
            return path / hangs / names[-1]
    return path


def _read_file(tree: Tree, name: str, evidence: HangEvidence) -> None:
    if name.endswith(".ncclras.txt"):
        evidence.ras_files.append(name)
        return
    with tree.open(name) as file:
        data = file.read(MAX_FILE_BYTES + 1)
    if len(data) > MAX_FILE_BYTES:
        raise UnreadableFile(f"it is larger than {MAX_FILE_BYTES >> 20} MiB, so it was not read")
    is_dump = data[:1] in (_PICKLE, _JSON) or ".flight." in name
    rank = find_rank(name, is_dump=is_dump)
    if is_dump:
        if rank is None:
            raise UnreadableFile("its name has no rank; rename it, for example to nccl_trace_rank_0")
        record = read_flight_record(data, rank)
        if rank in evidence.records:
            evidence.problems.append(f"{name}: another file has a dump of rank {rank} too; only this one was used")
        evidence.records[rank] = record
        return
    text = _POD.sub("", data.decode(errors="replace"))
    parts = split_by_rank(text) or ({} if rank is None else {rank: text})
    for part_rank, part in parts.items():
        if frames := parse_main_stack(part):
            evidence.stacks[part_rank] = frames
            evidence.stack_files[part_rank] = name
