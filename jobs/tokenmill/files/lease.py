"""Who holds or makes something on a shared file system, and whether that process still lives.

The rule, for leases, attempts, temporary files and scratch directories alike (`liveness`): a process of this machine
and pid namespace lives or does not, which the kernel knows. A process of another machine is dead once its file did not
change for a time, and until then nobody knows. How long a file did not change is never a difference of two machines'
clocks: a process that waits measures it with its own monotonic clock (`Lease.watch`), and a process that looks once
compares two times of the file server (`Tree.server_time`).

A process that holds something writes a `Claim` and changes the file every HEARTBEAT_SECONDS.
"""

import math
import os
import re
import secrets
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from enum import Enum
from functools import cache
from pathlib import Path
from typing import Annotated, Generic, NamedTuple, TypeVar

from msgspec import DecodeError, Meta, Struct, field, json, to_builtins

from tokenmill.errors import Superseded, TokenmillError
from tokenmill.files.codec import readable_json
from tokenmill.files.tree import Tree, UnexpectedEntry
from tokenmill.machine import is_alive, machine, machine_tag, process_name, start_ticks

OWNER = "owner.json"
"""Name of a claim to the directory that it lies in."""
HEARTBEAT_SECONDS = 10.0
STALE_SECONDS = 600.0
"""What another machine makes and did not change for this long is abandoned: 60 heartbeats are missing."""
LARGEST_CLAIM = 1 << 16

_MADE_BY = re.compile(r"([0-9a-f]{8})-(\d{1,10})-[0-9a-f]{8}(?:\.tmp)?$")


class Liveness(Enum):
    """What this process knows of another one."""

    ALIVE = "alive"
    DEAD = "dead"
    UNKNOWN = "unknown"


class Owner(Struct, frozen=True):
    """Identity of a process: equal only for the same process."""

    host: str
    boot: str
    namespace: str
    pid: Annotated[int, Meta(gt=0, lt=1 << 31)]
    started: int


class LeaseClaim(Struct, kw_only=True):
    """What a process writes where it holds something; a subclass says what else a reader needs to know."""

    owner: Owner
    token: str = field(default="", name="id")
    """Tells this claim from others of the same process."""


C = TypeVar("C", bound=LeaseClaim)


def this_process() -> Owner:
    """Return this process's identity."""
    return _process(os.getpid())


@cache
def _process(pid: int) -> Owner:
    boot, namespace = machine()
    return Owner(socket.gethostname(), boot, namespace, pid, start_ticks(pid) or 0)


def new_token() -> str:
    """Return a token that no other claim has."""
    return secrets.token_hex(16)


def liveness(owner: Owner | None, silent: float = 0.0, limit: float = math.inf) -> Liveness:
    """Tell whether a process lives, whose file did not change for `silent` seconds; None is an unknown process.

    This is the one rule: see the module's description.
    """
    if owner is not None and (owner.boot, owner.namespace) == machine():
        return _here(owner.pid, owner.started)
    return Liveness.DEAD if silent > limit else Liveness.UNKNOWN


def _here(pid: int, started: int | None = None) -> Liveness:
    return Liveness.ALIVE if is_alive(pid, started) else Liveness.DEAD


def maker_liveness(name: str) -> Liveness | None:
    """Tell whether the process lives that made what has this name (`process_name`); None for another name."""
    match = _MADE_BY.search(name)
    if not match:
        return None
    return _here(int(match.group(2))) if match.group(1) == machine_tag() else Liveness.UNKNOWN


def abandoned(path: Path) -> bool:
    """Tell whether a path is a temporary one that a dead process made."""
    known = maker_liveness(path.name) if path.name.endswith(".tmp") else None
    if known is not Liveness.UNKNOWN:
        return known is Liveness.DEAD
    try:
        silent = Tree(path.parent).server_time("") - path.lstat().st_mtime
    except OSError:
        return False
    return liveness(None, silent, STALE_SECONDS) is Liveness.DEAD


def read_claim(tree: Tree, path: Path, kind: type[C]) -> C | None:
    """Read a claim; None when it is missing, torn or something else. Raises ForeignEntry for what is no file."""
    try:
        with tree.open(path) as file:
            return json.decode(file.read(LARGEST_CLAIM), type=kind)
    except (FileNotFoundError, NotADirectoryError, DecodeError, RecursionError):
        return None


def encode_claim(claim: LeaseClaim) -> bytes:
    """Encode a claim for its file."""
    return readable_json(to_builtins(claim))


class LeaseHolder(NamedTuple, Generic[C]):
    """Who holds a lease, as far as this process knows."""

    claim: C | None
    """None where it cannot be read."""
    liveness: Liveness
    changed: bool
    """Whether the file changed while this process watched it."""


class Lease(Generic[C]):
    """A file that one process at a time holds."""

    def __init__(self, tree: Tree, path: Path, claim: C) -> None:
        """Name the file, which `tree` holds, and what this process would write there."""
        self.path = path
        self.claim = claim
        self._tree = tree
        self._seen: tuple[tuple[C | None, int], float] | None = None
        self._changed = False

    def take(self) -> bool:
        """Take the lease unless a file is there; return whether this process holds it now."""
        return self._tree.publish_once(self.path, encode_claim(self.claim))

    def write(self) -> None:
        """Write the claim, whoever holds the lease."""
        self._tree.write_atomic(self.path, encode_claim(self.claim))

    def beat(self) -> None:
        """Change the file, so that other machines see that this process lives.

        Raises:
            Superseded: another claim is there.
        """
        self.check()
        self.write()

    def check(self) -> C | None:
        """Return the claim in the file, which is this one or cannot be read.

        Raises:
            Superseded: another claim is there.
        """
        current = self.read()
        if current is not None and current.token != self.claim.token:
            raise Superseded(f"another process has taken over {self.path}, and two must not hold it")
        return current

    def read(self) -> C | None:
        """Read the claim in the file; None when it is missing or cannot be read."""
        return read_claim(self._tree, self.path, type(self.claim))

    def release(self) -> None:
        """Remove the file if this process holds the lease."""
        with suppress(UnexpectedEntry):  # what somebody put in its place is not this process's
            current = self.read()
            if current is not None and current.token == self.claim.token:
                self._tree.unlink(self.path)

    @contextmanager
    def hold(self) -> Iterator[bool]:
        """Take the lease unless a file is there, and keep it until the block ends; say whether it was taken."""
        if not self.take():
            yield False
            return
        try:
            with heartbeat(self.beat):
                yield True
        finally:
            self.release()

    def watch(self, limit: float = math.inf) -> LeaseHolder[C] | None:
        """Look who holds the lease, None when no file is there; call it again and again.

        A holder on another machine is dead once its file did not change for `limit` seconds of these calls.
        """
        claim, status = self.read(), self._tree.stat(self.path)
        if status is None:
            self._seen = None
            return None
        now, content = time.monotonic(), (claim, status.st_mtime_ns)
        if self._seen is None or self._seen[0] != content:
            self._changed = self._changed or self._seen is not None
            self._seen = content, now
        silent = now - self._seen[1]
        return LeaseHolder(claim, liveness(claim.owner if claim else None, silent, limit), self._changed)

    def break_(self, claim: C | None) -> None:
        """Remove the file of a dead holder, unless a live one has taken its place meanwhile.

        It is renamed to a name of its own first, so that of several processes only one breaks this lease.
        """
        broken = self.path.with_name(f".{self.path.stem}.{process_name()}.tmp")
        with suppress(FileNotFoundError):
            self._tree.rename(self.path, broken)
            if read_claim(self._tree, broken, type(self.claim)) == claim:
                self._tree.unlink(broken)
            else:
                self._tree.rename(broken, self.path)


@contextmanager
def heartbeat(beat: Callable[[], object]) -> Iterator[None]:
    """Call `beat` every few seconds on a thread until the block ends; what fails is tried again the next time."""
    done = threading.Event()

    def run() -> None:
        while not done.wait(HEARTBEAT_SECONDS):
            with suppress(OSError, TokenmillError):
                beat()

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()  # a beat after the block would bring back a file that it removes
