"""Encode rows of conversations: ids, mask and lengths of the sequences of each row.

`stages.chat.stage` passes a ChatEncoding to the encoder processes. A ChatEncoder cuts each row into chunks
(`stages.chat.turns`, `stages.chat.forms`), encodes the chunks of a block of rows in one batch, and sets the mask.
Prompt and answer are encoded apart, as at inference time. A chunk of which only a part is trained is encoded with
Hugging Face's offsets.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from tokenmill.core.typed_json import JsonObject
from tokenmill.engine.record import UNREAD_PREFIX
from tokenmill.errors import TemplateLimit
from tokenmill.stages.chat import limits
from tokenmill.stages.chat.forms import Forms
from tokenmill.stages.chat.lengths import OVER_LONG, Encoded, LengthSettings, RowLengths
from tokenmill.stages.chat.rows import BadRow, Conversation, PromptAnswer, RowSettings, read_row
from tokenmill.stages.chat.template import ChatTemplate
from tokenmill.stages.chat.turns import AnswerFormat, Chunk, MessageForm, Stops, TrainSettings, Turns, TurnSequence
from tokenmill.tokenize.records_encoding import EncodedRows
from tokenmill.tokenize.special_tokens import SPECIAL_COUNT, SpecialTokenFinder

if TYPE_CHECKING:
    from tokenmill.datasets.formats.indexed.reader import Array
    from tokenmill.tokenize.engines.base import Encoder

BATCH_CHARACTERS = 4 << 20
"""Characters of the sequences that are encoded at a time, so that a row with a long history needs less memory."""


@dataclass(frozen=True, kw_only=True)
class Rendering:
    """A chat template and what planning detected of it.

    `variables` are the special tokens that the template can write. `prompts` are its generation prompts. `form` is how
    it reads messages. `stop_ids` are the tokens that end an answer; `stops` are those that begin the next message. A
    `source` of None means that only rows with a prompt and an answer can be read. `whole`: the tokenizer writes a blank
    in front of every text, so a sequence is encoded as one text. `tool_use` is another template for rows with tools, if
    the tokenizer has one. If that template cannot be used, it has no source, and its name is the reason.
    """

    source: str | None
    name: str = ""
    variables: dict[str, str] | None = None
    date: str | None = None
    prompts: tuple[str, ...] = ()
    form: MessageForm = field(default_factory=MessageForm)
    stop_ids: tuple[int, ...] = ()
    stops: Stops = field(default_factory=Stops)
    special_tokens: tuple[str, ...] = ()
    end: str = ""
    whole: bool = False
    tool_use: "Rendering | None" = None

    def compile(self) -> ChatTemplate | None:
        """Return the compiled template."""
        if self.source is None:
            return None
        return ChatTemplate(self.source, name=self.name, variables=self.variables or {}, date=self.date)


@dataclass(frozen=True, kw_only=True)
class ChatEncoding:
    """Everything that determines the ids and the mask of a row, for the encoder processes."""

    rendering: Rendering
    rows: RowSettings
    train: TrainSettings
    train_end: str = "turn"
    lengths: LengthSettings = field(default_factory=LengthSettings)
    completion: AnswerFormat = field(default_factory=AnswerFormat)
    use_forms: bool = True
    reject_special: bool = False

    @property
    def columns(self) -> tuple[str, ...]:
        """The fields of a row that are read."""
        return self.rows.columns

    def limit_process(self) -> None:
        """Limit the time and the memory of the template in this process."""
        limits.enforce_limits()

    def explain_signal(self, number: int, *, during_record: bool) -> TemplateLimit | None:
        """Return the error of a process that the template ended."""
        return (
            limits.explain_signal(self.rendering.name, number) if during_record or number == limits.CPU_SIGNAL else None
        )

    def load(self, encoder: "Encoder", backend: Path) -> "ChatEncoder":
        """Compile the template."""
        return ChatEncoder(self, encoder, backend)


class _Row(NamedTuple):
    """A row that was read and cut; `special` counts the special tokens in its texts."""

    number: int
    source: Conversation | PromptAnswer
    cut: list[TurnSequence]
    special: int


class _BlockResult(NamedTuple):
    """The result for the rows so far: the sequences of each document, and what EncodedRows has besides."""

    documents: list[list[Encoded]]
    rejected: list[tuple[int, str, str]]
    dropped: list[int]
    counts: dict[str, int]

    def add(self, counts: Mapping[str, int]) -> None:
        for name, number in counts.items():
            self.counts[name] = self.counts.get(name, 0) + number

    def join(self) -> EncodedRows:
        import numpy as np

        arrays = [sequence for document in self.documents for sequence in document]
        ids = [part for sequence in arrays for part in sequence.ids]
        masks = [part for sequence in arrays for part in sequence.masks]
        mask = np.concatenate(masks) if masks else np.empty(0, np.uint8)
        answers = sum(sequence.answers for sequence in arrays)
        self.add({"sequences": len(arrays), "answers": answers, "trained": int(np.count_nonzero(mask))})
        return EncodedRows(
            ids=np.concatenate(ids) if ids else np.empty(0, np.uint32),
            mask=mask,
            lengths=np.array([sequence.length for sequence in arrays], np.int64),
            sequences_per_document=np.array([len(document) for document in self.documents], np.int64),
            rejected=sorted(self.rejected),
            counts={name: count for name, count in self.counts.items() if count},
            dropped=self.dropped,
        )


class ChatEncoder:
    """Encodes rows in one process."""

    def __init__(self, settings: ChatEncoding, encoder: "Encoder", backend: Path) -> None:
        """Compile the template; `backend` is the backend JSON of the tokenizer, for offsets."""
        self._settings = settings
        self._encoder = encoder
        self._backend = backend
        self._reference: Any = None
        rendering = settings.rendering
        self._turns = self._make_turns(rendering)
        self._tool_turns = self._make_turns(rendering.tool_use) if rendering.tool_use else self._turns
        self._forms = Forms(self._turns) if self._turns and settings.use_forms else None
        self._finder = SpecialTokenFinder(rendering.special_tokens)

    def _make_turns(self, rendering: Rendering) -> Turns | None:
        template = rendering.compile()
        if template is None:
            return None
        train, special = self._settings.train, rendering.special_tokens
        return Turns(template, rendering.prompts, rendering.form, train, special, rendering.stops)

    def encode(
        self,
        rows: Sequence[JsonObject],
        *,
        columnar: bool = False,
        begin: Callable[[int | None], None] = lambda number: None,
    ) -> EncodedRows:
        """Encode rows; the rows that cannot be trained on are rejected with a code and a reason."""
        block = _BlockResult([], [], [], {})
        batch: list[_Row] = []
        characters = 0
        for number, row in enumerate(rows):
            begin(number)
            try:
                source = read_row(row, self._settings.rows, columnar=columnar)
                special = self._count_special_tokens(source)
                cut = self._cut(source)
            except BadRow as error:
                block.rejected.append((number, error.code, error.reason))
                continue
            batch.append(_Row(number, source, cut, special))
            for sequence in cut:
                for chunk in sequence.chunks:
                    characters += len(chunk.text)
            if characters > BATCH_CHARACTERS:
                begin(None)
                self._finish_rows(batch, block, large=characters > 2 * BATCH_CHARACTERS)
                batch, characters = [], 0
        begin(None)
        self._finish_rows(batch, block, large=False)
        return block.join()

    def _finish_rows(self, rows: list[_Row], block: "_BlockResult", *, large: bool) -> None:
        """Encode the sequences of some rows, and make them fit; `large` ones are encoded in several batches."""
        sequences = [sequence for row in rows for sequence in row.cut]
        encoded = iter(self._encode_sequences(sequences) if large else self._encode_batch(sequences))
        for row in rows:
            fitting = [next(encoded) for _ in row.cut]
            lengths = self._make_lengths()
            try:
                if lengths is not None:
                    fitting = lengths.fit(row.source, row.cut, fitting)
                trained = _keep_trained(fitting)
            except BadRow as error:
                if lengths is not None and error.code == OVER_LONG and self._settings.lengths.over_long != "fail":
                    block.dropped.append(row.number)
                    block.add(lengths.counts)
                else:
                    block.rejected.append((row.number, error.code, error.reason))
                continue
            block.documents.append(trained)
            if lengths is not None:
                block.add(lengths.counts)
            if row.special:
                block.add({SPECIAL_COUNT: row.special})
            block.add(dict.fromkeys((f"{UNREAD_PREFIX}{name}" for name in row.source.unread), 1))
            block.add(dict.fromkeys((code for sequence in row.cut for code in sequence.unrendered), 1))
            if len(trained) < len(fitting):
                lost = sum(sequence.answers for sequence in fitting) - sum(sequence.answers for sequence in trained)
                block.add({"dropped_answers": lost})

    def chunk_texts(self, row: JsonObject, *, columnar: bool = False) -> list[str]:
        """Return the texts that the encoder gets for a row, for the parity gate (BadRow)."""
        source = read_row(row, self._settings.rows, columnar=columnar)
        self._count_special_tokens(source)
        return [chunk.text for sequence in self._cut(source) for chunk in sequence.chunks]

    def _cut(self, source: Conversation | PromptAnswer) -> list[TurnSequence]:
        if isinstance(source, PromptAnswer):
            train_all = self._settings.train.train == "all"
            return [self._settings.completion.cut(source, self._settings.rendering.end, train_all=train_all)]
        if self._turns is None:
            raise BadRow(
                "no_template",
                "the row has messages, the first rows have none, and the tokenizer has no chat template that can be "
                "used; pass --chat-template",
            )
        if not source.tools:
            return (self._forms or self._turns).cut(source)
        if self._tool_turns is None:
            assert self._settings.rendering.tool_use  # noqa: S101
            raise BadRow("no_template", f"the row has tools, and {self._settings.rendering.tool_use.name}")
        return self._tool_turns.cut(source)

    def _make_lengths(self) -> RowLengths | None:
        if self._settings.lengths.max_length is None:
            return None
        return RowLengths(self._settings.lengths, self._settings.rendering.stop_ids, self._encode_part)

    def _encode_part(self, part: Conversation) -> list[Encoded] | None:
        """Return the sequences of a part of a conversation; None if the template cannot render it."""
        try:
            return self._encode_sequences(self._cut(part))
        except BadRow:
            return None

    def _count_special_tokens(self, source: Conversation | PromptAnswer) -> int:
        """Count the special tokens in the texts of a row, which could fake the turn of another role."""
        texts: list[str | list[str]]
        if isinstance(source, PromptAnswer):
            texts = [source.prompt, source.answer, source.system or ""]
        else:
            texts = [
                message["content"] if len(message) == 2 else list(_find_texts(message)) for message in source.messages
            ]
            if source.tools:
                texts.append(list(_find_texts(source.tools)))
        total, index, token = self._finder.count(texts)
        if total and self._settings.reject_special:
            place = f"message {index + 1}"
            if isinstance(source, PromptAnswer):
                place = ("the prompt", "the answer", "'system'")[index]
            elif index == len(source.messages):
                place = "a tool"
            raise BadRow(
                "special_in_text",
                f"{place} contains the special token {token!a}, which is encoded as this token; correct the row, or "
                "pass --special-in-text keep",
            )
        return total

    def _encode_sequences(self, sequences: list[TurnSequence]) -> list[Encoded]:
        """Encode sequences of any size in batches."""
        encoded: list[Encoded] = []
        batch: list[TurnSequence] = []
        characters = 0
        for sequence in sequences:
            batch.append(sequence)
            characters += sum([len(chunk.text) for chunk in sequence.chunks])
            if characters > BATCH_CHARACTERS:
                encoded += self._encode_batch(batch)
                batch, characters = [], 0
        return encoded + self._encode_batch(batch)

    def _encode_batch(self, sequences: list[TurnSequence]) -> list[Encoded]:
        """Encode the chunks of all sequences in one batch."""
        import numpy as np

        if self._settings.rendering.whole:
            return [self._encode_with_offsets(sequence) for sequence in sequences]
        texts = [chunk.text for sequence in sequences for chunk in sequence.chunks if isinstance(chunk.trained, bool)]
        ids, offsets = self._encoder.encode(texts) if texts else (np.empty(0, np.uint32), np.zeros(1, np.int64))
        ids = np.asarray(ids, np.uint32)
        bounds = offsets.tolist()
        ones, zeros = np.ones(len(ids), np.uint8), np.zeros(len(ids), np.uint8)
        encoded: list[Encoded] = []
        position = 0
        for sequence in sequences:
            parts = Encoded([], [], [], len(sequence.answers))
            for chunk in sequence.chunks:
                if isinstance(chunk.trained, bool):
                    begin, end = bounds[position], bounds[position + 1]
                    position += 1
                    self._add_chunk(parts, chunk, ids[begin:end], (ones if chunk.trained else zeros)[begin:end])
                else:
                    part = self._encode_with_offsets(TurnSequence([chunk], sequence.answers))
                    parts.ids.extend(part.ids)
                    parts.masks.extend(part.masks)
                    parts.trained.extend(part.trained)
            encoded.append(parts)
        return encoded

    def _encode_with_offsets(self, sequence: TurnSequence) -> Encoded:
        """Encode chunks as one text; a token belongs to the chunk of its first character.

        In a chunk of which some characters are trained, a token is trained if it has one of them.
        """
        import numpy as np

        chunks = sequence.chunks
        text = "".join(chunk.text for chunk in chunks)
        encoding = self._open_reference().encode(text, add_special_tokens=False)
        ids = np.array(encoding.ids, np.uint32)
        starts, ends = (np.array([offset[side] for offset in encoding.offsets], np.int64) for side in (0, 1))
        parts, begin, first = Encoded([], [], [], len(sequence.answers)), 0, 0
        for number, chunk in enumerate(chunks):
            begin, offset = begin + len(chunk.text), begin
            last = len(ids) if number == len(chunks) - 1 else int(np.searchsorted(starts, begin))
            if isinstance(chunk.trained, bool):
                mask = np.full(last - first, chunk.trained, np.uint8)
            else:
                mask = np.zeros(last - first, np.uint8)
                for left, right in chunk.trained:
                    mask |= (starts[first:last] < offset + right) & (ends[first:last] > offset + left)
            self._add_chunk(parts, chunk, ids[first:last], mask)
            first = last
        templates = [turns.template for turns in (self._turns, self._tool_turns) if turns is not None]
        if len(chunks) == 1 and any(template.has_generation_tags for template in templates):
            return _divide_by_answers(parts)
        return parts

    def _add_chunk(self, parts: Encoded, chunk: Chunk, ids: "Array", mask: "Array") -> None:
        if chunk.trained and self._settings.train_end == "stop":
            mask = self._without_rest(ids, mask)
        parts.ids.append(ids)
        parts.masks.append(mask)
        parts.trained.append(bool(chunk.trained))

    def _open_reference(self) -> Any:
        if self._reference is None:
            import os

            os.environ["TOKENIZERS_PARALLELISM"] = "false"
            from tokenizers import Tokenizer

            self._reference = Tokenizer.from_file(str(self._backend))
        return self._reference

    def _without_rest(self, ids: "Array", mask: "Array") -> "Array":
        """Return the mask without the tokens behind the last stop token of each run of loss tokens."""
        import numpy as np

        mask = mask.copy()
        stops = np.isin(ids, self._settings.rendering.stop_ids)
        for begin, end in _find_runs(mask):
            positions = np.flatnonzero(stops[begin:end])
            if positions.size:
                mask[begin + int(positions[-1]) + 1 : end] = 0
        return mask


def _find_runs(mask: "Array") -> list[tuple[int, int]]:
    """Return the first and the last position (exclusive) of each run of ones."""
    import numpy as np

    changes = np.flatnonzero(np.diff(mask, prepend=0, append=0))
    return list(zip(changes[::2].tolist(), changes[1::2].tolist(), strict=True))


def _divide_by_answers(sequence: Encoded) -> Encoded:
    """Return a sequence of one part divided into its prompts and answers, if each answer is one run of ones."""
    (ids,), (mask,) = sequence.ids, sequence.masks
    runs = _find_runs(mask)
    if len(runs) != sequence.answers:
        return sequence
    bounds = [0, *(bound for run in runs for bound in run), len(ids)]
    parts = Encoded([], [], [], sequence.answers)
    for number, (begin, end) in enumerate(pairwise(bounds)):
        if begin < end:
            parts.ids.append(ids[begin:end])
            parts.masks.append(mask[begin:end])
            parts.trained.append(bool(number % 2))
    return parts


def _keep_trained(sequences: list[Encoded]) -> list[Encoded]:
    """Return the sequences with a loss token; raise BadRow if there are none."""
    trained = [sequence for sequence in sequences if _is_trained(sequence.masks)]
    if not trained:
        raise BadRow("nothing_trained", "no token of the row is trained; drop the row")
    return trained


def _is_trained(masks: "list[Array]") -> bool:
    """Return whether a token is trained; nearly always the last one is."""
    return bool(len(masks[-1]) and masks[-1][-1]) or any(mask.any() for mask in masks)


def _find_texts(value: Any) -> Iterator[str]:
    """Yield the texts in a message or a tool."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict):
        for key, item in value.items():
            if key != "role":
                yield key
                yield from _find_texts(item)
    elif isinstance(value, list):
        for item in value:
            yield from _find_texts(item)
