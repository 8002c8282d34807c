"""The fast path of `stages.chat.turns`: one form cuts all conversations with the same roles, and renders none of them.

A Form is the result of the rule for one list of roles, with the places of the messages' contents in its chunks. It is
made by rendering placeholders. `stages.chat.content_use` shows whether the template makes the same text of other
contents: if not, there is no form; if the template searches the contents for constants, the rule itself cuts the
contents that have one of them. It also cuts rows with tools, reasoning or other keys, long conversations, and contents
that are empty or begin or end with white space. As a second proof, a form must give the result of the rule for several
sets of contents, and the rule checks one row in SAMPLE_STEP.
"""

import re
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, NamedTuple

from tokenmill.core.typed_json import JsonObject
from tokenmill.errors import RequestError
from tokenmill.stages.chat.completeness import THINK_END
from tokenmill.stages.chat.rows import BadRow, Conversation
from tokenmill.stages.chat.template import RenderError
from tokenmill.stages.chat.turns import Chunk, Turns, TurnSequence
from tokenmill.stages.chat.untrained import common_prefix

if TYPE_CHECKING:
    from tokenmill.stages.chat.content_use import TracedTemplate

SAMPLE_STEP = 1000
"""The rule checks one row in this many that a form has cut."""

MIN_USES = 4
"""Rows with the same roles after which a form is made, which takes as long as cutting some ten rows."""

MAX_FORMS = 2000
"""Number of forms, so that rows with ever other roles do not fill the memory."""

MAX_MESSAGES = 256
"""Messages of the longest conversation with a form: making it takes time with the square of this number."""

_PLACEHOLDER = re.compile(r"Qz0(\d+)zQ")

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
    """The chunks and the trained answers of each sequence of a conversation with certain roles.

    The form is not for contents in which `sensitive` finds a text, or that begin with one of the characters that
    `beginnings` has for the number of their message.
    """

    sequences: list[tuple[list[FormChunk], list[int], tuple[str, ...]]]
    sensitive: re.Pattern[str] | None = None
    beginnings: tuple[tuple[int, str], ...] = ()

    def fits(self, contents: Sequence[str]) -> bool:
        """Return whether the form gives the result of the rule for these contents, which are not empty."""
        if self.sensitive is not None and any(map(self.sensitive.search, contents)):
            return False
        return not any(contents[number][0] in characters for number, characters in self.beginnings)

    def cut(self, contents: Sequence[str]) -> list[TurnSequence]:
        """Return the sequences of a conversation with these contents."""
        return [
            TurnSequence(
                [
                    Chunk("".join([contents[p] if type(p) is int else p for p in pieces]), trained)  # type: ignore[misc]
                    for pieces, trained in chunks
                ],
                answers,
                unrendered,
            )
            for chunks, answers, unrendered in self.sequences
        ]


class Forms:
    """The forms of one template, made when they are first needed."""

    def __init__(self, turns: Turns) -> None:
        """Start without forms."""
        self._turns = turns
        self._forms: dict[Key, Form | None] = {}
        self._uses: dict[Key, int] = {}
        self._rows = 0
        self._traced: TracedTemplate | None = None
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
        if form is None or not form.fits(contents):
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
        messages = conversation.messages
        if not self._usable or conversation.tools or conversation.variables or len(messages) > MAX_MESSAGES:
            return None
        contents = []
        for message in messages:
            if len(message) != 2:
                return None
            content = message["content"]
            if not content or content[0].isspace() or content[-1].isspace():
                return None
            contents.append(content)
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
        """Make a form with placeholders; return None if it would not give the rule's result for other contents."""
        conversation = _fill(key, [f"Qz0{number}zQ" for number in range(len(key))])
        try:
            made = self._turns.cut(conversation)
            form = Form([([_make_chunk(chunk) for chunk in part.chunks], *part[1:]) for part in made])
            form = self._find_conditions(form, conversation)
            for contents in _CONTENTS:
                values = [contents[number % len(contents)] for number in range(len(key))]
                if form.fits(values) and form.cut(values) != self._turns.cut(_fill(key, values)):
                    return None
        except (BadRow, RenderError, TypeError):
            return None
        return form

    def _find_conditions(self, form: Form, conversation: Conversation) -> Form:
        """Return a form with the contents that it is not for; raise TypeError if they cannot be described."""
        from tokenmill.stages.chat.content_use import TracedTemplate

        template = self._traced = self._traced or TracedTemplate(self._turns.template)
        template.begin()
        turns = replace(self._turns, template=template)
        beginnings: set[tuple[int, str]] = set()
        before: Pieces = []
        for number in turns.select_answers(conversation):
            answer, prompts, prompt = turns.render_answer(conversation, number)
            pieces = _split(answer)
            for candidate in prompts:
                beginnings |= _compare_starts(pieces, _split(candidate))
            beginnings |= _compare_starts(_split(prompt), before)
            before = pieces
        turns.cut(conversation)  # it also renders for the options about reasoning and tool calls
        if template.refused:
            raise TypeError("the template uses the characters of the contents")
        constants = template.constants if turns.settings.reasoning else {*template.constants, THINK_END}
        texts = sorted(constants, key=lambda text: (-len(text), text))
        sensitive = re.compile("|".join(map(re.escape, texts))) if texts else None
        return form._replace(sensitive=sensitive, beginnings=tuple(sorted(beginnings)))


def _compare_starts(text: Pieces, start: Pieces) -> set[tuple[int, str]]:
    """Return for which first characters of a content it is unknown whether a text begins with another one.

    For all other contents it is the same as for the placeholders. TypeError: it is unknown for all contents.
    """
    for index, piece in enumerate(start):
        own = text[index] if index < len(text) else ""
        if own == piece:
            continue
        if isinstance(own, str) and isinstance(piece, str):
            common = common_prefix(own, piece)
            if common < min(len(own), len(piece)):
                return set()
            if common == len(piece):
                if index == len(start) - 1:
                    return set()
                raise TypeError("a content is where the other text has a fixed one")
            if index + 1 >= len(text):
                return set()
            own, first = text[index + 1], piece[common]
        else:
            first = piece[0] if isinstance(piece, str) else ""
        if not isinstance(own, int) or not first:
            raise TypeError("two contents are at the same place")
        return set() if first.isspace() else {(own, first)}
    return set()


def _fill(key: Key, contents: Sequence[str]) -> Conversation:
    messages: list[JsonObject] = [
        {"role": role, "content": content} for (role, _), content in zip(key, contents, strict=True)
    ]
    return Conversation(messages=messages, tools=None, variables={}, train=[flag for _, flag in key])


def _make_chunk(chunk: Chunk) -> FormChunk:
    if not isinstance(chunk.trained, bool):
        raise TypeError("a form has no chunks that are trained in part")
    return FormChunk(_split(chunk.text), chunk.trained)


def _split(text: str) -> Pieces:
    """Return the fixed texts between placeholders, and the numbers of these."""
    return [int(part) if index % 2 else part for index, part in enumerate(_PLACEHOLDER.split(text)) if part]
