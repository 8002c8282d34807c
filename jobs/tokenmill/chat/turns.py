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

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from tokenmill.chat.rows import BadRow, Conversation, PromptAnswer
from tokenmill.chat.template import ChatTemplate, RenderError

THINKING_VARIABLES = ("enable_thinking", "thinking")
"""Variables by which templates turn reasoning on and off."""

EXCERPT_CHARACTERS = 160
"""Length of the texts in the reason of a rejected row."""

UNRENDERED = "unrendered_"
"""First part of the codes of rows of which the template leaves out a part."""

NO_PROMPT = "no_prompt"
"""The code of rows for which the template writes a prompt that is not the start of the conversation."""

Span = tuple[int, int]
"""First character and the character after the last one."""


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
            return list(self._cut_by_prompts(conversation))
        except RenderError as error:
            line = f", line {error.line}" if error.line else ""
            raise BadRow("template_failed", f"the chat template fails{line}: {error.reason}") from error

    def _render_all(self, conversation: Conversation) -> list[TurnSequence]:
        text = self.template.render(conversation.messages, conversation.tools, **conversation.variables)
        self._check_rendered(conversation, range(len(conversation.messages)), text)
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
        trained = set(self.select_answers(conversation))
        messages, last = conversation.messages, max(trained)
        chunks: list[Chunk] = []
        answers: list[int] = []
        before = ""
        for number, message in enumerate(messages[: last + 1]):
            if message["role"] != "assistant" or (self.settings.train == "last" and number < last):
                continue
            rendered = self.template.render(messages[: number + 1], conversation.tools, **conversation.variables)
            prompt = self._find_prompt(conversation, number, rendered)
            answer = rendered[len(prompt) :]
            if not answer:
                raise BadRow("empty_answer", f"message {number + 1}: the template renders an empty answer")
            if not prompt.startswith(before):
                if answers:
                    yield TurnSequence(chunks, answers)
                chunks, answers, before = [], [], ""
            if len(prompt) > len(before):
                chunks.append(Chunk(prompt[len(before) :], False))
            if number in trained:
                self._check_rendered(conversation, (number,), answer)
                chunks.append(Chunk(answer, self._find_trained(conversation, number, prompt, answer)))
                answers.append(number)
            else:
                chunks.append(Chunk(answer, False))
            before = rendered
        self._check_rendered(conversation, (), chunks[0].text if chunks else "")
        if answers:
            yield TurnSequence(_without_end(chunks), answers)

    def _find_prompt(self, conversation: Conversation, number: int, rendered: str) -> str:
        """Return the longest prompt with which the rendered text begins."""
        earlier, template = conversation.messages[:number], self.template
        best = -1
        first_error: RenderError | None = None
        for variables in self._thinking_variants(conversation):
            try:
                text = template.render(earlier, conversation.tools, add_generation_prompt=True, **variables)
            except RenderError as error:  # many templates refuse an empty list of messages
                first_error = first_error or error
                continue
            if len(text) > best and rendered.startswith(text):
                best = len(text)
        try:
            base = template.render(earlier, conversation.tools, **conversation.variables) if earlier else ""
        except RenderError as error:
            base, first_error = "", first_error or error
        if base or not earlier:
            for prompt in self.prompts:
                if (
                    len(base) + len(prompt) > best
                    and rendered.startswith(prompt, len(base))
                    and rendered.startswith(base)
                ):
                    best = len(base) + len(prompt)
        if best < 0:
            best = self._find_prompt_by_answer(conversation, number, rendered)
        if best >= 0:
            return rendered[:best]
        if first_error is not None:
            raise first_error
        expected = base + (self.prompts[0] if self.prompts else "")
        position = _common_prefix(rendered, expected)
        raise BadRow(
            NO_PROMPT,
            f"message {number + 1}: the template writes the conversation up to this answer as "
            f"{_excerpt(rendered, position)}, but a prompt for it as {_excerpt(expected, position)}; a model trained "
            "on this text would not see it at inference time: correct the template",
        )

    def _find_prompt_by_answer(self, conversation: Conversation, number: int, rendered: str) -> int:
        """Return the end of a known generation prompt in front of the answer's own text, or -1."""
        messages = list(conversation.messages[: number + 1])
        messages[number] = {"role": "assistant", "content": "\u2060unlike any answer\u2060"}
        try:
            other = self.template.render(messages, conversation.tools, **conversation.variables)
        except RenderError:
            return -1
        end = _common_prefix(rendered, other)
        ends = [rendered.rfind(prompt, 0, end) + len(prompt) for prompt in self.prompts if prompt in rendered[:end]]
        return max(ends, default=-1)

    def _thinking_variants(self, conversation: Conversation) -> list[dict[str, Any]]:
        own = conversation.variables
        names = [name for name in THINKING_VARIABLES if name in self.template.reads]
        return [own, *({**own, **dict.fromkeys(names, value)} for value in (True, False) if names)]

    def _find_trained(
        self, conversation: Conversation, number: int, prompt: str, answer: str
    ) -> bool | tuple[Span, ...]:
        """Return which part of an answer is trained, by --train-reasoning and --train-tool-calls."""
        message, start, end = conversation.messages[number], 0, len(answer)
        content = str(message["content"])
        if not self.settings.reasoning:
            visible = content.rpartition("</think>")[2].strip()
            if message.get("reasoning_content") or "</think>" in content:
                start = self._find_visible(conversation, number, prompt, answer, visible)
        if not self.settings.tool_calls and message.get("tool_calls"):
            without = {key: value for key, value in message.items() if key != "tool_calls"}
            other = self._render_answer(conversation, number, without, prompt)
            begin = _common_prefix(answer, other)
            suffix = _common_prefix(answer[::-1], other[::-1])
            suffix = min(suffix, len(answer) - begin, len(other) - begin)
            spans = tuple(span for span in ((start, max(start, begin)), (end - suffix, end)) if span[0] < span[1])
            return spans
        if start == 0:
            return True
        return ((start, end),)

    def _find_visible(self, conversation: Conversation, number: int, prompt: str, answer: str, visible: str) -> int:
        """Return where the answer begins behind its reasoning."""
        if visible and (position := answer.rfind(visible)) >= 0:
            return position
        message = conversation.messages[number]
        calls = message.get("tool_calls")
        if calls:
            without = {key: value for key, value in message.items() if key != "tool_calls"}
            return _common_prefix(answer, self._render_answer(conversation, number, without, prompt))
        return answer.rfind("</think>") + len("</think>") if "</think>" in answer else len(answer)

    def _render_answer(self, conversation: Conversation, number: int, message: dict[str, Any], prompt: str) -> str:
        messages = [*conversation.messages[:number], message]
        text = self.template.render(messages, conversation.tools, **conversation.variables)
        return text[_common_prefix(text, prompt) :]

    def _cut_by_tags(self, conversation: Conversation) -> list[TurnSequence]:
        trained = self.select_answers(conversation)
        messages = conversation.messages[: max(trained) + 1]
        text, spans = self.template.render_tagged(messages, conversation.tools, **conversation.variables)
        answers = [i for i, message in enumerate(messages) if message["role"] == "assistant"]
        self._check_rendered(conversation, answers, text)
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

    def _check_rendered(self, conversation: Conversation, numbers: Sequence[int], text: str) -> None:
        """Refuse a row of which the template leaves out reasoning, tool calls, tools or an answer's text."""
        if self.settings.allow_unrendered:
            return
        for number in numbers:
            message = conversation.messages[number]
            missing = _find_unrendered(message, text)
            if missing:
                raise BadRow(
                    f"{UNRENDERED}{missing[0]}",
                    f"message {number + 1}: the template does not render {missing[1]}: the row has "
                    f"{_excerpt(missing[2], 0)}, and the template writes {_excerpt(text, 0)}; use a template that "
                    "renders it, or pass --unrendered allow",
                )
        if not numbers and conversation.tools:
            name = _tool_name(conversation.tools[0])
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
    content = message["content"].rpartition("</think>")[2].strip()
    if message["role"] == "assistant" and content and content not in text:
        return "content", "its text unchanged", content
    return None


def _tool_name(tool: Any) -> str | None:
    function = tool.get("function", tool) if isinstance(tool, dict) else None
    name = function.get("name") if isinstance(function, dict) else None
    return name if isinstance(name, str) else None


def _common_prefix(first: str, second: str) -> int:
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

    def cut(self, row: PromptAnswer, end: str, *, train_all: bool) -> TurnSequence:
        """Return the prompt and the answer, which ends with the text `end`."""
        prompt, answer = row.prompt, row.answer
        if self.strip:
            prompt, answer = prompt.strip(" "), answer.strip(" ")
        prompt = self.prompt_template.replace("{system}", row.system or "").replace("{prompt}", prompt)
        chunks = [Chunk(prompt, train_all)] if prompt else []
        return TurnSequence([*chunks, Chunk(self.separator + answer + end, True)], [1])
