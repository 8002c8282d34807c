"""The fast path of `chat.turns`: conversations with the same roles are cut by one form, without rendering each one.

A Form is the result of the rule for one list of roles, with the places of the messages' contents in its chunks. It is
made by rendering placeholders, and accepted only if it gives the result of the rule for several other sets of contents.
A template can still treat some contents differently. Therefore the rule itself cuts rows with tools, reasoning or
other keys, contents that are empty or begin or end with white space, and contents with a text that occurs in an
expression of the template or with a special token. It also checks one row in SAMPLE_STEP.
"""

import re
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

from tokenmill.chat.rows import BadRow, Conversation
from tokenmill.chat.turns import Chunk, Turns, TurnSequence
from tokenmill.errors import RequestError

SAMPLE_STEP = 1000
"""The rule checks one row in this many that a form has cut."""

MIN_USES = 4
"""Rows with the same roles after which a form is made, which takes as long as cutting some ten rows."""

MAX_FORMS = 2000
"""Number of forms, so that rows with ever other roles do not fill the memory."""

_PLACEHOLDER = re.compile(r"Qz0(\d+)zQ")
_NAMES = frozenset(("system", "developer", "user", "assistant", "tool", "function", "ipython", "model"))
_NAMES |= {"role", "content", "name", "type", "text", "id", "tools", "tool_calls", "tool_call_id", "arguments"}
_NAMES |= {"parameters", "description", "properties", "required", "messages", "reasoning_content", "thinking"}
"""Roles and keys, which templates compare with those of messages. They are common words, so contents may have them."""

_CONTENTS: tuple[tuple[str, ...], ...] = (
    ("a", "B", "7", "x"),
    ("same words",),
    ("first line\nsecond  line\n\n\tthird {{ line }} {% x %} {# y #}", "'q' \"d\" \\ / & < > <b> [INST] $ %s {0} ###"),
    ("0123", "true", "None", "[1, 2]", '{"a": 1}', "\u00dcn\u00ef \u2192 \u6771\u4eac \U0001f44d \u200d \xa0 \ufeffz"),
    ("word " * 4000 + "end", "HTTP://EXAMPLE.ORG/?a=b&c=d", "- item\n- item", "System: no. User: yes. Assistant: no."),
)
"""Contents for which a form must give the result of the rule; the messages take them in turn."""

Key = tuple[tuple[str, bool | None], ...]
Pieces = list[str | int]


class FormChunk(NamedTuple):
    """A chunk of a form; its pieces are fixed texts and the numbers of the messages whose contents are inserted."""

    pieces: Pieces
    trained: bool


class Form(NamedTuple):
    """The chunks and the trained answers of each sequence of a conversation with certain roles."""

    sequences: list[tuple[list[FormChunk], list[int]]]

    def cut(self, contents: Sequence[str]) -> list[TurnSequence]:
        """Return the sequences of a conversation with these contents."""
        return [
            TurnSequence(
                [
                    Chunk("".join([contents[p] if type(p) is int else p for p in pieces]), trained)  # type: ignore[misc]
                    for pieces, trained in chunks
                ],
                answers,
            )
            for chunks, answers in self.sequences
        ]


class Forms:
    """The forms of one template, made when they are first needed."""

    def __init__(self, turns: Turns, special_tokens: Iterable[str]) -> None:
        """Prepare the search for contents that the rule must cut."""
        self._turns = turns
        self._forms: dict[Key, Form | None] = {}
        self._uses: dict[Key, int] = {}
        self._rows = 0
        texts = {text.strip() for text in turns.template.constants} | set(special_tokens)
        sensitive = sorted((text for text in texts if text and text not in _NAMES), key=len, reverse=True)
        self._sensitive = re.compile("|".join(map(re.escape, sensitive))) if sensitive else None
        self._usable = not turns.template.has_generation_tags and turns.settings.train != "all"

    def cut(self, conversation: Conversation) -> list[TurnSequence]:
        """Return what `Turns.cut` returns, by a form if one fits.

        Raises:
            BadRow: as `Turns.cut`.
            RequestError: a form differs from the rule.
        """
        contents = self._find_contents(conversation)
        if contents is None:
            return self._turns.cut(conversation)
        key: Key = tuple(
            [(message["role"], flag) for message, flag in zip(conversation.messages, conversation.train, strict=True)]
        )
        form = self._find_form(key)
        if form is None:
            return self._turns.cut(conversation)
        sequences = form.cut(contents)
        self._rows += 1
        if self._rows % SAMPLE_STEP == 1 and sequences != self._turns.cut(conversation):
            raise RequestError(
                "the chat template renders some contents in another way than the tested ones, so the fast path would "
                "give other text; run the same command again with --rendering each"
            )
        return sequences

    def _find_contents(self, conversation: Conversation) -> list[str] | None:
        """Return the contents of a row that a form may cut, or None."""
        if not self._usable or conversation.tools or conversation.variables:
            return None
        contents = []
        for message in conversation.messages:
            if len(message) != 2:
                return None
            content = message["content"]
            if not content or content[0].isspace() or content[-1].isspace():
                return None
            contents.append(content)
        if self._sensitive is not None and any(map(self._sensitive.search, contents)):
            return None
        return contents

    def _find_form(self, key: Key) -> Form | None:
        if key in self._forms:
            return self._forms[key]
        uses = self._uses.get(key, 0) + 1
        if uses < MIN_USES or len(self._forms) >= MAX_FORMS:
            if len(self._uses) < MAX_FORMS or key in self._uses:
                self._uses[key] = uses
            return None
        self._uses.pop(key, None)
        form = self._forms[key] = self._make_form(key)
        return form

    def _make_form(self, key: Key) -> Form | None:
        """Make a form with placeholders; return None if it does not give the rule's result for other contents."""
        try:
            made = self._turns.cut(_fill(key, [f"Qz0{number}zQ" for number in range(len(key))]))
            form = Form([([_make_chunk(chunk) for chunk in chunks], answers) for chunks, answers in made])
            for contents in _CONTENTS:
                values = [contents[number % len(contents)] for number in range(len(key))]
                if form.cut(values) != self._turns.cut(_fill(key, values)):
                    return None
        except (BadRow, TypeError):
            return None
        return form


def _fill(key: Key, contents: Sequence[str]) -> Conversation:
    messages: list[dict[str, Any]] = [
        {"role": role, "content": content} for (role, _), content in zip(key, contents, strict=True)
    ]
    return Conversation(messages=messages, tools=None, variables={}, train=[flag for _, flag in key])


def _make_chunk(chunk: Chunk) -> FormChunk:
    if not isinstance(chunk.trained, bool):
        raise TypeError("a form has no chunks that are trained in part")
    pieces: Pieces = []
    for index, part in enumerate(_PLACEHOLDER.split(chunk.text)):
        if index % 2:
            pieces.append(int(part))
        elif part:
            pieces.append(part)
    return FormChunk(pieces, chunk.trained)
