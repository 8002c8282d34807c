"""Rows of a corpus: every accepted shape, every refusal, and hostile input."""

import copy
import json
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from support.chat import load_builtin
from tokenmill.stages.chat.rows import ALIASES, BadRow, Conversation, PromptAnswer, RowSettings, read_row
from tokenmill.stages.chat.turns import MessageForm

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
    for message in result.messages:
        assert isinstance(message["content"], str) or ("tool_calls" in message and message["content"] is None)
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
        ([{"id": "c", "name": "f", "arguments": " {} "}], {}),
        ([{"id": "c", "name": "f", "arguments": {"a": 1}, "parameters": {"a": 1}, "input": None}], {"a": 1}),
        ('[{"id": "c", "name": "f", "arguments": {"a": 1}}]', {"a": 1}),
        (['{"id": "c", "name": "f", "arguments": {"a": 1}}'], {"a": 1}),
        ({"id": "c", "name": "f", "arguments": {}}, {}),
    ],
)
def test_tool_calls(calls: object, expected: dict[str, Any]) -> None:
    message = read_messages(QUESTION, {"role": "assistant", "content": None, "tool_calls": calls})[1]
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": expected}}
    assert message == {"role": "assistant", "content": None, "tool_calls": [call]}


ARGUMENTS = ("arguments", "parameters", "params", "args", "kwargs", "input", "tool_input", "tool_args", "action_input")


@pytest.mark.parametrize("key", ARGUMENTS)
@pytest.mark.parametrize("value", [{"city": "Lima"}, '{"city": "Lima"}'], ids=["object", "text"])
def test_arguments_under_the_names_that_people_use(key: str, value: object) -> None:
    forms: list[dict[str, Any]] = [
        {
            "role": "assistant",
            "content": "",
            "tool_calls": [{"type": "function", "function": {"name": "f", key: value}}],
        },
        {"role": "assistant", "content": "", "tool_calls": [{"type": "tool_use", "name": "f", key: value}]},
        {"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "f"}, key: value}]},
        {"role": "assistant", "content": "", "tool_calls": [{"function": "f", key: value}]},
        {"role": "assistant", "content": "", "tool_calls": json.dumps([{"tool_name": "f", key: value}])},
        {"role": "assistant", "content": None, "function_call": {"name": "f", key: value}},
        {"from": "function_call", "value": json.dumps({"name": "f", key: value})},
        {"from": "tool_call", "value": json.dumps([{"function_name": "f", key: value}])},
    ]
    for message in forms:
        (call,) = read_messages(QUESTION, message)[1]["tool_calls"]
        assert call == {"type": "function", "function": {"name": "f", "arguments": {"city": "Lima"}}}, message
        kept = read({"messages": [QUESTION, message]}, RowSettings(keep_arguments=True)).messages[1]["tool_calls"][0]
        assert kept["function"]["arguments"] == value


@pytest.mark.parametrize(
    ("call", "reason"),
    [
        ({"name": "f"}, "tool call 1 has no arguments (its keys are 'name'); name them 'arguments', and write {} for"),
        ({"name": "f", "arguments": None}, "tool call 1 has no arguments (its keys are 'name', 'arguments')"),
        ({"function": {"name": "f", "payload": {"a": 1}}}, "(its keys are 'name', 'payload', 'function')"),
        ({"function": "f", "arguments": None, "payload": {"a": 1}}, "has no arguments"),
        ({"name": "f", "arguments": ""}, "the JSON of its arguments is invalid (Expecting value at character 1)"),
        ({"name": "f", "arguments": "null"}, "the arguments are null; they must be an object, such as {}"),
        ({"name": "f", "input": "Lima"}, "the JSON of its input is invalid"),
        ({"name": "f", "args": ["Lima"]}, "the args are a list; they must be an object"),
        (
            {"name": "f", "arguments": {}, "parameters": {"city": "Lima"}},
            "has different arguments under 'arguments' and 'parameters'; keep one of them",
        ),
        ({"function": {"name": "f", "arguments": {}}, "arguments": {"a": 1}}, "has different arguments under 'arg"),
    ],
)
def test_a_call_without_written_arguments_is_refused(call: dict[str, Any], reason: str) -> None:
    for message in (
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "assistant", "content": "", "function_call": call},
        {"from": "function_call", "value": json.dumps(call)},
    ):
        code, text = refuse({"messages": [QUESTION, message]})
        assert code == "bad_tool_calls" and reason in text


def test_absent_arguments_of_columnar_files_are_refused() -> None:
    calls = [{"name": "f", "arguments": None, "parameters": {"city": "Lima", "day": None}}]
    row = {"messages": [QUESTION, {"role": "assistant", "content": "", "tool_calls": calls}]}
    assert read(row, columnar=True).messages[1]["tool_calls"][0]["function"]["arguments"] == {"city": "Lima"}
    calls[0]["parameters"] = None
    assert refuse(row, columnar=True)[0] == "bad_tool_calls"


def test_tool_call_without_id_or_calls() -> None:
    message = read_messages(QUESTION, {**ANSWER, "tool_calls": [{"name": "f", "arguments": {}}]})[1]
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
    assert message["content"] is None
    assert message["tool_calls"][0]["function"]["arguments"] == {"a": 1}
    turns[1]["value"] = "f(a=1)"
    assert refuse({"conversations": turns}) == (
        "bad_tool_calls",
        "message 2: the JSON of its tool calls is invalid (Expecting value at character 1); correct it",
    )


def test_string_arguments() -> None:
    row = DATA["records"]["tool_parallel"]
    result = read(row)
    form = MessageForm(string_arguments=True)
    texts = form.write(result.messages)
    calls = texts[1]["tool_calls"]
    assert [call["function"]["arguments"] for call in calls] == ['{"city": "Oslo"}', '{"city": "Rome"}']
    assert calls[0]["id"] == "c1"
    assert result.messages[1]["tool_calls"][0]["function"]["arguments"] == {"city": "Oslo"}
    assert texts[0] is result.messages[0]
    kept = read(row, RowSettings(keep_arguments=True))
    assert kept.messages[1]["tool_calls"][0]["function"]["arguments"] == '{"city":"Oslo"}'
    assert form.write(kept.messages)[1]["tool_calls"] == kept.messages[1]["tool_calls"]
    assert refuse(call(name="f", arguments="{"), RowSettings(keep_arguments=True))[0] == "bad_tool_calls"


@pytest.mark.parametrize(
    "tools",
    [
        [{"type": "function", "function": {"name": "f", "parameters": {"a": {}}}}],
        [{"name": "f", "parameters": {"a": {}}}],
        [{"type": "function", "name": "f", "parameters": {"a": {}}}],
        '[{"name": "f", "parameters": {"a": {}}}]',
        ['{"name": "f", "parameters": {"a": {}}}'],
        [{"name": "f", "parameters": '{"a": {}}'}],
    ],
)
def test_tools(tools: object) -> None:
    expected = [{"type": "function", "function": {"name": "f", "parameters": {"a": {}}}}]
    assert read({"messages": [QUESTION, ANSWER], "tools": tools}).tools == expected


@pytest.mark.parametrize("tools", [None, [], "", "[]", "null"])
def test_no_tools(tools: object) -> None:
    assert read({"messages": [QUESTION, ANSWER], "tools": tools}).tools is None


def test_nulls_of_objects_are_dropped() -> None:
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
    lines = read(row)
    assert (lines.messages, lines.tools) == (result.messages, result.tools)
    assert lines.variables == {"enable_thinking": None, "x": 1}
    calls[0]["function"] = {"name": "f", "arguments": '{"a": null}'}
    row["tools"] = '[{"name": "f", "parameters": {"a": null}}]'
    result = read(row, columnar=True)  # JSON text keeps its nulls
    assert (read(row).messages, read(row).tools) == (result.messages, result.tools)
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
    row = {"messages": [QUESTION, {"role": "assistant", "content": "", "tool_calls": [{"name": "f", "args": {}}]}]}
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
            with_message(role="assistant", content="", tool_calls=[{"id": {}, "name": "f", "input": {}}]),
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
    for message in result.messages:
        assert isinstance(message["content"], str) or ("tool_calls" in message and message["content"] is None)
    assert any(message["role"] == "assistant" for message in result.messages)
    for value in (result.messages, result.tools, result.variables):
        assert is_json(value)
    messages = MessageForm(string_arguments=True).write(result.messages)
    json.dumps(messages).encode()
    load_builtin("chatml").render(messages, result.tools, **result.variables)


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


# -- other keys than the conversation

MEDIA = ("image", "images", "image_url", "image_path", "video", "videos", "audio", "audios", "audio_path")


@pytest.mark.parametrize("key", MEDIA)
def test_rows_with_images_are_refused(key: str) -> None:
    text = "<image>\nWhat is it?"
    rows: list[dict[str, Any]] = [
        with_row(**{key: ["cat.png"]}),
        with_row(**{key: "cat.png"}),
        {"conversations": [{"from": "human", "value": text}, {"from": "gpt", "value": "a"}], key: {"bytes": b"x"}},
        {"messages": [{**QUESTION, key: ["cat.png"]}, ANSWER]},
        {"messages": [QUESTION, {**ANSWER, key: "cat.png"}]},
        {"instruction": text, "output": "A cat.", key: "cat.png"},
        {"prompt": text, "completion": "A cat.", key: ["cat.png"]},
        {"prompt": [QUESTION], "completion": [ANSWER], key: ["cat.png"]},
    ]
    for row in rows:
        code, reason = refuse(row)
        assert code == "content_type" and f"has {key!r}, and only text can be trained" in reason
    for nothing in (None, "", [], {}):
        assert read(with_row(**{key: nothing})).unread == []
        assert read_messages({**QUESTION, key: nothing}, ANSWER)[0]["content"] == "q"


def test_text_about_images_is_accepted() -> None:
    row = {"messages": [{"role": "user", "content": "What does <image> mean in SVG?"}, ANSWER]}
    assert read(row).messages == row["messages"]


TURNS = [{"role": role, "content": text} for role, text in (("user", "2+2?"), ("assistant", "Four."))]


@pytest.mark.parametrize(
    "history",
    [
        [["2+2?", "Four."]],
        [("2+2?", "Four.")],
        TURNS,
        [{"from": "human", "value": "2+2?"}, {"from": "gpt", "value": "Four."}],
        [{"human": "2+2?", "assistant": "Four."}],
        [{"input": "2+2?", "output": "Four."}],
    ],
)
def test_history_becomes_earlier_turns(history: Any) -> None:
    last = [{"role": "user", "content": "And 3+3?"}, {"role": "assistant", "content": "Six."}]
    row = {"instruction": "And 3+3?", "input": "", "output": "Six.", "system": "s", "history": history}
    result = read(row)
    assert result.messages == [{"role": "system", "content": "s"}, *TURNS, *last]
    assert (result.train, result.unread) == ([None] * 5, [])
    row = {"prompt": "And 3+3?", "response": "Six.", "history": history, "id": 1}
    assert (read(row).messages, read(row).unread) == ([*TURNS, *last], ["id"])
    with_input = read({"instruction": "Add", "input": "3+3", "output": "Six.", "history": history})
    assert with_input.messages[2]["content"] == "Add\n\n3+3"


def test_history_without_turns() -> None:
    for nothing in (None, [], ""):
        assert read_row({"instruction": "i", "output": "o", "history": nothing}, DEFAULTS) == PromptAnswer(
            "i", "o", None
        )
    for bad in ("earlier", ["a", "b"], [["a", "b", "c"]], [[]], [5], 5):
        code, reason = refuse({"instruction": "i", "output": "o", "history": bad})
        assert code == "messages_type" and "each as [question, answer]" in reason
    assert refuse({"instruction": "i", "output": "o", "history": [["q", None]]})[0] == "empty_answer"


@pytest.mark.parametrize("key", ["system", "system_prompt", "system_message"])
def test_names_of_the_system_text(key: str) -> None:
    system = {"role": "system", "content": "Answer in French."}
    result = read(with_row(**{key: "Answer in French."}))
    assert (result.messages[0], result.unread) == (system, [])
    assert read({"messages": [system, QUESTION, ANSWER], key: "Answer in French."}).messages[0] == system
    assert refuse({"messages": [system, QUESTION, ANSWER], key: "t"})[0] == "two_systems"
    answer = read_row({"prompt": "p", "response": "r", key: "Answer in French."}, DEFAULTS)
    assert answer == PromptAnswer("p", "r", "Answer in French.")
    assert (
        refuse(with_row(system="a", **({key: "b"} if key != "system" else {"system_prompt": "b"})))[0] == "two_systems"
    )


def test_thought_is_reasoning() -> None:
    assert read_messages(QUESTION, {**ANSWER, "thought": "because"})[1] == {**ANSWER, "reasoning_content": "because"}


@pytest.mark.parametrize(
    "turn",
    [
        {"human": "q", "assistant": "a"},
        {"user": "q", "bot": "a"},
        {"assistant": "a", "user": "q"},
        {"input": "q", "output": "a"},
    ],
)
def test_turns_of_a_question_and_its_answer(turn: dict[str, str]) -> None:
    assert read({"conversation": [turn, {**turn, "system": None}]}).messages == [QUESTION, ANSWER] * 2
    assert read({"conversation": [{"system": "s", **turn}]}).messages[0] == {"role": "system", "content": "s"}
    assert refuse({"conversation": [{**turn, "score": 1}]})[0] == "no_role"
    assert refuse({"conversation": [turn, {"human": "q"}]})[0] == "no_role"


@pytest.mark.parametrize(
    ("row", "unread"),
    [
        ({"messages": [QUESTION, ANSWER]}, []),
        (with_row(tools=[], system="", chat_template_kwargs={}, label=True), []),
        (with_row(label=0), ["label"]),
        (with_row(source="web", id=0, tags=[], meta={}, note=None, text=""), ["source", "id"]),
        (
            with_row(conversations=[QUESTION], functions=[{"name": "f"}], tools=[{"name": "g"}]),
            ["conversations", "functions"],
        ),
        (with_row(history=[["a", "b"]]), ["history"]),
        ({"instruction": "i", "input": "x", "context": "c", "output": "o"}, ["context"]),
        ({"instruction": "i", "input": "", "context": "c", "output": "o"}, []),
        ({"instruction": "i", "output": "o", "response": "r"}, ["response"]),
        ({"prompt": "p", "completion": "c", "messages": None, "chosen": "x", "rejected": "y"}, ["chosen", "rejected"]),
        ({"prompt": "p", "completion": "c", "tools": [{"name": "f"}]}, ["tools"]),
        ({"prompt": [QUESTION], "completion": [ANSWER], "score": 0.5}, ["score"]),
        ({"messages": [{**QUESTION, "name": "Ann", "n": 1}, {**ANSWER, "n": 2}]}, ["messages[].name", "messages[].n"]),
        (
            {"messages": [{**QUESTION, "parts": [1]}, {**ANSWER, "value": "b"}]},
            ["messages[].parts", "messages[].value"],
        ),
        ({"messages": [QUESTION, {**ANSWER, "thinking": "a", "reasoning": "b"}]}, ["messages[].thinking"]),
        (
            {"messages": [QUESTION, {**ANSWER, "tool_calls": [{"id": "c", "name": "f", "args": {}, "why": "x"}]}]},
            ["messages[].tool_calls[].why"],
        ),
        (with_row(**{"k" * 100: 1, "\x1b[31m": 1, "\ud800": 1}), ["k" * 60 + "...", "\\x1b[31m", "\\ud800"]),
    ],
)
def test_unread_keys(row: dict[str, Any], unread: list[str]) -> None:
    assert list(read_row(row, DEFAULTS).unread) == unread


def test_keys_that_the_template_reads_are_not_unread() -> None:
    row = {"messages": [{**QUESTION, "name": "Ann", "mood": "glad"}, ANSWER]}
    assert read(row, RowSettings(template_words=frozenset(("message", "name")))).unread == ["messages[].mood"]


# -- preference data

GOOD, BAD = {"role": "assistant", "content": "good"}, {"role": "assistant", "content": "bad"}


@pytest.mark.parametrize(
    "row",
    [
        {"prompt": "p", "chosen": "good", "rejected": "bad"},
        {"prompt": [QUESTION], "chosen": [GOOD], "rejected": [BAD]},
        {"chosen": [QUESTION, GOOD], "rejected": [QUESTION, BAD]},
        {"question": "q", "system": "s", "chosen": "good", "rejected": "bad"},
        {"instruction": "i", "input": "", "chosen": "good", "rejected": "bad"},
        {"context": [QUESTION], "completions": [{"rank": 0, "completion": [GOOD]}]},
        {"messages": [QUESTION, ANSWER, QUESTION], "chosen": GOOD, "rejected": BAD},
    ],
)
def test_preference_rows_are_sent_to_another_command(row: dict[str, Any]) -> None:
    code, reason = refuse(row)
    assert code == "preference"
    assert "tokenmill transform --transform dpo" in reason and "--transform good_answers" in reason


def test_messages_beside_preference_data_are_read() -> None:
    row = {
        "prompt": "q",
        "messages": [QUESTION, ANSWER],
        "chosen": [QUESTION, GOOD],
        "rejected": [QUESTION, BAD],
    }
    assert (read(row).messages, read(row).unread) == ([QUESTION, ANSWER], ["prompt", "chosen", "rejected"])


SYSTEM = {"role": "system", "content": "s"}


@pytest.mark.parametrize(
    ("prompt", "chosen", "expected"),
    [
        ([QUESTION], [GOOD], [QUESTION, GOOD]),
        ([SYSTEM, QUESTION], [GOOD], [SYSTEM, QUESTION, GOOD]),
        ("q", [GOOD], [QUESTION, GOOD]),
        ([QUESTION, ANSWER, QUESTION], [GOOD], [QUESTION, ANSWER, QUESTION, GOOD]),
        ([QUESTION], [QUESTION, GOOD], [QUESTION, GOOD]),
        ([QUESTION], [SYSTEM, QUESTION, GOOD], [SYSTEM, QUESTION, GOOD]),
        ([SYSTEM], [QUESTION, GOOD], [SYSTEM, QUESTION, GOOD]),
        ([SYSTEM, QUESTION], [QUESTION, GOOD], [SYSTEM, QUESTION, GOOD]),
        ("q", [QUESTION, GOOD], [QUESTION, GOOD]),
        ("Human: q", [QUESTION, GOOD], [QUESTION, GOOD]),
        (None, [QUESTION, GOOD], [QUESTION, GOOD]),
    ],
)
def test_chosen_messages_keep_their_prompt(prompt: Any, chosen: list[Any], expected: list[Any]) -> None:
    row = {"prompt": prompt, "chosen": chosen, "rejected": [BAD], "id": 1}
    result = read(row, RowSettings(messages_key="chosen"))
    assert (result.messages, result.unread) == (expected, ["id"])
    assert result.train[-1] is None
    assert all(flag is False for flag in result.train[: len(expected) - len(chosen)])


@pytest.mark.parametrize(
    ("key", "row"),
    [
        ("chosen", {"chosen": [GOOD], "rejected": [BAD]}),
        ("chosen", {"prompt": "", "chosen": [GOOD], "rejected": [BAD]}),
        ("chosen", {"prompt": "p", "chosen": "good", "rejected": "bad"}),
        ("rejected", {"prompt": [QUESTION], "chosen": [GOOD], "rejected": [BAD]}),
    ],
)
def test_answers_without_prompt_and_bad_answers_are_refused(key: str, row: dict[str, Any]) -> None:
    assert refuse(row, RowSettings(messages_key=key))[0] == "preference"


@pytest.mark.parametrize("label", ["label", "kto_tag"])
@pytest.mark.parametrize(
    "row",
    [
        {"prompt": "p", "completion": "bad"},
        {"prompt": [QUESTION], "completion": [BAD]},
        {"messages": [QUESTION, BAD]},
        {"conversations": [{"from": "human", "value": "q"}, {"from": "gpt", "value": "bad"}]},
        {"instruction": "i", "output": "bad"},
    ],
)
def test_bad_answers_of_kto_are_refused(row: dict[str, Any], label: str) -> None:
    code, reason = refuse({**row, label: False})
    assert code == "preference" and "--transform kto" in reason and f"its {label!r} is false" in reason
    for good in (True, None, 0, 1, "positive", "false"):
        assert read_row({**row, label: good}, DEFAULTS) == read_row(row, DEFAULTS)
