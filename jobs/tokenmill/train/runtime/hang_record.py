"""Stacks and dumps of the ranks of this node, saved next to the checkpoints for `tokenmill train diagnose`.

`Supervisor` requests dumps before it ends a run that hangs, passes on the stacks that the ranks write, and saves all
after the ranks have ended. None of these steps changes how the attempt ends.
"""

import contextlib
import os
import shutil
import subprocess
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from uuid import uuid4

from tokenmill.core.files.tree import Tree
from tokenmill.core.redaction import redact
from tokenmill.errors import TokenmillError
from tokenmill.train.diagnose.names import HANG_NAME, HANGS, flight_name, hang_name, ras_name, stack_name
from tokenmill.train.diagnose.report import format_ranks
from tokenmill.train.diagnose.stacks import STACKS_HEADER
from tokenmill.train.runtime.attempts import RunRecords
from tokenmill.train.runtime.flight_recorder import FlightRecorder
from tokenmill.train.runtime.node import Node
from tokenmill.train.runtime.output import log

DUMP_SECONDS = 6.0
"""Seconds for the dumps of all ranks and for ncclras; torch reads a pipe every second."""
HOLD_AFTER_SECONDS = 7.0
"""Seconds from the start of the dumps until a node of several stops its ranks, which then do not notice lost peers.

The other nodes read the announcement of a hang within 5 s. torch may need the ranks of all nodes to write a dump.
"""
STACKS_AFTER_SECONDS = 14.0
"""Seconds until a node of several lets its ranks write their stacks, which ends them.

By then the other nodes have stopped theirs.
"""
SAVE_SECONDS = 20.0
"""Seconds for saving the files; the ranks have ended, so this delays only the end of the pod."""
HANGS_KEPT = 5
MAX_STACK_CHARACTERS = 1 << 20
MAX_DUMP_BYTES = 64 << 20
MAX_RAS_BYTES = 4 << 20
CHUNK_BYTES = 1 << 20
RAS_ADDRESS = "NCCL_RAS_ADDR"
"""Variable with the address at which NCCL answers ncclras, HOST:PORT."""


@dataclass
class HangRecord:
    """The stacks, the dumps and the output of ncclras of one attempt on this node."""

    checkpoints: Path
    node: Node
    recorder: FlightRecorder
    scratch: Path
    environment: Mapping[str, str]
    announced_by: int | None = None
    """Another node that detected the hang of this attempt."""
    _stacks: dict[int, list[str]] = field(default_factory=dict)
    _rank: int | None = None
    """The rank whose stacks the launcher's output contains now."""
    _characters: int = 0
    """Characters of this rank's stacks so far."""

    @property
    def _ras_output(self) -> Path:
        return self.scratch / "ncclras.txt"

    @property
    def has_peers(self) -> bool:
        """Return whether the run has other nodes, whose ranks fail when those of this node end."""
        return self.node.nodes > 1

    def check_announcement(self) -> None:
        """Read whether another node has detected a hang."""
        if self.has_peers and self.announced_by is None and (hang := RunRecords(self.checkpoints).read_hang()):
            self.announced_by = hang.node

    def announce(self) -> None:
        """Let the other nodes dump too, unless one of them announced the hang; do not wait for the storage."""
        if self.has_peers and self.announced_by is None:
            threading.Thread(target=self._announce, daemon=True).start()

    def _announce(self) -> None:
        try:
            RunRecords(self.checkpoints).announce_hang(self.node.rank)
        except (OSError, TokenmillError) as problem:
            log(f"warning: cannot announce the hang to the other nodes: {problem}; their dumps may be incomplete")

    def request_dumps(self) -> None:
        """Let the ranks write their dumps, and ask NCCL about all ranks; wait for at most DUMP_SECONDS."""
        thread = threading.Thread(target=self._request_dumps, daemon=True)
        thread.start()
        thread.join(DUMP_SECONDS)  # the user may have set a directory on storage that blocks

    def _request_dumps(self) -> None:
        deadline = time.monotonic() + DUMP_SECONDS
        ranks = self.recorder.request_dumps()
        ras = self._start_ras()
        while time.monotonic() < deadline:
            try:
                complete = self.recorder.are_complete(ranks)
            except OSError:
                complete = False
            if complete and (ras is None or ras.poll() is not None):
                break
            time.sleep(0.1)
        if ras and ras.poll() is None:
            ras.kill()

    def _start_ras(self) -> "subprocess.Popen[bytes] | None":
        program = shutil.which("ncclras", path=self.environment.get("PATH"))
        if program is None or self.environment.get("NCCL_RAS_ENABLE") == "0":
            return None
        host, _, port = self.environment.get(RAS_ADDRESS, "").rpartition(":")
        address = ["-h", host.strip("[]") or "localhost", "-p", port] if port else []
        try:
            with self._ras_output.open("wb") as output:
                return subprocess.Popen(
                    [program, "-v", "-t", "2", *address],
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    stderr=subprocess.STDOUT,
                )
        except OSError as problem:
            log(f"warning: cannot run ncclras: {problem}; the run ends without its output")
            return None

    def read_line(self, line: str) -> None:
        """Read a line of the launcher's output after the ranks were requested to write their stacks."""
        if line.startswith(STACKS_HEADER):
            number = line[len(STACKS_HEADER) :].strip()
            self._rank = int(number) if number.isdecimal() and len(number) < 8 else None
            self._characters = 0
            if self._rank is not None:
                self._stacks[self._rank] = []
        elif self._rank is not None and self._characters < MAX_STACK_CHARACTERS:
            self._characters += len(line)
            self._stacks[self._rank].append(line)

    def save(self) -> None:
        """Save the files next to the checkpoints, if there are any; wait for at most SAVE_SECONDS."""
        thread = threading.Thread(target=self._save, daemon=True)
        thread.start()
        thread.join(SAVE_SECONDS)
        if thread.is_alive():
            log(
                f"warning: the storage did not accept the stacks and dumps of the ranks within {SAVE_SECONDS:.0f} s; "
                "the run ends without them"
            )

    def _save(self) -> None:
        try:
            self._write_files(self.recorder.find_dumps())
        except Exception as problem:  # the stacks are in the log too, and the verdict must not depend on their copy
            log(f"warning: cannot save the stacks and dumps of the ranks: {problem}; the run ends without them")

    def _write_files(self, dumps: dict[int, Path]) -> None:
        if not self._stacks and not dumps:
            return
        tree = Tree(self.checkpoints)
        directory = HANGS / self._find_name()
        for rank, lines in self._stacks.items():
            tree.write_atomic(str(directory / stack_name(rank)), redact("".join(lines)).encode(errors="replace"))
        saved_dumps = []
        for rank, path in dumps.items():
            if path.stat().st_size > MAX_DUMP_BYTES:
                log(f"warning: {path} is larger than {MAX_DUMP_BYTES >> 20} MiB and is not saved")
                continue
            tree.write_atomic(str(directory / flight_name(rank)), _read_chunks(path, MAX_DUMP_BYTES))
            saved_dumps.append(rank)
        if self._ras_output.exists() and self._ras_output.stat().st_size:
            output = b"".join(_read_chunks(self._ras_output, MAX_RAS_BYTES))
            tree.write_atomic(str(directory / ras_name(self.node.rank)), output)
        if self.node.is_leader:
            names = [entry for entry in tree.names(str(HANGS)) if HANG_NAME.fullmatch(entry)]
            for old in names[:-HANGS_KEPT]:
                tree.remove_tree(str(HANGS / old))
        self._log_content(directory, saved_dumps)

    def _find_name(self) -> str:
        """Return the directory's name, which is the same on all nodes because it names node 0's attempt."""
        attempts = RunRecords(self.checkpoints).read_attempts()
        if attempts:
            with contextlib.suppress(ValueError, OverflowError, OSError):
                name = hang_name(attempts[-1].started, attempts[-1].id)
                if HANG_NAME.fullmatch(name):
                    return name
        return hang_name(time.time(), uuid4().hex)

    def _log_content(self, directory: Path, saved_dumps: Sequence[int]) -> None:
        content = [f"the stacks of {format_ranks(self._stacks)}"] if self._stacks else []
        content += [f"the flight-recorder dumps of {format_ranks(saved_dumps)}"] if saved_dumps else []
        path = self.checkpoints / directory
        if content:
            log(f"saved {' and '.join(content)} in {path}; next: tokenmill train diagnose {path}")


def _read_chunks(path: Path, limit: int) -> Iterator[bytes]:
    """Yield the content of a file that a rank has written, up to a number of bytes."""
    handle = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW | os.O_CLOEXEC)
    with os.fdopen(handle, "rb") as file:
        while limit > 0 and (chunk := file.read(min(limit, CHUNK_BYTES))):
            limit -= len(chunk)
            yield chunk
