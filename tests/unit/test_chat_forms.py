"""The fast path of `tokenmill chat` against the rule: templates that treat some contents differently."""

import itertools
import json
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from support.chat import make_tokenizer
from support.chat_templates import BEGIN, FAMILIES, MARKS, STOP
from tokenmill.engine.options import InvalidOption
from tokenmill.errors import RequestError
from tokenmill.stages.chat.forms import Form, Forms
from tokenmill.stages.chat.gate import Tokenizer, resolve_rendering
from tokenmill.stages.chat.options import ChatOptions
from tokenmill.stages.chat.rows import BadRow, Conversation, RowSettings, read_row
from tokenmill.stages.chat.template import ChatTemplate
from tokenmill.stages.chat.turns import TrainSettings, Turns, TurnSequence

CHATML = """\
{%- for m in messages -%}
<|im_start|>{{ m.role }}
{{ m.content }}<|im_end|>
{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""


def with_content(expression: str, before: str = "") -> str:
    return before + CHATML.replace("{{ m.content }}", expression)


UNSAFE = {
    "a length": "{{ m.content }}{{ '!' if m.content | length > 30000 }}",
    "a count of words": "{{ m.content }}{{ '!' if m.content.split() | length > 3 }}",
    "the filter wordcount": "{{ m.content }}{{ '!' if m.content | wordcount == 3 }}",
    "a slice": "{{ m.content }}{{ '!' if m.content[:5] == 'alpha' }}",
    "a character": "{{ m.content }}{{ '!' if m.content[-1] == '?' }}",
    "the last character": "{{ m.content }}{{ '!' if (m.content | last) == '?' }}",
    "a loop over characters": "{% for c in m.content %}{{ c }}{{ '!' if c == '?' }}{% endfor %}",
    "upper case": "{{ m.content }}{{ '!' if m.content is upper }}",
    "digits": "{{ m.content }}{{ '!' if m.content.isdigit() }}",
    "a number": "{{ m.content }}{{ '!' if m.content | int == 123 }}",
    "an order": "{{ m.content }}{{ '!' if m.content < 'b' }}",
    "two orders": "{{ m.content }}{{ '!' if 'a' < m.content < 'b' }}",
    "a substring of a constant": "{{ m.content }}{{ '!' if m.content in 'alpha and omega' }}",
    "a key of an object": "{{ {'alpha': 'A'}.get(m.content, m.content) }}",
    "an index of an object": "{{ {'alpha': 'A'}[m.content] or m.content }}",
    "another content": "{{ '!' if not loop.first and loop.previtem.content == m.content }}{{ m.content }}",
    "another message": "{{ m.content }}{{ '!' if m in messages[1:] }}",
    "a change": "{{ m.content if loop.changed(m.content) }}",
    "a position": "{{ m.content }}{{ '!' if m.content.find('alpha') > 0 }}",
    "JSON": "{{ m.content }}{{ '!' if (m | tojson) | length > 60 }}",
    "a list as text": "{{ m.content }}{{ '!' if 'a' in [m.content] | string }}",
    "a format with a width": "{{ '%.300s' % m.content }}",
    "a format": "{{ '{:.300}'.format(m.content) }}",
    "other characters": "{{ m.content.lstrip('#') }}",
    "other blanks and characters": "{{ m.content | trim('# ') }}",
    "escapes": "{{ m.content | e }}",
    "escapes of added text": "{{ ('' | safe) + m.content }}",
    "a sum": "{{ m.content }}{{ '!' if m.role + m.content == 'useralpha' }}",
    "joined text": "{{ m.content }}{{ '!' if [m.content, '!'] | join == 'alpha!' }}",
    "a captured text": "{% set c %} {{ m.content }} {% endset %}{{ c | trim }}{{ '!' if 'alpha' in c }}",
    "a variable of a namespace": "{% set n = namespace(c=m.content) %}{{ n.c }}{{ '!' if n.c | length < 4 }}",
    "a macro": "{% macro f(c) %}{{ c }}{{ '!' if c | length < 4 }}{% endmacro %}{{ f(m.content) }}",
    "sorted contents": "{{ m.content }}{{ '!' if (messages | map(attribute='content') | sort)[0] == m.content }}",
    "a test with a variable": "{{ m.content }}{{ '!' if m.content is sameas messages[0].content }}",
}
"""Uses of a content for which there is no form."""

SEARCHES = {
    "in": "{{ m.content }}{{ '!' if 'alpha' in m.content }}",
    "a common word": "{{ m.content }}{{ '!' if 'user' in m.content }}",
    "not in": "{{ m.content }}{{ '!' if 'alpha' not in m.content }}",
    "four blanks": "{{ m.content }}{{ '!' if '    ' in m.content }}",
    "a line end": "{{ m.content.replace('\\r\\n', '\\n') }}",
    "the filter replace": "{{ m.content.replace('alpha', 'A') }}",
    "equal": "{{ m.content }}{{ '!' if m.content == 'alpha' }}",
    "unequal": "{{ m.content }}{{ '!' if 'alpha' != m.content }}",
    "a list": "{{ m.content }}{{ '!' if m.content in ['alpha', '7'] }}",
    "tests": "{{ m.content }}{{ '!' if m.content is in(['alpha']) or '7' is in(m.content) or m.content is eq('?') }}",
    "the start": "{{ m.content }}{{ '!' if m.content.startswith('alpha') }}",
    "the end": "{{ m.content }}{{ '!' if m.content.endswith('?') }}",
    "split": "{{ m.content.split('</think>')[-1] }}",
    "partition": "{{ m.content.partition('</think>')[2] or m.content }}",
    "a prefix": "{{ m.content.removeprefix('alpha') or '-' }}",
    "a loop over words": "{{ m.content }}{% for w in m.content.split(' ') %}{{ '!' if w == 'alpha' }}{% endfor %}",
    "values": "{{ m.content }}{{ '!' if (m.values() | list | last) == 'alpha' }}",
    "two names": "{% set a, b = m.content.split('</think>', 1) if '</think>' in m.content else ('', m.content) %}"
    "{{ b }}",
    "a macro": "{% macro f(c) %}{{ c if c is string else '' }}{% endmacro %}{% set c = f(m.content) | trim %}"
    "{{ c.split('</think>')[-1] if '</think>' in c else c }}",
}
"""Uses of a content for which a form is right unless the content has a constant."""

SAFE = {
    "types": "{{ m.content if m.content is string and m.content is not none and m.content is iterable else '?' }}",
    "blanks": "{{ m.content.strip('\\n') | trim }}",
    "truth": "{{ (m.content or 'nothing') if m.content else '-' }}",
    "defaults": "{{ m.content | default('', true) | string }}",
    "sums": "{{ '<' ~ m.content + '>' }}",
    "captured": "{% set c %}{{ m.content }}{% endset %}{% filter trim %} {{ c }} {% endfilter %}",
    "keys": "{{ m['content'] if 'content' in m and m.get('content') else '' }}",
    "loops": "{{ loop.index0 if loop.first and not loop.last and loop.length > 9 }}{{ m.content }}",
    "lists": "{{ (messages[loop.index0:] | first).content if messages | length > 0 }}",
}

CONTENTS = (
    "alpha", "Beta", "7", "123", "#head", "a\r\nb", "a    b", "ABC", "x user y", "word " * 3000 + "end", "yes", "what?",
    "one two three", "<think>x</think>y", "</think>", "\u65e5\u672c", "&<>", "omega", "{{ x }}", "alpha!", "end\n\nend",
    " alpha", "NOTHINK x", "alpha and omega", "<|im_end|>",
)  # fmt: skip
ROLES = (
    ("user", "assistant"), ("user", "assistant") * 2, ("system", "user", "assistant"),
    ("user", "user", "assistant", "user"),
)  # fmt: skip


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    directory = make_tokenizer(tmp_path_factory.mktemp("tokenizer") / "families", marks=MARKS)
    (directory / "tokenizer_config.json").write_text(json.dumps({"bos_token": BEGIN, "eos_token": STOP}))
    return Tokenizer(directory, directory / "tokenizer.json", STOP, "families")


def make_turns(tokenizer: Tokenizer, path: Path, template: str, **choices: Any) -> Turns:
    path.write_text(template)
    options = ChatOptions(tokenizer="families", chat_template=str(path), unrendered="allow", **choices)
    encoder = options.encoding(resolve_rendering(options, tokenizer, [])).load(None, tokenizer.backend)  # type: ignore[arg-type]
    assert encoder._turns is not None
    return encoder._turns


def cut(turns: Turns | Forms, messages: list[dict[str, Any]]) -> list[TurnSequence] | str:
    row = read_row({"messages": messages}, RowSettings(empty_answer="train"))
    assert isinstance(row, Conversation)
    try:
        return turns.cut(row)
    except BadRow as error:
        return error.reason


def count_forms(turns: Turns, seed: str, monkeypatch: pytest.MonkeyPatch, rows: int = 600) -> int:
    """Compare the forms with the rule for many rows, and return how many rows a form has cut."""
    forms, dice, uses = Forms(turns), random.Random(seed), []
    monkeypatch.setattr("tokenmill.stages.chat.forms.SAMPLE_STEP", 1 << 60)
    original = Form.cut
    monkeypatch.setattr(Form, "cut", lambda form, contents: uses.append(1) or original(form, contents))
    for _ in range(rows):
        messages = [{"role": role, "content": dice.choice(CONTENTS)} for role in dice.choice(ROLES)]
        assert cut(forms, messages) == cut(turns, messages), messages
    monkeypatch.setattr(Form, "cut", original)
    return len(uses) - len(ROLES) * 5  # each form is tried with five sets of contents


@pytest.mark.parametrize("use", UNSAFE)
def test_no_form_where_a_template_reads_a_content(
    tokenizer: Tokenizer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, use: str
) -> None:
    turns = make_turns(tokenizer, tmp_path / "t.jinja", with_content(UNSAFE[use]))
    assert count_forms(turns, use, monkeypatch, rows=150) <= 0


@pytest.mark.parametrize("use", SEARCHES)
def test_contents_with_a_searched_text_are_rendered(
    tokenizer: Tokenizer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, use: str
) -> None:
    turns = make_turns(tokenizer, tmp_path / "t.jinja", with_content(SEARCHES[use]))
    assert 100 < count_forms(turns, use, monkeypatch) < 580


@pytest.mark.parametrize("use", SAFE)
def test_forms_of_templates_that_only_print_contents(
    tokenizer: Tokenizer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, use: str
) -> None:
    turns = make_turns(tokenizer, tmp_path / "t.jinja", with_content(SAFE[use]))
    assert count_forms(turns, use, monkeypatch) > 300


@pytest.mark.parametrize("choices", [{}, {"train": "last"}, {"train_reasoning": False}])
@pytest.mark.parametrize("family", FAMILIES)
def test_forms_of_families(
    tokenizer: Tokenizer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, family: str, choices: dict[str, Any]
) -> None:
    turns = make_turns(tokenizer, tmp_path / "t.jinja", FAMILIES[family], **choices)
    assert count_forms(turns, family, monkeypatch) > (-99 if family == "forced" else 100)


PROMPT_BY_VARIABLE = CHATML + "{% if add_generation_prompt and enable_thinking is false %}NOTHINK {% endif %}"


def test_a_content_that_continues_a_generation_prompt_is_rendered(
    tokenizer: Tokenizer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With thinking off, the prompt ends with a text that only the output has; an answer can begin with it."""
    turns = make_turns(tokenizer, tmp_path / "t.jinja", PROMPT_BY_VARIABLE)
    forms, rows = Forms(turns), []
    for content in ("plain", "N", "NOTHINK really", "No", "x"):
        rows += [[{"role": "user", "content": "q"}, {"role": "assistant", "content": content}]] * 5
    assert [cut(forms, messages) for messages in rows] == [cut(turns, messages) for messages in rows]
    assert count_forms(turns, "prompt", monkeypatch) > 100


ARGUMENTS = ("", "'a'", "2", "'a', 'b'", "m.content", "attribute='content'")
OPERANDS = ("'a'", "2", "m.content", "messages[0].content", "['alpha', '7']", "none", "''", "m", "messages")
OPERATORS = ("==", "!=", "<", "<=", ">", ">=", "in", "not in", "~", "+", "*", "%", "and", "or")


def every_expression() -> Iterator[str]:
    """Yield an expression with a content for each filter, test, method and operator of a template."""
    from tokenmill.stages.chat.sandbox import TemplateEnvironment

    environment = TemplateEnvironment()
    for argument in ARGUMENTS:
        for name in filter(str.isidentifier, environment.filters):
            yield from (f"{value} | {name}({argument})" for value in ("m.content", "[m.content]", "messages", "'ab'"))
        for name in filter(str.isidentifier, environment.tests):
            yield from (f"m.content is {name}({argument})", f"[m.content] is {name}({argument})")
        for name in (name for name in dir(str) if not name.startswith("_")):
            yield f"m.content.{name}({argument})"
    for name in (name for name in dir(str) if not name.startswith("_")):
        yield f"'ab'.{name}(m.content)"
    for operator, operand in itertools.product(OPERATORS, OPERANDS):
        yield from (f"m.content {operator} {operand}", f"{operand} {operator} m.content")


@pytest.mark.slow
def test_forms_of_every_expression() -> None:
    """A form that exists gives the result of the rule for all contents that fit."""
    roles = (("user", None), ("assistant", None))
    contents = (*CONTENTS, "tab\tx", "a,b,c", "0x1F", "3.5", "true", "[1]", "%s", "\u00df", "alpha alpha", "x" * 300)
    tried = made = 0
    for expression in every_expression():
        template = ChatTemplate(with_content(f"{{{{ m.content }}}}{{{{ {expression} }}}}"), name="t")
        turns = Turns(template, ("<|im_start|>assistant\n",), settings=TrainSettings(allow_unrendered=True))
        form = Forms(turns)._make_form(roles)
        tried += 1
        if form is None:
            continue
        made += 1
        for pair in zip(contents, contents[3:] + contents[:3], strict=True):
            if pair[0].strip() == pair[0] and pair[1].strip() == pair[1] and form.fits(pair):
                messages = [{"role": role, "content": text} for (role, _), text in zip(roles, pair, strict=True)]
                assert form.cut(pair) == cut(turns, messages), (expression, pair)
    assert tried > 1500 and 100 < made < 500


def test_a_difference_ends_the_run(tokenizer: Tokenizer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The sample of rows that are also rendered is a second proof: here the first one is turned off."""
    monkeypatch.setattr("tokenmill.stages.chat.forms.SAMPLE_STEP", 2)
    monkeypatch.setattr(Form, "fits", lambda *_: True)
    forms = Forms(make_turns(tokenizer, tmp_path / "t.jinja", with_content(SEARCHES["in"])))
    with pytest.raises(RequestError, match="--rendering each"):
        for content in ("plain",) * 8 + ("alpha",) * 8:
            cut(forms, [{"role": "user", "content": "q"}, {"role": "assistant", "content": content}])


def test_long_conversations_have_no_form(tokenizer: Tokenizer, tmp_path: Path) -> None:
    forms = Forms(make_turns(tokenizer, tmp_path / "t.jinja", CHATML))
    for _ in range(6):
        cut(forms, [{"role": role, "content": "x"} for role in ("user", "assistant") * 129])
        cut(forms, [{"role": role, "content": "x"} for role in ("user", "assistant") * 128])
    assert [len(key) for key in forms._forms] == [256] and not forms._uses


def test_every_token_and_no_reasoning_contradict() -> None:
    for option in ("train_reasoning", "train_tool_calls"):
        with pytest.raises(InvalidOption, match="--train all trains every token"):
            ChatOptions(tokenizer="x", train="all", **{option: False})
