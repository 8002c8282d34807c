"""The decoded texts of a sample of documents: tokens per character by script, two tokenizers, and examples.

The sample has a fixed seed. Only its numbers are in a report, unless the caller requests examples.
"""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from tokenmill.datasets.weighted import Pair
from tokenmill.errors import TokenmillError
from tokenmill.reports.contract import (
    ComparedScript,
    ComparedTokenizers,
    DataExample,
    DocumentSample,
    DuplicateSummary,
    ScriptSummary,
    ScriptUsage,
    TokenFrequency,
    TokenizerSummary,
)
from tokenmill.reports.lengths import number_documents
from tokenmill.reports.scripts import find_main_script
from tokenmill.reports.usage import SEED
from tokenmill.tokenize.tokenizer import load_backend, resolve_tokenizer

if TYPE_CHECKING:
    from tokenizers import Tokenizer

SAMPLE_DOCUMENTS = 2000
SAMPLE_TOKENS = 4_000_000
DOCUMENT_TOKENS = 100_000
"""Ids at the start of a document that are decoded."""
EXAMPLE_CHARACTERS = 200
_BATCH = 64
_REPLACEMENT = "\ufffd"


class SampledText(NamedTuple):
    """The text of a document, and the number of its ids without the EOD."""

    text: str
    tokens: int


class TextSample(NamedTuple):
    """The texts of a sample; `cut` is the number of documents that were decoded in part."""

    sample: DocumentSample
    texts: list[SampledText]
    cut: int


class DatasetDecoder:
    """The tokenizer of a dataset, and the documents of its pairs."""

    def __init__(self, backend: Path, pairs: Sequence[Pair], eod: int | None) -> None:
        """Load the backend of the tokenizer.

        Raises:
            RequestError: the backend is missing or damaged.
        """
        self.tokenizer: Tokenizer = load_backend(backend)
        self._pairs = pairs
        self._numbered = number_documents(pairs)
        self._eod = eod

    def _read(self, number: int, limit: int) -> list[int]:
        """Return the first ids of a document without its EOD, at most one more than `limit`."""
        first, pair = next(numbered for numbered in reversed(self._numbered) if numbered[0] <= number)
        ids: list[int] = pair.reader.document(number - first)[: limit + 1].tolist()
        return ids[:-1] if ids and ids[-1] == self._eod and len(ids) <= limit + 1 else ids

    def decode(self, number: int, limit: int = DOCUMENT_TOKENS) -> str:
        """Return the text of the first ids of a document."""
        return str(self.tokenizer.decode(self._read(number, limit)[:limit], skip_special_tokens=False))

    def sample_texts(self) -> TextSample:
        """Decode a sample of the documents."""
        documents = sum(pair.reader.documents for pair in self._pairs)
        total = sum(pair.reader.ids.size for pair in self._pairs)
        random = np.random.default_rng(SEED)
        is_complete = documents <= SAMPLE_DOCUMENTS
        numbers = (
            range(documents)
            if is_complete
            else random.permutation(random.choice(documents, SAMPLE_DOCUMENTS, replace=False, shuffle=False)).tolist()
        )
        texts, batch, cut, read = list[SampledText](), list[list[int]](), 0, 0
        for number in numbers:
            if read >= SAMPLE_TOKENS:
                is_complete = False
                break
            ids = self._read(number, DOCUMENT_TOKENS)
            cut += len(ids) > DOCUMENT_TOKENS
            batch.append(ids[:DOCUMENT_TOKENS])
            read += len(batch[-1])
            if len(batch) == _BATCH:
                texts += self._decode_batch(batch)
                batch = []
        texts += self._decode_batch(batch)
        seed = None if is_complete else SEED
        return TextSample(DocumentSample(len(texts), documents, read, total, seed), texts, cut)

    def _decode_batch(self, batch: list[list[int]]) -> list[SampledText]:
        texts = self.tokenizer.decode_batch(batch, skip_special_tokens=False)
        return [SampledText(text, len(ids)) for text, ids in zip(texts, batch, strict=True)]

    def add_pieces(self, frequencies: Sequence[TokenFrequency]) -> list[TokenFrequency]:
        """Return frequencies with the text of each id in the vocabulary."""
        return [TokenFrequency(entry.id, entry.count, entry.share, self._find_piece(entry.id)) for entry in frequencies]

    def _find_piece(self, id: int) -> str | None:
        text = str(self.tokenizer.decode([id], skip_special_tokens=False))
        piece = self.tokenizer.id_to_token(id)
        if piece is None:
            return None
        is_readable = text and _REPLACEMENT not in text
        if is_readable and not piece.startswith("\u2581"):  # SentencePiece removes the space in front of a text
            return text
        return text if is_readable and text.startswith(" ") else piece.replace("\u2581", " ")


def summarize_scripts(sample: TextSample) -> ScriptSummary:
    """Return tokens and characters by the main script of the texts, the script with the most documents first."""
    sums: dict[str, list[int]] = {}
    for text, tokens in sample.texts:
        numbers = (1, len(text), len(text.encode("utf-8", "surrogatepass")), tokens)
        entry = sums.setdefault(find_main_script(text), [0, 0, 0, 0])
        entry[:] = [before + number for before, number in zip(entry, numbers, strict=True)]
    ordered = sorted(sums.items(), key=lambda item: (-item[1][1], item[0]))
    return ScriptSummary(sample.sample, sample.cut, [ScriptUsage(name, *numbers) for name, numbers in ordered])


def compare_tokenizers(
    decoder: DatasetDecoder, first: TokenizerSummary, sample: TextSample, reference: str, scratch: Path
) -> ComparedTokenizers:
    """Encode the sample with the tokenizer of the dataset and with another one.

    Args:
        decoder: the tokenizer of the dataset.
        first: its description.
        sample: the texts.
        reference: the other tokenizer: a directory, or a name on the Hub.
        scratch: a directory for the files of the other tokenizer.

    Raises:
        TokenmillError: the other tokenizer cannot be loaded.
    """
    resolved, _ = resolve_tokenizer(
        reference,
        None,
        eod_token=None,
        add_special_tokens=False,
        texts=[],
        destination=scratch / "resolved",
        scratch=scratch,
        need_eod=False,
        encoder="hf",
        use_cache=True,
    )
    other = load_backend(scratch / "resolved" / "backend.json")
    sums: dict[str, list[int]] = {}
    for texts in _iter_batches([text for text, _ in sample.texts]):
        encodings = [
            tokenizer.encode_batch(texts, add_special_tokens=False) for tokenizer in (decoder.tokenizer, other)
        ]
        for text, *encoded in zip(texts, *encodings, strict=True):
            entry = sums.setdefault(find_main_script(text), [0, 0, 0, 0])
            numbers = (1, len(text), *(len(encoding.ids) for encoding in encoded))
            entry[:] = [before + number for before, number in zip(entry, numbers, strict=True)]
    ordered = sorted(sums.items(), key=lambda item: (-item[1][1], item[0]))
    return ComparedTokenizers(
        sample.sample,
        first,
        TokenizerSummary(resolved.reference, resolved.vocab_size),
        [ComparedScript(name, *numbers) for name, numbers in ordered],
    )


def _iter_batches(texts: list[str]) -> Iterator[list[str]]:
    for start in range(0, len(texts), _BATCH):
        yield texts[start : start + _BATCH]


def make_examples(
    decoder: DatasetDecoder, duplicates: DuplicateSummary | None, longest: Sequence[tuple[int, int]], count: int
) -> list[DataExample]:
    """Return the first characters of the most repeated and of the longest documents."""
    examples = [
        DataExample(
            "repeated",
            f"document {group.document:,}: {group.copies:,} copies of {group.tokens:,} tokens",
            shorten(decoder.decode(group.document, 2 * EXAMPLE_CHARACTERS)),
        )
        for group in (duplicates.groups[:count] if duplicates else [])
    ]
    return examples + [
        DataExample(
            "longest",
            f"document {number:,}: {length:,} tokens",
            shorten(decoder.decode(number, 2 * EXAMPLE_CHARACTERS)),
        )
        for length, number in longest[:count]
    ]


def shorten(text: str) -> str:
    """Return the first characters of a text."""
    return text if len(text) <= EXAMPLE_CHARACTERS else f"{text[:EXAMPLE_CHARACTERS]}..."


def explain_tokenizer(error: TokenmillError) -> str:
    """Return the note that replaces the parts of a report that need a tokenizer."""
    return f"the texts were not decoded, so scripts and pieces are missing: {error}"
