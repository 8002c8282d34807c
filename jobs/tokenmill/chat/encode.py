"""Encode rows of conversations: ids, mask and lengths of the sequences of each row.

`stages.chat` passes a ChatEncoding to the encoder processes. A ChatEncoder cuts each row into chunks (`chat.turns`,
`chat.forms`), encodes the chunks of a block of rows in one batch, and sets the mask. Prompt and answer are encoded
apart, as at inference time. A chunk of which only a part is trained is encoded with Hugging Face's offsets.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from tokenmill.chat.forms import Forms
from tokenmill.chat.rows import BadRow, Conversation, PromptAnswer, RowSettings, read_row
from tokenmill.chat.template import ChatTemplate
from tokenmill.chat.turns import AnswerFormat, Chunk, TrainSettings, Turns, TurnSequence
from tokenmill.tokens.records_encoding import EncodedRows
from tokenmill.tokens.special_tokens import SPECIAL_COUNT, SpecialTokenFinder

if TYPE_CHECKING:
    from tokenmill.tokens.engines.base import Encoder
    from tokenmill.tokens.formats.indexed.reader import Array

OVER_LONG = "over_long"
"""The code of rows that are longer than --max-length."""


@dataclass(frozen=True, kw_only=True)
class Rendering:
    """A chat template and what planning detected of it.

    `variables` are the special tokens that the template can write. `prompts` are its generation prompts.
    `string_arguments`: it joins the arguments of tool calls to text, so they must be JSON strings. `stop_ids` are the
    tokens that end an answer. A `source` of None means that only rows with a prompt and an answer can be read. `whole`:
    the tokenizer writes a blank in front of every text, so a sequence is encoded as one text.
    """

    source: str | None
    name: str = ""
    variables: dict[str, str] | None = None
    date: str | None = None
    prompts: tuple[str, ...] = ()
    string_arguments: bool = False
    stop_ids: tuple[int, ...] = ()
    special_tokens: tuple[str, ...] = ()
    end: str = ""
    whole: bool = False

    def compile(self) -> ChatTemplate | None:
        """Return the compiled template."""
        if self.source is None:
            return None
        return ChatTemplate(self.source, name=self.name, variables=self.variables or {}, date=self.date)


@dataclass(frozen=True, kw_only=True)
class LengthSettings:
    """The options --max-length and --over-long."""

    max_length: int | None = None
    over_long: str = "drop"


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

    def load(self, encoder: "Encoder", backend: Path) -> "ChatEncoder":
        """Compile the template."""
        return ChatEncoder(self, encoder, backend)


class _Encoded(NamedTuple):
    """The chunks of one sequence as ids and masks; `trained` tells which chunks are trained at least in part."""

    ids: "list[Array]"
    masks: "list[Array]"
    trained: list[bool]

    @property
    def length(self) -> int:
        return sum(map(len, self.ids))


class ChatEncoder:
    """Encodes rows in one process."""

    def __init__(self, settings: ChatEncoding, encoder: "Encoder", backend: Path) -> None:
        """Compile the template; `backend` is the backend JSON of the tokenizer, for offsets."""
        self._settings = settings
        self._encoder = encoder
        self._backend = backend
        self._reference: Any = None
        rendering = settings.rendering
        template = rendering.compile()
        self._turns = (
            Turns(template, rendering.prompts, rendering.string_arguments, settings.train) if template else None
        )
        self._forms = Forms(self._turns, rendering.special_tokens) if self._turns and settings.use_forms else None
        self._finder = SpecialTokenFinder(rendering.special_tokens)
        self._counts: dict[str, int] = {}

    def encode(self, rows: Sequence[dict[str, Any]], *, columnar: bool = False) -> EncodedRows:
        """Encode rows; the rows that cannot be trained on are rejected with a code and a reason."""
        import numpy as np

        self._counts = {}
        sources: list[tuple[int, Conversation | PromptAnswer]] = []
        cuts: list[list[TurnSequence]] = []
        rejected: list[tuple[int, str, str]] = []
        for index, row in enumerate(rows):
            try:
                source = read_row(row, self._settings.rows, columnar=columnar)
                cuts.append(self._cut(source))
            except BadRow as error:
                rejected.append((index, error.code, error.reason))
            else:
                sources.append((index, source))
        encoded = iter(self._encode_sequences([sequence for cut in cuts for sequence in cut]))
        documents: list[list[_Encoded]] = []
        dropped: list[int] = []
        for (index, source), cut in zip(sources, cuts, strict=True):
            sequences = [next(encoded) for _ in cut]
            try:
                sequences = self._fit(source, cut, sequences)
                self._check_trained(sequences)
            except BadRow as error:
                if error.code == OVER_LONG and self._settings.lengths.over_long != "fail":
                    dropped.append(index)
                else:
                    rejected.append((index, error.code, error.reason))
                continue
            documents.append(sequences)
        arrays = [sequence for document in documents for sequence in document]
        ids = [part for sequence in arrays for part in sequence.ids]
        masks = [part for sequence in arrays for part in sequence.masks]
        mask = np.concatenate(masks) if masks else np.empty(0, np.uint8)
        self._counts["sequences"] = len(arrays)
        self._counts["trained"] = int(np.count_nonzero(mask))
        return EncodedRows(
            ids=np.concatenate(ids) if ids else np.empty(0, np.uint32),
            mask=mask,
            lengths=np.array([sequence.length for sequence in arrays], np.int64),
            sequences_per_document=np.array([len(document) for document in documents], np.int64),
            rejected=sorted(rejected),
            counts={name: count for name, count in self._counts.items() if count},
            dropped=dropped,
        )

    def chunk_texts(self, row: dict[str, Any], *, columnar: bool = False) -> list[str]:
        """Return the texts that the encoder gets for a row, for the parity gate (BadRow)."""
        cut = self._cut(read_row(row, self._settings.rows, columnar=columnar))
        return [chunk.text for sequence in cut for chunk in sequence.chunks]

    def _cut(self, source: Conversation | PromptAnswer) -> list[TurnSequence]:
        self._find_special_tokens(source)
        if isinstance(source, PromptAnswer):
            train_all = self._settings.train.train == "all"
            return [self._settings.completion.cut(source, self._settings.rendering.end, train_all=train_all)]
        if self._turns is None:
            raise BadRow("no_template", "the row has messages, but no chat template was chosen; pass --chat-template")
        return (self._forms or self._turns).cut(source)

    def _find_special_tokens(self, source: Conversation | PromptAnswer) -> None:
        """Count the special tokens in the contents of a row, which could fake the turn of another role."""
        if isinstance(source, PromptAnswer):
            texts = [source.prompt, source.answer]
        else:
            texts = [message["content"] for message in source.messages]
        total, index, token = self._finder.count(texts)
        if not total:
            return
        if self._settings.reject_special:
            place = "the prompt or the answer" if isinstance(source, PromptAnswer) else f"message {index + 1}"
            raise BadRow(
                "special_in_text",
                f"{place} contains the special token {token!a}, which is encoded as this token; correct the row, or "
                "pass --special-in-text keep",
            )
        self._count(SPECIAL_COUNT, total)

    def _encode_sequences(self, sequences: list[TurnSequence]) -> "list[_Encoded]":
        """Encode the chunks of all sequences in one batch."""
        import numpy as np

        if self._settings.rendering.whole:
            return [self._encode_with_offsets(sequence.chunks) for sequence in sequences]
        chunks = [chunk for sequence in sequences for chunk in sequence.chunks]
        texts = [chunk.text for chunk in chunks if isinstance(chunk.trained, bool)]
        ids, offsets = self._encoder.encode(texts) if texts else (np.empty(0, np.uint32), np.zeros(1, np.int64))
        ids = np.asarray(ids, np.uint32)
        bounds = offsets.tolist()
        ones, zeros = np.ones(len(ids), np.uint8), np.zeros(len(ids), np.uint8)
        encoded: list[_Encoded] = []
        position = 0
        for sequence in sequences:
            parts = _Encoded([], [], [])
            for chunk in sequence.chunks:
                if isinstance(chunk.trained, bool):
                    begin, end = bounds[position], bounds[position + 1]
                    position += 1
                    self._add_chunk(parts, chunk, ids[begin:end], (ones if chunk.trained else zeros)[begin:end])
                else:
                    part = self._encode_with_offsets([chunk])
                    parts.ids.extend(part.ids)
                    parts.masks.extend(part.masks)
                    parts.trained.extend(part.trained)
            encoded.append(parts)
        return encoded

    def _encode_with_offsets(self, chunks: list[Chunk]) -> "_Encoded":
        """Encode chunks as one text; a token belongs to the chunk of its first character.

        In a chunk of which some characters are trained, a token is trained if it has one of them.
        """
        import numpy as np

        text = "".join(chunk.text for chunk in chunks)
        encoding = self._open_reference().encode(text, add_special_tokens=False)
        ids = np.array(encoding.ids, np.uint32)
        starts, ends = (np.array([offset[side] for offset in encoding.offsets], np.int64) for side in (0, 1))
        parts, begin, first = _Encoded([], [], []), 0, 0
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
        return parts

    def _add_chunk(self, parts: "_Encoded", chunk: Chunk, ids: "Array", mask: "Array") -> None:
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
        """Return the mask without the tokens behind the last stop token."""
        import numpy as np

        stops = np.flatnonzero(np.isin(ids, self._settings.rendering.stop_ids))
        if not stops.size or stops[-1] + 1 == len(ids):
            return mask
        mask = mask.copy()
        mask[stops[-1] + 1 :] = 0
        return mask

    def _check_trained(self, sequences: "list[_Encoded]") -> None:
        if not any(bool(mask.any()) for sequence in sequences for mask in sequence.masks):
            raise BadRow("nothing_trained", "no token of the row is trained; drop the row")

    # Over-long sequences

    def _fit(
        self, source: Conversation | PromptAnswer, cut: list[TurnSequence], encoded: "list[_Encoded]"
    ) -> "list[_Encoded]":
        """Return the sequences with each over-long one shortened, divided or left out.

        Raises:
            BadRow: nothing of the row fits; the code is OVER_LONG.
        """
        limit, policy = self._settings.lengths.max_length, self._settings.lengths.over_long
        if limit is None or all(sequence.length <= limit for sequence in encoded):
            return encoded
        longest = max(sequence.length for sequence in encoded)
        reason = f"a sequence of the row has {longest:,} tokens, and --max-length is {limit:,}"
        if policy == "fail":
            raise BadRow(OVER_LONG, f"{reason}; shorten the row, or choose another --over-long")
        fitting: list[_Encoded] = []
        for turns, sequence in zip(cut, encoded, strict=True):
            if sequence.length <= limit:
                fitting.append(sequence)
            elif policy == "terminate":
                fitting += self._terminate(sequence, limit, completion=isinstance(source, PromptAnswer))
            elif policy == "drop" or isinstance(source, PromptAnswer):
                self._count("dropped_sequences")
            else:
                fitting += self._divide(source, turns, limit, windows=policy == "window")
        if not fitting:
            raise BadRow(OVER_LONG, f"{reason}; shorten the row")
        return fitting

    def _count(self, name: str, number: int = 1) -> None:
        self._counts[name] = self._counts.get(name, 0) + number

    def _terminate(self, sequence: "_Encoded", limit: int, *, completion: bool) -> "list[_Encoded]":
        """Return the sequence with an answer that is cut but keeps its end, or without this answer."""
        import numpy as np

        ids, masks, trained = list(sequence.ids), list(sequence.masks), list(sequence.trained)
        end = len(ids)
        if completion and end == 2:
            room = limit - len(ids[1])
            if room >= 0:  # the prompt is cut first
                self._count("cut_prompts")
                return [_Encoded([ids[0][:room], ids[1]], [masks[0][:room], masks[1]], trained)]
            ids, masks, trained, end = ids[1:], masks[1:], trained[1:], 1
        length = 0
        for number, part in enumerate(ids):
            length += len(part)
            if length > limit:
                end = number
                break
        if end < len(ids) and trained[end]:
            stops = np.flatnonzero(np.isin(ids[end], self._settings.rendering.stop_ids))
            tail = int(stops[-1]) if stops.size else len(ids[end])
            room = limit - (length - len(ids[end])) - (len(ids[end]) - tail)
            if 0 < room < tail and (tail < len(ids[end]) or completion):
                self._count("cut_answers")
                ids[end] = np.concatenate((ids[end][:room], ids[end][tail:]))
                masks[end] = np.concatenate((masks[end][:room], masks[end][tail:]))
                end += 1
        while end and not trained[end - 1]:
            end -= 1
        if not end:
            self._count("dropped_sequences")
            return []
        if end < len(ids):
            self._count("dropped_answers", sum(trained[end:]))
        return [_Encoded(ids[:end], masks[:end], trained[:end])]

    def _divide(self, source: Conversation, turns: TurnSequence, limit: int, *, windows: bool) -> "list[_Encoded]":
        """Return sequences of complete exchanges that fit: the newest ones, or with `windows` one after the other."""
        last = turns.answers[-1]
        system, exchanges = _split_exchanges(source, last)
        fitting: list[_Encoded] = []
        if not windows:
            for first in range(1, len(exchanges)):
                made = self._encode_exchanges(source, system, exchanges[first:], turns.answers)
                if made and all(sequence.length <= limit for sequence in made):
                    self._count("trimmed_sequences")
                    kept = {number for exchange in exchanges[first:] for number in exchange}
                    self._count("dropped_answers", sum(number not in kept for number in turns.answers))
                    return made
            self._count("dropped_sequences")
            return []
        first = 0
        while first < len(exchanges):
            best: list[_Encoded] = []
            after = first
            for stop in range(first + 1, len(exchanges) + 1):
                made = self._encode_exchanges(source, system, exchanges[first:stop], turns.answers)
                if not all(sequence.length <= limit for sequence in made):
                    break
                best, after = made, stop
            if after == first:
                self._count("dropped_answers", sum(number in turns.answers for number in exchanges[first]))
                first += 1
                continue
            if best:
                self._count("windows")
            fitting += best
            first = after
        return fitting

    def _encode_exchanges(
        self, source: Conversation, system: list[int], exchanges: list[list[int]], answers: list[int]
    ) -> "list[_Encoded]":
        """Return the sequences of a part of a conversation that train some of its answers; empty if none does."""
        numbers = [*system, *(number for exchange in exchanges for number in exchange)]
        if not set(numbers) & set(answers):
            return []
        messages = [source.messages[number] for number in numbers]
        train: list[bool | None] = [number in answers for number in numbers]
        part = replace(source, messages=messages, train=train)
        try:
            return self._encode_sequences(self._cut(part))
        except BadRow:
            return []


def _split_exchanges(source: Conversation, last: int) -> tuple[list[int], list[list[int]]]:
    """Return the numbers of the leading system messages, and those of each exchange up to a message.

    An exchange begins with a message of the user that follows another role, and ends before the next one.
    """
    roles = [message["role"] for message in source.messages[: last + 1]]
    first = next((number for number, role in enumerate(roles) if role not in ("system", "developer")), len(roles))
    exchanges: list[list[int]] = []
    for number in range(first, len(roles)):
        begins = roles[number] in ("user", "system", "developer") and roles[number - 1] not in (
            "user",
            "system",
            "developer",
        )
        if not exchanges or (begins and number > first):
            exchanges.append([])
        exchanges[-1].append(number)
    return list(range(first)), exchanges
