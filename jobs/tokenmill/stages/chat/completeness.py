"""Find the parts of a conversation that a template does not render in the text of their own message.

A part is a text of a row: a content, a reasoning, the name of a tool call, a name or a value of its arguments, the
result of a tool, or a text of the description of a tool. A copy of the conversation has a mark in each part: one letter
is replaced by a character that the conversation does not have. The template renders this copy. Two facts are then
certain, because a mark has the length of a letter:

- If the text without marks is the text of the row, the template makes the same decisions for both.
- The places of the marks are the places of the parts. So equal texts, and names that are also in other texts, are
  not confused.

A few templates read the marked letters, for example to compare a content with a constant. These parts keep their
letters, and are searched for in the text.
"""

import json
import re
from bisect import bisect_right
from collections.abc import Callable, Container, Iterator
from dataclasses import dataclass, field
from typing import Any

from tokenmill.core.typed_json import JsonObject
from tokenmill.stages.chat.rows import Conversation, Message

TOOLS = -1
"""The number of the message of a part of the tools, which may be in any message."""

THINK_END = "</think>"
"""The mark that ends the reasoning inside a content."""

KINDS = ("content", "context", "reasoning", "tool_calls", "tool_results", "tools")
"""The kinds of parts, which are the ends of the codes of rejected rows."""

CONTENT, CONTEXT, REASONING, CALLS, RESULTS, TOOL = KINDS

Render = Callable[[list[Message], list[Any] | None], str | None]
"""A function that renders messages and tools; None if the template cannot render them."""

Span = tuple[int, int]

_FIRST, _LAST = 0x20000, 0x2A6D6
_MARK = re.compile(f"([{chr(_FIRST)}-{chr(_LAST)}])")
"""The marks: rare Chinese characters, which JSON and Python print as they are."""

_THINK = re.compile(r"</?think>")
_WORD = re.compile(r"(?:^|(?<=\s))[A-Za-z]([A-Za-z])[A-Za-z]*(?=[\s.,;:!?]|$)")
_OUTSIDE_TAGS = re.compile(r"(?:<[^<>]*>|\W)*(\w)")
_MAX_TRIALS = 64
"""Renders of one conversation that find out which marks a template reads."""


@dataclass(slots=True)
class RowPart:
    """A text of a row without the blanks around it.

    `exact`: it must be rendered as it is; otherwise JSON or another notation may escape it. `values` are the numbers
    and booleans between this text and the next one in the arguments of a call. `mark` replaces the character `offset`.
    """

    message: int
    kind: str
    text: str
    exact: bool
    values: list[tuple[str, ...]] = field(default_factory=list)
    mark: str = ""
    offset: int = 0

    def write(self) -> Iterator[str]:
        """Yield the notations of the text, with its mark."""
        text = self.text
        if self.mark:
            text = f"{text[: self.offset]}{self.mark}{text[self.offset + 1 :]}"
        yield text
        if not self.exact:
            from markupsafe import escape

            once = json.dumps(text, ensure_ascii=False)[1:-1]
            others = [once, json.dumps(once, ensure_ascii=False)[1:-1], repr(text)[1:-1], str(escape(text))]
            if not self.mark:
                others.append(json.dumps(text)[1:-1])
            yield from dict.fromkeys(other for other in others if other != text)


class PartFinder:
    """Finds the parts of one conversation in its texts; `render` renders marked copies of it, or the start of one."""

    def __init__(self, conversation: Conversation, render: Render) -> None:
        self._conversation = conversation
        self._render = render
        self._copies: dict[bool, _Copy] = {}

    def find_missing(self, count: int, text: str | None, trained: dict[int, Span]) -> list[RowPart]:
        """Return the parts that the text of the first `count` messages lacks.

        `trained` has the places of the trained answers: the parts of these must be there. The parts of the other
        messages must be behind those of the answer before them, and in front of those of the next one. If `text` is
        None, the marked text is taken for it.
        """
        for shared in (False, True):  # with the same mark for equal names, a template can look up a tool by its name
            copy = self._copies.get(shared) or _Copy(self._conversation, None, shared)
            self._copies[shared] = copy
            if marked := self._try(copy, count, text):
                return marked.find_missing(count, trained)
        return [] if text is None else self._find_readable(count, text).find_missing(count, trained)

    def _try(self, copy: "_Copy", count: int, text: str | None) -> "_MarkedText | None":
        """Return the text of a marked copy; None if it is another text without its marks."""
        rendered = self._render(copy.messages[:count], copy.tools)
        if rendered is None:
            return None
        marked = _MarkedText(rendered, copy)
        return marked if text is None or marked.plain == text else None

    def _find_readable(self, count: int, text: str) -> "_MarkedText":
        """Return the text with as many marks as the template permits."""
        best = _MarkedText(text, _Copy(self._conversation, frozenset(), True))
        good: frozenset[int] = frozenset()
        parts = [(number, part) for number, part in enumerate(self._copies[True].parts) if part.message < count]
        queue = [
            [number for number, part in parts if (part.kind, part.exact) == kind]
            for kind in sorted({(part.kind, part.exact) for _, part in parts})
        ]
        for _ in range(_MAX_TRIALS):
            if not queue:
                break
            numbers = queue.pop()
            marked = self._try(_Copy(self._conversation, good.union(numbers), True), count, text)
            if marked:
                good, best = good.union(numbers), marked
            elif len(numbers) > 1:
                half = len(numbers) // 2
                queue += [numbers[half:], numbers[:half]]
        return best


class _Copy:
    """A copy of a conversation with marks in the chosen parts; None chooses all of them."""

    def __init__(self, conversation: Conversation, chosen: Container[int] | None, shared: bool) -> None:
        self.parts: list[RowPart] = []
        self.letters: dict[str, str] = {}
        self._chosen = chosen
        self._shared: dict[str, str] | None = {} if shared else None
        used = set(_MARK.findall(_collect(conversation)))
        self._marks = (mark for mark in map(chr, range(_FIRST, _LAST + 1)) if mark not in used)
        self.messages = [self._copy_message(number, message) for number, message in enumerate(conversation.messages)]
        tools = conversation.tools
        self.tools = tools and [self._copy_tool(tool) for tool in tools]

    def _copy_message(self, number: int, message: JsonObject) -> JsonObject:
        role, content = message["role"], message["content"]
        copy = dict(message)
        if reasoning := message.get("reasoning_content"):
            copy["reasoning_content"] = self._add(number, REASONING, reasoning)
        if content:
            if role == "assistant":
                copy["content"] = self._copy_answer(number, content)
            elif role == "tool":
                copy["content"] = self._add(number, RESULTS, content, exact=False)
            else:
                copy["content"] = self._add(number, CONTEXT, content)
        if "tool_calls" in message:
            copy["tool_calls"] = [self._copy_call(number, call) for call in message["tool_calls"]]
        return copy

    def _copy_answer(self, number: int, content: str) -> str:
        """Copy a content with its reasoning, which is in front of the mark `</think>`."""
        if "think>" not in content:
            return self._add(number, CONTENT, content)
        pieces, position, last = [], 0, content.rfind(THINK_END)
        for match in _THINK.finditer(content):
            kind = REASONING if match.start() <= last else CONTENT
            pieces += [self._add(number, kind, content[position : match.start()]), match.group()]
            position = match.end()
        return "".join([*pieces, self._add(number, CONTENT, content[position:])])

    def _copy_call(self, number: int, call: JsonObject) -> JsonObject:
        function = call["function"]
        name = self._add(number, CALLS, function["name"], exact=False, name=True)
        arguments = function["arguments"]
        if isinstance(arguments, str):
            arguments = self._add(number, CALLS, arguments, exact=False)
        else:
            arguments = self._copy_value(number, arguments)
        return {**call, "function": {**function, "name": name, "arguments": arguments}}

    def _copy_value(self, number: int, value: Any) -> Any:
        if isinstance(value, str):
            return self._add(number, CALLS, value, exact=False)
        if isinstance(value, dict):
            return {
                self._add(number, CALLS, key, exact=False, name=True): self._copy_value(number, item)
                for key, item in value.items()
            }
        if isinstance(value, list):
            return [self._copy_value(number, item) for item in value]
        if value is not None and self.parts:
            self.parts[-1].values.append(tuple(dict.fromkeys((json.dumps(value), str(value)))))
        return value

    def _copy_tool(self, tool: JsonObject) -> JsonObject:
        function = dict(tool["function"])
        function["name"] = self._add(TOOLS, TOOL, function["name"], exact=False, name=True)
        if isinstance(function.get("description"), str):
            function["description"] = self._add(TOOLS, TOOL, function["description"], exact=False)
        parameters = function.get("parameters")
        if isinstance(parameters, dict) and isinstance(parameters.get("properties"), dict):
            names = {key: self._add(TOOLS, TOOL, key, exact=False, name=True) for key in parameters["properties"]}
            properties = {names[key]: self._copy_property(value) for key, value in parameters["properties"].items()}
            function["parameters"] = {**parameters, "properties": properties}
            if isinstance(parameters.get("required"), list):
                required = [names.get(key, key) if isinstance(key, str) else key for key in parameters["required"]]
                function["parameters"]["required"] = required
        return {**tool, "function": function}

    def _copy_property(self, value: Any) -> Any:
        if not isinstance(value, dict) or not isinstance(value.get("description"), str):
            return value
        return value | {"description": self._add(TOOLS, TOOL, value["description"], exact=False)}

    def _add(self, message: int, kind: str, text: str, *, exact: bool = True, name: bool = False) -> str:
        """Add a part, and return its text with a mark."""
        stripped = text.strip()
        if not stripped:
            return text
        number = len(self.parts)
        part = RowPart(message, kind, stripped, exact)
        self.parts.append(part)
        if self._chosen is not None and number not in self._chosen:
            return text
        shared = self._shared if name else None
        mark = shared.get(text) if shared is not None else None
        if mark is None:
            mark = next(self._marks, "")
            if not mark:
                return text
            if shared is not None:
                shared[text] = mark
        position = _choose_letter(text)
        part.mark, part.offset = mark, position - (len(text) - len(text.lstrip()))
        self.letters[mark] = text[position]
        return f"{text[:position]}{mark}{text[position + 1 :]}"


def _choose_letter(text: str) -> int:
    """Return the number of a character that templates rarely read: inside a word, and outside of tags."""
    if match := _WORD.search(text):
        return match.start(1)
    if match := _OUTSIDE_TAGS.match(text):
        return match.start(1)
    return len(text) - len(text.lstrip())


def _collect(conversation: Conversation) -> str:
    """Return the characters of a conversation that can be marks."""
    marks: list[str] = []
    stack: list[Any] = [conversation.messages, conversation.tools]
    while stack:
        item = stack.pop()
        if isinstance(item, str):
            if not item.isascii():
                marks += _MARK.findall(item)
        elif isinstance(item, dict):
            stack += item.keys()
            stack += item.values()
        elif isinstance(item, list):
            stack += item
    return "".join(marks)


class _MarkedText:
    """The text of a marked copy, and the places of its marks."""

    def __init__(self, text: str, copy: _Copy) -> None:
        self._text = text
        self._copy = copy
        self._places: dict[str, list[int]] = {}
        self._order: list[int] = []
        pieces = _MARK.split(text)
        position = 0
        for number, piece in enumerate(pieces):
            if number % 2:
                letter = copy.letters.get(piece)
                if letter is not None:
                    pieces[number] = letter
                    self._places.setdefault(piece, []).append(position)
                    self._order.append(position)
                position += 1
            else:
                position += len(piece)
        self.plain = "".join(pieces)
        self._taken: set[int] = set()
        self._next: dict[str, int] = {}

    def find_missing(self, count: int, trained: dict[int, Span]) -> list[RowPart]:
        """Return the parts that are not in the text of their own message."""
        missing: list[RowPart] = []
        position = 0
        for members in self._group(count, trained):
            number, anywhere = members[0].message, self._is_anywhere(members[0])
            low, high = 0, len(self.plain)
            if number in trained:
                low, high = trained[number]
            elif not anywhere:
                low = max([position, *(end for answer, (_, end) in trained.items() if answer < number)])
                high = min([high, *(begin for answer, (begin, _) in trained.items() if answer > number)])
            end = low
            for part in members:
                place = self._find(part, low, high) if part.mark else self._search(part, low, high)
                if place is None:
                    missing.append(part)
                else:
                    end = max(end, place)
            if not anywhere:
                position = high if number in trained else end
        return missing

    def _is_anywhere(self, part: RowPart) -> bool:
        """Return whether a template may write a part in front of other messages."""
        return part.message == TOOLS or self._copy.messages[part.message]["role"] in ("system", "developer")

    def _group(self, count: int, trained: dict[int, Span]) -> Iterator[list[RowPart]]:
        """Yield the parts of the tools and of the system, of each answer, and of all messages between two answers.

        An answer that is not in `trained` is one group with the results of its calls, because some templates write its
        content behind them.
        """
        turns, turn = [], 0
        previous: Message = {"role": ""}
        for number, message in enumerate(self._copy.messages[:count]):
            result = message["role"] == "tool" and "tool_calls" in previous and number - 1 not in trained
            if "assistant" in (message["role"], previous["role"]) and not result:
                turn += 1
            turns.append(turn)
            previous = message
        groups: dict[int, list[RowPart]] = {}
        for part in self._copy.parts:
            if part.message < count:
                groups.setdefault(-1 if self._is_anywhere(part) else turns[part.message], []).append(part)
        for _, members in sorted(groups.items()):
            yield members

    def _find(self, part: RowPart, low: int, high: int) -> int | None:
        """Return the end of a part between two places."""
        places = [
            place for place in self._places.get(part.mark, ()) if low <= place < high and place not in self._taken
        ]
        for notation in part.write() if places else ():
            offset = notation.index(part.mark)
            for place in places:
                begin, end = place - offset, place - offset + len(notation)
                inside = low <= begin and end <= high and self._text.startswith(notation, begin)
                if inside and self._has_values(part, end, high):
                    self._taken.add(place)
                    return end
        return None

    def _search(self, part: RowPart, low: int, high: int) -> int | None:
        """Return the end of a part without a mark: its text behind the last such text."""
        low = max(low, self._next.get(part.text, 0))
        for notation in part.write():
            if (place := self.plain.find(notation, low, high)) >= 0:
                end = self._next[part.text] = place + len(notation)
                return end if self._has_values(part, end, high) else None
        return None

    def _has_values(self, part: RowPart, begin: int, high: int) -> bool:
        """Return whether the values of a part follow it in front of the next mark."""
        number = bisect_right(self._order, begin)
        end = min(high, self._order[number]) if number < len(self._order) else high
        for notations in part.values:
            places = [(place, len(text)) for text in notations if (place := self._text.find(text, begin, end)) >= 0]
            if not places:
                return False
            begin = sum(min(places))
        return True
