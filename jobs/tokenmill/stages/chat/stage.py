"""chat: rows of conversations -> `<name>_chat_document.{bin,idx}` and the mask of their loss tokens.

Input: the output of download, extract, concatenate or transform, a directory of files, or a source that the stage
streams (`stages.pairs`). The stage pack reads the output.

A row becomes one document of one or more sequences. `<name>_mask_document.{bin,idx}` has the same sequences and
documents; its uint8 values are 1 where the token at the same position is trained, and 0 elsewhere.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from tokenmill.core.files.hashing import sha256_of
from tokenmill.datasets.contract import CHAT, CHAT_KEY, MASK_KEY, ChatBasis, PairBasis, ResolvedTokenizer
from tokenmill.engine.record import Plan, StageRecord
from tokenmill.errors import InputError, RequestError, TemplateLimit
from tokenmill.records.blocks import detect_format
from tokenmill.records.readers import first_rows, get_record_unit
from tokenmill.records.unexpected_content import UnexpectedContent
from tokenmill.stages.chat.encode import ChatEncoding, Rendering
from tokenmill.stages.chat.gate import Row, Tokenizer
from tokenmill.stages.chat.options import ChatOptions
from tokenmill.stages.chat.template import BUILTIN
from tokenmill.stages.chat.trial import try_template
from tokenmill.stages.pairs import FindTokenizer, PairStage
from tokenmill.tokenize.encoder_store import Encoders, EncodingMode
from tokenmill.tokenize.options import EncodingOptions
from tokenmill.tokenize.workers.pool import BLOCK

FIRST_FILES, FIRST_ROWS, FIRST_BYTES = 8, 25, 1 << 20
"""Sample of the input for the gates: number of files, and rows and bytes per block of each file."""

FIRST_WORK = 250_000
"""Sum of the squares of the numbers of messages in the sample: the time to render a row grows with the square."""


@dataclass(frozen=True, kw_only=True)
class Chat(PairStage):
    """The stage that renders conversations, and writes their ids and masks."""

    options: ChatOptions

    kind: ClassVar = CHAT
    block_bytes: ClassVar = BLOCK // 4  # rendering takes longer than reading, so processes would wait for large blocks
    min_bytes_per_process: ClassVar = 1 << 20

    @property
    def keys(self) -> list[str]:
        """The keys of the ids and of the mask."""
        return [CHAT_KEY, MASK_KEY]

    def check_options(self) -> None:
        """Raise RequestError for a format without records."""
        super().check_options()
        if self.options.format == "txt":
            raise RequestError(
                "--format txt: a text has no messages; convert the conversations to rows with messages (JSON Lines), "
                "or use tokenmill preprocess for texts"
            )

    def request_fields(self) -> dict[str, object]:
        """Return the options that determine bytes."""
        return {"eod_token": self.options.eod_token, "chat": self._choices()}

    def _choices(self) -> dict[str, object]:
        """Return the choices for the plan; a template's file is identified by its content, not by its path."""
        choices, name = self.options.row_choices(), self.options.chat_template
        if name not in ("tokenizer", *BUILTIN) and Path(name).is_file():
            choices["chat_template"] = {"sha256": sha256_of(Path(name))}
        return choices

    def resolve(
        self, paths: Sequence[Path], options: EncodingOptions, find_tokenizer: FindTokenizer
    ) -> tuple[ResolvedTokenizer, PairBasis]:
        """Check the template with the first rows, and resolve the tokenizer."""
        rows = self._find_first_rows(paths)
        tokenizer = find_tokenizer(lambda directory: self._render_first_rows(directory, rows))
        encoders = Encoders(StageRecord(self.output, CHAT))
        local = encoders.record.tree.local
        backend = local(encoders.directory(tokenizer.fingerprint, EncodingMode(special_tokens=False, split=False)))
        rendering, _ = try_template(
            self.options,
            Tokenizer(
                local(self.output / "tokenizer"), backend / "backend.json", tokenizer.eod_token, tokenizer.reference
            ),
            rows,
        )
        basis = ChatBasis(
            tokenizer=tokenizer.fingerprint,
            keys=self.keys,
            eod=None,
            special_tokens=False,
            dtype=tokenizer.dtype,
            rows=None,
            mask=MASK_KEY,
            template=rendering.source,
            rendering=_to_json(rendering),
            choices=self._choices(),
            **options.choices(),
            **self.format_fields(),
        )
        return tokenizer, basis

    def _find_first_rows(self, paths: Sequence[Path]) -> list[Row]:
        """Return the first rows of some files; raise InputError if no file has a row."""
        options = self.options
        columns = options.encoding(Rendering(source=None)).columns
        rows: list[Row] = []
        problem: InputError | None = None
        for path in paths:
            try:
                first, rejected = first_rows(path, columns, FIRST_ROWS, FIRST_BYTES, settings=options.reading())
            except UnexpectedContent as error:  # if other files are valid, the unit of this file reports the error
                problem = problem or error
                continue
            except InputError:  # the unit of a damaged file reports the damage
                continue
            columnar = detect_format(path, options.format) in ("parquet", "arrow")
            unit = get_record_unit(path, options.reading(), "")
            rows += [Row(f"{path}, {unit} {line:,}", row, columnar) for line, row in first]
            if rejected is not None:
                problem = problem or InputError(
                    f"{path}: none of the first records is valid; {unit} {rejected.line}: {rejected.reason}; correct "
                    "the file, or choose another --format"
                )
            if len(rows) >= FIRST_FILES * FIRST_ROWS:
                break
        if problem and not rows:
            raise problem
        return list(limit_work(rows))

    def _render_first_rows(self, directory: Path, rows: Sequence[Row]) -> list[str]:
        """Return the texts of the first rows for the parity gate.

        The tokenizer is not resolved yet. If the template cannot be used with its files, there are no texts, and
        `resolve` reports the error.
        """
        tokenizer = Tokenizer(directory, directory / "tokenizer.json", None, self.options.tokenizer)
        try:
            return try_template(self.options, tokenizer, rows)[1]
        except TemplateLimit:
            raise
        except RequestError:
            return []

    def make_records_encoding(self, plan: Plan) -> ChatEncoding:
        """Return the encoding of a plan, whose choices are those of the options: both have the same request."""
        basis = ChatBasis.from_json(plan.basis)
        return self.options.encoding(_from_json(basis.template, basis.rendering))


def limit_work(rows: list[Row]) -> Iterator[Row]:
    """Yield the rows that are rendered in a short time, or the first row if all rows take long."""
    work, quick = 0, False
    for row in rows:
        more = max((len(value) for value in row.value.values() if isinstance(value, list)), default=0) ** 2
        if work + more <= FIRST_WORK:
            work, quick = work + more, True
            yield row
    if rows and not quick:
        yield rows[0]


def _to_json(rendering: Rendering) -> dict[str, object]:
    """Return a rendering without its source as JSON."""
    from msgspec import to_builtins

    fields: dict[str, object] = to_builtins(rendering)
    return {name: value for name, value in fields.items() if name != "source" and (name, value) != ("tool_use", None)}


def _from_json(source: str | None, fields: dict[str, object]) -> Rendering:
    from tokenmill.core.typed_json import convert_json

    return convert_json({**fields, "source": source}, Rendering)
