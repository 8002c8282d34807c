"""The rule that decides which text of a conversation is a prompt, which is trained, and where a sequence begins.

For each answer (a message of the assistant), R is the conversation up to the answer, rendered by the chat template.
The prompt P is the longest text that R begins with among

    - the earlier messages rendered with a generation prompt, for each setting of the template's thinking variable
    - the earlier messages rendered without one, followed by a generation prompt of the template

The text of R behind P is what a model generates at inference time, so it is trained, and nothing else is. Successive
answers share a sequence as long as the text before is a prefix of the next P. Where a template renders the history
differently (for example without its reasoning), a new sequence begins. Nothing behind the last answer is kept.

If a template has `{% generation %}` blocks, they decide instead.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from tokenmill.chat.rows import BadRow, Conversation, PromptAnswer
from tokenmill.chat.template import ChatTemplate, RenderError
from tokenmill.chat.untrained import THINK_END, AnswerParts, Span, common_prefix

THINKING_VARIABLES = ("enable_thinking", "thinking")
"""Variables by which templates turn reasoning on and off."""

MAX_RENDERED = 10_000_000
"""Messages in all renders of one row, which take some ten seconds."""

MAX_CHARACTERS = 64 << 20
"""Characters in all sequences of one row."""

EXCERPT_CHARACTERS = 160
"""Length of the texts in the reason of a rejected row."""

CONTEXT_ROLES = ("system", "developer", "user")
"""Roles whose text a template must render as it is; that of tools is often rendered as JSON."""

UNRENDERED = "unrendered_"
"""First part of the codes of rows of which the template leaves out a part."""

NO_PROMPT = "no_prompt"
"""The code of rows for which the template writes a prompt that is not the start of the conversation."""

_QUESTION = {"role": "user", "content": "any question"}
_OTHER_ANSWER = {"role": "assistant", "content": "\u2060unlike any answer\u2060"}


class Chunk(NamedTuple):
    """A text that is tokenized apart from its neighbours; `trained` is the spans of its trained characters."""

    text: str
    trained: bool | tuple[Span, ...]


class TurnSequence(NamedTuple):
    """The chunks of one sequence, and the numbers of the messages that it trains."""

    chunks: list[Chunk]
    answers: list[int]


@dataclass(frozen=True)
class TrainSettings:
    """The choice of the trained text: the options --train, --train-reasoning, --train-tool-calls and --unrendered."""

    train: str = "assistant"
    reasoning: bool = True
    tool_calls: bool = True
    allow_unrendered: bool = False


@dataclass(frozen=True)
class Turns:
    """Cut conversations with one template; `prompts` are the generation prompts that it writes."""

    template: ChatTemplate
    prompts: tuple[str, ...]
    string_arguments: bool
    settings: TrainSettings = field(default_factory=TrainSettings)
    special_tokens: tuple[str, ...] = ()

    def cut(self, conversation: Conversation) -> list[TurnSequence]:
        """Return the sequences of a conversation.

        Raises:
            BadRow: the template fails, does not render a part of the row, or nothing is trained.
        """
        if self.string_arguments:
            conversation = conversation.with_string_arguments()
        try:
            if self.settings.train == "all":
                return self._render_all(conversation)
            if self.template.has_generation_tags:
                return self._cut_by_tags(conversation)
            sequences = list(self._cut_by_prompts(conversation))
        except RenderError as error:
            line = f", line {error.line}" if error.line else ""
            raise BadRow("template_failed", f"the chat template fails{line}: {error.reason}") from error
        if not sequences:
            raise BadRow("nothing_trained", "the answers have no text besides what is not trained; drop the row")
        return sequences

    def _render_all(self, conversation: Conversation) -> list[TurnSequence]:
        text = self.template.render(conversation.messages, conversation.tools, **conversation.variables)
        for number in range(len(conversation.messages)):
            self._check_rendered(conversation, number, text)
        self._check_context_rendered(conversation, len(conversation.messages), text)
        answers = [i for i, message in enumerate(conversation.messages) if message["role"] == "assistant"]
        return [TurnSequence([Chunk(text, True)], answers)]

    def select_answers(self, conversation: Conversation) -> list[int]:
        """Return the numbers of the messages to train, by --train and the keys `train` and `weight` of the messages."""
        numbers = [i for i, message in enumerate(conversation.messages) if message["role"] == "assistant"]
        if self.settings.train == "last":
            numbers = numbers[-1:]
        chosen = [i for i in numbers if conversation.train[i] is not False]
        if not chosen:
            raise BadRow(
                "nothing_trained", "no answer is trained: set `train` to true or `weight` to 1 in one, or drop the row"
            )
        return chosen

    def _cut_by_prompts(self, conversation: Conversation) -> Iterator[TurnSequence]:
        numbers = self.select_answers(conversation)
        self._check_size(conversation, numbers)
        chunks: list[Chunk] = []
        answers: list[int] = []
        before = ""
        characters = 0
        for number in numbers:
            rendered, _, prompt = self.render_answer(conversation, number)
            answer = rendered[len(prompt) :]
            if not answer:
                raise BadRow("empty_answer", f"message {number + 1}: the template renders an empty answer")
            self._check_rendered(conversation, number, answer)
            if not prompt.startswith(before):
                if answers:
                    yield TurnSequence(_without_end(chunks), answers)
                chunks, answers, before = [], [], ""
            characters += len(rendered) - len(before)
            if characters > MAX_CHARACTERS:
                raise BadRow(
                    "too_large",
                    f"the template writes the history differently for each answer, so the {len(numbers):,} answers of "
                    f"the row become sequences of more than {MAX_CHARACTERS:,} characters in all; divide the row",
                )
            if len(prompt) > len(before):
                chunks.append(Chunk(prompt[len(before) :], False))
            chunk = Chunk(answer, self._find_trained(conversation, number, prompt, answer))
            chunks.append(chunk)
            if chunk.trained:
                answers.append(number)
            before = rendered
        self._check_context_rendered(conversation, numbers[-1], before)
        if answers:
            yield TurnSequence(_without_end(chunks), answers)

    def _check_size(self, conversation: Conversation, numbers: list[int]) -> None:
        """Refuse a row of so many messages that its renders would take minutes."""
        renders = 2 + len(self._thinking_variants(conversation))
        rendered = renders * sum(number + 1 for number in numbers)
        if rendered > MAX_RENDERED:
            raise BadRow(
                "too_many_messages",
                f"the row has {len(conversation.messages):,} messages, and the template renders the history of each of "
                f"its {len(numbers):,} answers: {rendered:,} messages in all, and the limit is {MAX_RENDERED:,}; "
                "divide the row, or pass --train last",
            )

    def render_answer(self, conversation: Conversation, number: int) -> tuple[str, list[str], str]:
        """Return the conversation up to an answer, the possible prompts, and the longest one that it begins with."""
        messages = conversation.messages[: number + 1]
        rendered = self.template.render(messages, conversation.tools, **conversation.variables)
        prompts, first_error = self._render_prompts(conversation, number)
        best = max((len(prompt) for prompt in prompts if rendered.startswith(prompt)), default=-1)
        if best < 0 and not number:
            best = self._find_first_prompt(conversation, rendered)
        if best >= 0:
            return rendered, prompts, rendered[:best]
        if first_error is not None:
            raise first_error
        expected = prompts[-1] if prompts else ""
        position = common_prefix(rendered, expected)
        raise BadRow(
            NO_PROMPT,
            f"message {number + 1}: the template writes the conversation up to this answer as "
            f"{_excerpt(rendered, position)}, but a prompt for it as {_excerpt(expected, position)}; a model trained "
            "on this text would not see it at inference time: correct the template",
        )

    def _render_prompts(self, conversation: Conversation, number: int) -> tuple[list[str], RenderError | None]:
        """Return the prompts that can precede an answer, and the first error of the template."""
        earlier, template = conversation.messages[:number], self.template
        prompts: list[str] = []
        first_error: RenderError | None = None
        for variables in self._thinking_variants(conversation):
            try:
                prompts.append(template.render(earlier, conversation.tools, add_generation_prompt=True, **variables))
            except RenderError as error:  # many templates refuse an empty list of messages
                first_error = first_error or error
        try:
            base = template.render(earlier, conversation.tools, **conversation.variables) if earlier else ""
        except RenderError as error:
            base, first_error = "", first_error or error
        if base or not earlier:
            prompts += [base + prompt for prompt in reversed(self.prompts)]
        return prompts, first_error

    def _find_first_prompt(self, conversation: Conversation, rendered: str) -> int:
        """Return the end of the generation prompt before an answer that is the first message, or -1.

        Many templates render no empty list of messages. Between the prompt and the answer can only be what the template
        writes there in front of other answers.
        """
        try:
            other = self.template.render([_OTHER_ANSWER], conversation.tools, **conversation.variables)
            short = self.template.render([_QUESTION, _OTHER_ANSWER], None, **conversation.variables)
        except RenderError:
            return -1
        end, best = common_prefix(rendered, other), -1
        for prompt in self.prompts:
            begin = short.rfind(prompt, 0, short.find(_OTHER_ANSWER["content"]))
            position = rendered.rfind(prompt, 0, end)
            if begin >= 0 and position >= 0:
                between = rendered[position + len(prompt) : end]
                if short.startswith(between, begin + len(prompt)):
                    best = max(best, position + len(prompt))
        return best

    def _thinking_variants(self, conversation: Conversation) -> list[dict[str, Any]]:
        own = conversation.variables
        names = [name for name in THINKING_VARIABLES if name in self.template.reads]
        return [own, *({**own, **dict.fromkeys(names, value)} for value in (True, False) if names)]

    def _find_trained(
        self, conversation: Conversation, number: int, prompt: str, answer: str
    ) -> bool | tuple[Span, ...]:
        """Return which part of an answer is trained, by --train-reasoning and --train-tool-calls."""
        message = conversation.messages[number]
        if (self.settings.reasoning or not ("reasoning_content" in message or THINK_END in message["content"])) and (
            self.settings.tool_calls or "tool_calls" not in message
        ):
            return True

        def render(other: dict[str, Any]) -> str | None:
            messages = [*conversation.messages[:number], other]
            try:
                text = self.template.render(messages, conversation.tools, **conversation.variables)
            except RenderError:
                return None
            return text[len(prompt) :] if text.startswith(prompt) else None

        parts = AnswerParts(answer, message, render, self.special_tokens)
        spans = parts.find_spans(reasoning=self.settings.reasoning, tool_calls=self.settings.tool_calls)
        return spans if spans != ((0, len(answer)),) else True

    def _cut_by_tags(self, conversation: Conversation) -> list[TurnSequence]:
        trained = self.select_answers(conversation)
        messages = conversation.messages[: max(trained) + 1]
        text, spans = self.template.render_tagged(messages, conversation.tools, **conversation.variables)
        answers = [i for i, message in enumerate(messages) if message["role"] == "assistant"]
        for number in answers:
            self._check_rendered(conversation, number, text)
        self._check_context_rendered(conversation, max(trained), text)
        if len(trained) < len(answers):
            if len(spans) != len(answers):
                raise BadRow(
                    "generation_blocks",
                    f"the template has {len(spans)} generation blocks for {len(answers)} answers, so a single answer "
                    "cannot be left out; train all answers of the row, or use a template without generation blocks",
                )
            spans = [span for span, number in zip(spans, answers, strict=True) if number in trained]
        spans = [span for span in spans if span[0] < span[1]]
        if not spans:
            raise BadRow("nothing_trained", "the generation blocks of the template contain no text of this row")
        return [TurnSequence([Chunk(text, tuple(spans))], trained)]

    def _check_rendered(self, conversation: Conversation, number: int, text: str) -> None:
        """Refuse a row of which the template leaves out reasoning, tool calls or an answer's text."""
        if self.settings.allow_unrendered:
            return
        missing = _find_unrendered(conversation.messages[number], text)
        if missing:
            raise BadRow(
                f"{UNRENDERED}{missing[0]}",
                f"message {number + 1}: the template does not render {missing[1]}: the row has "
                f"{_excerpt(missing[2], 0)}, and the template writes {_excerpt(text, 0)}; use a template that "
                "renders it, or pass --unrendered allow",
            )

    def _check_context_rendered(self, conversation: Conversation, last: int, text: str) -> None:
        """Refuse a row of which the template leaves out the tools, a system message or a message of the user."""
        if self.settings.allow_unrendered:
            return
        for number, message in enumerate(conversation.messages[:last]):
            content = message["content"].strip()
            if message["role"] in CONTEXT_ROLES and content not in text:
                raise BadRow(
                    f"{UNRENDERED}context",
                    f"message {number + 1}: the template does not render the text of the role {message['role']} "
                    f"unchanged: the row has {_excerpt(content, 0)}, and the template writes {_excerpt(text, 0)}; use "
                    "a template that renders it, or pass --unrendered allow",
                )
        name = _tool_name(conversation.tools[0]) if conversation.tools else None
        if name and name not in text:
            raise BadRow(
                f"{UNRENDERED}tools",
                f"the template does not render the tools of the row: the row has {name!r}, and the template writes "
                f"{_excerpt(text, 0)}; use a template that renders them, or pass --unrendered allow",
            )


def _without_end(chunks: list[Chunk]) -> list[Chunk]:
    """Drop the chunks behind the last trained one."""
    last = max(i for i, chunk in enumerate(chunks) if chunk.trained)
    return chunks[: last + 1]


def _find_unrendered(message: dict[str, Any], text: str) -> tuple[str, str, str] | None:
    """Return the code, the name and the content of a part of a message that a text lacks."""
    for call in message.get("tool_calls") or ():
        if call["function"]["name"] not in text:
            return "tool_calls", "its tool call", call["function"]["name"]
    reasoning = message.get("reasoning_content")
    if reasoning and reasoning.strip() not in text:
        return "reasoning", "its reasoning", reasoning
    content = message["content"].rpartition(THINK_END)[2].strip()
    if message["role"] == "assistant" and content and content not in text:
        return "content", "its text unchanged", content
    return None


def _tool_name(tool: Any) -> str | None:
    function = tool.get("function", tool) if isinstance(tool, dict) else None
    name = function.get("name") if isinstance(function, dict) else None
    return name if isinstance(name, str) else None


def _excerpt(text: str, position: int) -> str:
    """Return the part of a text in which it differs from another one."""
    begin = max(0, position - EXCERPT_CHARACTERS // 2)
    part = text[begin : begin + EXCERPT_CHARACTERS]
    return ("..." if begin else "") + ascii(part) + ("..." if begin + EXCERPT_CHARACTERS < len(text) else "")


class AnswerFormat(NamedTuple):
    """How a row with a prompt and an answer becomes text: Megatron-Bridge's defaults."""

    prompt_template: str = "{prompt}"
    separator: str = ""
    strip: bool = True
    append_eos: bool = True
    allow_unrendered: bool = False

    def cut(self, row: PromptAnswer, end: str, *, train_all: bool) -> TurnSequence:
        """Return the prompt and the answer, which ends with the text `end`; BadRow if there is no such text."""
        if self.append_eos and not end:
            raise BadRow(
                "no_eos_token",
                "the row has a prompt and an answer, and the tokenizer defines no eos token to end the answer with; "
                "pass --no-append-eos, or choose another tokenizer",
            )
        prompt, answer = row.prompt, row.answer
        if self.strip:
            prompt, answer = prompt.strip(" "), answer.strip(" ")
        if row.system and "{system}" not in self.prompt_template and not self.allow_unrendered:
            raise BadRow(
                f"{UNRENDERED}system",
                f"the row has a system text, {_excerpt(row.system, 0)}, and the prompt template has no place for it; "
                "set --prompt-template with {system} and {prompt}, or pass --unrendered allow",
            )
        values = {"{system}": row.system or "", "{prompt}": prompt}
        prompt = re.sub(r"\{(?:system|prompt)\}", lambda match: values[match.group()], self.prompt_template)
        chunks = [Chunk(prompt, train_all)] if prompt else []
        return TurnSequence([*chunks, Chunk(self.separator + answer + end, True)], [1])
