"""The rule of `tokenmill chat` on imitations of public templates, against a second implementation of the rule.

The second implementation renders with transformers and knows only the sentence: train what a model would generate
behind the longest generation prompt with which the conversation begins.
"""

import itertools
import json
import random
import re
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from support.chat import make_tokenizer
from support.chat_templates import BEGIN, FAMILIES, MARKS, STOP, TAGGED
from tokenmill.errors import RequestError
from tokenmill.stages.chat.encode import ChatEncoder
from tokenmill.stages.chat.gate import Row, Tokenizer, resolve_rendering
from tokenmill.stages.chat.options import ChatOptions
from tokenmill.stages.chat.rows import BadRow, Conversation, RowSettings, read_row
from tokenmill.stages.chat.turns import MessageForm, TurnSequence
from tokenmill.tokenize.encoders import load_encoder

WORDS = (
    "alpha", "Beta", "7", "<think>", "</think>", "x < y", "\u65e5\u672c", "{{ x }}", "[INST]", "user", "assistant\n",
    "\n\n", " tail ", "'q'", '"', "<|im_end|>", "None", "\U0001f642", "system", "<|bot|>", "<|start|>assistant",
)  # fmt: skip
TOOL = {"type": "function", "function": {"name": "look_up", "description": "d", "parameters": {}}}
THINKING_NAMES = ("enable_thinking", "thinking")
ALL_FAMILIES = {**FAMILIES, "tagged": TAGGED}


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    directory = make_tokenizer(tmp_path_factory.mktemp("tokenizer") / "families", marks=MARKS)
    (directory / "tokenizer_config.json").write_text(json.dumps({"bos_token": BEGIN, "eos_token": STOP}))
    return Tokenizer(directory, directory / "tokenizer.json", STOP, "families")


Make = Callable[..., ChatEncoder]


@pytest.fixture
def make(tokenizer: Tokenizer, tmp_path: Path) -> Make:
    def make_encoder(template: str, rows: Any = (), **choices: Any) -> ChatEncoder:
        if "{" in template:
            path = tmp_path / "template.jinja"
            path.write_text(template)
            template = str(path)
        options = ChatOptions(tokenizer="families", chat_template=template, **choices)
        rendering = resolve_rendering(options, tokenizer, [Row("rows.jsonl, line 1", row, False) for row in rows])
        return options.encoding(rendering).load(load_encoder("hf", tokenizer.backend, False), tokenizer.backend)

    return make_encoder


class Oracle:
    """The rule, rendered by transformers."""

    def __init__(self, source: str, string_arguments: bool) -> None:
        from transformers.utils.chat_template_utils import _compile_jinja_template

        self._template = _compile_jinja_template(source)
        self._template.environment.globals.pop("strftime_now", None)
        self._string_arguments = string_arguments
        names = [name for name in THINKING_NAMES if name in source]
        self._variants = [{}, *(dict.fromkeys(names, value) for value in (True, False) if names)]
        question = [{"role": "user", "content": "question"}]
        base = self._render(question)
        texts = [self._render(question, add_generation_prompt=True, **variant) for variant in self._variants]
        self._prompts = {text.removeprefix(base) for text in texts if text.startswith(base)}

    def _render(self, messages: list[dict[str, Any]], tools: Any = None, **variables: Any) -> str:
        values = {"add_generation_prompt": False, "bos_token": BEGIN, "eos_token": STOP, **variables}
        return str(self._template.render(messages=messages, tools=tools, **values))

    def cut(self, conversation: Conversation) -> Iterator[tuple[int, str, str | None]]:
        """Yield the number of each answer, the text up to it, and its prompt, or None if there is none."""
        form = MessageForm(string_arguments=self._string_arguments)
        messages = [
            {**m, "thinking": m["reasoning_content"]} if "reasoning_content" in m else m
            for m in form.write(conversation.messages)
        ]
        for number, message in enumerate(messages):
            if message["role"] != "assistant":
                continue
            text = self._render(messages[: number + 1], conversation.tools)
            prompts = (
                self._find_prompt(text, history, conversation.tools) for history in self._histories(messages, number)
            )
            yield number, text, next(filter(None, prompts), None)

    def _histories(self, messages: list[dict[str, Any]], number: int) -> Iterator[list[dict[str, Any]]]:
        """Yield the messages before an answer: all, those without reasoning, and those without text next to calls."""
        yield messages[:number]
        plain = [{k: v for k, v in m.items() if k not in ("reasoning_content", "thinking")} for m in messages[:number]]
        yield plain
        yield [{**m, "content": ""} if "tool_calls" in m else m for m in plain]

    def _find_prompt(self, text: str, earlier: list[dict[str, Any]], tools: Any) -> str | None:
        from jinja2 import TemplateError

        candidates = []
        for variant in self._variants:
            try:
                candidates.append(self._render(earlier, tools, add_generation_prompt=True, **variant))
            except TemplateError:
                continue
        try:
            base = self._render(earlier, tools) if earlier else ""
            candidates += [base + prompt for prompt in self._prompts]
        except TemplateError:
            pass
        return max((c for c in candidates if text.startswith(c)), key=len, default=None)


def converse(dice: random.Random, start: str) -> dict[str, Any]:
    """Return a row with tools, reasoning, several answers in a row, and roles in unusual places.

    Most answers begin with the text `start`.
    """

    def write(most: int) -> str:
        return " ".join(dice.choices(WORDS, k=dice.randint(1, most)))

    messages: list[dict[str, Any]] = []
    if dice.random() < 0.4:
        messages.append({"role": "system", "content": write(2)})
    for _ in range(dice.randint(1, 4)):
        messages.append({"role": "user", "content": write(3)})
        if dice.random() < 0.15:
            arguments = dice.choice(('{"city": "\u00dc"}', {"numbers": [1, 2]}))
            call = {"id": "call00001", "type": "function", "function": {"name": "look_up", "arguments": arguments}}
            messages.append({"role": "assistant", "content": dice.choice(("", write(2))), "tool_calls": [call]})
            messages.append({"role": "tool", "content": write(2), "tool_call_id": "call00001"})
        answer = {"role": "assistant", "content": (start if dice.random() < 0.9 else "") + write(4)}
        if dice.random() < 0.2:
            answer["reasoning_content"] = write(2)
        messages += [answer] * (2 if dice.random() < 0.1 else 1)
        if dice.random() < 0.05:
            messages.append({"role": dice.choice(("system", "user")), "content": "between"})
    if dice.random() < 0.1:
        messages.insert(0, {"role": "assistant", "content": "first"})
    return {"messages": messages, **({"tools": [TOOL]} if dice.random() < 0.2 else {})}


def flatten(sequences: list[TurnSequence]) -> list[tuple[int, str, str]]:
    """Return each trained answer with the text in front of it."""
    answers = []
    for sequence in sequences:
        text, numbers = "", iter(sequence.answers)
        for chunk in sequence.chunks:
            if chunk.trained:
                assert chunk.trained is True
                answers.append((next(numbers), text, chunk.text))
            text += chunk.text
        assert chunk.trained, "text behind the last answer"
    return answers


@pytest.mark.parametrize("family", FAMILIES)
def test_the_rule_is_that_of_a_second_implementation(make: Make, family: str) -> None:
    """Every answer is trained once, behind the prompt of inference; the row is rejected if one has none."""
    from jinja2 import TemplateError

    encoder, dice, kinds = make(FAMILIES[family], unrendered="allow"), random.Random(family), Counter[str]()
    turns = encoder._turns
    assert turns is not None
    oracle = Oracle(FAMILIES[family], turns.form.string_arguments)
    for _ in range(400):
        try:
            row = read_row(converse(dice, "<think>hm</think>" if family == "forced" else ""), RowSettings())
        except BadRow:  # an answer of blanks
            continue
        assert isinstance(row, Conversation)
        try:
            expected: list[tuple[int, str, str | None]] | None = list(oracle.cut(row))
        except TemplateError:
            expected = None
        try:
            actual = flatten(turns.cut(row))
        except BadRow as error:
            assert error.code in ("no_prompt", "template_failed")
            assert expected is None or any(prompt is None for *_, prompt in expected)
            kinds[error.code] += 1
            continue
        assert expected is not None and len(actual) == len(expected)
        for (number, context, trained), (own, text, prompt) in zip(actual, expected, strict=True):
            assert (number, context + trained) == (own, text)
            assert context == prompt or (prompt is None and number == 0)
        kinds["equal"] += 1
    assert kinds["equal"] > 100, kinds


def test_a_prompt_is_never_that_of_an_earlier_answer(make: Make) -> None:
    """The second of two joined answers has no prompt; with that of the first, both texts would be trained twice."""
    messages = [{"role": role, "content": f"{role} {i}"} for i, role in enumerate(("user", "assistant", "assistant"))]
    ((_, code, reason),) = make(FAMILIES["joined"]).encode([{"messages": messages}]).rejected
    assert code == "no_prompt" and "message 3" in reason and "'<|im_start|>user" in reason


def test_the_trained_text_never_has_an_output_of_tools(make: Make) -> None:
    """The history has a call whose reasoning the template removes when an answer follows."""
    call = {"type": "function", "function": {"name": "look_up", "arguments": {}}}
    messages = [
        {"role": "user", "content": "question"},
        {"role": "assistant", "content": "", "reasoning_content": "hm", "tool_calls": [call]},
        {"role": "tool", "content": "secret output"},
        {"role": "assistant", "content": "answer", "reasoning_content": "so"},
    ]
    for family in ("channels", "thinking", "arguments"):
        turns = make(FAMILIES[family], unrendered="allow")._turns
        row = read_row({"messages": messages, "tools": [TOOL]}, RowSettings())
        assert turns is not None and isinstance(row, Conversation)
        assert all("secret" not in trained for *_, trained in flatten(turns.cut(row))), family


# -- parts of answers that are not trained


def trained_texts(encoder: ChatEncoder, row: dict[str, Any]) -> list[str]:
    turns = encoder._turns
    conversation = read_row(row, RowSettings())
    assert turns is not None and isinstance(conversation, Conversation)
    return [
        chunk.text if chunk.trained is True else "".join(chunk.text[begin:end] for begin, end in chunk.trained)
        for sequence in turns.cut(conversation)
        for chunk in sequence.chunks
        if not isinstance(chunk.trained, bool) or chunk.trained
    ]


@pytest.mark.parametrize("family", ["chatml", "llama3", "nano3", *FAMILIES])
@pytest.mark.parametrize(("reasoning", "tool_calls"), [(False, True), (True, False), (False, False)])
def test_reasoning_and_tool_calls_are_left_out(make: Make, family: str, reasoning: bool, tool_calls: bool) -> None:
    """The rest of the answer stays: its text, whole, and its stop token."""
    options = {"train_reasoning": reasoning, "train_tool_calls": tool_calls, "unrendered": "allow"}
    encoder = make(FAMILIES.get(family, family), **options)
    contents, thoughts = ("VISIBLE", "", "VISIBLE behind"), (None, "HIDDEN", " HIDDEN\n")
    inline = (None, "<think>\nHIDDEN\n</think>\n\n", "<think>HIDDEN</think>")
    tried = 0
    for content, thought, mark, calls in itertools.product(contents, thoughts, inline, (0, 1, 2)):
        if (thought and mark) or not (content or calls):
            continue
        answer: dict[str, Any] = {"role": "assistant", "content": (mark or "") + content}
        if thought:
            answer["reasoning_content"] = thought
        if calls:
            functions = [{"name": "look_up", "arguments": {"city": f"PLACE{number}"}} for number in range(calls)]
            answer["tool_calls"] = [{"id": "call00001", "type": "function", "function": f} for f in functions]
        try:
            texts = trained_texts(encoder, {"messages": [{"role": "user", "content": "q"}, answer], "tools": [TOOL]})
        except BadRow as error:
            assert error.code in ("no_prompt", "nothing_trained", "template_failed", "empty_answer")
            continue
        tried += 1
        text = "".join(texts)
        place = (content, thought, mark, calls, text)
        assert reasoning or "HIDDEN" not in text, place
        assert tool_calls or ("PLACE" not in text and "look_up" not in text), place
        if content and not (calls and family == "channels"):
            assert content in text, place
        if not (calls and not tool_calls and family == "channels"):  # its calls end with a stop token of their own
            assert text.rstrip().endswith(MARKS), place
        assert not re.search(r"(?<!<)\|[a-z_]+\|>", text), place
    assert tried >= 10


def test_reasoning_of_plain_contents_is_left_out_on_the_fast_path(make: Make) -> None:
    row = {"messages": [{"role": "user", "content": "q"}, {"role": "assistant", "content": "plain"}]}
    thinking = {"messages": [row["messages"][0], {"role": "assistant", "content": "<think>\nx\n</think>\n\nplain"}]}
    encoder = make(FAMILIES["joined"], train_reasoning=False)
    first, second = (encoder.encode([value] * 8) for value in (row, thinking))
    assert first.counts["trained"] == second.counts["trained"]


def test_generation_blocks_cannot_leave_out_parts(make: Make) -> None:
    for option in ("train_reasoning", "train_tool_calls"):
        with pytest.raises(RequestError, match=r"generation blocks, so --no-train-reasoning .*; remove these options"):
            make(TAGGED, **{option: False})


def test_each_answer_ends_at_its_stop_token(make: Make) -> None:
    """The newline behind the stop token is in the generation block of each of the two answers."""
    row = {"messages": [{"role": role, "content": f"{role} x"} for role in ("user", "assistant") * 2]}
    counts = {end: make(TAGGED, train_end=end).encode([row]).counts["trained"] for end in ("turn", "stop")}
    assert counts["turn"] - counts["stop"] == 2


# -- over-long rows


def number_answers(dice: random.Random, numbers: Iterator[int]) -> dict[str, Any]:
    messages: list[dict[str, Any]] = []
    if dice.random() < 0.3:
        messages.append({"role": "system", "content": "system " * dice.randint(1, 8)})
    for _ in range(dice.randint(1, 6)):
        messages.append({"role": "user", "content": "q " * dice.randint(1, 30)})
        number = next(numbers)
        answer: dict[str, Any] = {
            "role": "assistant",
            "content": f"(A{number}) {'w ' * dice.randint(0, 40)}(Z{number})",
        }
        if dice.random() < 0.2:
            answer["reasoning_content"] = "r " * dice.randint(1, 40)
        if dice.random() < 0.1:
            answer["train"] = False
        messages.append(answer)
    return {"messages": messages}


@pytest.mark.slow
@pytest.mark.parametrize("policy", ["drop", "trim-history", "window", "terminate"])
@pytest.mark.parametrize("family", ["chatml", "nano3", *(name for name in ALL_FAMILIES if name != "forced")])
def test_answers_are_trained_once_and_whole_or_counted(
    make: Make, tokenizer: Tokenizer, family: str, policy: str
) -> None:
    from tokenizers import Tokenizer as Backend

    decode = Backend.from_file(str(tokenizer.backend)).decode
    template, dice = ALL_FAMILIES.get(family, family), random.Random(policy)
    rows, numbers = [], itertools.count()
    for _ in range(40):
        rows.append(number_answers(dice, numbers))
    for options in ({}, {"train": "last"}, {"train": "all"}, {"train_end": "stop"}):
        full = make(template, unrendered="allow", **options)
        complete = [full.encode([row]) for row in rows]
        for limit in (40, 90, 200):
            encoder = make(template, unrendered="allow", max_length=limit, over_long=policy, **options)
            for row, expected in zip(rows, complete, strict=True):
                result = encoder.encode([row])
                assert [r[:2] for r in expected.rejected] == [r[:2] for r in result.rejected]
                counts, seen, position = Counter(result.counts), Counter[str](), 0
                assert expected.counts.get("answers", 0) == counts["answers"] + counts["dropped_answers"]
                for length in result.lengths.tolist():
                    assert length <= limit
                    ids, mask = (part[position : position + length].tolist() for part in (result.ids, result.mask))
                    position += length
                    text = decode([i for i, flag in zip(ids, mask, strict=True) if flag], skip_special_tokens=False)
                    begins = re.findall(r"\(A(\d+)\)", text)
                    seen.update(begins)
                    counts["cut"] += len(set(begins) - set(re.findall(r"\(Z(\d+)\)", text)))
                    if options.get("train") != "all":
                        assert all("|>" in answer for answer in text.split("(A")[1:]), "an answer without stop token"
                assert counts["cut"] <= counts["cut_answers"]
                assert not seen or max(seen.values()) == 1
                if options.get("train") != "all":
                    assert len(seen) <= counts["answers"] <= len(seen) + counts["cut_answers"]


def test_an_answer_is_not_cut_in_a_part_that_is_not_trained(make: Make) -> None:
    answer = {"role": "assistant", "content": "short", "reasoning_content": "long " * 100}
    row = {"messages": [{"role": "user", "content": "q"}, answer]}
    result = make("chatml", train_reasoning=False, max_length=60, over_long="terminate").encode([row])
    assert result.dropped == [0] and result.counts == {"dropped_sequences": 1, "dropped_answers": 1}


def test_a_conversation_that_is_trained_whole_is_not_cut(make: Make) -> None:
    """A stop token behind a part of a question would be trained."""
    row = {"messages": [{"role": "user", "content": "q " * 100}, {"role": "assistant", "content": "a"}]}
    assert make("chatml", train="all", max_length=60, over_long="terminate").encode([row]).dropped == [0]


def test_a_window_has_as_much_history_as_fits(make: Make) -> None:
    """Where each answer has a sequence of its own, an over-long one loses its oldest turns only."""
    messages = [{"role": role, "content": f"{role} {'word ' * 8}."} for role in ("user", "assistant") * 12]
    result = make(FAMILIES["thinking"], max_length=150, over_long="window").encode([{"messages": messages}])
    assert result.counts["answers"] == 12 and "dropped_answers" not in result.counts
    assert min(result.lengths.tolist()[4:]) > 100 and max(result.lengths.tolist()) <= 150
