"""Encoder processes, started by `tokens.workers.pool` and by nobody else.

Each takes the texts out of blocks of records in shared memory, encodes them, and puts the ids into shared memory as the
encoder gave them. It loads an encoder and what reads JSON, and nothing else; what a third-party encoder does ends with
it.

Their arguments are ends. An end is one process's `CONTROL,TEXT:IDS,...`: file descriptors of its socket and of its
slabs. The process that was started has the first. It loads the encoder, which takes as long as 100 MB of text, and
forks one for each other end: they share its tables.

Messages on the control socket, by `multiprocessing.connection`: to the first a Task and how many processes are wanted,
from the others their process id; then for each block (slab, its sizes, segments), answered by an Answer.
"""

import contextlib
import os
import signal
import sys
from collections.abc import Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn

from tokenmill.errors import RequestError, TokenmillError
from tokenmill.tokens.workers.slab import Slab

if TYPE_CHECKING:
    from tokenmill.corpus.parse import ParsedBlock
    from tokenmill.tokens.engines.base import Encoder

NICENESS = 5
"""Of an encoder process: where it shares a CPU with who feeds it, which takes little, it does not interrupt that."""

SAMPLE = 1000
"""One text in so many is verified with --verify-encoder=sample."""


class Task(NamedTuple):
    """What the encoder processes of a stage do with every block.

    `verify`: which texts are encoded by Hugging Face too: all, sample, or none beyond the gate's (start). `special` are
    tokens to be counted where a text spells them.
    """

    encoder: str
    backend: str
    special_tokens: bool
    guard: str
    keys: tuple[str, ...]
    eod: int | None
    verify: str
    special: tuple[str, ...] = ()


class Segment(NamedTuple):
    """Whole records of one file in a block: from byte `start` to `end`, of a kind that `corpus.block_kinds` names."""

    start: int
    end: int
    kind: str
    begins_file: bool


class Column(NamedTuple):
    """One key's part of an answer, as `tokens.assemble` takes it.

    `size` bytes of uint32 ids from `start` in the slab, with EOD behind each text where one is wanted; int64 offsets of
    the texts; int64 texts of each document (empty: one each).
    """

    start: int
    size: int
    offsets: bytes
    texts: bytes


class Found(NamedTuple):
    """What a segment held; `rejected` are the fields of corpus.parse.Rejected, counted from the segment's start.

    `spelled` counts special tokens in its texts; the first is on `line`, or 0 where that was not looked for, `token`.
    """

    documents: int
    records: int
    blank: int
    rejected: Sequence[tuple[int, int, str, bytes]]
    spelled: int = 0
    line: int = 0
    token: str = ""


class Answer(NamedTuple):
    """What became of a block; `refused` says why nothing did, `memory` is what the process holds, in bytes."""

    ids_bytes: int
    columns: list[Column]
    segments: list[Found]
    memory: int
    refused: str


class _Server:
    def __init__(self, task: Task) -> None:
        from tokenmill.tokens.encoders import load_encoder
        from tokenmill.tokens.engines import REFERENCE
        from tokenmill.tokens.special_tokens import SpecialTokenFinder

        self._task = task
        self._finder = SpecialTokenFinder(task.special)
        self._located = False
        backend = Path(task.backend)
        self._encoder = load_encoder(task.encoder, backend, task.special_tokens, task.guard, end=task.eod)
        self._exact: Encoder | None = None
        if task.verify != "start" and task.encoder != REFERENCE:
            self._exact = load_encoder(REFERENCE, backend, task.special_tokens, end=task.eod)
        self._slabs: list[tuple[Slab, Slab]] = []
        self._blocks = 0
        self._end = 0  # of the last column's ids

    def serve(self, control: Connection, slabs: list[tuple[Slab, Slab]]) -> NoReturn:
        """Answer until nobody asks any more, which is an EOFError or OSError."""
        self._slabs = slabs
        self._memory = _Memory()
        while True:
            control.send(self._answer(*control.recv()))

    def _answer(self, number: int, text_bytes: int, ids_bytes: int, segments: list[Segment]) -> Answer:
        """Encode one block."""
        text, ids = self._slabs[number]
        text.follow(text_bytes)
        ids.follow(ids_bytes)
        self._blocks += 1
        parsed = [self._parse(text, segment) for segment in segments]
        try:
            columns = [self._column(index, parsed, ids) for index in range(len(self._task.keys))]
            refused = ""
        except RequestError as error:
            columns, refused = [], str(error)
        found = [self._found(text, s, p) for s, p in zip(segments, parsed, strict=True)]
        return Answer(len(ids.data), columns, found, self._memory.held(), refused)

    def _parse(self, text: Slab, segment: Segment) -> "ParsedBlock":
        from tokenmill.corpus.parse import parse_block

        return parse_block(
            segment.kind, text.data, segment.start, segment.end, self._task.keys, begins_file=segment.begins_file
        )

    def _found(self, text: Slab, segment: Segment, parsed: "ParsedBlock") -> Found:
        """Count what a segment held; the line of the first special token is looked for once in this process."""
        looks = [self._finder.look(texts) for texts in parsed.texts]
        count, line, token = sum(look.times for look in looks), 0, ""
        if count and not self._located:
            self._located = True
            _, document, token = min((look for look in looks if look.times), key=lambda look: look.document)
            line = _line(text, segment, parsed, document)
        return Found(parsed.documents, parsed.records, parsed.blank, parsed.rejected, count, line, token)

    def _column(self, index: int, parsed: "list[ParsedBlock]", slab: Slab) -> Column:
        texts = parsed[0].texts[index] if len(parsed) == 1 else [t for p in parsed for t in p.texts[index]]
        flat, counts = _flatten(texts)
        ids, offsets = self._encoder.encode_to_bytes(flat)
        if self._exact is not None:
            self._verify(self._exact, flat, ids, offsets)
        # Columns lie one after the other; the first begins at 0.
        start = self._end if index else 0
        self._end = start + len(ids)
        slab.grow(self._end)
        slab.data[start : self._end] = ids
        return Column(start, len(ids), bytes(offsets), counts)

    def _verify(self, encoder: "Encoder", texts: list[str], id_bytes: Any, offset_bytes: Any) -> None:
        import numpy as np

        from tokenmill.tokens.gate import difference

        ids, offsets = np.frombuffer(id_bytes, "<u4"), np.frombuffer(offset_bytes, "<i8")
        step = SAMPLE if self._task.verify == "sample" else 1
        chosen = range(self._blocks * 7919 % step % max(len(texts), 1), len(texts), step)
        exact, exact_offsets = encoder.encode([texts[i] for i in chosen])
        for k, i in enumerate(chosen):
            expected, got = exact[exact_offsets[k] : exact_offsets[k + 1]], ids[offsets[i] : offsets[i + 1]]
            if not np.array_equal(expected, got):
                found = difference(texts[i], expected, got, Path(self._task.backend), self._task.special_tokens)
                raise RequestError(
                    f"the encoder {self._task.encoder} differs from Hugging Face on {found['text']} (expected "
                    f"{found['expected']}, got {found['got']}); nothing of this file is kept: run the same command "
                    "with --encoder hf, and report the text"
                )


def _line(text: Slab, segment: Segment, parsed: "ParsedBlock", document: int) -> int:
    """Return the line, row or record of a document, counted from 1 at the segment's start."""
    from tokenmill.corpus.block_kinds import LINES, TEXT_LINES

    refused = {bad.line for bad in parsed.rejected}
    by_line = segment.kind in (LINES, TEXT_LINES)
    lines = bytes(text.data[segment.start : segment.end]).split(b"\n") if by_line else []
    number = left = 0
    while left <= document:
        number += 1
        blank = number <= len(lines) and not lines[number - 1].strip(b" \t\r")
        left += number not in refused and not blank
    return number


def _flatten(texts: list[Any]) -> tuple[list[str], bytes]:
    """Return the texts as one list, and how many belong to each document, int64 (empty: one each)."""
    if list not in set(map(type, texts)):
        return texts, b""
    from array import array

    lists = [text if isinstance(text, list) else [text] for text in texts]
    return [text for item in lists for text in item], array("q", map(len, lists)).tobytes()


class _Memory:
    """What this process alone holds; /proc says so."""

    def __init__(self) -> None:
        self._unit = os.sysconf("SC_PAGE_SIZE")
        try:
            self._statm = os.open("/proc/self/statm", os.O_RDONLY)
        except OSError:
            self._statm = -1

    def held(self) -> int:
        """Return it in bytes; 0 where the system does not say."""
        if self._statm < 0:
            return 0
        _, resident, shared, *_ = os.pread(self._statm, 200, 0).split()
        return (int(resident) - int(shared)) * self._unit


def _branch(controls: list[Connection]) -> int:
    """Fork a process for each control socket but the first; return which this is, with the others' sockets closed."""
    for mine in range(1, len(controls)):
        try:
            forked = os.fork()
        except OSError:  # it ends before it began, which the parent sees, and has one made on its own
            forked = -1
        if forked == 0:
            for control in (controls[0], *controls[mine + 1 :]):
                control.close()
            return mine
        controls[mine].close()
    return 0


def _slab(fd: str) -> Slab:
    return Slab(os.fstat(int(fd)).st_size, int(fd))


def _end() -> NoReturn:
    """End after the processes that this one forked: what waits for it then knows the CPU time of all."""
    signal.alarm(1)  # the end, if one of them hangs
    with contextlib.suppress(ChildProcessError):
        while True:
            os.wait()
    sys.exit()


def main() -> None:
    """Serve until the parent closes its end or dies."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)  # the parent gets them too, and says when it is over
    with contextlib.suppress(OSError):  # rather this process than the parent, which has another made
        Path("/proc/self/oom_score_adj").write_text("500")
    with contextlib.suppress(OSError):  # a sandbox that forbids it
        os.nice(NICENESS)
    ends = [end.split(",") for end in sys.argv[1:]]
    import tokenmill.corpus.parse
    import tokenmill.tokens.encoders  # noqa: F401 - both while nobody knows yet what is to be done

    try:
        controls = [Connection(int(end[0])) for end in ends]
        task, wanted = controls[0].recv()
        for control in controls[wanted:]:
            control.close()
        server = _Server(task)
        mine = _branch(controls[:wanted])
        if mine:
            controls[mine].send(os.getpid())
        pairs = (pair.split(":") for pair in ends[mine][1:])
        server.serve(controls[mine], [(_slab(text), _slab(ids)) for text, ids in pairs])
    except (EOFError, ConnectionError):
        _end()
    except TokenmillError as error:
        sys.stderr.write(f"{error}\n")
        sys.exit(1)
