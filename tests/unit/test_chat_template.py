"""Chat templates: the texts of the built-in ones, the semantics of transformers, and the limits of a render."""

import copy
import json
import pickle
import signal
from pathlib import Path
from typing import Any

import pytest

from support.chat import load_builtin
from support.limited_renders import render_limited
from tokenmill.errors import RequestError
from tokenmill.stages.chat.rows import Conversation, RowSettings, read_row
from tokenmill.stages.chat.template import BUILTIN, ChatTemplate, RenderError, builtin_source

DATA = json.loads((Path(__file__).parents[1] / "conformance" / "sft" / "chat_masks.json").read_text())
NANO3 = DATA["combos"]["nano3-qwen3"]["cases"]

HELLO = [{"role": "user", "content": "Hello"}, {"role": "assistant", "content": "Hi"}]
WEATHER = {
    "type": "function",
    "function": {"name": "get_weather", "description": "Weather", "parameters": {"type": "object", "properties": {}}},
}


def read(record: str) -> Conversation:
    row = read_row(DATA["records"][record], RowSettings(empty_answer="train"))
    assert isinstance(row, Conversation)
    return row


def render(source: str, messages: list[dict[str, Any]] | None = None, **variables: Any) -> str:
    return ChatTemplate(source, name="t.jinja").render(HELLO if messages is None else messages, **variables)


# -- built-in templates


@pytest.mark.parametrize("record", [name for name, case in NANO3.items() if case["expect"] not in (None, "reject")])
def test_nano3_renders_the_reference_texts(record: str) -> None:
    row = read(record)
    messages = [{**message, "content": message["content"] or ""} for message in row.messages]
    text = load_builtin("nano3").render(messages, row.tools)
    if "rendered" in NANO3[record]:
        assert text == NANO3[record]["rendered"]
    else:  # the reference gives only ids: test_chat_masks compares these
        assert text.endswith("<|im_end|>\n")


TOOL_SYSTEM = """<|im_start|>system
Use tools.

# Tools

You have access to the following functions:

<tools>
<function>
<name>get_weather</name>
<description>Weather at a place.</description>
<parameters>
<parameter>
<name>city</name>
<type>string</type>
<description>Town name</description>
</parameter>
<parameter>
<name>unit</name>
<type>string</type>
<enum>["c", "f"]</enum>
</parameter>
<required>["city"]</required>
</parameters>
</function>
</tools>

If you choose"""


def test_nano3_tools() -> None:
    row = read("tool_string_args")
    text = load_builtin("nano3").render(row.messages, row.tools)
    assert text.startswith(TOOL_SYSTEM)
    assert text.endswith(
        "<|im_start|>assistant\n<think></think>\n<tool_call>\n<function=get_weather>\n<parameter=city>\nOslo\n"
        "</parameter>\n<parameter=unit>\nc\n</parameter>\n</function>\n</tool_call>\n<|im_end|>\n<|im_start|>user\n"
        "<tool_response>\n-3 and snow\n</tool_response>\n<|im_end|>\n<|im_start|>assistant\n<think></think>"
        "It is -3 °C with snow.<|im_end|>\n"
    )


def test_nano3_parallel_calls_and_numbers() -> None:
    row, template = read("tool_parallel"), load_builtin("nano3")
    text = template.render(row.messages, row.tools)
    assert "</function>\n</tool_call>\n<tool_call>\n<function=get_weather>" in text
    assert "user\n<tool_response>\n-3\n</tool_response>\n<tool_response>\n14\n</tool_response>\n<|im_end|>" in text
    row = read("tool_dict_args")
    text = template.render(row.messages, row.tools)
    assert "<parameter=xs>\n[1, 2.5, 3]\n</parameter>" in text
    assert '<type>array</type>\n<items>{"type": "number"}</items>\n' in text


def test_nano3_scalars_and_unusual_schemas() -> None:
    """The format has Python's words for booleans and null, and JSON for lists and objects."""
    properties = {"a": {"type": ["string", "null"], "default": None}, "b": {"description": " x "}, "c": {"enum": []}}
    schema = {"type": "object", "properties": properties, "required": [], "additionalProperties": False}
    tools = [
        {"type": "function", "function": {"name": "f", "description": " d ", "parameters": schema, "strict": True}},
        {"type": "function", "function": {"name": "g"}},
    ]
    call = {"function": {"name": "f", "arguments": {"a": None, "b": True, "c": {"d": [1.5]}, "e": "x"}}}
    text = load_builtin("nano3").render([HELLO[0], {**HELLO[1], "tool_calls": [call]}], tools)
    assert (
        "<function>\n<name>f</name>\n<description>d</description>\n<parameters>\n"
        "<parameter>\n<name>a</name>\n<type>['string', 'null']</type>\n<default>None</default>\n</parameter>\n"
        "<parameter>\n<name>b</name>\n<description>x</description>\n</parameter>\n"
        "<parameter>\n<name>c</name>\n<enum>[]</enum>\n</parameter>\n"
        "<additionalProperties>False</additionalProperties>\n<required>[]</required>\n</parameters>\n"
        "<strict>True</strict>\n</function>\n<function>\n<name>g</name>\n<parameters>\n</parameters>\n</function>\n"
    ) in text
    assert (
        "<think></think>Hi\n<tool_call>\n<function=f>\n<parameter=a>\nNone\n</parameter>\n<parameter=b>\nTrue\n"
        '</parameter>\n<parameter=c>\n{"d": [1.5]}\n</parameter>\n<parameter=e>\nx\n</parameter>\n</function>\n'
    ) in text


def test_nano3_history_and_inline_reasoning() -> None:
    template = load_builtin("nano3")
    row = read("reasoning_inline_multi")
    assert template.render(row.messages) == NANO3["reasoning_inline_multi"]["rendered"]
    kept = template.render(row.messages, truncate_history_thinking=False)
    assert "<think>\nfive less two\n</think>\n3<|im_end|>" in kept
    row = read("tool_multi_step_reasoning")
    current = template.render(row.messages[:-2], row.tools)
    assert "<think>\nneed Oslo\n</think>\n<tool_call>" in current
    assert "need Oslo" not in template.render(row.messages, row.tools)


@pytest.mark.parametrize(
    ("variables", "end"),
    [
        ({}, "<|im_start|>assistant\n<think>\n"),
        ({"enable_thinking": True}, "<|im_start|>assistant\n<think>\n"),
        ({"enable_thinking": False}, "<|im_start|>assistant\n<think></think>"),
    ],
)
def test_nano3_generation_prompt(variables: dict[str, Any], end: str) -> None:
    text = load_builtin("nano3").render(HELLO[:1], add_generation_prompt=True, **variables)
    assert text == "<|im_start|>system\n<|im_end|>\n<|im_start|>user\nHello<|im_end|>\n" + end


@pytest.mark.parametrize("record", ["single", "system", "multi_turn", "whitespace", "system_mid", "developer_role"])
def test_chatml_and_llama3_equal_the_templates_of_the_reference(record: str) -> None:
    messages = read(record).messages
    for name, other in (("chatml", "chatml_gen"), ("llama3", "llama_gen")):
        reference = ChatTemplate(DATA["templates"][other], name=other, variables={"bos_token": "<bos>"})
        template = load_builtin(name, variables={"bos_token": "<bos>"})
        for prompt in (False, True):
            assert template.render(messages, add_generation_prompt=prompt) == reference.render(
                messages, add_generation_prompt=prompt
            )


def test_chatml_tools_and_reasoning() -> None:
    row = read("tool_multi_step_reasoning")
    text = load_builtin("chatml").render(row.messages, row.tools)
    assert text.startswith("<|im_start|>system\nAgent.\n\nYou can call these functions")
    assert json.dumps(row.tools and row.tools[0], ensure_ascii=False) in text
    assert text.count("<|im_start|>system") == 1
    assert (
        "<|im_start|>assistant\n<think>\nneed Oslo\n</think>\n\n<tool_call>\n"
        '{"name": "get_weather", "arguments": {"city": "Oslo"}}\n</tool_call><|im_end|>\n'
        "<|im_start|>user\n<tool_response>\n-3\n</tool_response><|im_end|>\n"
    ) in text
    row = read("tool_parallel")
    text = load_builtin("chatml").render(row.messages, row.tools)
    assert "</tool_call>\n<tool_call>" in text
    assert "-3\n</tool_response>\n<tool_response>\n14\n</tool_response><|im_end|>" in text


def test_llama3_tools_and_reasoning() -> None:
    row = read("tool_multi_step_reasoning")
    text = load_builtin("llama3", variables={"bos_token": "<bos>"}).render(row.messages, row.tools)
    assert text.startswith("<bos><|start_header_id|>system<|end_header_id|>\n\nAgent.\n\nYou can call these functions")
    assert '    "type": "function"' in text
    assert (
        "<|start_header_id|>assistant<|end_header_id|>\n\n<think>\nneed Oslo\n</think>\n\n"
        '{"name": "get_weather", "parameters": {"city": "Oslo"}}<|eot_id|>'
        "<|start_header_id|>ipython<|end_header_id|>\n\n-3<|eot_id|>"
    ) in text


@pytest.mark.parametrize("name", BUILTIN)
def test_builtin_template_without_messages(name: str) -> None:
    template = load_builtin(name)
    assert "assistant" in template.render([], add_generation_prompt=True)
    assert "assistant" in template.render([], [WEATHER], add_generation_prompt=True)
    assert not template.has_generation_tags


@pytest.mark.parametrize("name", BUILTIN)
def test_builtin_template_keeps_prefixes(name: str) -> None:
    messages, template = read("multi_turn").messages, load_builtin(name)
    whole = template.render(messages)
    for end in range(1, len(messages)):
        assert whole.startswith(template.render(messages[:end]))


def test_unknown_builtin_name() -> None:
    with pytest.raises(RequestError, match=r"unknown chat template 'llama4'.*chatml, llama3, nano3; choose"):
        builtin_source("llama4")


# -- semantics of transformers

SEMANTICS = {
    "blocks are trimmed": "a\n  {% if true %}\n  b\n  {% endif %}\n  {{ messages[0].role }}\n\n",
    "loop controls": "{% for m in messages %}{% if loop.index == 2 %}{% break %}{% endif %}{{ m.role }}{% endfor %}",
    "continue": "{% for m in messages %}{% if loop.first %}{% continue %}{% endif %}{{ m['content'] }}{% endfor %}",
    "loop variables": "{% for m in messages %}{{ loop.index0 }}{{ loop.first }}{{ loop.last }}{{ loop.length }}"
    "{{ loop.previtem is defined }}{{ loop.nextitem.role if not loop.last }}{{ loop.revindex }}{% endfor %}",
    "filtered loop": "{% for m in messages if m.role != 'user' %}{{ loop.index }}{{ m.role }}{% else %}x{% endfor %}",
    "recursive loop": "{% for x in [[1], [[2]]] recursive %}{{ x if x is number else loop(x) }},{% endfor %}",
    "json": "{{ tools | tojson }}{{ tools | tojson(indent=2) }}{{ tools | tojson(separators=(',', ':')) }}"
    "{{ {'b': 'é<&>', 'a': none} | tojson(sort_keys=true, ensure_ascii=true) }}{{ 'é<&>\u2028' | tojson }}",
    "namespace": "{% set ns = namespace(a=1, b='x') %}{% for m in messages %}{% set ns.a = ns.a + 1 %}{% endfor %}"
    "{{ ns.a }}{{ ns.b }}",
    "macro": "{% macro f(x, y='d') %}<{{ x }}{{ y }}{{ varargs }}{{ kwargs }}{{ caller() if caller }}>{% endmacro %}"
    "{{ f(1) }}{{ f(1, 2, 3, k=4) }}{% call f(5) %}body{% endcall %}",
    "slices": "{{ messages[1:] | length }}{{ messages[::-1][0].role }}{{ 'abcdef'[1:-1:2] }}{{ messages[-1]['role'] }}",
    "text methods": "{{ ' a b '.strip() }}{{ 'a,b'.split(',') }}{{ 'x'.join(['a', 'b']) }}{{ 'abc'.replace('b', 'c') }}"
    "{{ 'ab'.startswith('a') }}{{ 'a'.center(5) }}|{{ '%s-%03d' % ('a', 7) }}{{ '{}-{a:>4}'.format(1, a='x') }}",
    "filters": "{{ ' x ' | trim }}{{ 'a' | upper }}{{ [1, 2, 3] | sum }}{{ ['b', 'a'] | sort | join(', ') }}"
    "{{ messages | map(attribute='role') | list }}{{ messages | selectattr('role', 'equalto', 'user') | list }}"
    "{{ {'a': 1} | items | list }}{{ {'b': 1, 'a': 2} | dictsort }}{{ 'a\nb' | indent(2, true) }}{{ '7' | int + 1 }}"
    "{{ messages | length }}{{ x | default('d') }}{{ 'a<b' | escape }}{{ messages | first }}{{ 3.7 | round | int }}"
    "{{ [1, 2, 3] | batch(2) | list }}{{ [1, 1, 2] | unique | list }}{{ messages | rejectattr('x') | list | length }}"
    "{{ [[1], [2]] | sum(start=[]) }}{{ [1, 2] | reverse | list }}"
    "{{ messages | groupby('role') | map(attribute='grouper') | list }}{{ '%s' | format(1) }}",
    "printed values": "{{ none }}{{ true }}{{ 1.5 }}{{ [1, 'a', none] }}{{ {'a': (1,)} }}{{ undefined }}{{ 2 ** 3 }}",
    "operators": "{{ 7 // 2 }}{{ 7 % 2 }}{{ 'ab' * 2 }}{{ [1] * 2 }}{{ [1] + [2] }}{{ 'a' ~ 1 ~ none }}{{ 1 + 2 * 3 }}"
    "{{ 'a' in 'abc' }}{{ messages[0].role + messages[1].role }}{{ 'x' if false }}{{ (1, 2) + (3,) }}{{ -1 }}",
    "tests": "{{ messages is iterable }}{{ tools is none }}{{ x is defined }}{{ 'a' is string }}{{ {} is mapping }}"
    "{{ documents is defined }}{{ 3 is in [3] }}{{ 'a' is eq('a') }}{{ true is boolean }}{{ 1 is number }}",
    "keys named as methods": "{{ messages[0].items is mapping }}{{ {'items': 1}['items'] }}{{ {'x': 1}.get('y', 2) }}"
    "{% for k, v in {'a': 1}.items() %}{{ k }}{{ v }}{% endfor %}{{ {'a': 1}.keys() | list }}",
    "set blocks": "{% set x %} {{ messages[0].role }} {% endset %}{{ x | trim }}"
    "{% filter upper %}{{ x }}{% endfilter %}",
    "globals": "{% set c = cycler('a', 'b') %}{{ c.next() }}{{ c.next() }}{{ dict(a=1) }}{% set j = joiner('+') %}"
    "{{ j() }}{{ j() }}{{ range(3) | list }}",
    "generation block": "{% set x = 1 %}{% generation %}{% set x = 2 %}{{ x }}{% endgeneration %}{{ x }}",
    "prompt": "{% if add_generation_prompt %}yes{% else %}no{% endif %}{{ bos_token }}",
}


@pytest.mark.parametrize("source", [*SEMANTICS.values(), *map(builtin_source, BUILTIN), *DATA["templates"].values()])
def test_equal_to_transformers(source: str) -> None:
    from transformers.utils.chat_template_utils import render_jinja_template

    template = ChatTemplate(source, name="t", variables={"bos_token": "<s>"})
    row = read("tool_multi_step_reasoning")
    for messages, tools in ((HELLO, None), (row.messages, row.tools)):
        expected, _ = render_jinja_template([messages], tools, chat_template=source, bos_token="<s>")
        assert template.render(messages, tools) == expected[0]


@pytest.mark.parametrize("name", [*DATA["templates"]])
@pytest.mark.parametrize(
    "record", ["single", "multi_turn", "reasoning_multi", "tool_parallel", "empty_assistant", "unicode"]
)
def test_generation_spans_equal_transformers(name: str, record: str) -> None:
    from transformers.utils.chat_template_utils import render_jinja_template

    source, row = DATA["templates"][name], read(record)
    template = ChatTemplate(source, name=name, variables={"bos_token": "<s>"})
    assert template.has_generation_tags
    expected, spans = render_jinja_template(
        [row.messages], row.tools, chat_template=source, return_assistant_tokens_mask=True, bos_token="<s>"
    )
    assert template.render_tagged(row.messages, row.tools) == (expected[0], list(map(tuple, spans[0])))
    assert template.render(row.messages, row.tools) == expected[0]


def test_old_reasoning_keys() -> None:
    messages = [*HELLO[:1], {"role": "assistant", "content": "Hi", "reasoning_content": "why"}]
    assert render("{{ messages[1].thinking }}{{ messages[0].thinking }}", messages) == "why"
    assert render("{{ messages[1]['reasoning'] }}{{ messages[1].reasoning_content }}", messages) == "whywhy"
    assert "thinking" not in messages[1]


def test_date() -> None:
    source = "{{ strftime_now('%d %b %Y') if strftime_now is defined else 'no date' }}"
    template = ChatTemplate(source, name="t", date="2024-07-26")
    assert template.render([]) == "26 Jul 2024"
    assert ChatTemplate(source, name="t").render([]) == "no date"
    assert "strftime_now" in template.reads
    with pytest.raises(RequestError, match=r"invalid date '26 July'.*correct it"):
        ChatTemplate(source, name="t", date="26 July")
    with pytest.raises(RenderError, match="has a width"):
        ChatTemplate("{{ strftime_now('%0900000000d') }}", name="t", date="2024-07-26").render([])


# -- generation blocks


def test_generation_blocks_in_macros_and_loops() -> None:
    source = (
        "{% macro answer(m) %}[{% generation %}{{ m.content }}{% endgeneration %}]{% endmacro %}"
        "{% for m in messages %}{{ answer(m) }}{% endfor %}{% generation %}{% endgeneration %}"
    )
    template = ChatTemplate(source, name="t")
    assert template.render_tagged(HELLO) == ("[Hello][Hi]", [(1, 6), (8, 10)])
    nested = "a{% generation %}b{% generation %}c{% endgeneration %}d{% endgeneration %}e"
    assert ChatTemplate(nested, name="t").render_tagged([]) == ("abcde", [(1, 4)])


@pytest.mark.parametrize(
    "source",
    [
        "{% set x %}{% generation %} a {% endgeneration %}{% endset %}{{ x | trim }}",
        "{% set x %}{% generation %}a{% endgeneration %}{% endset %}{{ x[:3] }}",
        "{% for m in messages %}{% generation %}{% continue %}{% endgeneration %}{% endfor %}",
    ],
)
def test_generation_block_that_is_cut(source: str) -> None:
    with pytest.raises(RenderError, match="a generation block does not reach the output as one piece"):
        ChatTemplate(source, name="t").render_tagged(HELLO)


# -- facts about a template


def test_facts() -> None:
    template = ChatTemplate(
        "{{ bos_token }}{% for m in messages %}{{ m.content.strip() }}{{ x }}{% endfor %}", name="t"
    )
    assert template.reads == {"messages", "bos_token", "x"}
    assert not template.has_generation_tags
    assert ChatTemplate("{% generation %}{% endgeneration %}", name="t").has_generation_tags
    assert ChatTemplate("x", name="t", date="2026-01-02").parameters == {"variables": {}, "date": "2026-01-02"}


# -- refused templates


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("a\n{% if x %}", "line 2: Unexpected end of template"),
        ("{{ x", "line 1: unexpected end of template"),
        ("{% foo %}", "line 1: Encountered unknown tag 'foo'"),
        ("\n{{ x | nothing }}", "line 2: No filter named 'nothing'; fix"),
        ("{{ x is nothing }}", "line 1: No test named 'nothing'"),
        ("{{ [1] | random }}", "line 1: No filter named 'random'"),
        ("{% generation %}", "Unexpected end of template"),
        ("\n\n{% import 'os' as x %}", "line 3: a chat template cannot have {% import %}; remove it"),
        ("{% from 'os' import x %}", "line 1: a chat template cannot have {% import %}"),
        ("{% include 'a' %}", "cannot have {% include %}"),
        ("{% extends 'a' %}", "cannot have {% extends %}"),
        ("{% autoescape true %}{% endautoescape %}", "cannot have {% autoescape %}"),
        ("a\n{{ ''.__class__ }}", "line 2: a chat template cannot read '__class__'"),
        ("{{ x['__class__'] }}", "cannot read '__class__'"),
        ("{{ x._private }}", "cannot read '_private'"),
        ("{% set ns = namespace() %}{% set ns._x = 1 %}", "cannot read '_x'"),
        ("{{ " + "(" * 5000 + "1" + ")" * 5000 + " }}", "nested too deeply"),
        ("{% for x in y %}" * 30 + "{% endfor %}" * 30, "Python cannot compile the template"),
        ("{% continue %}", "'continue' not properly in loop"),
        ("{{ " + "9" * 6000 + " }}", "Python cannot compile the template"),
    ],
)
def test_refused_template(source: str, message: str) -> None:
    with pytest.raises(RequestError) as caught:
        ChatTemplate(source, name="dir/t.jinja")
    assert str(caught.value).startswith("dir/t.jinja")
    assert message in str(caught.value)
    assert caught.value.exit_code == 2


# -- the sandbox

OBJECTS = [
    "{{ '' | attr('__class__') }}",
    "{{ messages[0][('_' * 2) ~ 'class' ~ ('_' * 2)] }}{{ ''['_' ~ '_class__'] }}",
    "{{ ['x'] | map(attribute='__class__') | list }}",
    "{{ ['x'] | selectattr('__class__') | list }}",
    "{{ ['x'] | groupby('__class__') }}",
    "{{ ['x'] | sort(attribute='__class__') }}",
    "{{ '{0.__class__}'.format('x') }}",
    "{{ '{0[x].__class__}'.format({'x': ''}) }}",
    "{{ '{a.__class__}'.format_map({'a': ''}) }}",
    "{{ self['_TemplateReference' ~ '__context'] }}",
    "{{ namespace.mro() }}",
    "{{ raise_exception.func_globals.x }}",
    "{{ raise_exception }}",
    "{{ [raise_exception] }}",
    "{{ 'a' ~ raise_exception }}",
    "{{ messages[0].items }}",
    "{{ messages | map('upper') }}",
    "{{ namespace(a=1) }}",
    "{{ {'a': namespace()} }}",
    "{{ messages | tojson(default=raise_exception) }}",
    "{{ 'x'.encode() }}",
    "{{ 'x'.translate({}) }}",
    "{{ (5).to_bytes(2, 'big') }}",
    "{{ range(3).start }}",
    "{% set j = joiner('a') %}{{ j.sep }}",
    "{% macro m() %}{% endmacro %}{{ m.catch_kwargs }}",
    "{{ lipsum() }}",
    "{{ cycler.mro }}",
]


@pytest.mark.parametrize("source", OBJECTS)
def test_python_objects_are_unreachable(source: str) -> None:
    with pytest.raises(RenderError) as caught:
        render("\n" + source)
    assert caught.value.line == 2
    assert "0x" not in str(caught.value)


CHANGES = [
    "{{ messages.append(1) }}",
    "{{ messages.clear() }}",
    "{{ messages.reverse() }}",
    "{{ messages[0].update({'role': 'x'}) }}",
    "{{ messages[0].pop('role') }}",
    "{{ messages[0].setdefault('a', 1) }}",
    "{{ messages | attr('clear') }}",
    "{{ messages | map('attr', 'clear') | list }}",
    "{% set messages[0].role = 'x' %}",
]


@pytest.mark.parametrize("source", CHANGES)
def test_messages_cannot_be_changed(source: str) -> None:
    messages, tools = copy.deepcopy(HELLO), [copy.deepcopy(WEATHER)]
    with pytest.raises((RenderError, RequestError)):
        ChatTemplate(source, name="t").render(messages, tools)
    assert (messages, tools) == (HELLO, [WEATHER])


def test_assigned_names_do_not_reach_the_caller() -> None:
    messages = copy.deepcopy(HELLO)
    template = ChatTemplate("{{ n }}{% set messages = [] %}{% set n = 1 %}{% set tools = [1] %}{{ n }}", name="t")
    assert [template.render(messages) for _ in range(2)] == ["1", "1"]
    assert messages == HELLO


def grow(start: str, step: str) -> str:
    """Return a template that computes a value `x` again and again from itself."""
    return (
        f"{{% set ns = namespace(x={start}) %}}{{% for i in range(999) %}}{{% set ns.x = {step} %}}{{% endfor %}}"
        "{{ ns.x | length }}"
    )


GROWING = [
    "{{ 'a' * 1000000000000 }}",
    "{{ 2 ** 10000000000 }}",
    grow("2", "ns.x * ns.x"),
    grow("'ab'", "ns.x ~ ns.x"),
    grow("'ab' | escape", "ns.x + ns.x"),
    grow("[1]", "ns.x + ns.x"),
    "{% macro m() %}{{ m(varargs, varargs) }}{% endmacro %}{{ m(1) }}",
    "{% set x = 'x' * 1000000 %}{% for i in range(100000) %}{{ x }}{% endfor %}",
    "{{ '%*d' % (1000000000, 1) }}",
    "{{ 'a'.center(1000000000) }}",
    "{{ ('a' * 1000000) | replace('a', 'b' * 1000000) }}",
    "{{ ('b' * 10000000) | map('upper') | list }}",
    "{{ [[1]] | tojson(indent=100000000) }}",
]

ENDLESS = [
    "{% for a in range(100000) %}{% for b in range(100000) if false %}{% endfor %}{% endfor %}",
    "{% macro m(n) %}{% if n %}{{ m(n - 1) }}{{ m(n - 1) }}{% endif %}{% endmacro %}{{ m(60) }}",
    "{% for x in [[1]] recursive %}{{ loop([x, x]) }}{% endfor %}",
    "{% block a %}{{ self.a() }}{% endblock %}",
    "{% for a in range(100000) %}{{ range(100000) | sum }}{% endfor %}",
    "{% set ns = namespace(x=1) %}{% for i in range(999) %}{% set ns.x = [ns.x] %}{% endfor %}{{ ns.x | tojson }}",
]

UNCOUNTED = [
    "{% set ns = namespace(s='f' * 2000000) %}{% set x = (ns.s * 30) | int(0, 16) %}"
    "{% set y = x // ((ns.s * 15) | int(0, 16)) %}",
    "{% set ns = namespace(s='f' * 20000000) %}{% set x = ns.s | int(0, 16) %}{{ 1 if x * x else 2 }}",
    "{% set ns = namespace(a=[1, 2, 3, 4]) %}{% for i in range(40) %}{% set ns.a = [ns.a, ns.a] %}{% endfor %}"
    "{{ ns.a == ns.a | list }}{{ ns.a | string | length }}",
    "{% set ns = namespace(a=' ' * 60000000) %}" + "{% set b = ns.a | trim %}" * 2000,
    "{% set ns = namespace(a='x' * 60000000) %}" + "{% set b = 'xy' in ns.a %}" * 2000,
    "{% set ns = namespace(a=range(100000) | list) %}{% for i in range(100000) %}{% set b = -1 in ns.a %}{% endfor %}",
    "{% set ns = namespace() %}{% for i in range(100000) %}{% set ns.a = [ns.a] * 10000 %}{% endfor %}",
    "{% set ns = namespace(a=messages) %}{% for i in range(100000) %}{% set ns.a = ns.a | map('upper') %}{% endfor %}"
    "{{ ns.a | list }}",
    "{% for i in range(100000) %}{% set x = 'x' * 50000000 %}{% endfor %}",
    "{{ x }}" * 150_000,
    "{% set x = [" + "0," * 2_000_000 + "] %}",
    "{{ " + "(" * 50_000 + ")" * 50_000 + " }}",
    "{{ " + "-" * 50_000 + "1 }}",
    "{{ " + " + ".join(["1"] * 50_000) + " }}",
]


@pytest.mark.slow
@pytest.mark.parametrize("sources", [GROWING, ENDLESS, UNCOUNTED], ids=["growing", "endless", "uncounted"])
def test_time_and_memory_are_limited(sources: list[str]) -> None:
    for outcome in render_limited(sources):
        about = (outcome.source[:200], outcome[1:])
        assert outcome.end in ("RenderError", "RequestError", "TemplateLimit", signal.SIGPROF), about
        assert outcome.memory_mib < 1000, about
        assert outcome.cpu_seconds < 5, about


@pytest.mark.slow
def test_the_average_time_is_limited() -> None:
    """Renders that each take less than the limit of one are limited together."""
    (outcome,) = render_limited(["{% for a in range(400) if range(20000) | sum < 0 %}{% endfor %}"], renders=1000)
    assert outcome.end == signal.SIGPROF
    assert outcome.cpu_seconds < 20


def test_large_conversations_are_within_the_limits() -> None:
    source = "{% for a in range(5000) %}{% for m in messages %}{{ m.content ~ m.role | upper }}{% endfor %}{% endfor %}"
    assert [outcome.end for outcome in render_limited([source, "{{ messages[0].content * 50000 }}"])] == [
        "rendered"
    ] * 2


def test_a_text_much_longer_than_the_conversation_is_refused() -> None:
    with pytest.raises(RenderError, match=r"writes 20,000,000 characters, more than 1,048,576 and 16 times"):
        render("{{ 'x' * 20000000 }}")
    long = [{"role": "user", "content": "x" * 2_000_000}]
    assert len(ChatTemplate("{{ messages[0].content * 10 }}", name="t").render(long)) == 20_000_000


@pytest.mark.parametrize("source", [r"{{ '\ud800' }}", r"{% for m in messages %}{{ '\ud83d' + '\ude42' }}{% endfor %}"])
def test_a_text_that_no_tokenizer_takes_is_refused(source: str) -> None:
    with pytest.raises(RenderError, match="it writes a lone surrogate, which is not a character"):
        render(source)


@pytest.mark.parametrize(
    ("source", "reason"),
    [
        ("{{ messages[5].role }}", "list object has no element 5"),
        ("{{ messages[0].x.y }}", "'dict object' has no attribute 'x'"),
        ("{{ none + 'a' }}", "TypeError: unsupported operand"),
        ("{{ 1 / 0 }}", "ZeroDivisionError: division by zero"),
        ("{{ raise_exception('no  tools\nhere') }}", "the template raised an exception: no tools here"),
        ("{{ strftime_now('%Y') }}", "'strftime_now' is undefined"),
        ("{{ messages | sort }}", "TypeError: '<' not supported"),
        ("{{ x | tojson }}", "TypeError: Object of type Undefined is not JSON serializable"),
        ("{{ x() }}", "'x' is undefined"),
        ("{{ 'a'.split(1, 2, 3) }}", "TypeError: split() takes at most 2 arguments"),
        ("{{ 'a'.center() }}", "TypeError"),
        ("{{ '{'.format(1) }}", "ValueError: Single '{' encountered"),
        ("{{ [1] | join(attribute='a.b', d=1) }}", "'int object' has no attribute 'a'"),
        ("{{ dict(1) }}", "TypeError"),
    ],
)
def test_failed_render(source: str, reason: str) -> None:
    with pytest.raises(RenderError) as caught:
        render("a\n\n" + source)
    assert reason in caught.value.reason
    assert caught.value.line == 3
    assert str(caught.value) == f"{caught.value.reason} (line 3 of the template)"


def test_pickle() -> None:
    template = ChatTemplate("{{ bos }}{{ strftime_now('%Y') }}", name="t", variables={"bos": "<s>"}, date="2024-01-02")
    assert pickle.loads(pickle.dumps(template)).render([]) == "<s>2024"
