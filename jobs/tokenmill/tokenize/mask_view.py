"""Show which tokens of a sequence are trained: in colour on a terminal, between marks elsewhere, as spans in JSON.

`tokenmill inspect` uses this module for the documents of a chat output and for packed rows. Texts come from foreign
data, so all characters that could control a terminal or change the order of its text are escaped.
"""

import re
import sys
import unicodedata
from collections.abc import Iterator, Sequence
from itertools import groupby, pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from tokenmill.core.files.paths import join_inside
from tokenmill.errors import InputError, RequestError
from tokenmill.tokenize.tokenizer import load_backend

if TYPE_CHECKING:
    from tokenmill.datasets.dataset import Dataset, Document

BEGIN_MARK, END_MARK = "\u27e6", "\u27e7"
"""The brackets around trained text without colour."""

NEWLINE_SIGN = "\u21b5"
"""Precedes a trained line break in colour, where a line break alone would be invisible."""

TRAINED_STYLE, SPECIAL_STYLE, TRAINED_SPECIAL_STYLE = "black on green", "bold magenta", "bold black on green"
"""The styles of trained text and of special tokens."""

CONTEXT_TOKENS = 8
"""Tokens that are decoded before a part again: a character can have several tokens, and a tokenizer can remove the
blank before the first token of a text."""

_JOINERS = "\u200c\u200d"
"""Format characters that are part of ordinary text in several scripts and in emoji."""


class MaskedSequence(NamedTuple):
    """The ids of one sequence; `trained` tells for each id whether it is trained."""

    ids: list[int]
    trained: list[bool]

    @property
    def trained_count(self) -> int:
        """The number of loss tokens."""
        return sum(self.trained)

    @property
    def spans(self) -> list[tuple[int, int]]:
        """The first token of each trained part, and the token after its last one."""
        edges = [i for i, (old, new) in enumerate(pairwise([False, *self.trained, False])) if old != new]
        return list(zip(edges[::2], edges[1::2], strict=True))


class TextPart(NamedTuple):
    """The text of consecutive tokens, and whether they are trained and special."""

    text: str
    trained: bool
    special: bool


def read_masked_document(dataset: "Dataset", document: "Document") -> list[MaskedSequence]:
    """Return the sequences of a document with their masks.

    Raises:
        RequestError: the dataset has no masks.
        InputError: the mask has other sequences than the document.
    """
    from tokenmill.datasets.formats.indexed.reader import IndexedReader

    record, prefix = dataset.record, dataset.get_mask_prefix(document.pair)
    if prefix is None:
        raise RequestError(
            f"{record.output} has no mask, because {record.stage} trains every token: --mask shows the output of "
            "tokenmill chat; run tokenmill chat on conversations, or leave out --mask"
        )
    ids = IndexedReader(join_inside(record.output, document.pair.prefix))
    mask = IndexedReader(join_inside(record.output, prefix))
    first, end = ids.document_indices[document.number : document.number + 2].tolist()
    bounds = mask.document_indices[document.number : document.number + 2].tolist()
    if bounds != [first, end] or not (ids.lengths[first:end] == mask.lengths[first:end]).all():
        raise InputError(
            f"{record.output / prefix} is not the mask of {document.pair.prefix}: document {document.number} has other "
            f"sequences there; run tokenmill verify {record.output}"
        )
    return [
        MaskedSequence(ids.sequence(number).tolist(), (mask.sequence(number) != 0).tolist())
        for number in range(first, end)
    ]


class SequenceDecoder:
    """Decodes sequences with the backend JSON of their tokenizer."""

    def __init__(self, backend: Path) -> None:
        self._backend = backend
        self._tokenizer = load_backend(backend)
        added = self._tokenizer.get_added_tokens_decoder()
        self._special = frozenset(number for number, token in added.items() if token.special)

    def cut(self, sequence: MaskedSequence) -> list[TextPart]:
        """Return the text of a sequence, cut where the mask changes, and before and after special tokens.

        Raises:
            InputError: an id is not a token of the tokenizer.
        """
        ids = sequence.ids
        kinds = [(trained, number in self._special) for number, trained in zip(ids, sequence.trained, strict=True)]
        parts: list[TextPart] = []
        start = 0
        for (trained, special), group in groupby(kinds):
            end = start + len(list(group))
            before = self._decode(ids[max(0, start - CONTEXT_TOKENS) : start])
            text = self._decode(ids[max(0, start - CONTEXT_TOKENS) : end])
            common = _count_common(before, text)
            if common < len(before) and parts:  # the first tokens complete the last character of the part before
                parts[-1] = parts[-1]._replace(text=parts[-1].text[: common - len(before)])
            parts.append(TextPart(text[common:], trained, special))
            start = end
        return parts

    def _decode(self, ids: Sequence[int]) -> str:
        try:
            return str(self._tokenizer.decode(ids, skip_special_tokens=False))
        except OverflowError:
            raise InputError(
                f"the sequence has ids that {self._backend} does not have, such as {min(ids)} or {max(ids)}; run "
                "tokenmill verify on the output"
            ) from None


def _count_common(first: str, second: str) -> int:
    """Return the number of characters with which both texts begin."""
    if second.startswith(first):
        return len(first)
    return next((i for i, pair in enumerate(zip(first, second, strict=False)) if pair[0] != pair[1]), len(second))


def join_parts(parts: Sequence[TextPart]) -> Iterator[tuple[str, bool]]:
    """Yield the text of successive parts that are all trained, or all not trained."""
    for trained, group in groupby(parts, key=lambda part: part.trained):
        yield "".join(part.text for part in group), trained


def escape(text: str) -> str:
    """Return a text with escapes such as \\x1b for the characters that could control a terminal.

    These are control characters except tabs and line breaks, and invisible characters that change the order of text.
    """
    return "".join(map(_escape_character, text)) if _UNSAFE.search(text) else text


_UNSAFE = re.compile("[^\t\n -~]")
"""A character that may need an escape."""


def _escape_character(character: str) -> str:
    safe = character in "\t\n" or character in _JOINERS
    if safe or unicodedata.category(character) not in ("Cc", "Cf", "Cs", "Zl", "Zp"):
        return character
    code = ord(character)
    return f"\\x{code:02x}" if code < 256 else f"\\u{code:04x}" if code < 65536 else f"\\U{code:08x}"


def mark_trained(parts: Sequence[TextPart]) -> str:
    """Return the escaped text with marks around trained text; the same characters in the text are escaped."""
    return "".join(
        f"{BEGIN_MARK}{text}{END_MARK}" if trained else text
        for text, trained in ((_escape_marks(escape(text)), trained) for text, trained in join_parts(parts))
    )


def _escape_marks(text: str) -> str:
    return text.replace(BEGIN_MARK, f"\\u{ord(BEGIN_MARK):04x}").replace(END_MARK, f"\\u{ord(END_MARK):04x}")


def style_trained(parts: Sequence[TextPart]) -> Any:
    """Return a `rich.text.Text` with the escaped text, in which trained text and special tokens have styles."""
    from rich.text import Text

    shown = Text()
    for part in parts:
        text = escape(part.text)
        if part.trained:
            shown.append(
                text.replace("\n", f"{NEWLINE_SIGN}\n"), TRAINED_SPECIAL_STYLE if part.special else TRAINED_STYLE
            )
        else:
            shown.append(text, SPECIAL_STYLE if part.special else "")
    return shown


class MaskPrinter:
    """Prints sequences to standard output: in colour if it is a terminal with colours, otherwise with marks.

    The environment variables NO_COLOR, FORCE_COLOR and TERM are respected.
    """

    def __init__(self) -> None:
        from rich.console import Console

        self._console = Console(highlight=False, markup=False, emoji=False)
        self._styled = self._console.color_system is not None and not self._console.no_color

    @property
    def legend(self) -> str:
        """The description of trained text."""
        if self._styled:
            return f"trained text is green ({NEWLINE_SIGN} is a trained line break), special tokens are bold"
        return f"trained text is between {BEGIN_MARK} and {END_MARK}"

    def print(self, parts: Sequence[TextPart]) -> None:
        """Print the text of a sequence."""
        if self._styled:
            self._console.print(style_trained(parts), soft_wrap=True)
        else:
            sys.stdout.write(mark_trained(parts) + "\n")
