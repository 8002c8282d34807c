"""A row of a corpus in one of the usual shapes becomes a Conversation or a PromptAnswer.

Shapes, in the order in which `read_row` looks for them:

    {messages: [{role, content, ...}], tools?, system?}             OpenAI
    {conversations | conversation: [{from, value}], tools?, ...}    ShareGPT; also under `messages`
    {prompt: [messages], completion: [messages] | text}             TRL; only answers of the completion are trained
    {instruction, input? | context?, output | response, system?}    Alpaca, Dolly
    {prompt, completion | response}, {input, output}                a prompt and its answer; both can be messages

A row in another shape, or with a part which a template cannot render, raises BadRow. A Conversation holds only
dicts, lists, text, numbers, booleans and None, so a template never sees another Python object.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from types import MappingProxyType
from typing import Any

Message = dict[str, Any]

ROLES = ("system", "developer", "user", "assistant", "tool")
"""The roles that templates know."""

ALIASES: Mapping[str, str] = MappingProxyType(
    {
        "human": "user",
        "prompter": "user",
        "gpt": "assistant",
        "chatgpt": "assistant",
        "bard": "assistant",
        "bing": "assistant",
        "bot": "assistant",
        "model": "assistant",
        "function": "tool",
        "function_response": "tool",
        "function_result": "tool",
        "observation": "tool",
        "ipython": "tool",
        "function_call": "assistant",
        "tool_call": "assistant",
    }
)
"""Names that public corpora use for the roles. The content of `function_call` and `tool_call` is the JSON of calls."""

_CALL_ROLES = ("function_call", "tool_call")
_MESSAGE_LISTS = ("messages", "conversations", "conversation")
_REASONING_KEYS = ("reasoning_content", "reasoning", "thinking")
_CONSUMED = frozenset(
    ("role", "from", "content", "value", "tool_calls", "function_call", "train", "weight", *_REASONING_KEYS)
)
"""Keys of a message with a meaning here; other keys whose value is text, a number or a boolean go to the template."""

_TEXT_PARTS = ("text", "input_text", "output_text")
_RESERVED = frozenset(("messages", "tools", "documents", "add_generation_prompt"))
_COMPLETIONS = (
    ("instruction", ("output", "response")),
    ("prompt", ("completion", "response")),
    ("input", ("output",)),
)
_PART_KEYS = ("instruction", "input", "context", "output", "prompt", "completion", "response")

MAX_DEPTH = 100
"""Levels of lists and objects in tools and arguments."""
MAX_NAMES = 8
"""Number of keys or roles that a message lists."""


class BadRow(Exception):
    """A row cannot be used; `code` is stable, `reason` is a sentence without a final period."""

    def __init__(self, code: str, reason: str) -> None:
        super().__init__(reason)
        self.code = code
        self.reason = reason


@dataclass(frozen=True)
class RowSettings:
    """How rows are read.

    `role_map` adds to ALIASES. `empty_answer` is "reject" or "train": an answer without text and without tool calls.
    `keep_arguments`: the arguments of a tool call stay a JSON string if they are one; otherwise they become an object.
    """

    messages_key: str = "messages"
    tools_key: str = "tools"
    role_map: Mapping[str, str] = field(default_factory=dict)
    empty_answer: str = "reject"
    keep_arguments: bool = False

    @cached_property
    def roles(self) -> dict[str, str]:
        """The accepted names of roles."""
        return {**{role: role for role in ROLES}, **ALIASES, **self.role_map}

    @cached_property
    def message_keys(self) -> tuple[str, ...]:
        """The keys that may hold the list of messages."""
        return _MESSAGE_LISTS if self.messages_key == "messages" else (self.messages_key,)

    @property
    def columns(self) -> tuple[str, ...]:
        """The fields of a row that are read."""
        names = (*self.message_keys, self.tools_key, "functions", "system", "chat_template_kwargs", *_PART_KEYS)
        return tuple(dict.fromkeys(names))


@dataclass(slots=True)
class Conversation:
    """Messages for a template.

    Attributes:
        messages: each has `role` and `content` (text); `reasoning_content`, `tool_calls`, `tool_call_id`, `name` and
            other keys only with a value. The arguments of a tool call are an object.
        tools: the descriptions of functions, each as {"type": "function", "function": {...}}; None if there are none.
        variables: variables for the template, from `chat_template_kwargs`.
        train: for each message, its `train` or `weight` as a boolean, or None.
    """

    messages: list[Message]
    tools: list[Any] | None
    variables: dict[str, Any]
    train: list[bool | None]

    def with_string_arguments(self) -> "Conversation":
        """Return the same conversation with the arguments of each tool call as a JSON string."""
        messages = [
            {**message, "tool_calls": [_with_string_arguments(call) for call in message["tool_calls"]]}
            if "tool_calls" in message
            else message
            for message in self.messages
        ]
        return Conversation(messages, self.tools, self.variables, self.train)


@dataclass(slots=True)
class PromptAnswer:
    """A prompt and its answer, for a row without messages."""

    prompt: str
    answer: str
    system: str | None


def _with_string_arguments(call: dict[str, Any]) -> dict[str, Any]:
    function = call["function"]
    arguments = function["arguments"]
    text = arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
    return {**call, "function": {**function, "arguments": text}}


def read_row(row: object, settings: RowSettings, *, columnar: bool = False) -> Conversation | PromptAnswer:
    """Return what a row contains; raise BadRow if it cannot be used.

    `columnar`: the row comes from Parquet or Arrow, where all rows have the same fields. Therefore keys with null are
    dropped inside tools, messages and arguments. A null that the author wrote is lost there, except in JSON strings.
    """
    if not isinstance(row, dict):
        raise BadRow("not_object", f"the row is {_describe(row)}; a row must be an object")
    for key in settings.message_keys:
        messages = row.get(key)
        if messages is not None:
            return _read_conversation(row, key, messages, settings, columnar)
    if settings.messages_key == "messages":
        return _read_parts(row, settings, columnar)
    raise BadRow(
        "no_messages",
        f"the row has no {settings.messages_key!r} (its keys are {_list(row)}); set --messages to the key of the "
        "messages",
    )


def _read_conversation(
    row: dict[Any, Any], key: str, messages: object, settings: RowSettings, columnar: bool
) -> Conversation:
    if not isinstance(messages, list):
        raise BadRow("messages_type", f"{key!r} is {_describe(messages)}; it must be a list of messages")
    if not messages:
        raise BadRow("no_messages", f"{key!r} is an empty list; it must contain messages")
    roles, reject_empty = settings.roles, settings.empty_answer == "reject"
    train: list[bool | None] = [None] * len(messages)
    ready: list[Message] = []
    answers = False
    for index, message in enumerate(messages):
        if type(message) is dict and len(message) == 2:  # the common case: a role and a text
            name, content = message.get("role"), message.get("content")
            if (
                type(content) is str
                and type(name) is str
                and roles.get(name) == name
                and (name != "assistant" or (content and not content.isspace()))
                and (content.isascii() or _is_text(content))
            ):
                ready.append(message)
                answers = answers or name == "assistant"
                continue
        result, train[index] = _read_message(message, index + 1, settings, columnar)
        if result["role"] == "assistant":
            answers = True
            if reject_empty and train[index] is not False:
                _check_answer(result, index + 1)
        ready.append(result)
    if not answers:
        raise BadRow("no_answer", "no message has the role assistant, so there is nothing to train; drop the row")
    if len(row) == 1:
        return Conversation(ready, None, {}, train)
    system = _read_system(row)
    if system is not None and ready[0]["role"] != "system":
        ready.insert(0, {"role": "system", "content": system})
        train.insert(0, None)
    elif system is not None and ready[0]["content"] != system:
        raise BadRow(
            "two_systems",
            "the row has a 'system' and a first message with the role system, which differ; keep one of them",
        )
    return Conversation(ready, _read_tools(row, settings, columnar), _read_variables(row, columnar), train)


def _check_answer(message: Message, number: int) -> None:
    content = message["content"]
    if not message.get("tool_calls") and (not content or content.isspace()):
        raise BadRow(
            "empty_answer",
            f"message {number}: the answer is empty, so only its end would be trained; drop the row, or pass "
            "--empty-answer train",
        )


def _read_message(message: object, number: int, settings: RowSettings, columnar: bool) -> tuple[Message, bool | None]:
    """Return a message for a template, and whether it must or must not be trained."""
    if not isinstance(message, dict):
        raise BadRow("message_type", f"message {number} is {_describe(message)}; a message must be an object")
    name, role = _read_role(message, number, settings)
    ready: Message = {"role": role, "content": ""}
    content = message.get("content")
    if content is None:
        content = message.get("value")
    calls = None
    if name in _CALL_ROLES and name not in settings.role_map:
        calls, content = content, ""
    else:
        calls = _find_calls(message)
    if calls is not None:
        if role != "assistant":
            raise BadRow("bad_tool_calls", f"message {number}: only the assistant can have tool_calls, not {name!r}")
        ready["tool_calls"] = _read_calls(calls, number, columnar, settings.keep_arguments)
    if (reasoning := _read_reasoning(message, number)) is not None:
        ready["reasoning_content"] = reasoning
    if content is None and role == "assistant" and (calls is not None or settings.empty_answer == "train"):
        content = ""
    ready["content"] = _read_content(content, number, role, settings)
    for key, value in message.items():
        if key not in _CONSUMED and isinstance(key, str) and isinstance(value, (str, int, float)):
            ready[key] = _copy(value, False, f"message {number}: {key!r}")
    return ready, _read_train(message, number)


def _read_role(message: dict[Any, Any], number: int, settings: RowSettings) -> tuple[str, str]:
    """Return the name of the role in the row, and the role."""
    name = message.get("role")
    if name is None:
        name = message.get("from")
    if name is None:
        raise BadRow(
            "no_role", f"message {number} has neither 'role' nor 'from' (its keys are {_list(message)}); name its role"
        )
    role = settings.roles.get(name) if isinstance(name, str) else None
    if not isinstance(name, str) or role is None:
        raise BadRow(
            "unknown_role",
            f"message {number}: the role {_shorten(name)} is unknown; map it to one of {', '.join(ROLES)} with "
            "--role-map",
        )
    return name, role


def _read_reasoning(message: dict[Any, Any], number: int) -> str | None:
    """Return the first reasoning that is not empty, or None."""
    for key in _REASONING_KEYS:
        reasoning = message.get(key)
        if reasoning is None:
            continue
        if not isinstance(reasoning, str):
            raise BadRow(
                "content_type", f"message {number}: {key!r} is {_describe(reasoning)}; the reasoning must be a string"
            )
        if reasoning:
            _check_text(reasoning, f"message {number}: {key!r}")
            return str(reasoning)
    return None


def _find_calls(message: dict[Any, Any]) -> object:
    """Return the tool calls of a message, or None."""
    calls = message.get("tool_calls")
    if calls is not None and calls != []:
        return calls
    call = message.get("function_call")  # OpenAI's API before tools
    return None if call is None else [call]


def _read_content(content: object, number: int, role: str, settings: RowSettings) -> str:
    if isinstance(content, str):
        _check_text(content, f"message {number}: its content")
        return str(content)
    if content is None:
        if role == "assistant":
            raise BadRow(
                "empty_answer",
                f"message {number}: the answer has no content and no tool calls; drop the row, or pass --empty-answer "
                "train",
            )
        raise BadRow("null_content", f"message {number}: the content of the {role} is null or missing; it must be text")
    if not isinstance(content, list):
        raise BadRow(
            "content_type",
            f"message {number}: the content is {_describe(content)}; it must be a string or a list of text parts",
        )
    texts = []
    for part in content:
        text = part
        if isinstance(part, dict):
            kind = part.get("type", "text")
            if kind not in _TEXT_PARTS:
                raise BadRow(
                    "content_type",
                    f"message {number}: the content has a part of type {_shorten(kind)}; only text parts are supported",
                )
            text = part.get("text")
        if not isinstance(text, str):
            raise BadRow(
                "content_type", f"message {number}: a part of the content is {_describe(text)}; parts must be text"
            )
        _check_text(text, f"message {number}: its content")
        texts.append(text)
    return "".join(texts)


def _read_train(message: dict[Any, Any], number: int) -> bool | None:
    """Return the choice of the keys `train` and `weight`, or None."""
    train, weight = message.get("train"), message.get("weight")
    if train is not None and not isinstance(train, bool):
        raise BadRow("bad_train", f"message {number}: 'train' is {_shorten(train)}; it must be true or false")
    if weight is None:
        return train
    if not isinstance(weight, (int, float)) or weight not in (0, 1):
        raise BadRow(
            "bad_weight",
            f"message {number}: the weight is {_shorten(weight)}; it must be 0 or 1, because a mask has only these",
        )
    if train is not None and train != bool(weight):
        raise BadRow("bad_weight", f"message {number}: 'train' and 'weight' contradict each other; keep one of them")
    return bool(weight)


def _read_calls(calls: object, number: int, columnar: bool, keep: bool) -> list[dict[str, Any]]:
    """Return tool calls as {id?, type, function: {name, arguments}} with arguments as an object."""
    if isinstance(calls, str):
        calls = _parse_json(calls, "bad_tool_calls", f"message {number}: the JSON of its tool calls")
    if isinstance(calls, dict):
        calls = [calls]
    if not isinstance(calls, list) or not calls:
        raise BadRow(
            "bad_tool_calls", f"message {number}: the tool calls are {_describe(calls)}; they must be a list of calls"
        )
    return [
        _read_call(call, f"message {number}, tool call {index}", columnar, keep) for index, call in enumerate(calls, 1)
    ]


def _read_call(call: object, place: str, columnar: bool, keep: bool) -> dict[str, Any]:
    if isinstance(call, str):
        call = _parse_json(call, "bad_tool_calls", f"{place}: its JSON")
    function = call.get("function", call) if isinstance(call, dict) else None
    if not isinstance(call, dict) or not isinstance(function, dict):
        raise BadRow("bad_tool_calls", f"{place} is {_describe(call)}; it must be an object with a function")
    name = function.get("name")
    if not isinstance(name, str) or not name:
        raise BadRow("bad_tool_calls", f"{place}: the name of the function is {_shorten(name)}; it must be a string")
    _check_text(name, f"{place}: its name")
    arguments = text = function.get("arguments")
    if isinstance(arguments, str):
        arguments = (
            _parse_json(arguments, "bad_tool_calls", f"{place}: the JSON of its arguments") if arguments.strip() else {}
        )
        columnar = False  # a string keeps the nulls that its author wrote
    if arguments is None:
        arguments = {}
    if not isinstance(arguments, dict):
        raise BadRow("bad_tool_calls", f"{place}: the arguments are {_describe(arguments)}; they must be an object")
    ready: dict[str, Any] = {}
    identifier = call.get("id")
    if identifier is not None:
        if not isinstance(identifier, (str, int)):
            raise BadRow("bad_tool_calls", f"{place}: its id is {_describe(identifier)}; it must be a string")
        ready["id"] = _copy(identifier, False, f"{place}: its id")
    ready["type"] = "function"
    ready["function"] = {"name": name, "arguments": _copy(arguments, columnar, place, "bad_tool_calls")}
    if keep and isinstance(text, str):
        ready["function"]["arguments"] = text
    return ready


def _read_tools(row: dict[Any, Any], settings: RowSettings, columnar: bool) -> list[Any] | None:
    key = settings.tools_key
    tools = row.get(key)
    if tools is None and key == "tools":
        key = "functions"  # OpenAI's API before tools
        tools = row.get(key)
    if isinstance(tools, str):
        if not tools.strip():
            return None
        tools, columnar = _parse_json(tools, "bad_tools", f"the JSON of {key!r}"), False
    if tools is None:
        return None
    if not isinstance(tools, list):
        raise BadRow("bad_tools", f"{key!r} is {_describe(tools)}; it must be a list of tools, or the JSON of one")
    return [_read_tool(tool, f"{key!r}, tool {number}", columnar) for number, tool in enumerate(tools, 1)] or None


def _read_tool(tool: object, place: str, columnar: bool) -> dict[str, Any]:
    if isinstance(tool, str):
        tool, columnar = _parse_json(tool, "bad_tools", f"{place}: its JSON"), False
    if not isinstance(tool, dict):
        raise BadRow("bad_tools", f"{place} is {_describe(tool)}; it must be an object")
    ready: dict[str, Any] = _copy(tool, columnar, place, "bad_tools")
    if not isinstance(ready.get("function"), dict):  # without the level "function", as in OpenAI's newer API
        ready = {"type": "function", "function": {key: value for key, value in ready.items() if key != "type"}}
    function = ready["function"]
    name = function.get("name")
    if not isinstance(name, str) or not name:
        raise BadRow("bad_tools", f"{place}: the name of the function is {_shorten(name)}; it must be a string")
    if isinstance(function.get("parameters"), str):
        function["parameters"] = _parse_json(
            function["parameters"], "bad_tools", f"{place}: the JSON of its parameters"
        )
    return ready


def _read_system(row: dict[Any, Any]) -> str | None:
    system = row.get("system")
    if system is None or system == "":
        return None
    if not isinstance(system, str):
        raise BadRow("content_type", f"'system' is {_describe(system)}; it must be a string")
    _check_text(system, "'system'")
    return str(system)


def _read_variables(row: dict[Any, Any], columnar: bool) -> dict[str, Any]:
    variables = row.get("chat_template_kwargs")
    if isinstance(variables, str):
        variables = _parse_json(variables, "bad_variables", "the JSON of 'chat_template_kwargs'") if variables else None
    if variables is None:
        return {}
    if not isinstance(variables, dict):
        raise BadRow("bad_variables", f"'chat_template_kwargs' is {_describe(variables)}; it must be an object")
    ready: dict[str, Any] = {}
    for name, value in variables.items():
        if not isinstance(name, str) or not name.isidentifier() or name.startswith("_") or name in _RESERVED:
            raise BadRow(
                "bad_variables",
                f"'chat_template_kwargs': {_shorten(name)} cannot be a variable of a template; rename it",
            )
        if value is not None and not isinstance(value, (str, int, float)):
            raise BadRow(
                "bad_variables",
                f"'chat_template_kwargs': {name!r} is {_describe(value)}; it must be text, a number or a boolean",
            )
        if value is not None or not columnar:
            ready[name] = _copy(value, False, f"'chat_template_kwargs': {name!r}", "bad_variables")
    return ready


def _read_parts(row: dict[Any, Any], settings: RowSettings, columnar: bool) -> Conversation | PromptAnswer:
    """Return a row that has a prompt and an answer under separate keys."""
    for prompt_key, answer_keys in _COMPLETIONS:
        prompt = row.get(prompt_key)
        answer_key = next((key for key in answer_keys if row.get(key) is not None), None)
        if answer_key is None:
            answer_key = next((key for key in answer_keys if key in row), None)
        if prompt is None or answer_key is None:
            continue
        answer = row[answer_key]
        if isinstance(prompt, list) and isinstance(answer, (list, str)):
            answer = answer if isinstance(answer, list) else [{"role": "assistant", "content": answer}]
            return _join_messages(row, prompt, answer, settings, columnar)
        prompt = _read_part(prompt, prompt_key)
        if prompt_key == "instruction":
            extra_key = next((key for key in ("input", "context") if row.get(key) is not None), None)
            extra = "" if extra_key is None else _read_part(row[extra_key], extra_key)
            if extra and not extra.isspace():
                prompt = f"{prompt}\n\n{extra}"
        answer = _read_part(answer, answer_key)
        if settings.empty_answer == "reject" and (not answer or answer.isspace()):
            raise BadRow("empty_answer", f"{answer_key!r} is empty; drop the row, or pass --empty-answer train")
        return PromptAnswer(prompt, answer, _read_system(row))
    raise BadRow(
        "no_messages",
        f"the row has no 'messages', and no prompt with an answer (its keys are {_list(row)}); set --messages to the "
        "key of the messages",
    )


def _join_messages(
    row: dict[Any, Any], prompt: list[Any], answer: list[Any], settings: RowSettings, columnar: bool
) -> Conversation:
    """Return the conversation of a prompt and a completion that are lists of messages."""
    conversation = _read_conversation(row, "completion", [*prompt, *answer], settings, columnar)
    added = len(conversation.messages) - len(prompt) - len(answer)
    for index in range(added + len(prompt)):
        conversation.train[index] = False
    return conversation


def _read_part(value: object, key: str) -> str:
    if not isinstance(value, str):
        code = "null_content" if value is None else "content_type"
        raise BadRow(code, f"{key!r} is {_describe(value)}; it must be a string")
    _check_text(value, repr(key))
    return str(value)


def _parse_json(text: str, code: str, subject: str) -> Any:
    """Return the value of a JSON text; raise BadRow with the position of the error."""
    try:
        return json.loads(text, parse_constant=_refuse_constant)
    except json.JSONDecodeError as error:
        reason = f"{error.msg} at character {error.pos + 1:,}"
    except (ValueError, RecursionError) as error:
        reason = "nested too deeply" if isinstance(error, RecursionError) else str(error)
    raise BadRow(code, f"{subject} is invalid ({reason}); correct it")


def _refuse_constant(name: str) -> None:
    raise ValueError(f"JSON has no {name}")


def _copy(value: Any, columnar: bool, place: str, code: str = "content_type", depth: int = 0) -> Any:
    """Return a copy of a JSON value without null keys if it is columnar; raise BadRow for any other value."""
    if isinstance(value, str):
        _check_text(value, place)
        return str(value)
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, int):
        return int(value)
    if isinstance(value, float):
        return float(value)
    if depth >= MAX_DEPTH:
        raise BadRow(code, f"{place} is nested more than {MAX_DEPTH} levels deep; drop the row")
    if isinstance(value, list):
        return [_copy(item, columnar, place, code, depth + 1) for item in value]
    if isinstance(value, dict):
        copy = {}
        for key, item in value.items():
            if not isinstance(key, str):
                raise BadRow(code, f"{place} has the key {_shorten(key)}; keys must be text")
            if item is None and columnar:
                continue
            _check_text(key, place)
            copy[str(key)] = _copy(item, columnar, place, code, depth + 1)
        return copy
    raise BadRow(code, f"{place} contains {_describe(value)}; only JSON values can be rendered")


def _check_text(text: str, subject: str) -> None:
    if not text.isascii() and not _is_text(text):
        raise BadRow("bad_text", f"{subject} contains a lone surrogate, which is not a character; correct the text")


def _is_text(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


_NAMES: tuple[tuple[type, str], ...] = (
    (bool, "true or false"),
    (int, "a number"),
    (float, "a number"),
    (str, "a string"),
    (list, "a list"),
    (dict, "an object"),
)


def _describe(value: object) -> str:
    """Return the kind of a value in the words of JSON."""
    if value is None:
        return "null"
    return next((name for kind, name in _NAMES if isinstance(value, kind)), f"a value of type {type(value).__name__}")


def _shorten(value: object) -> str:
    """Return a value for a message: short text in quotes, another value by its kind."""
    if isinstance(value, str):
        return ascii(value if len(value) <= 60 else f"{value[:60]}...")
    if isinstance(value, (bool, int, float)) and (not isinstance(value, int) or value.bit_length() < 64):
        return str(value).lower()
    return _describe(value)


def _list(row: dict[Any, Any]) -> str:
    """Return the first keys of an object, for a message."""
    names = [_shorten(key) for key in list(row)[:MAX_NAMES]]
    more = len(row) - len(names)
    return (", ".join(names) + (f" and {more} more" if more else "")) or "not there: it is empty"
