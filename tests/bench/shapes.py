"""Give the benchmark's text other shapes: `shapes.py SHAPE BASE.jsonl DIRECTORY SIZE`.

Writes DIRECTORY/files (the input of tokenmill); DIRECTORY/texts.jsonl (all texts, plain), if an alternative reads them;
and last DIRECTORY/about.json. BASE is a corpus of `corpus.py`. A shape larger than BASE repeats BASE, and each pass
exchanges two letters and all digits: as in a real corpus, many words repeat and many are new.

The script runs as a subprocess: Linux counts a parent's memory in a child's peak, so `tests.bench` must stay small.
"""

import itertools
import json
import random
import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO

import orjson
import zstandard

MB = 1_000_000
QUESTION, ANSWER = (50, 500), (200, 1500)
"""Least and greatest number of characters of a message of the user and of the assistant."""
SHORT_QUESTION, SHORT_ANSWER = (20, 60), (40, 120)
"""The same for short conversations."""
SHORT_TEXTS = 2_000
"""Texts that short conversations repeat. A larger corpus of them has more rows, and no new words."""
RESERVED = re.compile(r"<\||</?(?:think|tool_call|tools)>|# Tools")
"""Texts that templates and their readers could take for a part of the format of a conversation."""
MANY_TEXT = 100_000
"""Bytes of text in one of many small files: about 30 kB compressed."""
HUGE = (10, 50)
"""Megabytes of a huge document, if all documents together have HUGE_ALL megabytes."""
HUGE_ALL = 512
PIECES = 200
TINY, TINY_FILE = 60, 160
"""Characters of a tiny document; tiny documents in a tiny file. Half of 59,166 such files have 280 MB of text, at which
fastokens' table of words has reached its maximum: further growth is due to the number of files."""

Count = dict[str, int]


def texts(base: Path) -> Iterator[str]:
    """Yield texts without end, different ones in every pass."""
    swaps = list(itertools.combinations("bfgjkpqvwxyz", 2))
    random.Random(0).shuffle(swaps)
    digits = "0123456789"
    for copy in itertools.count():
        a, b = swaps[copy % len(swaps)]
        rotated = digits[copy % 10 :] + digits[: copy % 10]
        old, new = f"{a}{b}{a.upper()}{b.upper()}{digits}", f"{b}{a}{b.upper()}{a.upper()}{rotated}"
        table = bytes.maketrans(old.encode(), new.encode())
        with base.open("rb") as lines:
            for line in lines:
                text = orjson.loads(line)["text"]
                yield text.encode().translate(table).decode() if copy else text


def record(text: str) -> bytes:
    """Return the JSON line of a text."""
    return orjson.dumps({"text": text}) + b"\n"


class Out:
    """An output of lines: counts documents and bytes of text, and starts a zstd frame every 64 MB of a file."""

    FRAME = 64 * MB

    def __init__(self, directory: Path) -> None:
        self.files = directory / "files"
        self.files.mkdir(parents=True)
        self.about: Count = {"documents": 0, "text_bytes": 0, "files": 0}

    def line(self, text: str) -> bytes:
        """Count a document and return its line."""
        self.about["documents"] += 1
        self.about["text_bytes"] += len(text.encode())
        return record(text)

    def file(self, name: str, lines: Iterator[bytes], plain: IO[bytes] | None = None) -> None:
        """Compress lines into a file, and copy them uncompressed to `plain`."""
        self.about["files"] += 1
        compressor = zstandard.ZstdCompressor()
        with (self.files / f"{name}.jsonl.zst").open("wb") as out:
            while True:
                block_lines = list(_up_to(self.FRAME, lines))
                if not block_lines:
                    return
                block = b"".join(block_lines)
                out.write(compressor.compress(block))
                if plain:
                    plain.write(block)


def _up_to(size: int, lines: Iterator[bytes]) -> Iterator[bytes]:
    for line in lines:
        yield line
        size -= len(line)
        if size <= 0:
            return


def many(base: Path, directory: Path, count: int) -> Count:
    """Write `count` small files."""
    out, source = Out(directory), texts(base)

    def lines() -> Iterator[bytes]:
        size = 0
        while size < MANY_TEXT:
            text = next(source)
            size += len(text.encode())
            yield out.line(text)

    with (directory / "texts.jsonl").open("wb") as plain:
        for number in range(count):
            out.file(f"{number:05d}", lines(), plain)
    return out.about


def huge(base: Path, directory: Path, megabytes: int) -> Count:
    """Write one file of a few huge documents, which are smaller if `megabytes` is less than HUGE_ALL."""
    out, source, dice = Out(directory), texts(base), random.Random(0)

    def lines() -> Iterator[bytes]:
        left = megabytes * MB
        while left > 0:
            size = min(left, dice.uniform(*HUGE) * MB * megabytes / HUGE_ALL)
            texts_of_document: list[str] = []
            while size > 0:
                texts_of_document.append(next(source))
                size -= len(texts_of_document[-1].encode())
            text = "\n\n".join(texts_of_document)
            left -= len(text.encode())
            yield out.line(text)

    with (directory / "texts.jsonl").open("wb") as plain:
        out.file("texts", lines(), plain)
    return out.about


def long(base: Path, directory: Path, megabytes: int) -> Count:
    """Write one very large file."""
    out, source = Out(directory), texts(base)

    def lines() -> Iterator[bytes]:
        while out.about["text_bytes"] < megabytes * MB:
            yield out.line(next(source))

    out.file("texts", lines())
    return out.about


def pieces(base: Path, directory: Path, megabytes: int) -> Count:
    """Write PIECES plain files of equal size that repeat the base: these benchmarks do not depend on the content."""
    out = Out(directory)
    lines = itertools.chain.from_iterable(base.open("rb") for _ in itertools.count())
    for number in range(PIECES):
        with (out.files / f"piece-{number:03d}.jsonl").open("wb") as file:
            for line in _up_to(megabytes * MB // PIECES, lines):
                file.write(line)
                out.about["documents"] += 1
        out.about["files"] += 1
    return out.about


def tiny_texts(base: Path) -> Iterator[str]:
    """Yield tiny documents without end."""
    for text in texts(base):
        for start in range(0, len(text), TINY):
            yield text[start : start + TINY]


def documents(base: Path, directory: Path, count: int) -> Count:
    """Write one file of very many tiny documents."""
    out = Out(directory)
    out.file("texts", map(out.line, itertools.islice(tiny_texts(base), count)))
    return out.about


def files(base: Path, directory: Path, count: int) -> Count:
    """Write very many files of TINY_FILE tiny documents."""
    out, source = Out(directory), tiny_texts(base)
    with (directory / "texts.jsonl").open("wb") as plain:
        for number in range(count):
            out.file(f"{number:06d}", map(out.line, itertools.islice(source, TINY_FILE)), plain)
    return out.about


def message_texts(base: Path) -> Iterator[tuple[str, str]]:
    """Yield questions and answers without end: pieces of texts, without text that a chat template could write."""
    return _cut_messages(texts(base), QUESTION, ANSWER)


def _cut_messages(source: Iterator[str], *sizes: tuple[int, int]) -> Iterator[tuple[str, str]]:
    dice = random.Random(0)
    pieces: list[str] = []
    for text in source:
        start = 0
        while start < len(text):
            length = dice.randint(*sizes[len(pieces)])
            piece = text[start : start + length].strip()
            start += length
            if not piece or RESERVED.search(piece):
                continue
            pieces.append(piece)
            if len(pieces) == 2:
                yield pieces[0], pieces[1]
                pieces = []


def _write_chats(directory: Path, rows: int, turns: int, messages: Iterator[tuple[str, str]]) -> Count:
    """Write one file of conversations with this number of questions and answers."""
    out = Out(directory)

    def lines() -> Iterator[bytes]:
        for _ in range(rows):
            pairs = list(itertools.islice(messages, turns))
            out.about["documents"] += 1
            out.about["text_bytes"] += sum(len(text.encode()) for pair in pairs for text in pair)
            yield (
                orjson.dumps({"messages": [m for pair in pairs for m in map(_message, ("user", "assistant"), pair)]})
                + b"\n"
            )

    with (directory / "texts.jsonl").open("wb") as plain:
        out.file("chats", lines(), plain)
    return out.about


def _message(role: str, text: str) -> dict[str, str]:
    return {"role": role, "content": text}


def chat_4(base: Path, directory: Path, rows: int) -> Count:
    """Write conversations of four questions and answers."""
    return _write_chats(directory, rows, 4, message_texts(base))


def chat_16(base: Path, directory: Path, rows: int) -> Count:
    """Write conversations of sixteen questions and answers."""
    return _write_chats(directory, rows, 16, message_texts(base))


def chat_short(base: Path, directory: Path, rows: int) -> Count:
    """Write short conversations of one question and answer; their texts repeat."""
    messages = _cut_messages(texts(base), SHORT_QUESTION, SHORT_ANSWER)
    pool = list(itertools.islice(messages, SHORT_TEXTS))
    return _write_chats(directory, rows, 1, itertools.cycle(pool))


SHAPES: dict[str, Callable[[Path, Path, int], Count]] = {
    shape.__name__: shape for shape in (many, huge, long, pieces, documents, files, chat_4, chat_16, chat_short)
}

if __name__ == "__main__":
    counts = SHAPES[sys.argv[1]](Path(sys.argv[2]), Path(sys.argv[3]), int(sys.argv[4]))
    Path(sys.argv[3], "about.json").write_text(json.dumps(counts, indent=2) + "\n")
