"""Built-in transforms, calls of transforms, functions of the user, and the lines that are written."""

import json
import math
import pickle
import subprocess
import sys
from collections import OrderedDict
from dataclasses import dataclass
from datetime import UTC, datetime
from decimal import Decimal
from enum import Enum
from pathlib import Path
from typing import Any
from uuid import UUID

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tokenmill.errors import RequestError
from tokenmill.stages.transform import builtin
from tokenmill.stages.transform.call import TransformCall, parse_call
from tokenmill.stages.transform.lines import encode_line, make_compressor, remove_nulls
from tokenmill.stages.transform.load import is_portable, load_planned, load_transform, wrap_function
from tokenmill.stages.transform.shards import FileSlice, assign_files, sample_shards
from tokenmill.stages.transform.types import RejectedRow

USER = {"role": "user", "content": "Hi"}
GOOD = {"role": "assistant", "content": "Hello!"}
BAD = {"role": "assistant", "content": "Go away."}
SYSTEM = {"role": "system", "content": "Be kind."}
NEMO_RL = {"context": [USER], "completions": [{"rank": 0, "completion": [GOOD]}, {"rank": 1, "completion": [BAD]}]}


def reason(text: str, record: dict[str, Any]) -> str:
    """Return why a transform rejects a record."""
    with pytest.raises(RejectedRow) as error:
        load_transform(parse_call(text)).function(record)
    return str(error.value)


@pytest.mark.parametrize(
    ("text", "record", "expected"),
    [
        ("nemo_gym", {"messages": [USER], "answer": "42"}, {"input": [USER]}),
        ("nemo_gym", {"messages": [USER], "tools": [], "answer": "42"}, {"input": [USER]}),
        ("nemo_gym", {"messages": [USER], "tools": [{"x": 1}], "answer": "42"}, {"input": [USER], "tools": [{"x": 1}]}),
        ("nemo_gym(messages=m,tools=t)", {"m": [USER], "t": [1], "answer": "42"}, {"input": [USER], "tools": [1]}),
        ("nemo_gym", {"responses_create_params": {"input": "Hi", "n": 2}, "answer": "42"}, {"input": "Hi", "n": 2}),
    ],
)
def test_nemo_gym_keeps_the_keys_of_the_verifier(text: str, record: dict[str, Any], expected: dict[str, Any]) -> None:
    result = load_transform(parse_call(text)).function(record)
    assert result == {"responses_create_params": expected, "answer": "42"}


@pytest.mark.parametrize(
    ("record", "expected"),
    [
        ({"responses_create_params": None}, "'responses_create_params' is not an object with the key 'input'"),
        ({"responses_create_params": {"tools": []}}, "'responses_create_params' is not an object with the key 'input'"),
        ({"responses_create_params": {"input": []}}, "the input is empty"),
        ({"responses_create_params": {"input": {}}}, "the input is not a list of messages"),
        ({"messages": [USER, {"content": "x"}]}, "message 2 of the input is not an object with a role"),
    ],
)
def test_nemo_gym_rejects_a_prompt_that_is_not_messages(record: dict[str, Any], expected: str) -> None:
    assert reason("nemo_gym", record) == expected


@pytest.mark.parametrize(
    ("record", "context", "chosen", "rejected"),
    [
        ({"prompt": "Hi", "chosen": "Hello!", "rejected": "Go away."}, [USER], [GOOD], [BAD]),
        ({"prompt": [USER], "chosen": [GOOD], "rejected": [BAD]}, [USER], [GOOD], [BAD]),
        ({"prompt": [SYSTEM, USER], "chosen": [GOOD], "rejected": "Go away."}, [SYSTEM, USER], [GOOD], [BAD]),
        ({"chosen": [USER, GOOD], "rejected": [USER, BAD]}, [USER], [GOOD], [BAD]),
        ({"prompt": "Hi", "chosen": [USER, GOOD], "rejected": [USER, BAD]}, [USER], [GOOD], [BAD]),
        ({"prompt": [USER], "chosen": [USER, GOOD], "rejected": [USER, BAD]}, [USER], [GOOD], [BAD]),
        (
            {"prompt": "Hi", "chosen": [SYSTEM, USER, GOOD], "rejected": [SYSTEM, USER, BAD]},
            [SYSTEM, USER],
            [GOOD],
            [BAD],
        ),
        (
            {"prompt": "Hi", "chosen": [USER, GOOD, USER, GOOD], "rejected": [USER, GOOD, USER, BAD]},
            [USER, GOOD, USER],
            [GOOD],
            [BAD],
        ),
        ({"prompt": "Hi", "chosen": [GOOD, USER, GOOD], "rejected": [BAD]}, [USER], [GOOD, USER, GOOD], [BAD]),
        (NEMO_RL, [USER], [GOOD], [BAD]),
        ({"messages": [SYSTEM, USER], "chosen": GOOD, "rejected": BAD}, [SYSTEM, USER], [GOOD], [BAD]),
        (
            {
                "conversations": [{"from": "human", "value": "Hi"}],
                "chosen": {"from": "gpt", "value": "Hello!"},
                "rejected": {"from": "gpt", "value": "Go away."},
            },
            [USER],
            [GOOD],
            [BAD],
        ),
    ],
)
def test_preference_reads_the_forms_of_trl_and_nemo_rl(
    record: dict[str, Any],
    context: list[dict[str, str]],
    chosen: list[dict[str, str]],
    rejected: list[dict[str, str]],
) -> None:
    assert builtin.preference()({"id": 7, **record}) == {
        "context": context,
        "completions": [{"rank": 0, "completion": chosen}, {"rank": 1, "completion": rejected}],
        "id": 7,
    }


def test_preference_keeps_the_ranks_of_nemo_rl() -> None:
    swapped = {**NEMO_RL, "completions": [{"rank": 2, "completion": [BAD]}, {"rank": 1.5, "completion": [GOOD]}]}
    assert builtin.preference()(swapped) == swapped
    assert builtin.binary_preference()(swapped) == {"prompt": "Hi", "chosen": "Hello!", "rejected": "Go away."}


@pytest.mark.parametrize("text", ["preference", "binary_preference", "dpo", "good_answers"])
@pytest.mark.parametrize(
    ("record", "expected"),
    [
        ({"prompt": "Hi", "chosen": "a", "rejected": "a"}, "both answers are equal"),
        ({"chosen": [USER, GOOD], "rejected": [USER, GOOD]}, "both answers are equal"),
        ({"prompt": "", "chosen": "a", "rejected": "b"}, "the prompt is empty"),
        ({"chosen": "a", "rejected": "b"}, "the prompt is empty"),
        ({"prompt": 3, "chosen": "a", "rejected": "b"}, "the prompt is not a list of messages"),
        ({"prompt": "Hi", "chosen": None, "rejected": "b"}, "the chosen answer is not a list of messages"),
        (
            {"prompt": "Hi", "chosen": [{**USER, "content": "Hi!"}, GOOD], "rejected": [USER, BAD]},
            "answer 1 does not continue the common context with a message of the assistant",
        ),
        (
            {"chosen": [USER, GOOD], "rejected": [USER]},
            "answer 2 does not continue the common context with a message of the assistant",
        ),
        (
            {**NEMO_RL, "completions": NEMO_RL["completions"][:1]},
            "it has 1 completions, and a preference needs exactly 2",
        ),
        ({**NEMO_RL, "completions": "x"}, "it has no list of completions, and a preference needs exactly 2"),
        (
            {**NEMO_RL, "completions": [{"rank": 1, "completion": [GOOD]}, {"rank": 1, "completion": [BAD]}]},
            "both completions have the rank 1, and a preference needs a better one",
        ),
        (
            {**NEMO_RL, "completions": [{"rank": 0, "completion": [GOOD]}, {"rank": 1, "completion": [GOOD]}]},
            "both answers are equal",
        ),
        (
            {**NEMO_RL, "completions": [{"rank": True, "completion": [GOOD]}, {"rank": 1, "completion": [BAD]}]},
            "completion 1 has no rank that is a number",
        ),
        ({**NEMO_RL, "completions": [3, 4]}, "completion 1 has no rank that is a number"),
        (
            {**NEMO_RL, "completions": [{"rank": 0, "completion": "Hi"}, {"rank": 1, "completion": [BAD]}]},
            "completion 1 is not a list of messages",
        ),
    ],
)
def test_preference_rejects_what_a_trainer_refuses(text: str, record: dict[str, Any], expected: str) -> None:
    assert reason(text, record) == expected


def test_dpo_has_the_form_of_trl() -> None:
    expected = {"prompt": [USER], "chosen": [GOOD], "rejected": [BAD], "score": 1}
    for record in ({"prompt": "Hi", "chosen": "Hello!", "rejected": "Go away."}, NEMO_RL):
        assert builtin.dpo()({**record, "score": 1}) == expected
    swapped = {**NEMO_RL, "completions": [{"rank": 2, "completion": [BAD]}, {"rank": 1.5, "completion": [GOOD]}]}
    assert builtin.dpo()(swapped) == {"prompt": [USER], "chosen": [GOOD], "rejected": [BAD]}
    again = builtin.dpo()(expected)
    assert again == expected


@pytest.mark.parametrize("label", [True, False, 1, 0, "true", "False"])
@pytest.mark.parametrize(
    "record",
    [
        {"prompt": "Hi", "completion": "Hello!"},
        {"prompt": [USER], "completion": [GOOD]},
        {"messages": [USER, GOOD]},
        {"conversations": [{"from": "human", "value": "Hi"}, {"from": "gpt", "value": "Hello!"}]},
    ],
)
@pytest.mark.parametrize("key", ["label", "kto_tag"])
def test_kto_has_the_form_of_trl(record: dict[str, Any], key: str, label: object) -> None:
    good = label in (True, 1, "true")
    result = builtin.kto()({**record, key: label, "id": 7, "completions": 3})
    assert result == {"prompt": [USER], "completion": [GOOD], "label": good, "id": 7, "completions": 3}
    answers = builtin.good_answers()({**record, key: label, "id": 7})
    assert answers == ({"prompt": [USER], "completion": [GOOD], "id": 7} if good else None)


@pytest.mark.parametrize(
    ("record", "expected"),
    [
        ({"prompt": "Hi", "completion": "a", "label": "good"}, "the label 'good' is neither true nor false"),
        ({"prompt": "Hi", "completion": "a", "label": 2}, "the label 2 is neither true nor false"),
        ({"prompt": "", "completion": "a", "label": True}, "the prompt is empty"),
        ({"prompt": "Hi", "completion": "", "label": True}, "the answer is not a message of the assistant"),
        ({"messages": [GOOD], "label": True}, "the prompt is empty"),
        ({"messages": [USER, GOOD, USER], "label": True}, "the answer is not a message of the assistant"),
    ],
)
def test_kto_rejects_what_a_trainer_cannot_read(record: dict[str, Any], expected: str) -> None:
    assert reason("kto", record) == reason("good_answers", record) == expected


def test_good_answers_of_pairs() -> None:
    expected = {"prompt": [USER], "completion": [GOOD], "tools": [{"name": "f"}]}
    for record in ({"prompt": "Hi", "chosen": "Hello!", "rejected": "Go away."}, NEMO_RL):
        assert builtin.good_answers()({**record, "tools": [{"name": "f"}]}) == expected


GYM = {"responses_create_params": {"input": [USER], "tools": [{"name": "f"}]}, "expected_answer": "42"}


@pytest.mark.parametrize(
    ("record", "expected"),
    [
        ({"prompt": "Hi", "answer": "42", "info": {"a": 1}}, {"prompt": [USER], "answer": "42", "info": {"a": 1}}),
        ({"prompt": [SYSTEM, USER], "context": "c"}, {"prompt": [SYSTEM, USER], "context": "c"}),
        ({"messages": [USER], "answer": "42"}, {"prompt": [USER], "answer": "42"}),
        ({"prompt": "Hi", "messages": [USER, GOOD]}, {"prompt": [USER], "messages": [USER, GOOD]}),
        (GYM, {"prompt": [USER], "tools": [{"name": "f"}], "expected_answer": "42"}),
    ],
)
def test_grpo_keeps_the_keys_of_the_verifier(record: dict[str, Any], expected: dict[str, Any]) -> None:
    assert builtin.grpo()(record) == expected


def test_verl_has_the_answer_as_ground_truth() -> None:
    record = {"prompt": "Hi", "answer": "42", "level": 3, "ability": "math", "extra_info": {"index": 5}}
    expected = {
        "data_source": "gsm8k",
        "prompt": [USER],
        "reward_model": {"style": "rule", "ground_truth": "42"},
        "ability": "math",
        "extra_info": {"level": 3, "index": 5},
    }
    transform = load_transform(parse_call("verl(source=gsm8k)")).function
    assert transform(record) == expected
    assert transform({**record, "data_source": "aime"}) == {**expected, "data_source": "aime"}
    assert transform(expected) == expected, "a row of verl is not changed"
    gym = load_transform(parse_call("verl(answer=expected_answer,source=s)")).function(GYM)
    assert gym is not None
    assert gym["reward_model"]["ground_truth"] == "42" and gym["extra_info"] == {"tools": [{"name": "f"}]}
    assert transform({"prompt": "Hi"}) is None and transform({"answer": "42"}) is None
    assert reason("verl", {"prompt": "Hi", "answer": "42"}).startswith("it has no text under 'data_source'")
    assert "'ground_truth'" in reason("verl(source=s)", {"prompt": "Hi", "reward_model": {}})


@pytest.mark.parametrize("text", ["grpo", "verl(source=s)"])
def test_prompt_with_an_answer_is_rejected(text: str) -> None:
    assert "the prompt ends with an answer" in reason(text, {"messages": [USER, GOOD], "answer": "42"})
    assert reason(text, {"prompt": "", "answer": "42"}) == "the prompt is empty"


@pytest.mark.parametrize(
    "text",
    ["nemo_gym", "preference", "binary_preference", "megatron_sft", "dpo", "kto", "good_answers", "grpo", "verl"],
)
@pytest.mark.parametrize("record", [{}, {"chosen": "a"}, {"context": [USER]}, {"text": "x"}])
def test_record_without_the_keys_is_dropped(text: str, record: dict[str, Any]) -> None:
    assert load_transform(parse_call(text)).function(record) is None


def test_binary_preference_has_texts() -> None:
    transform = builtin.binary_preference(prompt="q", chosen="good", rejected="bad")
    record = {"q": [SYSTEM, USER], "good": [GOOD], "bad": "Go away.", "source": "x"}
    assert transform(record) == {
        "prompt": [SYSTEM, USER],
        "chosen": "Hello!",
        "rejected": "Go away.",
        "source": "x",
    }
    several = {"prompt": "Hi", "chosen": [GOOD, USER, GOOD], "rejected": "x"}
    assert "not a single message with a text; use the transform preference" in reason("binary_preference", several)


def test_megatron_sft_begins_each_conversation_with_a_system_message() -> None:
    transform, empty = builtin.megatron_sft(messages="m"), {"role": "system", "content": ""}
    assert transform({"m": [USER, GOOD], "id": 1}) == {"messages": [empty, USER, GOOD]}
    several = [SYSTEM, USER, GOOD, SYSTEM, USER, BAD]
    assert transform({"m": [*several[:2], {**GOOD, "tool_calls": [], "name": None}, *several[3:]]}) == {
        "messages": several
    }


@pytest.mark.parametrize(
    ("messages", "expected"),
    [
        (
            [USER, {"role": "tool", "content": "3"}, GOOD],
            "message 2 has the role 'tool', and Megatron-LM's --sft knows",
        ),
        ([USER, {**GOOD, "tool_calls": [1]}], "message 2 has 'tool_calls', which Megatron-LM's --sft does not read"),
        ([USER, {**GOOD, "content": None}], "message 2 has no text as its content"),
        ([USER, {**GOOD, "content": ""}], "message 2 is an empty answer"),
        ([USER, GOOD, GOOD], "message 3 is an answer that follows no message of the user"),
        ([SYSTEM, GOOD], "message 2 is an answer that follows no message of the user"),
        ([GOOD, USER, GOOD], "message 1 is an answer that follows no message of the user"),
        ([], "the conversation has no message"),
        ([USER], "a conversation has no answer"),
        ([SYSTEM, USER, GOOD, SYSTEM, USER], "a conversation has no answer: each system message starts a conversation"),
        ("text", "the conversation is not a list of messages"),
    ],
)
def test_megatron_sft_rejects_what_megatron_fails_on(messages: Any, expected: str) -> None:
    assert reason("megatron_sft", {"messages": messages}).startswith(expected)


@pytest.mark.parametrize(
    ("text", "settings", "expected"),
    [
        ("sft", (), TransformCall("sft")),
        (" sft ( ) ", (), TransformCall("sft")),
        ("sft(input=a, output = b c )", (), TransformCall("sft", (), {"input": "a", "output": "b c"})),
        ("sft", ("input=a", "output=b=c"), TransformCall("sft", (), {"input": "a", "output": "b=c"})),
        ("sft(input=a)", ("output=b",), TransformCall("sft", (), {"input": "a", "output": "b"})),
        ("select(id,text)", (), TransformCall("select", ("id", "text"))),
        ("select", ("id", "text"), TransformCall("select", ("id", "text"))),
        ("select('a,b',\"c'd\", 'x\\'y')", (), TransformCall("select", ("a,b", "c'd", "x'y"))),
        ("rename(input='a=(b)')", (), TransformCall("rename", (), {"input": "a=(b)"})),
        ("my_filters.chat:Filter.keep", (), TransformCall("my_filters.chat:Filter.keep")),
    ],
)
def test_call_is_parsed(text: str, settings: tuple[str, ...], expected: TransformCall) -> None:
    assert parse_call(text, settings) == expected


FIELDS = st.text(st.characters(exclude_categories=["Cs"]), max_size=8)


@given(st.lists(FIELDS, max_size=3), st.dictionaries(st.text("ab_", min_size=1, max_size=3), FIELDS, max_size=3))
def test_every_call_is_parsed_from_its_text(arguments: list[str], named: dict[str, str]) -> None:
    call = TransformCall("select", tuple(arguments), named)
    assert parse_call(str(call)) == call
    assert TransformCall.from_json(json.loads(json.dumps(call.to_json()))) == call


@pytest.mark.parametrize(
    ("text", "settings", "expected"),
    [
        ("", (), "'' is not a transform; write it as NAME, NAME(key=field,...) or module:function"),
        ("a-b", (), "'a-b' is not a transform"),
        ("__import__('os').system('x')", (), "'__import__('os').system('x')' is not a list of arguments"),
        ("lambda r: r", (), "'lambda r: r' is not a transform"),
        ("a:b:c", (), "'a:b:c' is not a transform"),
        ("sft(input=a", (), "'sft(input=a' has no ) at its end; add it"),
        ("sft(input=a)x", (), "'sft(input=a)x' has no ) at its end"),
        ("sft(input=a,,output=b)", (), "is not a list of arguments; write them as key=field"),
        ("sft(input=)", (), "is not a list of arguments"),
        ("sft(input=a=b)", (), "is not a list of arguments"),
        ("sft(input=a 'b')", (), "is not a list of arguments"),
        ("sft(input='a)", (), "has an unexpected"),
        ("sft(input=f(x))", (), "has an unexpected '('"),
        ("sft(input=a,input=b)", (), "the argument 'input' is empty or repeated; specify each argument once"),
        ("sft", ("=a",), "the argument '' is empty or repeated"),
        ("select(a=b,c)", (), "the argument 'c' follows a named argument; write it before them"),
    ],
)
def test_wrong_call_is_refused(text: str, settings: tuple[str, ...], expected: str) -> None:
    with pytest.raises(ValueError) as error:
        parse_call(text, settings)
    assert expected.replace("'__import__", '"__import__').split("'os'")[0] in str(error.value)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("sft(instruction=a)", r"wrong arguments; use sft\(input=FIELD,output=FIELD,system=FIELD\)"),
        ("sft(a)", r"wrong arguments; use sft\(input=FIELD"),
        ("select(a=b)", r"wrong arguments; use select\(FIELD,\.\.\.\)"),
        ("rename(a)", r"wrong arguments; use rename\(NEW=OLD,\.\.\.\)"),
        ("nemotron_rl(a)", r"wrong arguments; use nemotron_rl\(\)"),
        ("alpaca", r"--transform alpaca: there is no such transform; use sft, openai_chat, .* or module:function"),
        (
            "no_such_module_x:f",
            r"importing no_such_module_x failed \(ModuleNotFoundError: .*add that directory to PYTH",
        ),
        ("json:no_such", r"--transform json:no_such: json has no no_such; choose one of its functions"),
        ("json:decoder", r"decoder is module, and must be a function of a record; choose one"),
        ("json:dumps(a=b)", r"takes the record and no arguments; remove the arguments"),
    ],
)
def test_transform_that_cannot_be_loaded_is_refused(text: str, expected: str) -> None:
    with pytest.raises(RequestError, match=expected):
        load_transform(parse_call(text))


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """Write a module of the user into the current directory, with a new name for each test."""
    name = f"own_{tmp_path.name.replace('-', '_')}"
    (tmp_path / f"{name}.py").write_text("def keep(row):\n    return row if row['n'] > 1 else None\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    return name


def test_function_of_the_current_directory(module: str, tmp_path: Path) -> None:
    loaded = load_transform(parse_call(f"{module}:keep"))
    assert [loaded.function({"n": n}) for n in (1, 2)] == [None, {"n": 2}]
    assert load_planned(loaded.call, loaded.code) is loaded.function
    assert is_portable(loaded.function)


def test_module_of_the_current_directory_is_preferred_and_hides_no_other(tmp_path: Path) -> None:
    (tmp_path / "colorsys.py").write_text("def keep(row):\n    import helper_of_keep\n    return helper_of_keep.ROW\n")
    (tmp_path / "helper_of_keep.py").write_text("ROW = {'n': 1}\n")
    (tmp_path / "wave.py").write_text("raise ValueError\n")
    code = (
        "from tokenmill.stages.transform.call import parse_call\n"
        "from tokenmill.stages.transform.load import load_transform\n"
        "print(load_transform(parse_call('colorsys:keep')).function({}))\n"
        "import wave\n"
    )
    program = [Path(sys.executable), "-P", "-c", code]
    done = subprocess.run(program, capture_output=True, text=True, check=True, cwd=tmp_path)
    assert done.stdout == "{'n': 1}\n"


def test_changed_function_has_another_hash(module: str, tmp_path: Path) -> None:
    path = tmp_path / f"{module}.py"
    code = (
        "from tokenmill.stages.transform.call import parse_call\n"
        "from tokenmill.stages.transform.load import load_transform\n"
        f"print(load_transform(parse_call('{module}:keep')).code)"
    )
    hashes = []
    for _ in range(2):
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=tmp_path)
        hashes.append(done.stdout)
        path.write_text(path.read_text().replace("> 1", "> 2"))
    assert hashes[0] != hashes[1]


def test_function_that_changed_after_planning_is_refused(module: str) -> None:
    loaded = load_transform(parse_call(f"{module}:keep"))
    with pytest.raises(RequestError, match=r":keep changed after it was planned; restore the file, or run .*--replace"):
        load_planned(loaded.call, "0" * 32)


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("raise ValueError('no GPU')", r"failed \(ValueError: no GPU\)"),
        ("def keep(", r"failed \(SyntaxError: "),
        ("import sys; sys.exit(3)", r"failed \(SystemExit: 3\)"),
        ("raise BaseException('a\\nb')", r"failed \(BaseException: a\\nb\)"),
        ("def a(): a()\na()", r"failed \(RecursionError: "),
        ("import os; os.chdir('/'); raise ValueError('x')", r"failed \(ValueError: x\)"),
    ],
)
def test_module_that_fails_is_refused(module: str, tmp_path: Path, source: str, expected: str) -> None:
    (tmp_path / f"{module}.py").write_text(source)
    with pytest.raises(RequestError, match=expected):
        load_transform(parse_call(f"{module}:keep"))
    assert Path.cwd() == tmp_path


def test_built_in_transform_of_a_module(module: str, tmp_path: Path) -> None:
    (tmp_path / f"{module}.py").write_text(
        "from tokenmill.stages.transform.builtin import sft\nmine = sft(input='q')\n"
    )
    assert load_transform(parse_call(f"{module}:mine")).function({"q": 1, "output": 2}) == {"input": 1, "output": 2}


def test_transforms_of_python_programs() -> None:
    wrapped = wrap_function(builtin.sft(input="q", system="s"))
    assert wrapped.call == TransformCall("sft", (), {"input": "q", "output": "output", "system": "s"})
    assert wrapped.code == ""
    copy = pickle.loads(pickle.dumps(wrapped.function))
    assert copy == wrapped.function and copy({"q": 1, "output": 2}) == {"input": 1, "output": 2}

    def longer_than(limit: int) -> Any:
        return lambda row: row if len(row["text"]) > limit else None

    codes = [wrap_function(longer_than(limit)).code for limit in (1, 2, 1)]
    assert codes[0] == codes[2] != codes[1]
    assert not is_portable(longer_than(1)) and is_portable(json.dumps)
    with pytest.raises(RequestError, match="the transform is 3, and must be a function of a record; pass a function"):
        wrap_function(3)  # type: ignore[arg-type]
    assert str(wrap_function(longer_than(1)).call).endswith("longer_than.<locals>.<lambda>")


JSON_VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False)
    | st.text(st.characters(exclude_categories=["Cs"])),
    lambda values: st.lists(values, max_size=3) | st.dictionaries(st.text(max_size=5), values, max_size=3),
    max_leaves=8,
)


@given(st.dictionaries(st.text(st.characters(exclude_categories=["Cs"]), max_size=5), JSON_VALUES, max_size=4))
def test_written_record_has_all_values(record: dict[str, Any]) -> None:
    line = encode_line(record)
    assert json.loads(line) == record
    assert b"\n" not in line


def test_numbers_that_orjson_would_change_keep_their_values() -> None:
    record = {"a": 2**64, "b": -(2**63) - 1, "c": math.nan, "d": [math.inf, -math.inf, None], "e": "é\u2028"}
    text = encode_line(record).decode()
    assert text == (
        '{"a":18446744073709551616,"b":-9223372036854775809,"c":NaN,"d":[Infinity,-Infinity,null],"e":"é\u2028"}'
    )
    assert encode_line({"a": math.nan}) == b'{"a":NaN}'
    assert encode_line({"a": None, "null": 1.5}) == orjson.dumps({"a": None, "null": 1.5})


@dataclass
class Score:
    """A value that orjson writes itself, with null for NaN."""

    value: float
    more: Any = None


class Kind(Enum):
    """A value that orjson writes itself."""

    CHAT = "chat"


def test_objects_of_python_keep_their_values() -> None:
    assert (
        encode_line({"a": [Score(math.nan, Score(1.0))]}) == b'{"a":[{"value":NaN,"more":{"value":1.0,"more":null}}]}'
    )
    record = {"a": Score(2**70), "b": Kind.CHAT, "c": UUID(int=1)}
    assert encode_line(record) == (
        b'{"a":{"value":1180591620717411303424,"more":null},"b":"chat","c":"00000000-0000-0000-0000-000000000001"}'
    )


def test_values_of_columnar_files_and_of_python_become_json() -> None:
    record = {
        "time": datetime(2026, 1, 2, tzinfo=UTC),
        "price": Decimal("1.50"),
        "bytes": "é".encode(),
        "map": [("a", 1)],
        "ordered": OrderedDict(b=1, a=2),
        5: 6,
    }
    assert (
        encode_line(record)
        == (  # type: ignore[arg-type]
            '{"time":"2026-01-02T00:00:00+00:00","price":"1.50","bytes":"é","map":[["a",1]],"ordered":{"b":1,"a":2},"5":6}'
        ).encode()
    )


def nested(depth: int) -> dict[str, Any]:
    value: dict[str, Any] = {}
    for _ in range(depth):
        value = {"a": value}
    return value


def endless() -> dict[str, Any]:
    value: dict[str, Any] = {}
    value["a"] = value
    return value


@pytest.mark.parametrize(
    ("record", "expected"),
    [
        ({"a": "\ud800"}, "'a' contains a lone surrogate, which is not a character"),
        ({"a": {"b": ["\udfff"]}}, "'a' contains a lone surrogate"),
        ({"\ud800": 1}, "contains a lone surrogate"),
        ({"a": b"\xff"}, "the result is not JSON: binary data that is not UTF-8"),
        ({"a": {1, 2}}, "the result is not JSON: a value of the type set"),
        ({(1, 2): 1}, "the result is not JSON: keys must be str"),
        ({"x": [{1: "a", "1": "b"}]}, "the result is not JSON: two keys of an object are '1' as text"),
        ({"x": {None: 1, "null": 2}}, "the result is not JSON: two keys of an object are 'null' as text"),
        (nested(100_000), "the result is nested too deeply"),
        (endless(), "the result is not JSON: Circular reference detected"),
    ],
    ids=range(10),
)
def test_record_without_a_json_form_is_rejected(record: dict[str, Any], expected: str) -> None:
    with pytest.raises(RejectedRow) as error:
        encode_line(record)
    assert expected in str(error.value)


def test_deep_records_are_written() -> None:
    assert json.loads(encode_line(nested(300))) == nested(300)


def test_null_fields_of_columnar_files_are_absent() -> None:
    row = {"messages": [{"role": "user", "content": "x", "tool_calls": None}], "tools": [{"a": {"b": None}}, None]}
    assert remove_nulls(row) == {"messages": [{"role": "user", "content": "x"}], "tools": [{"a": {}}, None]}


@given(st.lists(st.binary(max_size=300_000), max_size=5))
def test_compressed_bytes_depend_on_the_data_alone(pieces: list[bytes]) -> None:
    def compress(pieces: list[bytes]) -> bytes:
        compressor = make_compressor()
        return b"".join([*(compressor.compress(piece) for piece in pieces), compressor.flush()])

    assert compress(pieces) == compress([b"".join(pieces)])


@given(st.lists(st.integers(0, 1000), min_size=1, max_size=8), st.integers(1, 40))
def test_each_row_of_each_file_is_in_exactly_one_shard(sizes: list[int], shards: int) -> None:
    assigned = assign_files([(f"{index}.jsonl", size) for index, size in enumerate(sizes)], shards)
    assert len(assigned) == shards
    slices = sorted(piece for shard in assigned for piece in shard.slices)
    expected = []
    for path in sorted({piece.path for piece in slices}):
        modulus = next(piece.modulus for piece in slices if piece.path == path)
        expected += [FileSlice(path, remainder, modulus) for remainder in range(modulus)]
    assert slices == expected
    assert len({piece.path for piece in slices}) == len(sizes)
    if any(sizes):
        assert all(shard.slices for shard in assigned) or len(sizes) > shards or not all(sizes)


def test_no_shards_are_refused() -> None:
    with pytest.raises(ValueError, match="0 shards are too few; request at least 1"):
        assign_files([("a", 1)], 0)


def test_sample_that_is_not_a_number_is_refused() -> None:
    with pytest.raises(ValueError, match=r"'ten%' is not a sample; write a number of shards, or a share such as 10%"):
        sample_shards(4, "a", "ten%")
