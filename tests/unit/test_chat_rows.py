"""Rows of a corpus: every accepted shape, every refusal, and hostile input."""

import copy
import json
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tokenmill.chat.rows import ALIASES, BadRow, Conversation, PromptAnswer, RowSettings, read_row
from tokenmill.chat.template import load_builtin

DATA = json.loads((Path(__file__).parents[1] / "conformance" / "sft" / "chat_masks.json").read_text())
COMPLETIONS = json.loads((Path(__file__).parents[1] / "conformance" / "sft" / "prompt_completion.json").read_text())

DEFAULTS = RowSettings()
LENIENT = RowSettings(empty_answer="train")
QUESTION = {"role": "user", "content": "q"}
ANSWER = {"role": "assistant", "content": "a"}


def read(row: object, settings: RowSettings = DEFAULTS, **options: Any) -> Conversation:
    result = read_row(row, settings, **options)
    assert isinstance(result, Conversation)
    return result


def read_messages(*messages: Any, **options: Any) -> list[dict[str, Any]]:
    return read({"messages": list(messages)}, **options).messages


def refuse(row: object, settings: RowSettings = DEFAULTS, **options: Any) -> tuple[str, str]:
    with pytest.raises(BadRow) as caught:
        read_row(row, settings, **options)
    assert str(caught.value) == caught.value.reason
    return caught.value.code, caught.value.reason


# -- the records of the conformance data

REJECTED = {
    "no_assistant": "no_answer",
    "system_only": "no_answer",
    "empty_list": "no_messages",
    "missing_messages": "no_messages",
    "tool_bad_json": "bad_tool_calls",
    "missing_role": "no_role",
    "upper_role": "unknown_role",
    "not_a_list": "messages_type",
}


def test_rejected_records_are_those_of_the_conformance_data() -> None:
    for combo in DATA["combos"].values():
        assert {name for name, case in combo["cases"].items() if case["expect"] == "reject"} == REJECTED.keys()


@pytest.mark.parametrize("record", REJECTED)
def test_rejected_record(record: str) -> None:
    assert refuse(DATA["records"][record], LENIENT)[0] == REJECTED[record]


@pytest.mark.parametrize("record", [name for name in DATA["records"] if name not in REJECTED])
def test_accepted_record(record: str) -> None:
    row = copy.deepcopy(DATA["records"][record])
    result = read(row, LENIENT)
    assert row == DATA["records"][record]
    assert len(result.messages) == len(result.train) == len(row["messages"])
    assert all(isinstance(message["content"], str) for message in result.messages)
    assert result.tools == (row.get("tools") or None)
    assert load_builtin("chatml").render(result.messages, result.tools)


@pytest.mark.parametrize("record", ["empty_assistant", "empty_assistant_mid", "assistant_null"])
def test_record_with_an_empty_answer(record: str) -> None:
    code, reason = refuse(DATA["records"][record])
    assert code == "empty_answer"
    assert "message 2" in reason
    assert "--empty-answer train" in reason


# -- shapes


def test_plain_messages_are_not_copied() -> None:
    row = {"messages": [QUESTION, ANSWER], "id": 7}
    result = read(row)
    assert result.messages == [QUESTION, ANSWER]
    assert result.messages[0] is QUESTION
    assert (result.tools, result.variables, result.train) == (None, {}, [None, None])


@pytest.mark.parametrize("key", ["messages", "conversations", "conversation"])
def test_sharegpt(key: str) -> None:
    turns = [
        {"from": "system", "value": "s"},
        {"from": "human", "value": "q"},
        {"from": "gpt", "value": "a"},
        {"from": "observation", "value": "o"},
    ]
    assert read({key: turns}).messages == [
        {"role": "system", "content": "s"},
        {"role": "user", "content": "q"},
        {"role": "assistant", "content": "a"},
        {"role": "tool", "content": "o"},
    ]


@pytest.mark.parametrize(("name", "role"), [*ALIASES.items()])
def test_aliases_of_roles(name: str, role: str) -> None:
    content = '{"name": "f", "arguments": {}}' if name.endswith("_call") else "c"
    assert read_messages({"role": name, "content": content}, ANSWER)[0]["role"] == role


def test_role_map() -> None:
    settings = RowSettings(role_map={"User": "user", "Assistant": "assistant", "gpt": "user"})
    row = {"messages": [{"role": "User", "content": "q"}, {"role": "gpt", "content": "x"}]}
    row["messages"].append({"role": "Assistant", "content": "r"})
    assert [message["role"] for message in read(row, settings).messages] == ["user", "user", "assistant"]
    code, reason = refuse(row)
    assert code == "unknown_role"
    assert reason == (
        "message 1: the role 'User' is unknown; map it to one of system, developer, user, assistant, tool with "
        "--role-map"
    )


def test_messages_key() -> None:
    settings = RowSettings(messages_key="dialog", tools_key="functions_json")
    row = {"dialog": [QUESTION, ANSWER], "functions_json": '[{"name": "f"}]', "messages": "ignored"}
    assert read(row, settings).tools == [{"type": "function", "function": {"name": "f"}}]
    code, reason = refuse({"messages": [QUESTION, ANSWER]}, settings)
    assert code == "no_messages"
    assert reason == "the row has no 'dialog' (its keys are 'messages'); set --messages to the key of the messages"
    assert "dialog" in settings.columns
    assert "messages" not in settings.columns
    assert {"messages", "conversations", "tools", "system", "instruction", "output"} <= set(DEFAULTS.columns)


def test_chosen_key_wins_over_a_prompt() -> None:
    row = {"prompt": "p", "response": "r", "dialog": [QUESTION, ANSWER]}
    assert read(row, RowSettings(messages_key="dialog")).messages == [QUESTION, ANSWER]
    assert read_row(row, DEFAULTS) == PromptAnswer("p", "r", None)


@pytest.mark.parametrize(
    ("row", "prompt", "answer", "system"),
    [
        ({"instruction": "i", "input": "", "output": "o"}, "i", "o", None),
        ({"instruction": "i", "input": "x", "output": "o", "system": "s"}, "i\n\nx", "o", "s"),
        ({"instruction": "i", "input": None, "output": "o", "system": None}, "i", "o", None),
        ({"instruction": "i", "input": " \n", "output": "o", "system": ""}, "i", "o", None),
        ({"instruction": "i", "context": "c", "response": "o"}, "i\n\nc", "o", None),
        ({"instruction": "i", "output": None, "response": "o"}, "i", "o", None),
        ({"prompt": "p", "completion": "c"}, "p", "c", None),
        ({"prompt": "p", "response": " c "}, "p", " c ", None),
        ({"input": "p", "output": "c"}, "p", "c", None),
        ({"input": "", "output": "c", "messages": None}, "", "c", None),
    ],
)
def test_completion(row: dict[str, Any], prompt: str, answer: str, system: str | None) -> None:
    assert read_row(row, DEFAULTS) == PromptAnswer(prompt, answer, system)


@pytest.mark.parametrize("row", COMPLETIONS["records"])
def test_completions_of_the_conformance_data(row: dict[str, Any]) -> None:
    assert read_row(row, LENIENT) == PromptAnswer(row["input"], row["output"], None)


def test_prompt_and_completion_of_messages() -> None:
    row = {"prompt": [QUESTION, ANSWER, QUESTION], "completion": [ANSWER], "system": "s"}
    result = read(row)
    assert [message["role"] for message in result.messages] == ["system", "user", "assistant", "user", "assistant"]
    assert result.train == [False, False, False, False, None]
    result = read({"input": [QUESTION], "output": "yes"})
    assert result.messages == [QUESTION, {"role": "assistant", "content": "yes"}]


def test_system_of_the_row() -> None:
    assert read({"messages": [QUESTION, ANSWER], "system": "s"}).messages[0] == {"role": "system", "content": "s"}
    assert len(read({"messages": [QUESTION, ANSWER], "system": ""}).messages) == 2
    system = {"role": "system", "content": "s"}
    result = read({"messages": [system, QUESTION, ANSWER], "system": "s"})
    assert result.messages == [system, QUESTION, ANSWER]
    assert len(result.train) == 3
    assert refuse({"messages": [system, QUESTION, ANSWER], "system": "t"})[0] == "two_systems"
    assert refuse({"messages": [QUESTION, ANSWER], "system": 1})[0] == "content_type"


def test_content_parts() -> None:
    parts = [
        {"type": "text", "text": "one", "image_url": None},
        " two",
        {"type": "input_text", "text": "!"},
        {"text": "?"},
    ]
    assert read_messages({"role": "user", "content": parts}, ANSWER)[0]["content"] == "one two!?"
    assert read_messages({"role": "user", "content": []}, ANSWER)[0]["content"] == ""


def test_reasoning() -> None:
    for key in ("reasoning_content", "reasoning", "thinking"):
        message = read_messages(QUESTION, {**ANSWER, key: "because"})[1]
        assert message == {**ANSWER, "reasoning_content": "because"}
    for nothing in (None, ""):
        assert read_messages(QUESTION, {**ANSWER, "reasoning_content": nothing})[1] == ANSWER
        message = read_messages(QUESTION, {**ANSWER, "reasoning_content": nothing, "thinking": "x"})[1]
        assert message["reasoning_content"] == "x"


def test_other_keys_reach_the_template() -> None:
    extra = {"name": "Ann", "tool_call_id": "c0", "prefix": True, "n": 1, "none": None, "list": [1], 5: "x", "b": b"x"}
    message = read_messages({**QUESTION, **extra}, ANSWER)[0]
    assert message == {**QUESTION, "name": "Ann", "tool_call_id": "c0", "prefix": True, "n": 1}


@pytest.mark.parametrize(
    ("calls", "expected"),
    [
        ([{"id": "c", "type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}}], {"a": 1}),
        ([{"id": "c", "function": {"name": "f", "arguments": {"a": [1, None]}}}], {"a": [1, None]}),
        ([{"id": "c", "name": "f", "arguments": {}}], {}),
        ([{"id": "c", "name": "f"}], {}),
        ([{"id": "c", "name": "f", "arguments": ""}], {}),
        ([{"id": "c", "name": "f", "arguments": "null"}], {}),
        ('[{"id": "c", "name": "f", "arguments": {"a": 1}}]', {"a": 1}),
        (['{"id": "c", "name": "f", "arguments": {"a": 1}}'], {"a": 1}),
        ({"id": "c", "name": "f"}, {}),
    ],
)
def test_tool_calls(calls: object, expected: dict[str, Any]) -> None:
    message = read_messages(QUESTION, {"role": "assistant", "content": None, "tool_calls": calls})[1]
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": expected}}
    assert message == {"role": "assistant", "content": "", "tool_calls": [call]}


def test_tool_call_without_id_or_calls() -> None:
    message = read_messages(QUESTION, {**ANSWER, "tool_calls": [{"name": "f"}]})[1]
    assert message["tool_calls"] == [{"type": "function", "function": {"name": "f", "arguments": {}}}]
    for nothing in (None, []):
        assert read_messages({**QUESTION, "tool_calls": nothing}, {**ANSWER, "tool_calls": nothing}) == [
            QUESTION,
            ANSWER,
        ]


def test_old_function_calls() -> None:
    row = {
        "messages": [
            QUESTION,
            {"role": "assistant", "content": None, "function_call": {"name": "f", "arguments": "{}"}},
        ],
        "functions": [{"name": "f", "parameters": '{"type": "object"}'}],
    }
    result = read(row)
    assert result.messages[1]["tool_calls"] == [{"type": "function", "function": {"name": "f", "arguments": {}}}]
    assert result.tools == [{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}]
    turns = [
        {"from": "human", "value": "q"},
        {"from": "function_call", "value": '{"name": "f", "arguments": {"a": 1}}'},
        {"from": "observation", "value": "1"},
    ]
    message = read({"conversations": turns}).messages[1]
    assert message["content"] == ""
    assert message["tool_calls"][0]["function"]["arguments"] == {"a": 1}
    turns[1]["value"] = "f(a=1)"
    assert refuse({"conversations": turns}) == (
        "bad_tool_calls",
        "message 2: the JSON of its tool calls is invalid (Expecting value at character 1); correct it",
    )


def test_string_arguments() -> None:
    row = DATA["records"]["tool_parallel"]
    result = read(row)
    texts = result.with_string_arguments()
    calls = texts.messages[1]["tool_calls"]
    assert [call["function"]["arguments"] for call in calls] == ['{"city": "Oslo"}', '{"city": "Rome"}']
    assert calls[0]["id"] == "c1"
    assert texts.tools == result.tools
    assert result.messages[1]["tool_calls"][0]["function"]["arguments"] == {"city": "Oslo"}
    assert texts.messages[0] is result.messages[0]
    kept = read(row, RowSettings(keep_arguments=True))
    assert kept.messages[1]["tool_calls"][0]["function"]["arguments"] == '{"city":"Oslo"}'
    assert kept.with_string_arguments() == kept
    assert refuse(call(name="f", arguments="{"), RowSettings(keep_arguments=True))[0] == "bad_tool_calls"


@pytest.mark.parametrize(
    "tools",
    [
        [{"type": "function", "function": {"name": "f", "parameters": {"a": None}}}],
        [{"name": "f", "parameters": {"a": None}}],
        [{"type": "function", "name": "f", "parameters": {"a": None}}],
        '[{"name": "f", "parameters": {"a": null}}]',
        ['{"name": "f", "parameters": {"a": null}}'],
        [{"name": "f", "parameters": '{"a": null}'}],
    ],
)
def test_tools(tools: object) -> None:
    expected = [{"type": "function", "function": {"name": "f", "parameters": {"a": None}}}]
    assert read({"messages": [QUESTION, ANSWER], "tools": tools}).tools == expected


@pytest.mark.parametrize("tools", [None, [], "", "[]", "null"])
def test_no_tools(tools: object) -> None:
    assert read({"messages": [QUESTION, ANSWER], "tools": tools}).tools is None


def test_columnar_nulls() -> None:
    arguments = {"city": "Oslo", "title": None, "where": {"a": None, "b": 1}}
    calls = [{"id": None, "type": "function", "function": {"name": "f", "arguments": arguments}}]
    tools = [{"type": "function", "function": {"name": "f", "parameters": {"a": {"enum": None}, "b": None}}}]
    row = {
        "messages": [
            {**QUESTION, "tool_calls": None, "name": None, "train": None, "weight": None, "reasoning_content": None},
            {"role": "assistant", "content": None, "tool_calls": calls},
        ],
        "tools": tools,
        "chat_template_kwargs": {"enable_thinking": None, "x": 1},
        "system": None,
    }
    result = read(row, columnar=True)
    assert result.messages[0] == QUESTION
    function = result.messages[1]["tool_calls"][0]["function"]
    assert function["arguments"] == {"city": "Oslo", "where": {"b": 1}}
    assert result.tools == [{"type": "function", "function": {"name": "f", "parameters": {"a": {}}}}]
    assert result.variables == {"x": 1}
    result = read(row)
    assert result.messages[1]["tool_calls"][0]["function"]["arguments"] == arguments
    assert result.tools == tools
    assert result.variables == {"enable_thinking": None, "x": 1}
    calls[0]["function"] = {"name": "f", "arguments": '{"a": null}'}
    row["tools"] = '[{"name": "f", "parameters": {"a": null}}]'
    result = read(row, columnar=True)  # JSON text keeps its nulls
    assert result.messages[1]["tool_calls"][0]["function"]["arguments"] == {"a": None}
    assert result.tools == [{"type": "function", "function": {"name": "f", "parameters": {"a": None}}}]


def test_variables() -> None:
    row = {"messages": [QUESTION, ANSWER], "chat_template_kwargs": {"enable_thinking": False, "n": 1, "s": "x"}}
    assert read(row).variables == {"enable_thinking": False, "n": 1, "s": "x"}
    assert read({**row, "chat_template_kwargs": '{"a": 1}'}).variables == {"a": 1}
    for nothing in (None, "", {}):
        assert read({**row, "chat_template_kwargs": nothing}).variables == {}


def test_train_and_weight() -> None:
    keys: list[dict[str, Any]] = [{"weight": 0}, {"weight": 1}, {"train": False}, {"weight": 0.0, "train": False}, {}]
    row = {"messages": [{**ANSWER, **key} for key in keys]}
    assert read(row).train == [False, True, False, False, None]
    assert all(message == ANSWER for message in read(row).messages)


def test_empty_answer_that_is_not_trained() -> None:
    row = {"messages": [QUESTION, {"role": "assistant", "content": "", "train": False}, QUESTION, ANSWER]}
    assert read(row).messages[1] == {"role": "assistant", "content": ""}
    row = {"messages": [QUESTION, {"role": "assistant", "content": "", "tool_calls": [{"name": "f"}]}]}
    assert read(row).messages[1]["content"] == ""


# -- refusals


def call(**function: Any) -> dict[str, Any]:
    return {"messages": [QUESTION, {**ANSWER, "tool_calls": [{"function": function}]}]}


def with_message(**message: Any) -> dict[str, Any]:
    return {"messages": [QUESTION, ANSWER, message]}


def with_row(**keys: Any) -> dict[str, Any]:
    return {"messages": [QUESTION, ANSWER], **keys}


def nest(depth: int) -> dict[str, Any]:
    value: dict[str, Any] = {}
    for _ in range(depth):
        value = {"a": value}
    return value


@pytest.mark.parametrize(
    ("row", "code", "reason"),
    [
        ("text", "not_object", "the row is a string; a row must be an object"),
        (None, "not_object", "the row is null"),
        ([], "not_object", "the row is a list"),
        ({}, "no_messages", "(its keys are not there: it is empty)"),
        ({f"k{i}": 1 for i in range(20)}, "no_messages", "'k7' and 12 more)"),
        ({"text": "x"}, "no_messages", "the row has no 'messages', and no prompt with an answer (its keys are 'text')"),
        ({"messages": {}}, "messages_type", "'messages' is an object; it must be a list of messages"),
        ({"conversations": "x"}, "messages_type", "'conversations' is a string"),
        ({"messages": ["q", ANSWER]}, "message_type", "message 1 is a string; a message must be an object"),
        ({"messages": [QUESTION, None]}, "message_type", "message 2 is null"),
        ({"messages": [{"content": "q"}, ANSWER]}, "no_role", "message 1 has neither 'role' nor 'from'"),
        ({"messages": [{}]}, "no_role", "message 1"),
        (with_message(role=5, content="x"), "unknown_role", "message 3: the role 5 is unknown"),
        (with_message(role=["user"], content="x"), "unknown_role", "the role a list is unknown"),
        (with_message(role="r" * 999, content="x"), "unknown_role", "...' is unknown"),
        (with_message(role="Assistant", content="x"), "unknown_role", "the role 'Assistant' is unknown"),
        (
            with_message(role="user", content=None),
            "null_content",
            "message 3: the content of the user is null or missing",
        ),
        (with_message(role="tool"), "null_content", "message 3: the content of the tool is null or missing"),
        (with_message(role="system", value=None), "null_content", "the content of the system is null"),
        (with_message(role="assistant"), "empty_answer", "message 3: the answer has no content and no tool calls"),
        (with_message(role="assistant", content=""), "empty_answer", "message 3: the answer is empty"),
        (with_message(role="assistant", content=" \n"), "empty_answer", "message 3: the answer is empty"),
        (with_message(role="assistant", content="", reasoning="r"), "empty_answer", "the answer is empty"),
        (with_message(role="assistant", content=[]), "empty_answer", "the answer is empty"),
        (
            with_message(role="user", content=5),
            "content_type",
            "message 3: the content is a number; it must be a string",
        ),
        (with_message(role="user", content={"a": 1}), "content_type", "the content is an object"),
        (with_message(role="user", content=True), "content_type", "the content is true or false"),
        (with_message(role="user", content=b"x"), "content_type", "the content is a value of type bytes"),
        (with_message(role="user", content=[{"type": "image"}]), "content_type", "has a part of type 'image'"),
        (with_message(role="user", content=[{"type": "text"}]), "content_type", "a part of the content is null"),
        (with_message(role="user", content=[{"type": {}, "text": ""}]), "content_type", "a part of type an object"),
        (with_message(role="user", content=[None]), "content_type", "a part of the content is null"),
        (with_message(role="assistant", content="a", reasoning=5), "content_type", "'reasoning' is a number"),
        (with_message(role="user", content="x\ud800"), "bad_text", "message 3: its content contains a lone surrogate"),
        (with_message(role="user", content=["\udfff"]), "bad_text", "message 3: its content contains a lone surrogate"),
        (with_message(role="assistant", content="a", thinking="\ud800"), "bad_text", "'thinking' contains a lone"),
        (with_message(role="user", content="a", name="\ud800"), "bad_text", "'name' contains a lone surrogate"),
        (with_message(role="user", content="a", tool_calls=[{}]), "bad_tool_calls", "only the assistant can have"),
        (with_message(role="user", content="a", train=1), "bad_train", "message 3: 'train' is 1; it must be true or"),
        (with_message(role="user", content="a", train="yes"), "bad_train", "'train' is 'yes'"),
        (
            with_message(role="user", content="a", weight=0.5),
            "bad_weight",
            "message 3: the weight is 0.5; it must be 0 or",
        ),
        (with_message(role="user", content="a", weight="1"), "bad_weight", "the weight is '1'"),
        (with_message(role="user", content="a", weight=float("nan")), "bad_weight", "the weight is nan"),
        (with_message(role="user", content="a", weight=[1]), "bad_weight", "the weight is a list"),
        (with_message(role="user", content="a", weight=1, train=False), "bad_weight", "contradict each other"),
        ({"messages": [QUESTION]}, "no_answer", "no message has the role assistant"),
        (call(name="f", arguments='{"a": b}'), "bad_tool_calls", "(Expecting value at character 7); correct it"),
        (call(name="f", arguments='{"a": NaN}'), "bad_tool_calls", "(JSON has no NaN)"),
        (call(name="f", arguments="9" * 5000), "bad_tool_calls", "message 2, tool call 1: the JSON of its arguments"),
        (call(name="f", arguments="[" * 99999), "bad_tool_calls", "nested too deeply"),
        (call(name="f", arguments="5"), "bad_tool_calls", "the arguments are a number; they must be an object"),
        (call(name="f", arguments=[1]), "bad_tool_calls", "the arguments are a list"),
        (call(name="f", arguments='{"a": "\\ud800"}'), "bad_text", "message 2, tool call 1 contains a lone surrogate"),
        (call(name="f", arguments={"\ud800": 1}), "bad_text", "a lone surrogate"),
        (call(name="f", arguments={1: 2}), "bad_tool_calls", "has the key 1; keys must be text"),
        (call(name="f", arguments={"a": {1, 2}}), "bad_tool_calls", "contains a value of type set; only JSON values"),
        (call(name="f", arguments={"a": datetime(2024, 1, 1)}), "bad_tool_calls", "a value of type datetime"),
        (call(name="f", arguments=nest(101)), "bad_tool_calls", "is nested more than 100 levels deep"),
        (call(name="", arguments={}), "bad_tool_calls", "the name of the function is ''"),
        (call(arguments={}), "bad_tool_calls", "the name of the function is null; it must be a string"),
        (call(name="\ud800"), "bad_text", "its name contains a lone surrogate"),
        (with_message(role="assistant", content="", tool_calls=5), "bad_tool_calls", "the tool calls are a number"),
        (
            with_message(role="assistant", content="", tool_calls={}),
            "bad_tool_calls",
            "the name of the function is null",
        ),
        (with_message(role="assistant", content="", tool_calls="[]"), "bad_tool_calls", "must be a list of calls"),
        (with_message(role="assistant", content="", tool_calls=[5]), "bad_tool_calls", "tool call 1 is a number"),
        (with_message(role="assistant", content="", tool_calls=[{"function": 5}]), "bad_tool_calls", "with a function"),
        (
            with_message(role="assistant", content="", tool_calls=[{"id": {}, "name": "f"}]),
            "bad_tool_calls",
            "its id is an object",
        ),
        (with_row(tools={}), "bad_tools", "'tools' is an object; it must be a list of tools, or the JSON of one"),
        (with_row(tools="x"), "bad_tools", "the JSON of 'tools' is invalid (Expecting value at character 1)"),
        (with_row(tools="{}"), "bad_tools", "'tools' is an object"),
        (with_row(tools=[5]), "bad_tools", "'tools', tool 1 is a number; it must be an object"),
        (with_row(tools=["x"]), "bad_tools", "'tools', tool 1: its JSON is invalid"),
        (with_row(tools=[{}]), "bad_tools", "'tools', tool 1: the name of the function is null"),
        (with_row(tools=[{"function": {"name": 5}}]), "bad_tools", "the name of the function is 5"),
        (with_row(tools=[{"name": "f", "parameters": "x"}]), "bad_tools", "the JSON of its parameters is invalid"),
        (with_row(tools=[{"name": "f", "a": nest(101)}]), "bad_tools", "nested more than 100 levels"),
        (with_row(functions=5), "bad_tools", "'functions' is a number"),
        (with_row(chat_template_kwargs=[1]), "bad_variables", "'chat_template_kwargs' is a list"),
        (with_row(chat_template_kwargs="{"), "bad_variables", "the JSON of 'chat_template_kwargs' is invalid"),
        (with_row(chat_template_kwargs={"messages": 1}), "bad_variables", "'messages' cannot be a variable"),
        (with_row(chat_template_kwargs={"a b": 1}), "bad_variables", "'a b' cannot be a variable of a template"),
        (with_row(chat_template_kwargs={"_x": 1}), "bad_variables", "'_x' cannot be a variable"),
        (with_row(chat_template_kwargs={5: 1}), "bad_variables", "5 cannot be a variable"),
        (with_row(chat_template_kwargs={"a": [1]}), "bad_variables", "'a' is a list; it must be text, a number or a"),
        ({"input": "p", "output": ""}, "empty_answer", "'output' is empty; drop the row, or pass --empty-answer train"),
        ({"input": "p", "output": None}, "null_content", "'output' is null; it must be a string"),
        ({"input": 5, "output": "x"}, "content_type", "'input' is a number"),
        ({"prompt": "p", "completion": [ANSWER]}, "content_type", "'completion' is a list"),
        ({"instruction": "i", "input": ["x"], "output": "o"}, "content_type", "'input' is a list"),
        ({"instruction": "\ud800", "output": "o"}, "bad_text", "'instruction' contains a lone surrogate"),
        ({"instruction": "i", "output": "o", "system": []}, "content_type", "'system' is a list"),
        ({"prompt": [QUESTION], "completion": [QUESTION]}, "no_answer", "no message has the role assistant"),
        ({"prompt": [], "completion": []}, "no_messages", "is an empty list"),
    ],
)
def test_refused_row(row: object, code: str, reason: str) -> None:
    actual, text = refuse(row)
    assert actual == code
    assert reason in text
    assert len(text) < 500


@pytest.mark.parametrize("row", [call(name="f", arguments=nest(99)), with_row(tools=[{"name": "f", "a": nest(98)}])])
def test_deepest_accepted_row(row: dict[str, Any]) -> None:
    result = read(row)
    for name in ("chatml", "llama3", "nano3"):
        assert load_builtin(name).render(result.messages, result.tools)


# -- hostile input

KEYS = [
    *("messages", "conversations", "tools", "functions", "system", "chat_template_kwargs", "instruction", "input"),
    *("output", "prompt", "completion", "response", "role", "from", "content", "value", "tool_calls", "function_call"),
    *("function", "name", "arguments", "parameters", "id", "type", "text", "train", "weight", "reasoning_content"),
]
TEXTS = ["user", "assistant", "system", "tool", "human", "gpt", "function_call", "text", "", " ", "{}", "[]", "[{}]"]
LEAVES = st.one_of(
    st.sampled_from([*TEXTS, "\ud800", '{"name": "f", "arguments": "{}"}', "[" * 3000, "9" * 5000]),
    st.none(),
    st.booleans(),
    st.integers(),
    st.floats(),
    st.text(max_size=5),
    st.binary(max_size=2),
    st.just({1}),
    st.just(datetime(2024, 1, 1)),
)
ANY = st.recursive(
    LEAVES,
    lambda values: st.one_of(
        st.lists(values, max_size=4),
        st.dictionaries(st.one_of(st.sampled_from(KEYS), LEAVES.filter(lambda x: not isinstance(x, set))), values),
        st.fixed_dictionaries({"role": st.sampled_from(TEXTS), "content": values}, optional={"tool_calls": values}),
    ),
    max_leaves=20,
)
ROWS = st.one_of(
    ANY,
    st.fixed_dictionaries(
        {"messages": st.lists(ANY, max_size=3).map(lambda values: [*values, QUESTION, ANSWER])},
        optional={"tools": ANY, "system": ANY, "chat_template_kwargs": ANY},
    ),
    st.fixed_dictionaries(
        {}, optional=dict.fromkeys(("instruction", "input", "output", "prompt", "completion", "system"), ANY)
    ),
)


def is_json(value: object) -> bool:
    if isinstance(value, dict):
        return all(type(key) is str and is_json(item) for key, item in value.items())
    if isinstance(value, list):
        return all(map(is_json, value))
    return value is None or type(value) in (str, int, float, bool)


@given(ROWS, st.booleans(), st.sampled_from(["reject", "train"]))
def test_any_row_is_read_or_refused(row: object, columnar: bool, empty_answer: str) -> None:
    try:
        result = read_row(row, RowSettings(empty_answer=empty_answer), columnar=columnar)
    except BadRow as error:
        assert error.code.isidentifier()
        assert 0 < len(error.reason) < 2000
        error.reason.encode()
        return
    if isinstance(result, PromptAnswer):
        assert all(isinstance(text, str) for text in (result.prompt, result.answer))
        return
    assert len(result.messages) == len(result.train)
    assert all(isinstance(message["content"], str) for message in result.messages)
    assert any(message["role"] == "assistant" for message in result.messages)
    for value in (result.messages, result.tools, result.variables):
        assert is_json(value)
    json.dumps(result.with_string_arguments().messages).encode()
    load_builtin("chatml").render(result.messages, result.tools, **result.variables)


def test_deep_and_long_rows() -> None:
    deep: list[Any] = []
    for _ in range(100_000):
        deep = [deep]
    for key in ("messages", "tools", "system", "chat_template_kwargs"):
        refuse({"messages": [QUESTION, ANSWER], key: deep})
    for key in ("content", "tool_calls", "reasoning", "role", "train", "weight"):
        refuse({"messages": [QUESTION, {**ANSWER, key: deep}]})
    long = "x" * 10_000_000
    for row in ({long: 1}, {"messages": long}, with_message(role=long), with_row(tools=long), with_message(long=long)):
        assert len(refuse(row)[1]) < 500
    assert read_messages({"role": "user", "content": long}, ANSWER)[0]["content"] is long
