"""Leases on a shared file system, and the rule that decides whether the process that holds one is alive.

The rule (`get_liveness`) is the same for leases, attempts, temporary files and scratch directories:

- A process of this machine and pid namespace is alive or dead; the kernel has the state.
- A process of another machine is dead when its file has not changed for a time limit. Until then, its state is
  unknown.

The clocks of two machines are never compared. A process that waits measures the time without a change with its own
monotonic clock (`Lease.watch`). A process that looks only once compares two times of the file server
(`Tree.server_time`).

A process that holds a lease writes a `LeaseClaim`, and changes the file every HEARTBEAT_SECONDS. The planner, the
attempts of units and the training run all use this module.
"""

import math
import secrets
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from enum import Enum
from pathlib import Path
from typing import Annotated, Generic, NamedTuple, TypeVar

from msgspec import DecodeError, Meta, Struct, field, to_builtins

from tokenmill.core.files.codec import readable_json
from tokenmill.core.files.tree import Tree, TreePath, UnexpectedEntry
from tokenmill.core.machine import (
    is_alive,
    machine_identity,
    machine_tag,
    parse_creator,
    this_process,
)
from tokenmill.core.typed_json import decode_json
from tokenmill.errors import Superseded, TokenmillError

OWNER_FILE = "owner.json"
"""Name of the claim file in the directory that the process holds."""
HEARTBEAT_SECONDS = 10.0
"""Seconds between two heartbeats."""
STALE_SECONDS = 600.0
"""A file of another machine without a change for so many seconds is abandoned: 60 heartbeats are missing."""
MAX_CLAIM_BYTES = 1 << 16
"""Bytes that `read_claim` reads at most; a longer file is not a claim."""


class Liveness(Enum):
    """The state of another process, as this process can determine it."""

    ALIVE = "alive"
    DEAD = "dead"
    UNKNOWN = "unknown"


class Owner(Struct, frozen=True):
    """Identity of a process; two are equal only if they identify the same process."""

    host: str
    boot: str
    namespace: str
    pid: Annotated[int, Meta(gt=0, lt=1 << 31)]
    started: int


class LeaseClaim(Struct, kw_only=True):
    """The content of a lease file; a subclass adds the fields that its readers need."""

    owner: Owner
    token: str = field(default="", name="id")
    """Random text that distinguishes this claim from others of the same process."""


C = TypeVar("C", bound=LeaseClaim)


def current_process() -> Owner:
    """Return the identity of this process."""
    return Owner(socket.gethostname(), *machine_identity(), *this_process())


def new_token() -> str:
    """Return a token that is unique among all claims."""
    return secrets.token_hex(16)


def get_liveness(owner: Owner | None, unchanged_seconds: float = 0.0, limit: float = math.inf) -> Liveness:
    """Return the state of a process whose file has not changed for `unchanged_seconds` seconds.

    `owner` None is an unknown process. The module's docstring describes the rule.
    """
    if owner is not None and (owner.boot, owner.namespace) == machine_identity():
        return Liveness.ALIVE if is_alive(owner.pid, owner.started) else Liveness.DEAD
    return Liveness.DEAD if unchanged_seconds > limit else Liveness.UNKNOWN


def get_creator_liveness(name: str) -> Liveness | None:
    """Return the state of the process in a file name from `process_name`, or None for another name."""
    creator = parse_creator(name)
    if creator is None:
        return None
    if creator.machine != machine_tag():
        return Liveness.UNKNOWN
    if not is_alive(creator.pid, creator.started):
        return Liveness.DEAD
    # Without a start time in the name, the process may be a later one with the same number.
    return Liveness.UNKNOWN if creator.started is None and this_process().started else Liveness.ALIVE


def is_abandoned(path: Path) -> bool:
    """Return whether a path is a temporary file or directory of a dead process."""
    liveness = get_creator_liveness(path.name) if path.name.endswith(".tmp") else None
    if liveness is not Liveness.UNKNOWN:
        return liveness is Liveness.DEAD
    try:
        unchanged_seconds = Tree(path.parent).server_time("") - path.lstat().st_mtime
    except OSError:
        return False
    return get_liveness(None, unchanged_seconds, STALE_SECONDS) is Liveness.DEAD


def remove_abandoned(tree: Tree, *directories: TreePath) -> None:
    """Remove the temporary files and directories that killed processes left directly in these directories."""
    for directory in directories:
        folder = directory if isinstance(directory, Path) else tree.root / directory
        with suppress(OSError, UnexpectedEntry):
            for path in (folder / name for name in tree.names(directory) if name.startswith(".")):
                if not is_abandoned(path):
                    continue
                if tree.is_directory(path):
                    tree.remove_tree(path)
                else:
                    tree.unlink(path)


def read_claim(tree: Tree, path: Path, kind: type[C]) -> C | None:
    """Read a claim; return None when the file is missing, truncated or not a claim.

    Raises:
        UnexpectedEntry: the path is not a regular file.
    """
    try:
        with tree.open(path) as file:
            return _decode_claim(file.read(MAX_CLAIM_BYTES), kind)
    except (FileNotFoundError, NotADirectoryError):
        return None


def _decode_claim(data: bytes, kind: type[C]) -> C | None:
    try:
        return decode_json(data, kind)
    except DecodeError:
        return None


def encode_claim(claim: LeaseClaim) -> bytes:
    """Encode a claim as the content of its file."""
    return readable_json(to_builtins(claim))


class LeaseHolder(NamedTuple, Generic[C]):
    """The holder of a lease, as this process sees it."""

    claim: C | None
    """None if this process cannot read the claim."""
    liveness: Liveness
    changed: bool
    """Whether the file changed while this process watched the lease."""


class Lease(Generic[C]):
    """A file that one process at a time holds."""

    def __init__(self, tree: Tree, path: Path, claim: C) -> None:
        """Set the lease file, which is in `tree`, and the claim of this process."""
        self.path = path
        self.claim = claim
        self._tree = tree
        self._seen: tuple[tuple[C | None, int], float] | None = None
        self._changed = False

    def acquire(self) -> bool:
        """Acquire the lease if its file does not exist; return whether this process acquired the lease."""
        return self._tree.publish_once(self.path, encode_claim(self.claim))

    def write(self) -> None:
        """Write the claim, even if another process holds the lease."""
        self._tree.write_atomic(self.path, encode_claim(self.claim))

    def renew(self) -> None:
        """Renew the heartbeat: change the file, so that other machines can detect that this process is alive.

        Raises:
            Superseded: the file has the claim of another process.
        """
        self.check()
        self.write()

    def check(self) -> C | None:
        """Return the claim in the file: this process's own, or None if the claim is missing or unreadable.

        Raises:
            Superseded: the file has the claim of another process.
        """
        current = self.read()
        if current is not None and current.token != self.claim.token:
            raise Superseded(
                f"another process has taken over {self.path}, and only one process may hold it; stop that process, or "
                "wait until it ends, and run the same command again"
            )
        return current

    def read(self) -> C | None:
        """Return the claim in the file, or None when the claim is missing or unreadable."""
        return read_claim(self._tree, self.path, type(self.claim))

    def release(self) -> None:
        """Remove the file if this process holds the lease."""
        with suppress(UnexpectedEntry):  # another program replaced the file: this process does not own the entry
            current = self.read()
            if current is not None and current.token == self.claim.token:
                self._tree.unlink(self.path)

    @contextmanager
    def hold(self) -> Iterator[bool]:
        """Acquire the lease if its file does not exist, and hold the lease until the block ends.

        Yields:
            Whether this process acquired the lease.
        """
        if not self.acquire():
            yield False
            return
        try:
            with heartbeat(self.renew):
                yield True
        finally:
            self.release()

    def watch(self, limit: float = math.inf) -> LeaseHolder[C] | None:
        """Return the holder of the lease, or None when the file does not exist; callers poll this method.

        A holder on another machine is dead when its file has not changed during `limit` seconds of polling.
        """
        claim, status = self.read(), self._tree.stat(self.path)
        if status is None:
            self._seen = None
            return None
        now, content = time.monotonic(), (claim, status.st_mtime_ns)
        if self._seen is None or self._seen[0] != content:
            self._changed = self._changed or self._seen is not None
            self._seen = content, now
        unchanged_seconds = now - self._seen[1]
        return LeaseHolder(claim, get_liveness(claim.owner if claim else None, unchanged_seconds, limit), self._changed)

    def break_stale(self, claim: C | None) -> None:
        """Remove the file of a dead holder, unless another process has acquired the lease since."""
        with suppress(FileNotFoundError):
            self._tree.take_away(self.path, lambda data: _decode_claim(data, type(self.claim)) == claim)


@contextmanager
def heartbeat(renew: Callable[[], object]) -> Iterator[None]:
    """Call `renew` every HEARTBEAT_SECONDS on a thread until the block ends; errors of a call are ignored."""
    done = threading.Event()

    def run() -> None:
        while not done.wait(HEARTBEAT_SECONDS):
            with suppress(OSError, TokenmillError):
                renew()

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()  # a heartbeat after the block would create a file again that the block removes
