"""preprocess: JSONL, JSON, Parquet, Arrow or text -> `<name>_<key>_document.{bin,idx}`, as Megatron-LM writes them.

Input: the output of download, extract, concatenate or transform, a directory of files, or a source that the stage
streams (`stages.pairs`). Training reads the output.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

from tokenmill.datasets.contract import PREPROCESS, PairBasis, ResolvedTokenizer
from tokenmill.errors import InputError, RequestError
from tokenmill.records.block_kinds import LINES
from tokenmill.records.readers import MAX_SEARCH_BYTES, get_record_unit, read_documents
from tokenmill.records.unexpected_content import CHAT_UNSUPPORTED, UnexpectedContent, suggest_text_format
from tokenmill.stages.pairs import FindTokenizer, PairStage
from tokenmill.tokenize.encoder_store import first_texts
from tokenmill.tokenize.options import EncodingOptions, PreprocessOptions

if TYPE_CHECKING:
    from tokenmill.records.readers import TextBatch

FIRST_BYTES = 1 << 20
"""Bytes per batch when the planner checks the first records for the keys."""


@dataclass(frozen=True, kw_only=True)
class Preprocess(PairStage):
    """The stage that tokenizes groups of files into pairs; each key of a record has a pair."""

    options: PreprocessOptions

    kind: ClassVar = PREPROCESS

    @property
    def keys(self) -> list[str]:
        """The keys of the texts in a record."""
        return self.options.key_names

    def check_options(self) -> None:
        """Raise RequestError for keys and names that cannot be part of an output's name."""
        options, keys = self.options, self.keys
        if len(set(keys)) != len(keys) or not all(keys):
            raise RequestError(f"--keys {options.keys!r}: a key is empty or repeated; specify each key once")
        for key in keys:
            if "/" in key:
                raise RequestError(
                    f"--keys {key}: a key is part of file names and must not contain /; choose another key"
                )
        super().check_options()
        if options.format == "txt" and len(keys) > 1:
            raise RequestError(
                f"--keys {options.keys}: text files have no keys; with --format txt, pass one key, which names the "
                "outputs"
            )

    def request_fields(self) -> dict[str, object]:
        """Return the keys, and the additions to the texts."""
        options = self.options
        return {
            "keys": self.keys,
            "append_eod": options.append_eod,
            "eod_token": options.eod_token,
            "special_tokens": options.special_tokens,
        }

    def resolve(
        self, paths: Sequence[Path], options: EncodingOptions, find_tokenizer: FindTokenizer
    ) -> tuple[ResolvedTokenizer, PairBasis]:
        """Check that the first records have the keys, and resolve the tokenizer."""
        _check_keys(paths, self.options)
        tokenizer = find_tokenizer(lambda _: first_texts(paths, self.options))
        basis = PairBasis(
            tokenizer=tokenizer.fingerprint,
            keys=self.keys,
            eod=tokenizer.eod_id if options.append_eod else None,
            special_tokens=options.special_tokens,
            dtype=tokenizer.dtype,
            rows=None,
            **options.choices(),
            **self.format_fields(),
        )
        return tokenizer, basis


def _check_keys(paths: Sequence[Path], options: PreprocessOptions) -> None:
    """Raise InputError if no first record has the keys: then the keys are wrong, not the records."""
    unexpected: UnexpectedContent | None = None
    for path in paths:
        try:
            batch = _first_records(path, options)
        except UnexpectedContent as error:  # if other files are valid, the unit of this file reports the error
            unexpected = unexpected or error
            continue
        if batch and batch.documents:
            return
        if batch:
            first = batch.rejected[0]
            unit = get_record_unit(path, options.reading(), batch.kind)
            place = f"{path}: none of the first {batch.records} records is valid; {unit} {first.line}"
            if CHAT_UNSUPPORTED in first.reason:
                raise InputError(f"{place}: {first.reason}")
            hint = suggest_text_format(first.raw) if batch.kind == LINES and options.format in (None, "jsonl") else ""
            exclude_hint = ", or, if the file is not a data file, leave it out with --exclude" if len(paths) > 1 else ""
            raise InputError(f"{place}: {first.reason}; {hint or 'choose the key with --keys'}{exclude_hint}")
    if unexpected:
        raise unexpected


def _first_records(path: Path, options: PreprocessOptions) -> "TextBatch | None":
    """Return the first batch of a file that has a record, or None if the file is empty or damaged.

    The unit of a damaged file reports the damage.
    """
    remaining = MAX_SEARCH_BYTES
    try:
        for batch in read_documents(
            path,
            options.key_names,
            display=str(path),
            batch_bytes=FIRST_BYTES,
            on_bad="quarantine",
            settings=options.reading(),
        ):
            remaining -= batch.bytes
            if batch.records or remaining <= 0:
                return batch if batch.records else None
    except UnexpectedContent:
        raise
    except InputError:
        pass
    return None
