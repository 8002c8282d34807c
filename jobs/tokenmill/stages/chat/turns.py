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
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple, NoReturn

from tokenmill.core.typed_json import JsonObject
from tokenmill.stages.chat.completeness import (
    CALLS,
    CONTENT,
    CONTEXT,
    REASONING,
    RESULTS,
    THINK_END,
    TOOL,
    TOOLS,
    PartFinder,
    RowPart,
)
from tokenmill.stages.chat.rows import BadRow, Conversation, Message, PromptAnswer, write_arguments
from tokenmill.stages.chat.template import ChatTemplate, RenderError
from tokenmill.stages.chat.untrained import AnswerParts, Span, common_prefix

THINKING_VARIABLES = ("enable_thinking", "thinking")
"""Variables by which templates turn reasoning on and off."""

MAX_RENDERED = 10_000_000
"""Messages in all renders of one row, which take some ten seconds."""

MAX_CHARACTERS = 64 << 20
"""Characters in all sequences of one row."""

EXCERPT_CHARACTERS = 160
"""Length of the texts in the reason of a rejected row."""

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
    """The chunks of one sequence, and the numbers of the messages that it trains.

    `unrendered` has the codes of parts of the row that the template leaves out, if that is allowed.
    """

    chunks: list[Chunk]
    answers: list[int]
    unrendered: tuple[str, ...] = ()


class _StartText(NamedTuple):
    """The text of the first messages, `size` of them, the answers that it trains, and their places."""

    size: int
    text: str
    answers: list[int]
    spans: dict[int, Span]


@dataclass(frozen=True)
class TrainSettings:
    """The choice of the trained text: the options --train, --train-reasoning, --train-tool-calls and --unrendered."""

    train: str = "assistant"
    reasoning: bool = True
    tool_calls: bool = True
    allow_unrendered: bool = False


@dataclass(frozen=True)
class MessageForm:
    """The form in which a template reads messages, which planning detects.

    `string_arguments`: it joins the arguments of tool calls to text, so they must be JSON strings. `null_content`: it
    renders tool calls only with a content that is null. `content_lists`: it reads only contents that are lists of
    parts.
    """

    string_arguments: bool = False
    null_content: bool = False
    content_lists: bool = False

    def write(self, messages: list[Message]) -> list[Message]:
        """Return messages in this form."""
        if self.string_arguments:
            messages = [write_arguments(message) if "tool_calls" in message else message for message in messages]
        if not self.null_content:
            messages = [
                message if message["content"] is not None else {**message, "content": ""} for message in messages
            ]
        if self.content_lists:
            messages = [
                {**message, "content": [{"type": "text", "text": message["content"]}]}
                if message["content"] is not None
                else message
                for message in messages
            ]
        return messages


class Stops(NamedTuple):
    """The tokens that end an answer and begin the next message: that of a user, and that of a tool behind a call."""

    user: str = ""
    tool: str = ""

    def find(self, message: Message) -> str:
        """Return the token behind an answer."""
        return self.tool if message.get("tool_calls") else self.user


@dataclass(frozen=True)
class Turns:
    """Cut conversations with one template; `prompts` are the generation prompts that it writes."""

    template: ChatTemplate
    prompts: tuple[str, ...]
    form: MessageForm = field(default_factory=MessageForm)
    settings: TrainSettings = field(default_factory=TrainSettings)
    special_tokens: tuple[str, ...] = ()
    stops: Stops = field(default_factory=Stops)

    def cut(self, conversation: Conversation) -> list[TurnSequence]:
        """Return the sequences of a conversation.

        Raises:
            BadRow: the template fails, does not render a part of the row, or nothing is trained.
        """
        finder = PartFinder(conversation, lambda messages, tools: self._try_render(conversation, messages, tools))
        try:
            if self.settings.train == "all":
                sequences, texts = self._render_all(conversation)
            elif self.template.has_generation_tags:
                sequences, texts = self._cut_by_tags(conversation)
            else:
                sequences, texts = self._cut_by_prompts(conversation)
            codes = self._check_rendered(conversation, finder, texts)
        except RenderError as error:
            line = f", line {error.line}" if error.line else ""
            raise BadRow("template_failed", f"the chat template fails{line}: {error.reason}") from error
        if not sequences:
            raise BadRow("nothing_trained", "the answers have no text besides what is not trained; drop the row")
        return [sequences[0]._replace(unrendered=codes), *sequences[1:]] if codes else sequences

    def _render(self, conversation: Conversation, messages: list[Message], **variables: Any) -> str:
        return self.template.render(
            self.form.write(messages), conversation.tools, **{**conversation.variables, **variables}
        )

    def _try_render(self, conversation: Conversation, messages: list[Message], tools: list[Any] | None) -> str | None:
        try:
            return self.template.render(self.form.write(messages), tools, **conversation.variables)
        except RenderError:
            return None

    def _render_all(self, conversation: Conversation) -> tuple[list[TurnSequence], list[_StartText]]:
        text = self._render(conversation, conversation.messages)
        answers = [i for i, message in enumerate(conversation.messages) if message["role"] == "assistant"]
        texts = [_StartText(len(conversation.messages), text, answers, {})]
        if answers[-1] == len(conversation.messages) - 1:
            text += self.stops.find(conversation.messages[-1])
        return [TurnSequence([Chunk(text, True)], answers)], texts

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

    def _cut_by_prompts(self, conversation: Conversation) -> tuple[list[TurnSequence], list[_StartText]]:
        numbers = self.select_answers(conversation)
        self._check_size(conversation, numbers)
        sequences: list[TurnSequence] = []
        texts: list[_StartText] = []
        chunks: list[Chunk] = []
        answers: list[int] = []
        before = ""
        characters = 0
        for number in numbers:
            rendered, _, prompt = self.render_answer(conversation, number)
            answer = rendered[len(prompt) :]
            if not answer:
                raise BadRow("empty_answer", f"message {number + 1}: the template renders an empty answer")
            if not texts or not prompt.startswith(before):
                if answers:
                    sequences.append(TurnSequence(_without_end(chunks), answers))
                chunks, answers, before = [], [], ""
                texts.append(_StartText(0, "", [], {}))
            texts[-1].answers.append(number)
            texts[-1].spans[number] = len(prompt), len(rendered)
            texts[-1] = texts[-1]._replace(size=number + 1, text=rendered)
            characters += len(rendered) - len(before)
            if characters > MAX_CHARACTERS:
                raise BadRow(
                    "too_large",
                    f"the template writes the history differently for each answer, so the {len(numbers):,} answers of "
                    f"the row become sequences of more than {MAX_CHARACTERS:,} characters in all; divide the row",
                )
            if len(prompt) > len(before):
                chunks.append(Chunk(prompt[len(before) :], False))
            stop = self.stops.find(conversation.messages[number])
            trained = self._find_trained(conversation, number, prompt, answer)
            if stop and not isinstance(trained, bool):
                trained = (*trained, (len(answer), len(answer) + len(stop)))
            chunks.append(Chunk(answer + stop, trained))
            if trained:
                answers.append(number)
            before = rendered + stop
        if answers:
            sequences.append(TurnSequence(_without_end(chunks), answers))
        return sequences, texts

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
        rendered = self._render(conversation, conversation.messages[: number + 1])
        prompts, first_error = self._render_prompts(conversation, number)
        best = max((len(prompt) for prompt in prompts if rendered.startswith(prompt)), default=-1)
        if best < 0 and not number:
            best = self._find_first_prompt(conversation, rendered)
        if best < 0:
            best = self._find_prompt_without_reasoning(conversation, number, rendered)
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
        earlier = conversation.messages[:number]
        prompts: list[str] = []
        first_error: RenderError | None = None
        for variables in self._thinking_variants(conversation):
            try:
                prompts.append(self._render(conversation, earlier, add_generation_prompt=True, **variables))
            except RenderError as error:  # many templates refuse an empty list of messages
                first_error = first_error or error
        try:
            base = self._render(conversation, earlier) if earlier else ""
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
            other = self._render(conversation, [_OTHER_ANSWER])
            short = self._render(replace(conversation, tools=None), [_QUESTION, _OTHER_ANSWER])
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

    def _find_prompt_without_reasoning(self, conversation: Conversation, number: int, rendered: str) -> int:
        """Return the end of a prompt whose history has no reasoning, or -1.

        Some templates write the reasoning of a tool call until an answer without calls follows. So the prompt has it,
        and the conversation up to the answer does not. Such a template may also take the content of a call for
        reasoning.
        """
        earlier = conversation.messages[:number]
        plain = [{key: value for key, value in message.items() if key != "reasoning_content"} for message in earlier]
        silent = [{**message, "content": ""} if "tool_calls" in message else message for message in plain]
        for history in (plain, silent):
            if history != earlier:
                prompts, _ = self._render_prompts(replace(conversation, messages=history), number)
                best = max((len(prompt) for prompt in prompts if rendered.startswith(prompt)), default=-1)
                if best >= 0:
                    return best
        return -1

    def _thinking_variants(self, conversation: Conversation) -> list[JsonObject]:
        own = conversation.variables
        names = [name for name in THINKING_VARIABLES if name in self.template.reads]
        return [own, *({**own, **dict.fromkeys(names, value)} for value in (True, False) if names)]

    def _find_trained(
        self, conversation: Conversation, number: int, prompt: str, answer: str
    ) -> bool | tuple[Span, ...]:
        """Return which part of an answer is trained, by --train-reasoning and --train-tool-calls."""
        message = conversation.messages[number]
        reasoned = "reasoning_content" in message or THINK_END in (message["content"] or "")
        if (self.settings.reasoning or not reasoned) and (self.settings.tool_calls or "tool_calls" not in message):
            return True

        def render(other: JsonObject) -> str | None:
            messages = [*conversation.messages[:number], other]
            try:
                text = self._render(conversation, messages)
            except RenderError:
                return None
            return text[len(prompt) :] if text.startswith(prompt) else None

        parts = AnswerParts(answer, message, render, self.special_tokens)
        spans = parts.find_spans(reasoning=self.settings.reasoning, tool_calls=self.settings.tool_calls)
        return spans if spans != ((0, len(answer)),) else True

    def _cut_by_tags(self, conversation: Conversation) -> tuple[list[TurnSequence], list[_StartText]]:
        trained = self.select_answers(conversation)
        messages = conversation.messages[: max(trained) + 1]
        text, spans = self.template.render_tagged(
            self.form.write(messages), conversation.tools, **conversation.variables
        )
        answers = [i for i, message in enumerate(messages) if message["role"] == "assistant"]
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
        texts = [_StartText(len(messages), text, trained, {})]
        stops = tuple({stop for stop in self.stops if stop})
        if stops and spans[-1][1] == len(text):
            text += self.stops.find(messages[-1])
        spans = [
            (begin, end + next((len(stop) for stop in stops if text.startswith(stop, end)), 0)) for begin, end in spans
        ]
        called = [number for number in trained if "tool_calls" in messages[number] and number + 1 < len(messages)]
        if called:  # a template that writes the calls in front of the results of tools would not mark them
            count = called[-1] + 1
            texts.insert(0, _StartText(count, self._render(conversation, messages[:count]), called[-1:], {}))
        return [TurnSequence([Chunk(text, tuple(spans))], trained)], texts

    def _check_rendered(
        self, conversation: Conversation, finder: PartFinder, texts: list[_StartText]
    ) -> tuple[str, ...]:
        """Return the codes of the parts that no text of the row has in its own message.

        An answer is complete where it is trained. Elsewhere, a template can leave out parts of it, such as the
        reasoning, if it renders them at the time of the answer: this is the history that a model sees.
        """
        trained = {number for text in texts for number in text.answers}
        missing: dict[tuple[int, str], tuple[RowPart, str]] = {}
        complete: set[int] = set()
        for text in texts:
            lost = finder.find_missing(text.size, text.text, text.spans)
            complete |= {*range(text.size)} - trained - {part.message for part in lost}
            for part in lost:
                history = part.message in trained and part.message not in text.answers
                earlier = part.kind in (CONTEXT, TOOL) and text is not texts[-1]
                if not history and not earlier:
                    own = text.text[slice(*text.spans.get(part.message, (None,)))]
                    missing.setdefault((part.message, part.kind), (part, own))
        codes: set[str] = set()
        known: dict[tuple[Any, ...], bool] = {}
        for (number, kind), (part, own) in sorted(missing.items(), key=lambda item: item[0]):
            if kind not in (CONTEXT, TOOL) and number in complete:
                continue
            if kind in (CONTENT, REASONING, CALLS) and number not in trained:
                message = conversation.messages[number]
                shape = (kind, *sorted(message), bool(message["content"]), THINK_END in (message["content"] or ""))
                if shape not in known:  # answers of the same shape are rendered in the same way
                    others = finder.find_missing(number + 1, None, {})
                    known[shape] = (number, kind) not in {(other.message, other.kind) for other in others}
                if known[shape]:
                    continue
            if not self.settings.allow_unrendered:
                self._refuse(conversation, part, own)
            codes.add(f"{UNRENDERED}{kind}")
        return tuple(sorted(codes))

    def _refuse(self, conversation: Conversation, part: RowPart, rendered: str) -> NoReturn:
        """Raise BadRow for a part that the template leaves out."""
        role = conversation.messages[part.message]["role"]
        subject = {
            CONTENT: "its text unchanged",
            CONTEXT: f"the text of the role {role} unchanged",
            REASONING: "its reasoning",
            CALLS: "its tool call",
            RESULTS: "its result",
            TOOL: "the tools of the row",
        }[part.kind]
        place = "" if part.message == TOOLS else f"message {part.message + 1}: "
        raise BadRow(
            f"{UNRENDERED}{part.kind}",
            f"{place}the template does not render {subject}: the row has {_excerpt(part.text, 0)}, and the template "
            f"writes {_excerpt(rendered, 0)}; use a template that renders it, or pass --unrendered allow",
        )


def _without_end(chunks: list[Chunk]) -> list[Chunk]:
    """Drop the chunks behind the last trained one."""
    last = max(i for i, chunk in enumerate(chunks) if chunk.trained)
    return chunks[: last + 1]


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
