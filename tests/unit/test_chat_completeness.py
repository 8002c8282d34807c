"""Every part of an accepted row is in the text of its own message, whatever the template does."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from support.chat import make_tokenizer
from tokenmill.errors import RequestError
from tokenmill.stages.chat.encode import ChatEncoder
from tokenmill.stages.chat.gate import Row, Tokenizer, resolve_rendering
from tokenmill.stages.chat.options import ChatOptions
from tokenmill.tokenize.encoders import load_encoder

HEADER = "<|im_start|>{{ m.role }}\n"
END = "<|im_end|>\n"
PROMPT = "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
EACH_CALL = "{% for c in m.tool_calls or [] %}"
CALLS = EACH_CALL + "<call>{{ c.function.name }} {{ c.function.arguments | tojson }}</call>{% endfor %}"
NAMES = "{{ m.content }}" + EACH_CALL + "{{ c.function.name }}{{ c.function.arguments | list }}{% endfor %}"
TOOLS = "{% if tools %}<|im_start|>system\n{{ tools | tojson }}<|im_end|>\n{% endif %}"
REASONING = "{% if m.reasoning_content %}<think>{{ m.reasoning_content }}</think>{% endif %}"
BODY = REASONING + "{{ m.content }}" + CALLS


def template(body: str = BODY, *, before: str = TOOLS, tagged: bool = False) -> str:
    """Return a template that writes `body` for each message."""
    text = body + END
    if tagged:
        answer = "{% generation %}" + text + "{% endgeneration %}"
        text = "{% if m.role == 'assistant' %}" + answer + "{% else %}" + text + "{% endif %}"
    return f"{before}{{% for m in messages %}}{HEADER}{text}{{% endfor %}}{PROMPT}"


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    directory = make_tokenizer(
        tmp_path_factory.mktemp("tokenizer") / "chatml", marks=("<|im_start|>", "<|im_end|>", "<|user|>", "<|out|>")
    )
    return Tokenizer(directory, directory / "tokenizer.json", "<|im_end|>", "chatml")


Make = Callable[..., ChatEncoder]


@pytest.fixture
def make(tokenizer: Tokenizer, tmp_path: Path) -> Make:
    def make_encoder(source: str, rows: Any = (), **choices: Any) -> ChatEncoder:
        path = tmp_path / "template.jinja"
        path.write_text(source)
        options = ChatOptions(tokenizer="chatml", chat_template=str(path), **choices)
        rendering = resolve_rendering(
            options, tokenizer, [Row(f"line {n}", row, False) for n, row in enumerate(rows, 1)]
        )
        return options.encoding(rendering).load(load_encoder("hf", tokenizer.backend, False), tokenizer.backend)

    return make_encoder


def call(name: str = "get_weather", **arguments: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "arguments": arguments}}


def tool(name: str = "get_weather", description: str = "Report the weather") -> dict[str, Any]:
    properties = {"city": {"type": "string", "description": "Name of a place"}}
    parameters = {"type": "object", "properties": properties, "required": ["city"]}
    return {"type": "function", "function": {"name": name, "description": description, "parameters": parameters}}


def weather(*calls: dict[str, Any], results: tuple[str, ...] = ("sun",), **answer: Any) -> dict[str, Any]:
    messages = [
        {"role": "user", "content": "Weather?"},
        {"role": "assistant", "content": "", "tool_calls": list(calls), **answer},
        *({"role": "tool", "content": result} for result in results),
        {"role": "assistant", "content": "Fine."},
    ]
    return {"messages": messages, "tools": [tool()]}


def chat(*contents: str) -> dict[str, Any]:
    return {"messages": [{"role": ("user", "assistant")[i % 2], "content": text} for i, text in enumerate(contents)]}


def code_of(encoder: ChatEncoder, row: dict[str, Any]) -> str | None:
    rejected = encoder.encode([row]).rejected
    return rejected[0][1] if rejected else None


QUESTION, ANSWER = {"role": "user", "content": "a plan"}, {"role": "assistant", "content": "an answer"}
FIRST_CALL = REASONING + (
    "{{ m.content }}{% if m.tool_calls %}{% set c = m.tool_calls[0].function %}"
    "<call>{{ c.name }} {{ c.arguments | tojson }}</call>{% endif %}"
)
NO_THINKING = "{{ m.content.split('</think>')[-1] }}" + CALLS
DEDUPLICATED = (
    "{% set ns.text = '' if m.role == 'user' and m.content == ns.seen else m.content %}"
    "{% if m.role == 'user' %}{% set ns.seen = m.content %}{% endif %}{{ ns.text }}"
)

LOST: dict[str, tuple[str, dict[str, Any], str]] = {
    "a second call of the same function": (
        template(FIRST_CALL), weather(call(city="Lima"), call(city="Oslo"), results=("sun", "rain")), "tool_calls"
    ),
    "a second call that equals the first": (
        template(FIRST_CALL), weather(call(city="Lima"), call(city="Lima"), results=("sun", "sun")), "tool_calls"
    ),
    "a call whose name the tools have": (template("{{ m.content }}"), weather(call(city="Lima")), "tool_calls"),
    "a call whose name is in the answer": (
        template("{{ m.content }}"), weather(call(), content="I use get_weather."), "tool_calls"
    ),
    "the arguments": (
        template(NAMES.replace("{{ c.function.arguments | list }}", "")), weather(call(city="Lima")), "tool_calls"
    ),
    "the value of an argument": (
        template(NAMES), weather(call(city="Lima")), "tool_calls"
    ),
    "the number in an argument": (
        template(NAMES), weather(call(days=3)), "tool_calls"
    ),
    "the tools": (template(before=""), weather(call(city="Lima")), "tools"),
    "the descriptions of the tools": (
        template(before="{% for t in tools or [] %}{{ t.function.name }} city {% endfor %}"),
        weather(call(city="Lima")),
        "tools",
    ),
    "a tool of two": (
        template(before="{% if tools %}{{ tools[0] | tojson }}{% endif %}"),
        {**weather(call(city="Lima")), "tools": [tool(), tool("get_weather_of_week")]}, "tools",
    ),
    "a result": (
        template("{{ m.content if m.role != 'tool' }}" + CALLS), weather(call(city="Lima")), "tool_results"
    ),
    "one of two equal results": (
        template("{{ m.content if m.role != 'tool' or loop.previtem.role != 'tool' }}" + CALLS),
        weather(call(city="Lima"), call(city="Oslo"), results=("sun", "sun")), "tool_results",
    ),
    "inline reasoning": (template(NO_THINKING), chat("q", "<think>two and two</think>\n\nFour."), "reasoning"),
    "inline reasoning that the question has": (
        template(NO_THINKING), chat("two and two", "<think>two and two</think>\n\nFour."), "reasoning"
    ),
    "the first of two inline reasonings": (
        template("{{ m.content.split('</think>')[-2:] | join('</think>') }}" + CALLS),
        chat("q", "<think>a plan</think>step<think>more</think>Four."), "reasoning",
    ),
    "reasoning that the question has": (
        template("{{ m.content }}"),
        {"messages": [QUESTION, {"role": "assistant", "reasoning_content": "a plan", "content": "b"}]},
        "reasoning",
    ),
    "one of three equal questions": (
        template(DEDUPLICATED, before="{% set ns = namespace(seen='', text='') %}"),
        chat("same words", "one", "same words", "two", "same words", "three"), "context",
    ),
    "a part of a question": (template("{{ m.content.split('#')[0] }}"), chat("first # second", "answer"), "context"),
}  # fmt: skip
"""A template, a row of which it leaves out a part, and the kind of this part."""


@pytest.mark.parametrize("choices", [{}, {"train": "all"}, {"train": "last"}], ids=str)
@pytest.mark.parametrize("loss", LOST)
def test_a_row_with_a_lost_part_is_rejected(make: Make, loss: str, choices: dict[str, Any]) -> None:
    source, row, kind = LOST[loss]
    assert code_of(make(source, **choices), row) == f"unrendered_{kind}"
    allowed = make(source, unrendered="allow", **choices).encode([row])
    assert not allowed.rejected and allowed.counts[f"unrendered_{kind}"] == 1


@pytest.mark.parametrize("tagged", [False, True])
def test_a_call_in_the_message_of_the_result_is_not_in_its_own(make: Make, tagged: bool) -> None:
    calls = CALLS.replace("m.tool_calls", "messages[loop.index0 - 1].tool_calls")
    source = template(
        "{% set i = loop.index0 %}{% if m.role == 'tool' %}"
        + calls.replace("loop.index0", "i")
        + "{% endif %}{{ m.content }}",
        tagged=tagged,
    )
    assert code_of(make(source), weather(call(city="Lima"))) == "unrendered_tool_calls"


@pytest.mark.parametrize("loss", ["inline reasoning", "a call whose name the tools have", "one of two equal results"])
def test_a_row_with_a_lost_part_is_rejected_under_generation_tags(make: Make, loss: str) -> None:
    source, row, kind = LOST[loss]
    body = source.partition(HEADER)[2].partition(END)[0]
    assert code_of(make(template(body, tagged=True)), row) == f"unrendered_{kind}"


def test_reasoning_of_earlier_answers_is_rejected_where_all_answers_have_one_text(make: Make) -> None:
    """The template removes it from the history, so it would never be trained."""
    body = "{{ m.content if loop.last else m.content.split('</think>')[-1] }}"
    row = chat("q", "<think>one</think>1", "q", "<think>two</think>2")
    assert code_of(make(template(body, tagged=True)), row) == "unrendered_reasoning"
    assert code_of(make(template(body), train="all"), row) == "unrendered_reasoning"
    for choices in ({}, {"train": "last"}):  # each answer is trained in a sequence of its own, or is history
        result = make(template(body), **choices).encode([row])
        assert not result.rejected and not any(name.startswith("unrendered") for name in result.counts)


KEPT: dict[str, tuple[str, dict[str, Any]]] = {
    "all parts": (
        template(),
        weather(call(city="Lima", days=3, exact=True, deep={"a": [1, "two", None]}), reasoning_content="hm"),
    ),
    "two equal calls": (template(), weather(call(city="Lima"), call(city="Lima"), results=("sun", "sun"))),
    "escaped texts": (
        template(BODY.replace("{{ m.content }}", "{{ m.content | tojson if m.role == 'tool' else m.content }}")),
        weather(call(text='say "no"\n\\ & <b>'), results=('{"a": "b\\n"}',)),
    ),
    "arguments as Python prints them": (
        template(BODY.replace("| tojson", "")), weather(call(text="it's\n\u6771\u4eac", ok=False))
    ),
    "a search of the content": (
        template("{{ 'Result: ' if m.content.startswith('<tool_response>') }}{{ m.content }}"),
        chat("<tool_response> sun", "It is sunny."),
    ),
    "a comparison of the content": (
        template("{{ 'Go on: ' if m.content == 'Continue' }}{{ m.content }}"),
        chat("Continue", "Yes.", "Continue", "No."),
    ),
    "a length": (template("{{ m.content }}{{ '!' if m.content | length > 5 }}"), chat("12345", "123456")),
    "a tool that is looked up": (
        template(BODY + EACH_CALL + "{{ tools[0].function.name == c.function.name }}{% endfor %}"),
        weather(call(city="Lima")),
    ),
    "marks in the text": (template(), chat("\U00020000 \U00020001", "\U00020000\U0002a6d6 <think>\U00020005</think>")),
    "system messages in front": (
        template(
            "{{ m.content if m.role != 'system' }}",
            before="{% for m in messages if m.role == 'system' %}{{ m.content }}{% endfor %}",
        ),
        {"messages": [QUESTION, ANSWER, {"role": "system", "content": "be brief"}, QUESTION, ANSWER]},
    ),
    "a content behind the results of its calls": (
        "{% for m in messages %}{% if m.role == 'tool' %}{{ m.content }} {{ messages[1].content }}<|im_end|>{% else %}"
        "<|im_start|>{{ m.role }}\n" + CALLS + "{% if loop.last or not m.tool_calls %}{{ m.content }}<|im_end|>"
        "{% endif %}{% endif %}{% endfor %}" + PROMPT,
        {"messages": weather(call(city="Lima"), content="I look it up.", train=False)["messages"]},
    ),
    "an answer that is a text of the template": (
        template("{{ m.content }}{{ '!' if '</think>' in m.content }}"),
        chat("a question", "</think>", "another question", "an answer"),
    ),
    "no letters": (template(), chat("?", "!", "1 + 1", "2", "\U0001f44d", "\u3002")),
}  # fmt: skip
"""Templates and rows without a loss."""


@pytest.mark.parametrize("choices", [{}, {"train": "all"}], ids=str)
@pytest.mark.parametrize("case", KEPT)
def test_a_complete_row_is_accepted(make: Make, case: str, choices: dict[str, Any]) -> None:
    source, row = KEPT[case]
    strict, lenient = (make(source, unrendered=choice, **choices).encode([row]) for choice in ("reject", "allow"))
    assert not strict.rejected
    assert strict.ids.tolist() == lenient.ids.tolist() and strict.mask.tolist() == lenient.mask.tolist()
    assert not any(name.startswith("unrendered") for name in lenient.counts)


def test_forms_reject_what_the_rule_rejects(make: Make) -> None:
    body = "{{ m.content if loop.index0 != 2 }}"
    rows = [chat("q", f"a {number}", "lost", "b") for number in range(9)]
    assert [code for _, code, _ in make(template(body)).encode(rows).rejected] == ["unrendered_context"] * 9
    assert make(template(body), unrendered="allow").encode(rows).counts["unrendered_context"] == 9


# -- the form in which a template reads messages

NULL_CALLS = "{% if m.content is none %}" + CALLS + "{% else %}{{ m.content }}{% endif %}"


def test_null_stays_null_for_a_template_that_asks_for_it(make: Make) -> None:
    row = weather(call(city="Lima"), content=None)
    assert code_of(make(template(NULL_CALLS)), row) is None
    (text,) = ["".join(make(template(), [row]).chunk_texts(row))]
    assert "None" not in text and "<call>get_weather" in text


def test_contents_as_lists_of_parts(make: Make) -> None:
    body = "{% for part in m.content %}{% if part.type == 'text' %}{{ part.text }}{% endif %}{% endfor %}" + CALLS
    rows = [chat("question", f"answer {number}") for number in range(9)]
    encoder = make(template(body), rows)
    plain = make(template("{{ m.content }}" + CALLS), rows).encode(rows)
    assert encoder.encode(rows).ids.tolist() == plain.ids.tolist()
    assert code_of(encoder, weather(call(city="Lima"), content=None)) is None


def test_a_template_that_requires_variables_of_the_rows(make: Make) -> None:
    source = "{% if not mode %}{{ raise_exception('mode is missing') }}{% endif %}" + template()
    rows = [{**chat("q", "a"), "chat_template_kwargs": {"mode": mode}} for mode in ("x", "y")]
    assert not make(source, rows).encode(rows).rejected
    with pytest.raises(RequestError, match="mode is missing"):
        make(source, [chat("q", "a")])


NEXT = (
    "{% for m in messages %}<|{{ 'out' if m.role == 'tool' else m.role }}|>\n{{ m.content }}" + CALLS + "{% endfor %}"
)
NEXT = TOOLS.replace("<|im_end|>", "") + NEXT + "{% if add_generation_prompt %}<|assistant|>\n{% endif %}"
"""A template whose answers end where the next message begins."""


def test_the_stop_token_is_that_of_the_next_message(make: Make, tokenizer: Tokenizer) -> None:
    from tokenizers import Tokenizer as Backend

    with pytest.raises(RequestError, match=r"pass --stop-tokens '<\|user\|>,<\|out\|>'") as error:
        make(NEXT)
    assert "copy" not in str(error.value)
    row = weather(call(city="Lima"))
    row["messages"] += chat("again?", "Yes.")["messages"]
    decode = Backend.from_file(str(tokenizer.backend)).decode
    for end in ("turn", "stop"):
        result = make(NEXT, [row], stop_tokens="<|user|>,<|out|>", train_end=end).encode([row])
        ids = [token for token, flag in zip(result.ids.tolist(), result.mask.tolist(), strict=True) if flag]
        trained = decode(ids, skip_special_tokens=False)
        assert trained == '<call>get_weather {"city": "Lima"}</call><|out|>Fine.<|user|>Yes.<|user|>'
        assert len(result.lengths) == 1
    with pytest.raises(RequestError, match=r"nobody.* is not a token"):
        make(NEXT, stop_tokens="<|nobody|>")


CHANNELS = TOOLS + (
    "{% for m in messages %}<|im_start|>{{ m.role }}{% if m.tool_calls %}"
    "{% set later = messages[loop.index0:] | rejectattr('tool_calls') | map(attribute='role') | list %}"
    "{% if m.reasoning_content and 'assistant' not in later %}"
    " thinks {{ m.reasoning_content }}<|im_end|><|im_start|>assistant{% endif %} calls "
    + CALLS
    + "{% else %} says {{ m.content }}{% endif %}"
    "<|im_end|>{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant{% endif %}"
)
"""A template that writes the reasoning of a call until an answer without calls follows."""


def test_an_answer_behind_a_reasoned_call_has_a_sequence_of_its_own(make: Make) -> None:
    row = weather(call(city="Lima"), reasoning_content="I must look it up.")
    result = make(CHANNELS).encode([row])
    assert not result.rejected and (result.counts["sequences"], result.counts["answers"]) == (2, 2)
    texts = make(CHANNELS).chunk_texts(row)
    assert "I must look it up." in texts[1] and "I must look" not in "".join(texts[2:])


def test_a_template_that_fits_a_few_rows_is_used_under_quarantine(make: Make) -> None:
    """The prompt begins the reasoning, which the first rows lack."""
    source = template().replace("assistant\n{% endif %}", "assistant\n<think>{% endif %}")
    bad, good = chat("q", "no reasoning"), chat("q", "<think>hm</think>yes")
    encoder = make(source, [bad, bad, bad, good], on_bad_record="quarantine")
    assert [code for _, code, _ in encoder.encode([bad, good]).rejected] == ["no_prompt"]
    with pytest.raises(RequestError, match="line 1: "):
        make(source, [bad, good])


def test_the_reason_has_the_lost_text_and_the_remedy(make: Make) -> None:
    source, row, _ = LOST["a second call of the same function"]
    ((_, _, reason),) = make(source).encode([row]).rejected
    assert "message 2" in reason and "'get_weather'" in reason and "--unrendered allow" in reason
