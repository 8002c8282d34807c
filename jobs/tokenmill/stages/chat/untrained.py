"""Find the reasoning and the tool calls in the text of an answer, for --no-train-reasoning and --no-train-tool-calls.

A template writes its own marks around both, so they are found by comparison: the answer is rendered again without its
reasoning, without its tool calls, and with other names and arguments. A special token is never divided.
"""

import re
from collections.abc import Callable, Iterable
from typing import Any

from tokenmill.core.typed_json import JsonObject
from tokenmill.stages.chat.completeness import THINK_END

Span = tuple[int, int]
"""First character and the character after the last one."""

Render = Callable[[JsonObject], str | None]
"""A function that renders an answer with another message; None if the template cannot render it."""

_OTHER = "\u2060"


def common_prefix(first: str, second: str) -> int:
    """Return the length of the common prefix of two texts."""
    low, high = 0, min(len(first), len(second))
    if first[:high] == second[:high]:
        return high
    while low < high:  # first[:low] is common, first[:high] is not
        middle = (low + high + 1) // 2
        if first[:middle] == second[:middle]:
            low = middle
        else:
            high = middle - 1
    return low


class AnswerParts:
    """The parts of one answer: the text `answer` of a message, which `render` can render with other content."""

    def __init__(self, answer: str, message: JsonObject, render: Render, special_tokens: Iterable[str]) -> None:
        self._answer = answer
        self._message = message
        self._render = render
        tokens = sorted((token for token in special_tokens if token), key=len, reverse=True)
        self._special = re.compile("|".join(map(re.escape, tokens)) or r"(?!)")
        self._tokens = self._find_tokens(answer)
        self._visible = (message["content"] or "").rpartition(THINK_END)[2].strip()

    def find_spans(self, *, reasoning: bool, tool_calls: bool) -> tuple[Span, ...]:
        """Return the spans of the answer that are not left out; `reasoning` and `tool_calls` are those that stay."""
        start = 0 if reasoning else self._find_reasoning_end()
        spans = [(0, len(self._answer))] if tool_calls else self._find_around_calls()
        return tuple((max(start, begin), end) for begin, end in spans if max(start, begin) < end)

    def _find_reasoning_end(self) -> int:
        """Return where the answer continues behind its reasoning."""
        answer, message = self._answer, self._message
        reasoning = str(message.get("reasoning_content") or "").strip()
        inline = THINK_END in (message["content"] or "")
        if not reasoning and not inline:
            return 0
        plain = {key: value for key, value in message.items() if key != "reasoning_content"}
        other = self._render({**plain, "content": self._visible} if inline else plain)
        if other == answer:  # the template does not render it
            return 0
        start = 0 if other is None else len(answer) - _common_suffix(answer, other)
        if reasoning and (position := answer.find(reasoning)) >= 0:
            start = max(start, position + len(reasoning))
        start = self._after_token(start)
        limit = answer.rfind(self._visible) if self._visible else len(answer)
        mark = answer.rfind(THINK_END, 0, max(limit, start) if limit >= 0 else len(answer))
        if mark >= 0 and (inline or mark >= start):
            start = max(start, mark + len(THINK_END))
        return len(answer) - len(answer[start:].lstrip()) if mark >= 0 else start

    def _find_around_calls(self) -> list[Span]:
        """Return the span before the tool calls, and the span behind them."""
        answer, message = self._answer, self._message
        calls = message.get("tool_calls")
        if not calls:
            return [(0, len(answer))]
        changed = self._render({**message, "tool_calls": [_change(call) for call in calls]})
        first = last = 0
        if changed is not None:
            first, last = common_prefix(answer, changed), len(answer) - _common_suffix(answer, changed)
        if first >= last:  # the template does not render the calls
            return [(0, len(answer))] if changed is not None else self._without_comparison()
        plain = self._render({key: value for key, value in message.items() if key != "tool_calls"})
        begin, end = 0, next((begin for begin, _ in reversed(self._tokens) if begin >= last), len(answer))
        if plain is not None:
            begin = _before_token(self._find_tokens(plain), min(first, common_prefix(answer, plain)))
            begin = _before_token(self._tokens, begin)
            end = len(answer) - min(_common_suffix(answer, plain), len(plain) - begin, len(answer) - begin)
        if self._visible and (position := answer.rfind(self._visible, 0, first)) >= 0:
            begin = max(begin, position + len(self._visible))
        return [(0, begin), (self._after_token(max(end, last)), len(answer))]

    def _without_comparison(self) -> list[Span]:
        """Return the span of the visible content, for a template that renders no other calls."""
        position = self._answer.find(self._visible) if self._visible else -1
        return [] if position < 0 else [(0, position + len(self._visible))]

    def _find_tokens(self, text: str) -> list[Span]:
        return [match.span() for match in self._special.finditer(text)]

    def _after_token(self, position: int) -> int:
        return next((end for begin, end in self._tokens if begin < position < end), position)


def _before_token(tokens: list[Span], position: int) -> int:
    return next((begin for begin, end in tokens if begin < position < end), position)


def _common_suffix(first: str, second: str) -> int:
    return common_prefix(first[::-1], second[::-1])


def _change(call: JsonObject) -> JsonObject:
    """Return a call with another name and other arguments."""
    function = call["function"]
    arguments: Any = function["arguments"]
    if isinstance(arguments, str):
        arguments = f"{_OTHER}{arguments}{_OTHER}"
    else:
        arguments = {_OTHER: 1, **arguments, f"{_OTHER}{_OTHER}": 2}
    return {**call, "function": {**function, "name": f"{_OTHER}{function['name']}{_OTHER}", "arguments": arguments}}
