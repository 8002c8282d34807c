"""Make over-long sequences fit --max-length: drop, shorten or divide them, and count what is lost.

A sequence that is written has only complete answers, or with `terminate` cut ones that keep their stop token. For each
row, the answers that are trained and those that are counted as dropped are together all of its answers.
"""

from collections.abc import Callable
from dataclasses import dataclass
from itertools import accumulate
from typing import TYPE_CHECKING, NamedTuple

from tokenmill.stages.chat.rows import BadRow, Conversation, Message, PromptAnswer
from tokenmill.stages.chat.turns import TurnSequence

if TYPE_CHECKING:
    from tokenmill.datasets.formats.indexed.reader import Array

OVER_LONG = "over_long"
"""The code of rows that are longer than --max-length."""

_LEADING = ("system", "developer")
_ASKING = (*_LEADING, "user")


@dataclass(frozen=True, kw_only=True)
class LengthSettings:
    """The options --max-length and --over-long."""

    max_length: int | None = None
    over_long: str = "drop"


class Encoded(NamedTuple):
    """One sequence in parts, such as its prompts and answers; `answers` is the number of its trained answers.

    `trained` tells which parts are trained at least in part.
    """

    ids: "list[Array]"
    masks: "list[Array]"
    trained: list[bool]
    answers: int

    @property
    def length(self) -> int:
        """Number of tokens."""
        return sum(map(len, self.ids))


class RowLengths:
    """The sequences of one row, and the numbers of what is dropped, cut or divided to make them fit."""

    def __init__(
        self,
        settings: LengthSettings,
        stop_ids: tuple[int, ...],
        encode: Callable[[Conversation], list[Encoded] | None],
    ) -> None:
        """Prepare the counts; `encode` returns the sequences of a part of the row, None if it cannot be rendered."""
        self._settings = settings
        self._stop_ids = stop_ids
        self._encode = encode
        self.counts: dict[str, int] = {}

    def fit(
        self, source: Conversation | PromptAnswer, cut: list[TurnSequence], encoded: list[Encoded]
    ) -> list[Encoded]:
        """Return the sequences that fit.

        Raises:
            BadRow: nothing of the row fits; the code is OVER_LONG.
        """
        limit, policy = self._settings.max_length, self._settings.over_long
        if limit is None or all(sequence.length <= limit for sequence in encoded):
            return encoded
        longest = max(sequence.length for sequence in encoded)
        reason = f"a sequence of the row has {longest:,} tokens, and --max-length is {limit:,}"
        if policy == "fail":
            raise BadRow(OVER_LONG, f"{reason}; shorten the row, or choose another --over-long")
        fitting: list[Encoded] = []
        for turns, sequence in zip(cut, encoded, strict=True):
            parts = [sequence]
            if sequence.length > limit:
                if policy == "terminate":
                    parts = self._terminate(sequence, limit, completion=isinstance(source, PromptAnswer))
                elif policy == "drop" or isinstance(source, PromptAnswer):
                    parts = []
                else:
                    parts = self._divide(source, turns, sequence, limit)
                self._count("dropped_sequences", not parts)
            fitting += parts
        self._count("dropped_answers", sum(s.answers for s in encoded) - sum(s.answers for s in fitting))
        if not fitting:
            raise BadRow(OVER_LONG, f"{reason}; shorten the row")
        return fitting

    def _count(self, name: str, number: int = 1) -> None:
        self.counts[name] = self.counts.get(name, 0) + number

    # terminate

    def _terminate(self, sequence: Encoded, limit: int, *, completion: bool) -> list[Encoded]:
        """Return the sequence with an answer that is cut but keeps its end, or without this answer."""
        import numpy as np

        ids, masks, trained = list(sequence.ids), list(sequence.masks), list(sequence.trained)
        if completion and len(ids) == 2:
            room = limit - len(ids[1])
            if room >= 0:  # the prompt is cut first
                self._count("cut_prompts")
                return [sequence._replace(ids=[ids[0][:room], ids[1]], masks=[masks[0][:room], masks[1]])]
            ids, masks, trained = ids[1:], masks[1:], trained[1:]
        length = end = 0
        while length + len(ids[end]) <= limit:
            length += len(ids[end])
            end += 1
        last, mask = ids[end], masks[end]
        if trained[end] and (end or completion):  # a whole conversation is trained with --train all: it has no end
            stops = np.flatnonzero(np.isin(last, self._stop_ids))
            tail = int(stops[-1]) if stops.size else len(last)
            room = limit - length - (len(last) - tail)
            # The end is kept only behind a text that is trained: elsewhere a model would learn to stop there.
            if 0 < room < tail and mask[room - 1] and (tail < len(last) or completion):
                self._count("cut_answers")
                ids[end] = np.concatenate((last[:room], last[tail:]))
                masks[end] = np.concatenate((mask[:room], mask[tail:]))
                end += 1
        while end and not trained[end - 1]:
            end -= 1
        if not end:
            return []
        answers = sequence.answers if len(sequence.ids) == 1 else sum(trained[:end])
        return [Encoded(ids[:end], masks[:end], trained[:end], answers)]

    # trim-history and window

    def _divide(self, source: Conversation, turns: TurnSequence, sequence: Encoded, limit: int) -> list[Encoded]:
        """Return sequences of complete turns that fit: the newest ones, or with `window` one after the other."""
        parts = _Turns(source, turns, sequence, limit, self._encode)
        if self._settings.over_long == "window" and any(parts.trains(number) for number in range(parts.number - 1)):
            windows = parts.find_windows()
            self._count("windows", len(windows))
            return [part for window in windows for part in window]
        newest = parts.find_newest()
        self._count("trimmed_sequences", bool(newest))
        return newest


class _Turns:
    """The turns of a conversation up to the last answer of a sequence.

    A turn begins with a message of the user that follows another role, and ends before the next one. Leading
    system messages are in front of all turns.
    """

    def __init__(
        self,
        source: Conversation,
        turns: TurnSequence,
        sequence: Encoded,
        limit: int,
        encode: Callable[[Conversation], list[Encoded] | None],
    ) -> None:
        self._source, self._limit, self._encode = source, limit, encode
        self._answers = set(turns.answers)
        roles = [message["role"] for message in source.messages[: turns.answers[-1] + 1]]
        first = next((number for number, role in enumerate(roles) if role not in _LEADING), len(roles))
        self._system = list(range(first))
        self._turns: list[list[int]] = []
        for number in range(first, len(roles)):
            begins = roles[number] in _ASKING and roles[number - 1] not in _ASKING
            if not self._turns or (begins and number > first):
                self._turns.append([])
            self._turns[-1].append(number)
        sizes = [_estimate(message) for message in source.messages[: len(roles)]]
        scale = sequence.length / sum(sizes)
        self._sizes = [scale * sum(sizes[number] for number in turn) for turn in self._turns]
        self._room = limit - scale * sum(sizes[:first])

    @property
    def number(self) -> int:
        """Number of turns."""
        return len(self._turns)

    def trains(self, number: int) -> bool:
        """Return whether a turn has a trained answer."""
        return not self._answers.isdisjoint(self._turns[number])

    def find_newest(self) -> list[Encoded]:
        """Return the sequences of as many of the newest turns as fit; none if the last one does not."""
        return self._find_most(None)[0]

    def find_windows(self) -> list[list[Encoded]]:
        """Return the sequences of each part of consecutive turns that fits; turns that do not are left out."""
        windows, first = [], 0
        while first < self.number:
            best, count = self._find_most(first)
            first += max(count, 1)
            if best:
                windows.append(best)
        return windows

    def _find_most(self, first: int | None) -> tuple[list[Encoded], int]:
        """Return the sequences of the most turns that fit, and their number; 0 if the first one is too long.

        The turns follow the turn `first`, or are the last ones, but not all. The search begins at an estimate,
        and assumes that more turns are longer.
        """
        made: dict[int, list[Encoded] | None] = {0: []}

        def fits(count: int) -> bool:
            if first is None:
                made[count] = self._encode_part(self.number - count, self.number)
            else:
                made[count] = self._encode_part(first, first + count)
            return made[count] is not None

        most = self.number - (1 if first is None else first)
        sizes = accumulate(reversed(self._sizes) if first is None else self._sizes[first:])
        count = next((number for number, size in enumerate(sizes) if size > self._room), most)
        low, high, step = 0, most + 1, 1  # `low` turns fit, `high` do not
        while low + 1 < high:
            count = min(max(count, low + 1), high - 1)
            if fits(count):
                low = count
                count = low + step if high > most else (low + high) // 2
            else:
                high = count
                count = high - step if not low else (low + high) // 2
            step *= 2
        return made[low] or [], low

    def _encode_part(self, first: int, stop: int) -> list[Encoded] | None:
        """Return the sequences of some turns; None if they are too long or cannot be rendered."""
        numbers = [*self._system, *(number for turn in self._turns[first:stop] for number in turn)]
        if self._answers.isdisjoint(numbers):
            return []
        messages = [self._source.messages[number] for number in numbers]
        train: list[bool | None] = [number in self._answers for number in numbers]
        sequences = self._encode(Conversation(messages, self._source.tools, self._source.variables, train))
        if sequences is None or any(sequence.length > self._limit for sequence in sequences):
            return None
        return sequences


def _estimate(message: Message) -> int:
    """Return about the number of characters of a message."""
    size = 16 + len(message["content"] or "") + len(str(message.get("reasoning_content") or ""))
    return size + (len(str(message["tool_calls"])) if "tool_calls" in message else 0)
