"""The filters of a configuration as one transform, which the stage transform applies before other stages read the rows.

A filter returns the record unchanged, or None to leave it out; the stage counts the records that are left out.
"""

from dataclasses import dataclass

from tokenmill.stages.transform.types import Record


@dataclass(frozen=True)
class RowFilter:
    """Keep records whose text is long enough, and whose field `used_in_field` has the value `used_in`.

    `min_chars` is the minimum number of characters under the key `text_field`; a list of texts counts as one text. A
    record without a text is kept, so that the stage that reads the text reports it.
    """

    text_field: str
    min_chars: int | None = None
    used_in_field: str = ""
    used_in: str | None = None

    def __call__(self, record: Record) -> Record | None:
        """Return the record, or None to leave it out."""
        if self.used_in is not None:
            value = record.get(self.used_in_field)
            if value != self.used_in and not (isinstance(value, list) and self.used_in in value):
                return None
        if self.min_chars is not None:
            length = _count_characters(_find_text(record, self.text_field))
            if length is not None and length < self.min_chars:
                return None
        return record


def _find_text(record: Record, key: str) -> object:
    """Return the value of a key; `a.b` is the key b in the object a, unless the record has the key `a.b`."""
    if key in record:
        return record[key]
    value: object = record
    for part in key.split("."):
        if not isinstance(value, dict):
            return None
        value = value.get(part)
    return value


def _count_characters(text: object) -> int | None:
    """Return the characters of a text or of a list of texts, or None for another value."""
    texts = text if isinstance(text, list) else [text]
    return sum(map(len, texts)) if all(isinstance(item, str) for item in texts) else None
