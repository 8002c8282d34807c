"""Make the benchmark's corpus: `corpus.py CORPUS.jsonl MEGABYTES`.

Writes CORPUS.jsonl, CORPUS.jsonl.zst, and CORPUS.json with their counts. The base text is part of Python
(`tokenmill.pipelines.sample.harvest`: prose, docstrings, code, 13 MB). The script copies the base as often as
necessary, and changes each copy: it replaces other words and numbers, cuts and joins documents at other places, and
inserts documents in other scripts and tables of numbers. An encoder's cache of words therefore fills as with a real
corpus, whose vocabulary never stops growing, and is not warm after the first copy. The same Python version gives the
same bytes.

The script runs as a subprocess: Linux counts a parent's memory in a child's peak, so `tests.bench` must stay small.
"""

import itertools
import json
import random
import re
import sys
import tempfile
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

MB = 1_000_000
CHANGED = 0.4
"""Share of the distinct words of five letters or more that a copy changes."""
OTHER_SCRIPTS, TABLES = 0.12, 0.03
"""Shares of the bytes of the corpus."""

_WORD = re.compile(r"([^\W\d_]+|\d+)")
_VOWELS, _CONSONANTS = "aeiou", "bcdfghjklmnpqrstvwxz"
_SCRIPTS = {  # name: first and last letter, lengths of words, separator of words
    "Cyrillic": (0x0430, 0x044F, (2, 11), " "),
    "Greek": (0x03B1, 0x03C9, (2, 11), " "),
    "Arabic": (0x0627, 0x064A, (2, 8), " "),
    "Hebrew": (0x05D0, 0x05EA, (2, 7), " "),
    "Devanagari": (0x0905, 0x0939, (2, 7), " "),
    "Thai": (0x0E01, 0x0E2E, (2, 8), ""),
    "Han": (0x4E00, 0x5FFF, (1, 3), ""),
    "Kana": (0x3042, 0x3093, (1, 5), ""),
    "Hangul": (0xAC00, 0xBFFF, (1, 4), " "),
}


class _Words(dict[str, str]):
    """The words of a copy: only the hash of a word decides whether it is changed, and how."""

    def __init__(self, copy: int) -> None:
        super().__init__()
        self._copy = copy

    def __missing__(self, word: str) -> str:
        self[word] = changed = self._change(word)
        return changed

    def _change(self, word: str) -> str:
        dice = zlib.crc32(f"{self._copy} {word}".encode())
        if self._copy == 0 or not word.isalnum():
            return word
        if word.isdecimal():
            return str(dice % 10 ** len(word)).zfill(len(word)) if len(word) > 2 else word
        if len(word) < 5 or dice % 1000 >= CHANGED * 1000:
            return word
        position = dice // 1000 % len(word)
        old = word[position]
        letters = _VOWELS if old.lower() in _VOWELS else _CONSONANTS
        new = letters[dice // 100_000 % len(letters)]
        return word[:position] + (new.upper() if old.isupper() else new) + word[position + 1 :]


def documents(base: list[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """Yield records without end."""
    split = [_WORD.split(record["text"]) for record in base]
    for copy in itertools.count():
        dice = random.Random(copy)
        words = _Words(copy)
        order = list(range(len(base)))
        dice.shuffle(order)
        tail: list[str] = []
        others = _other_documents(copy)
        owed = 0.0
        for index in order:
            parts = split[index]
            cut = dice.randrange(len(parts)) if copy else len(parts)
            text = "".join(map(words.__getitem__, itertools.chain(parts[:cut], tail)))
            tail = parts[cut:]
            if not text:  # datatrove skips empty documents, and would do less work
                continue
            yield {**base[index], "text": text}
            owed += len(text.encode()) * (OTHER_SCRIPTS + TABLES) / (1 - OTHER_SCRIPTS - TABLES)
            while owed > 0:
                other = next(others)
                owed -= len(other["text"].encode())
                yield other


def _other_documents(copy: int) -> Iterator[dict[str, Any]]:
    dice = random.Random(f"others {copy}")
    vocabularies = {name: _vocabulary(dice, *of[:3]) for name, of in _SCRIPTS.items()}
    ranks = list(itertools.accumulate(1 / (rank + 2) for rank in range(20_000)))
    for number in itertools.count():
        if dice.random() < TABLES / (OTHER_SCRIPTS + TABLES):
            text, kind = _table(dice), "table"
        else:
            kind = dice.choice(list(_SCRIPTS))
            words = dice.choices(vocabularies[kind], cum_weights=ranks, k=dice.randint(30, 600))
            sentences = (words[i : i + 12] for i in range(0, len(words), 12))
            text = ". ".join(_SCRIPTS[kind][3].join(sentence) for sentence in sentences) + "."
        yield {"text": text, "title": f"{kind} {number}", "meta": {"source": "made", "kind": kind}}


def _vocabulary(dice: random.Random, first: int, last: int, lengths: tuple[int, int]) -> list[str]:
    letters = [chr(code) for code in range(first, last + 1) if chr(code).isalpha()]
    ranks = list(itertools.accumulate(1 / (rank + 4) for rank in range(len(letters))))
    dice.shuffle(letters)
    return ["".join(dice.choices(letters, cum_weights=ranks, k=dice.randint(*lengths))) for _ in range(20_000)]


def _table(dice: random.Random) -> str:
    rows = (
        f"{dice.randrange(10**6)},{dice.random():.4f},{dice.choice('ABCDEF')}{dice.randrange(100):02d},"
        f"20{dice.randrange(30):02d}-{dice.randint(1, 12):02d}-{dice.randint(1, 28):02d}\n"
        for _ in range(dice.randint(20, 200))
    )
    return "id,value,class,date\n" + "".join(rows)


def base_documents() -> list[dict[str, Any]]:
    """Return the records of the sample corpus, in a fixed order."""
    import zstandard

    from tokenmill.pipelines.sample.harvest import harvest

    with tempfile.TemporaryDirectory() as scratch:
        report = harvest(Path(scratch))
        shards = [Path(scratch, name) for name in report.files if name.endswith(".zst")]
        lines = [line for shard in shards for line in zstandard.decompress(shard.read_bytes()).splitlines()]
    return [json.loads(line) for line in lines]


def write(plain: Path, megabytes: int) -> None:
    """Write the corpus and, last, its counts; `megabytes` of 10^6 bytes count only the text, as UTF-8."""
    import orjson
    import xxhash
    import zstandard

    plain.parent.mkdir(parents=True, exist_ok=True)
    digest = xxhash.xxh3_128()
    text_bytes = count = 0
    with (
        plain.open("wb") as out,
        Path(f"{plain}.zst").open("wb") as compressed,
        zstandard.ZstdCompressor().stream_writer(compressed) as compressor,
    ):
        for record in documents(base_documents()):
            line = orjson.dumps(record) + b"\n"
            out.write(line)
            compressor.write(line)
            digest.update(line)
            text_bytes += len(record["text"].encode())
            count += 1
            if text_bytes >= megabytes * MB:
                break
    about = {
        "documents": count,
        "text_bytes": text_bytes,
        "jsonl_bytes": plain.stat().st_size,
        "zst_bytes": Path(f"{plain}.zst").stat().st_size,
        "xxh3_128": digest.hexdigest(),
    }
    plain.with_suffix(".json").write_text(json.dumps(about, indent=2) + "\n")


if __name__ == "__main__":
    write(Path(sys.argv[1]), int(sys.argv[2]))
