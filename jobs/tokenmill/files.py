"""Files that survive a crash: atomic writes, one-winner publication, hashing while writing, safe names.

Everything tokenmill leaves on a disk passes through here, so that a killed process never leaves
something a later one could take for data.
"""

import contextlib
import errno
import hashlib
import itertools
import json
import os
import re
import time
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import IO, Any

import xxhash

from tokenmill.errors import MachineError, RequestError, TransientError
from tokenmill.machine import is_alive, machine_tag
from tokenmill.tree import Tree, check_inside

COPY_CHUNK = 8 << 20
"""Bytes moved per system call where a file is copied or hashed: large enough to amortise the call."""

NAME_BYTES = 200
"""Longest file name we make, in bytes: ext4, XFS and Lustre allow 255, and suffixes are added to ours."""

RECORDS = ".tokenmill"
"""Directory below every output where the records of its stages lie."""

TMPDIR = "the directory for temporary files, which TMPDIR names"
"""How messages name the directory that `tempfile` chose."""

BATCH = 64 << 10
"""Bytes of packed values that are looked at together: few enough to take no memory, enough to amortise a call."""

_TEMPORARY = re.compile(r"\.([0-9a-f]{8})-(\d+)-[0-9a-f]{8}\.tmp$")
_UNSAFE = re.compile(r"[^A-Za-z0-9._=+@,~-]")

JsonText = bytes
"""A JSON value as its text."""


class Packed(Sequence[Any]):
    """A long list of JSON values, each kept as text until it is looked at: as objects, they take ten times as much."""

    def __init__(self, texts: Iterable[JsonText] = ()) -> None:
        """Take the texts; whether they are JSON shows when they are looked at (ValueError)."""
        self.texts = list(texts)

    @classmethod
    def of(cls, values: Iterable[Any]) -> "Packed":
        """Pack values."""
        return cls(map(pack, values))

    def __len__(self) -> int:
        """Count the values."""
        return len(self.texts)

    def __getitem__(self, index: Any) -> Any:
        """Look at a value, or at those of a slice."""
        return list(map(unpack, self.texts[index])) if isinstance(index, slice) else unpack(self.texts[index])

    def __iter__(self) -> Iterator[Any]:
        """Look at one value after the other."""
        return itertools.chain.from_iterable(self.batches())

    def batches(self) -> Iterator[list[Any]]:
        """Look at some values after the other."""
        return (values for _, values in self.with_texts())

    def with_texts(self) -> Iterator[tuple[list[JsonText], list[Any]]]:
        """Look at some values after the other, each list with the list of their texts."""
        start = held = 0
        for end, text in enumerate(self.texts, 1):
            held += len(text)
            if held >= BATCH or end == len(self):
                texts = self.texts[start:end]
                yield texts, unpack(b"[" + b",".join(texts) + b"]")
                start, held = end, 0


def pack(value: Any) -> JsonText:
    """Encode a value as a text in memory, or as one line."""
    return json.dumps(value).encode()


def unpack(text: JsonText) -> Any:
    """Decode a JSON text; what is none raises ValueError or RecursionError."""
    import orjson

    try:
        return orjson.loads(text)
    except orjson.JSONDecodeError:  # it refuses lone surrogates: file names that are no UTF-8
        return json.loads(text)


def canonical_json(value: Any) -> bytes:
    """Encode a value to the one form that is hashed: sorted keys, no spaces, ASCII."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"), allow_nan=False).encode()


def content_id(value: Any) -> str:
    """Hash a JSON value, which may be an object with Packed parts, to 32 hex digits (SHA-256, truncated)."""
    digest = hashlib.sha256()
    packed = isinstance(value, dict) and any(isinstance(part, Packed) for part in value.values())
    for piece in _canonical_pieces(value) if packed else [canonical_json(value)]:
        digest.update(piece)
    return digest.hexdigest()[:32]


def _canonical_pieces(value: dict[str, Any]) -> Iterator[bytes]:
    mark = b"{"
    for name, part in sorted(value.items()):
        yield mark + canonical_json(name) + b":"
        mark = b","
        if not isinstance(part, Packed):
            yield canonical_json(part)
            continue
        yield b"["
        for number, batch in enumerate(part.batches()):
            yield (b"," if number else b"") + canonical_json(batch)[1:-1]
        yield b"]"
    yield b"}"


def readable_json(value: Any) -> bytes:
    """Encode a record for a person to read: one item a line, keys in the order given, ASCII."""
    return (json.dumps(value, indent=1, allow_nan=False) + "\n").encode()


def readable_pieces(value: dict[str, Any]) -> Iterator[bytes]:
    """Encode as readable_json does an object that has Packed parts."""
    mark = b"{"
    for name, part in value.items():
        yield mark + b"\n " + pack(name) + b": "
        mark = b","
        if not isinstance(part, Packed) or not part:
            yield _indented([] if isinstance(part, Packed) else part)
            continue
        yield b"["
        for number, batch in enumerate(part.batches()):
            yield (b"," if number else b"") + _indented(batch)[1:-3]
        yield b"\n ]"
    yield b"\n}\n"


def _indented(value: Any) -> bytes:
    """Encode a value as it stands one level deep in a readable record; strings hold no newlines as they are."""
    return readable_json(value)[:-1].replace(b"\n", b"\n ")


def read_json(path: Path, *, packed: str | None = None, tree: Tree | None = None) -> Any | None:
    """Read a JSON file; None when it is missing, cut short or no JSON, which a crash can leave.

    `packed` names a list in a readable record that is to come as Packed, never having been objects all at once.
    `tree` holds the path; without it, only the file itself may be no link. Raises ForeignEntry for what is no file.
    """
    try:
        with (tree or Tree(path.parent)).open(path) as file:
            if packed is None:
                return unpack(file.read())
            return _read_packed(file, packed)
    except (FileNotFoundError, NotADirectoryError, ValueError, RecursionError):
        return None


def _read_packed(file: IO[bytes], name: str) -> Any:
    """Read the list's items line by line where it is laid out as records are, else with all the rest."""
    begins, rest, texts, text = f' "{name}": [\n'.encode(), bytearray(), list[bytes](), b""
    for line in file:
        rest += line
        if line == begins:
            break
    for line in file:
        if line.startswith(b" ]"):
            rest += line
            break
        text += line.strip()
        if line.startswith((b"{", b"  }")):  # an item on one line, or the end of one on several
            texts.append(text.removesuffix(b","))
            text = b""
    if text:
        texts = []
        rest.clear()
        file.seek(0)
    value = unpack(bytes(rest) + file.read())
    if isinstance(value, dict) and isinstance(value.get(name), list):
        value[name] = Packed(texts) if texts else Packed.of(value[name])
    return value


def is_content(file: IO[bytes], pieces: Iterable[bytes]) -> bool:
    """Tell whether an open file holds these pieces and nothing else."""
    return all(file.read(len(piece)) == piece for piece in pieces) and not file.read(1)


def fsync_directory(path: Path) -> None:
    """Make renames in a directory durable."""
    Tree(path).fsync("")


def write_atomic(path: Path, data: bytes | Iterable[bytes], *, directory: Path | None = None) -> None:
    """Replace a small file so that a reader sees the old content or the new, also after a power cut.

    `directory` below the file's own keeps the temporary file out of sight. No link is written through.
    """
    Tree(path.parent).write_atomic(path, data, directory=directory)


def abandoned(path: Path) -> bool:
    """Tell whether a file is a temporary one of ours whose writer is dead: gone, or silent for ten minutes."""
    match = _TEMPORARY.search(path.name)
    if not match:
        return False
    if match.group(1) == machine_tag():
        return not is_alive(int(match.group(2)))
    try:
        return Tree(path.parent).server_time("") - path.lstat().st_mtime > 600
    except OSError:
        return False


def size_of(path: str | Path) -> int | None:
    """Return a file's size in bytes; None when it is missing."""
    try:
        return os.stat(path).st_size  # noqa: PTH116 - for 59,166 files a Path each would take longer than the call
    except (FileNotFoundError, NotADirectoryError):
        return None


def publish_once(path: Path, data: bytes | Sequence[bytes]) -> bool:
    """Create a file whole unless it exists; return whether this call created it (the first writer wins)."""
    return Tree(path.parent).publish_once(path, data)


def hash_file(path: Path, length: int | None = None, *, tree: Tree | None = None) -> str:
    """Return the xxh3-128 hex digest of a file, or of its first `length` bytes; `tree` holds the path."""
    digest = xxhash.xxh3_128()
    update_hash(digest, path, length, tree=tree)
    return str(digest.hexdigest())


def has_sha256(tree: Tree, path: Path, sha256: str) -> bool:
    """Tell whether a file of a tree is there, with this SHA-256 in hexadecimal digits."""
    return tree.size(path) is not None and sha256_of(path, tree=tree) == sha256


def sha256_of(path: Path, *, tree: Tree | None = None) -> str:
    """Hash a file to the hexadecimal digits of its SHA-256, without having all of it in memory."""
    with tree.open(path, buffering=0) if tree else path.open("rb", buffering=0) as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def update_hash(digest: Any, path: Path, length: int | None = None, *, tree: Tree | None = None) -> int:
    """Feed a file, or its first `length` bytes, to a hash object; return the bytes fed."""
    done = 0
    buffer = memoryview(bytearray(COPY_CHUNK))
    with tree.open(path, buffering=0) if tree else path.open("rb", buffering=0) as file:
        while length is None or done < length:
            want = COPY_CHUNK if length is None else min(COPY_CHUNK, length - done)
            got = file.readinto(buffer[:want])
            if not got:
                break
            digest.update(buffer[:got])
            done += got
    return done


def safe_name(name: str) -> str:
    """Turn any text into one file name: portable characters kept, others as %XX of their UTF-8 bytes.

    The mapping is injective ('%' itself is escaped); a name over NAME_BYTES, empty or starting with a
    dot is marked with a hash of the original, so two different texts never share a result.
    """
    escaped = _UNSAFE.sub(lambda m: "".join(f"%{b:02X}" for b in m.group().encode("utf-8", "surrogatepass")), name)
    if len(escaped) <= NAME_BYTES and escaped and not escaped.startswith("."):
        return escaped
    mark = hashlib.sha256(name.encode("utf-8", "surrogatepass")).hexdigest()[:12]
    head, tail = escaped.lstrip(".")[:120], escaped[-40:] if len(escaped) > NAME_BYTES else ""
    return f"{head}%~{mark}{tail}"


def inside(root: Path, relative: str) -> Path:
    """Join a recorded relative path to its root; a path that would leave the root is refused."""
    check_inside(root, relative)
    return root / relative


def settle_seconds(path: Path) -> float:
    """Return how long this mount may show stale directory entries, in seconds.

    A client of a network file system may answer "no such file" from its cache: blobfuse for up to 120 s
    with the mount options Azure's guides give, NFS for acdirmax (60 s). Local file systems and Lustre
    are coherent.
    """
    configured = os.environ.get("TOKENMILL_SETTLE_SECONDS")
    if configured:
        return float(configured)
    try:
        mounts = Path("/proc/self/mountinfo").read_text().splitlines()
    except OSError:
        return 0.0
    target, best, kind = str(path.resolve()), "", ""
    for line in mounts:
        fields, _, rest = line.partition(" - ")
        point = fields.split(" ")[4].replace("\\040", " ")
        if (target == point or target.startswith(point.rstrip("/") + "/")) and len(point) >= len(best):
            best, kind = point, rest.split(" ")[0]
    if kind.startswith("fuse"):
        return 125.0
    return 65.0 if kind.startswith("nfs") else 0.0


def patiently(look: Any, path: Path) -> Any:
    """Repeat a look until it finds something or the mount's caches must have expired; return the last."""
    deadline = time.monotonic() + settle_seconds(path)
    while True:
        found = look()
        left = deadline - time.monotonic()
        if found or left <= 0:
            return found
        with contextlib.suppress(OSError):  # reading the directory makes NFS revalidate it
            list(path.iterdir())
        time.sleep(min(5.0, left))


@contextlib.contextmanager
def explained(output: Path, called: str = "") -> Iterator[None]:
    """Turn the operating system's refusals into messages that say what to do.

    A full or read-only file system and a forbidden directory are the machine's state, which a retry
    does not change (exit 2); an input/output error or a stale handle may pass (exit 1). `called`: what the
    directory is, where that is not plain from its path.
    """
    try:
        yield
    except OSError as error:
        where = error.filename or output
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise MachineError(
                f"no space left writing {where}; free space on {output}{called and f', {called}'} (or raise the quota) "
                "and run the same command again: finished units are kept"
            ) from error
        if error.errno in (errno.EROFS, errno.EACCES, errno.EPERM):
            kind = MachineError if error.errno == errno.EROFS else RequestError
            raise kind(
                f"cannot use {where}: {error.strerror}; give a path this user may write (uid {os.getuid()}), "
                "or mount the volume read-write"
            ) from error
        if error.errno == errno.ENOENT:
            raise TransientError(f"{where} vanished while it was being used; run the same command again") from error
        if error.errno == errno.EXDEV:
            raise RequestError(
                f"{where} and {error.filename2} are on different file systems, and one cannot be renamed to the other; "
                f"let {output} and everything in it be on one"
            ) from error
        if error.errno in (errno.EEXIST, errno.ENAMETOOLONG, errno.ENOTDIR, errno.EISDIR, errno.ELOOP):
            raise RequestError(f"cannot use {where}: {error.strerror}; choose another path") from error
        if error.errno == errno.EFBIG:
            raise RequestError(
                f"{where} would be larger than its file system or the limit of this process (ulimit -f) allows; raise "
                f"the limit, make smaller files (--target-files), or let {output} be on another file system"
            ) from error
        if error.errno == errno.EINVAL:
            raise TransientError(
                f"{where}: {error.strerror}; its file system refused this kind of access: run the same command again, "
                f"and where that does not help let {output} be on another file system, or mount it with other options"
            ) from error
        if error.errno == errno.ENOTCONN:
            raise TransientError(
                f"{where}: the process that serves the mount {_mount_of(where)} has died (blobfuse or another FUSE "
                "file system); unmount it (fusermount -u, or umount -l) and mount it again, which a new pod does on "
                "Kubernetes, and run the same command again"
            ) from error
        if error.errno in (errno.ENOMEM, errno.ENFILE, errno.EMFILE):
            what = "memory" if error.errno == errno.ENOMEM else "open files (ulimit -n, or fs.file-max)"
            raise TransientError(
                f"{where}: {error.strerror}; the machine or this process is out of {what}: give more, or let less run "
                "at a time (--processes, --connections), and run the same command again"
            ) from error
        if error.errno in (
            errno.EIO,
            errno.ESTALE,
            errno.ENODEV,
            errno.ETIMEDOUT,
            errno.EREMOTEIO,
            errno.EBUSY,
            errno.EAGAIN,
            errno.ENOLCK,
            errno.EHOSTDOWN,
            errno.EHOSTUNREACH,
            errno.ECONNRESET,
            errno.ECONNABORTED,
            errno.ENETDOWN,
            errno.ENETUNREACH,
            errno.ETXTBSY,
            errno.ENXIO,
        ):
            raise TransientError(f"{where}: {error.strerror}; run the same command again") from error
        raise


def _mount_of(path: str | Path) -> str:
    """Return the directory where the file system of a path is mounted."""
    place = os.path.abspath(os.fsdecode(path))  # noqa: PTH100 - nothing of a dead mount is to be looked at
    try:
        lines = Path("/proc/self/mounts").read_text().splitlines()
    except OSError:
        return place
    points = [line.split(" ")[1].replace("\\040", " ") for line in lines]
    return max((point for point in points if f"{place}/".startswith(f"{point.rstrip('/')}/")), key=len, default=place)
